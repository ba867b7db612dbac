"""What the examples share: text, a small GPT on its characters, a schedule, and progress."""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path

import torch
from torch import nn


def arguments(steps, **more):
    """The command line of an example: --steps, and --text or other options with their defaults."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=steps, help=f"default: {steps}")
    for name, default in more.items():
        parser.add_argument(f"--{name}", default=default, type=type(default or ""))
    return parser.parse_args()


def sentences(count=6000):
    """Made-up sentences: easy to spell, and with choices that nobody can foresee."""
    choose = random.Random(0).choice
    who = ["the captain", "the old cat", "a child", "my sister", "the miller", "a grey goose"]
    does = ["sails to", "sings of", "waits for", "walks around", "dreams of", "laughs at"]
    what = ["the quiet harbour", "a small hill", "the red moon", "the winter sea", "an open door"]
    when = ["at night", "in the rain", "before dawn", "every spring", "once a year"]
    return [f"{choose(who)} {choose(does)} {choose(what)} {choose(when)}." for _ in range(count)]


def characters(path=""):
    """A text file, or made-up sentences, as indices of characters; and the characters."""
    text = Path(path).read_text("utf-8") if path else "\n".join(sentences())
    alphabet = sorted(set(text))
    index = {character: k for k, character in enumerate(alphabet)}
    return torch.tensor([index[character] for character in text]), alphabet


def windows(tokens, context, batch, generator):
    """A random batch of windows, and the same one character later."""
    starts = torch.randint(len(tokens) - context, (batch,), generator=generator)
    rows = torch.stack([tokens[start : start + context + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


class GPT(nn.Module):
    """Embeddings, Transformer blocks that look back only, and a head."""

    def __init__(self, characters, context=48, width=64, layers=2, heads=4):
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(context, width)
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.02)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.characters(tokens) + self.places(torch.arange(length, device=tokens.device))
        return self.head(self.blocks(x, mask=mask, is_causal=True))

    def loss(self, inputs, targets):
        return nn.functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


def warmup_cosine(optimizer, steps):
    """lr grows over the first 5 % of the steps, then falls to 0 along a cosine."""
    warmup = max(1, steps // 20)

    def factor(step):
        done = (step - warmup) / max(1, steps - warmup)
        return (step + 1) / warmup if step < warmup else 0.5 + 0.5 * math.cos(math.pi * done)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Progress:
    """A line that follows the loss on a terminal, and the losses at start and end at the end."""

    def __init__(self, steps):
        self.steps, self.losses = steps, []

    def __call__(self, loss):
        self.losses.append(float(loss))
        done = len(self.losses)
        if sys.stderr.isatty():
            bar = "#" * (30 * done // self.steps)
            print(f"\r[{bar:<30}] {done}/{self.steps}  loss {loss:.3f} ", end="", file=sys.stderr)
        if done == self.steps:
            print(f"\nloss at start {self.losses[0]:.3f}, at end {sum(self.losses[-5:]) / 5:.3f}")

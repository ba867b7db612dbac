"""Language models of the paper's experiments. Each maps token ids (batch, time) to logits."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, Block, check_heads


def _check_context(tokens: Tensor, context: int) -> None:
    if tokens.shape[1] > context:
        raise ValueError(
            f"{tokens.shape[1]} tokens do not fit the model's context of {context}: "
            "cut the sequence, or build the model with a larger `context`"
        )


def _init_normal(model: nn.Module, layers: int, residual: tuple[str, ...]) -> None:
    """Normal(0, 0.02) for matrices; layers that end a residual branch are scaled by depth."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            scaled = name.rsplit(".", 1)[-1] in residual
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if scaled else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class GPT(nn.Module):
    """Pre-norm Transformer with learned positions, in the manner of GPT-2 and nanoGPT."""

    def __init__(
        self,
        vocab: int,
        context: int,
        layers: int,
        heads: int,
        dim: int,
        dropout: float = 0.0,
        bias: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.context = context
        self.embed = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(Attention(dim, heads, dropout, bias), dim, 4 * dim, dropout, bias)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim, bias=bias)
        self.head = nn.Linear(dim, vocab, bias=False)
        _init_normal(self, layers, residual=("proj",))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        _check_context(tokens, self.context)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def char_transformer(
    vocab: int = 65,
    context: int = 32,
    layers: int = 24,
    heads: int = 8,
    dim: int = 64,
    dropout: float = 0.0,
) -> GPT:
    """Character-level Transformer.

    The paper gives 24 layers of 8 heads and a batch of 16. It gives neither width nor context:
    64 and 32 are the small set-up of the lecture code that it links.
    """
    return GPT(vocab, context, layers, heads, dim, dropout, tied=False)


def gpt2(
    vocab: int = 50257,
    context: int = 1024,
    layers: int = 12,
    heads: int = 12,
    dim: int = 768,
    dropout: float = 0.0,
) -> GPT:
    """GPT-2 small, 124M parameters; embedding and head are tied."""
    return GPT(vocab, context, layers, heads, dim, dropout)


class RMSNorm(nn.Module):
    """x / rms(x) · weight, with the mean square in float32 under autocast."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_f32 = x.float()
        scale = torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + self.eps)
        return (x_f32 * scale).to(x.dtype) * self.weight


class PlusBlock(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm, with fused `qkv` and `gate_up`."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(dim)
        self.attn = Attention(dim, heads, bias=False)
        self.norm2 = RMSNorm(dim)
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norm1(x), rotary)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def swiglu_hidden(dim: int) -> int:
    """8/3 of the width, rounded up to a multiple of 128."""
    return -(-8 * dim // (3 * 128)) * 128


class TransformerPlus(nn.Module):
    """The paper's Transformer++: RoPE, RMSNorm, SwiGLU, no biases, untied head."""

    def __init__(
        self,
        vocab: int = 50280,
        context: int = 2048,
        layers: int = 6,
        heads: int = 8,
        dim: int = 512,
        hidden: int | None = None,
        rope_base: float = 10000.0,
    ) -> None:
        super().__init__()
        check_heads(dim, heads)
        if (dim // heads) % 2:
            raise ValueError(f"rotary positions need an even head size, not {dim}/{heads}")
        self.context = context
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            PlusBlock(dim, heads, hidden or swiglu_hidden(dim)) for _ in range(layers)
        )
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        half = dim // heads // 2
        rates = rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(context, dtype=torch.float32), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        _init_normal(self, layers, residual=("proj", "down"))

    def forward(self, tokens: Tensor) -> Tensor:
        _check_context(tokens, self.context)
        time = tokens.shape[1]
        rotary = (self.get_buffer("cos")[:time], self.get_buffer("sin")[:time])
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))


class PlusSize(NamedTuple):
    dim: int
    heads: int
    layers: int


TRANSFORMER_PLUS_SIZES = {
    "70m": PlusSize(dim=512, heads=8, layers=6),
    "160m": PlusSize(dim=768, heads=12, layers=12),
    "410m": PlusSize(dim=1024, heads=16, layers=24),
    "1b": PlusSize(dim=2048, heads=8, layers=16),
}


def transformer_plus(
    size: str = "70m",
    vocab: int = 50280,
    context: int = 2048,
    layers: int | None = None,
    heads: int | None = None,
    dim: int | None = None,
) -> TransformerPlus:
    """Transformer++ of one of the paper's sizes; single numbers can be overridden."""
    if size not in TRANSFORMER_PLUS_SIZES:
        known = ", ".join(TRANSFORMER_PLUS_SIZES)
        raise ValueError(f"unknown Transformer++ size {size!r}; the paper's are {known}")
    preset = TRANSFORMER_PLUS_SIZES[size]
    return TransformerPlus(
        vocab, context, layers or preset.layers, heads or preset.heads, dim or preset.dim
    )


LSTMState = list[tuple[Tensor, Tensor]]


class WordLSTM(nn.Module):
    """Word-level LSTM with the sizes of AWD-LSTM: 400 → 1150 → 1150 → 400, tied to the head.

    `forward` returns the logits and the state to carry into the next chunk of text.
    """

    def __init__(
        self,
        vocab: int = 10000,
        embed: int = 400,
        hidden: int = 1150,
        layers: int = 3,
        dropout: float = 0.4,
        tied: bool = True,
    ) -> None:
        super().__init__()
        sizes = [embed] + [hidden] * (layers - 1) + [embed if tied else hidden]
        self.embed = nn.Embedding(vocab, embed)
        self.rnns = nn.ModuleList(
            nn.LSTM(n_in, n_out, batch_first=True) for n_in, n_out in itertools.pairwise(sizes)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(sizes[-1], vocab)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, state: LSTMState | None = None) -> tuple[Tensor, LSTMState]:
        x = self.dropout(self.embed(tokens))
        new_state: LSTMState = []
        for index, rnn in enumerate(self.rnns):
            x, (h, c) = rnn(x, None if state is None else state[index])
            x = self.dropout(x)
            new_state.append((h.detach(), c.detach()))
        return self.head(x), new_state

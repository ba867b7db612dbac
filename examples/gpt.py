"""A GPT on the characters of a text, in a loop by hand: python examples/gpt.py [--text FILE]."""

import torch
from common import GPT, Progress, arguments, characters, warmup_cosine, windows

from ngn_kernels import NGNMDv1, groups

CONTEXT, BATCH = 48, 16


def main():
    args = arguments(steps=1000, text="")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    tokens, alphabet = characters(args.text)
    model = GPT(len(alphabet), CONTEXT)

    # No decay on biases and norms. Each step takes 0.2 of its loss for the lowest possible one, and
    # the schedule scales the whole step, since ρ is computed at step_cap and not at the schedule's lr.
    optimizer = NGNMDv1(
        groups(model, weight_decay=0.1),
        lr=1e-2,
        step_cap=1e-2,
        loss_target=0.2,
        decay_form="adamw",
        max_grad_norm=1.0,
    )
    scheduler = warmup_cosine(optimizer, args.steps)
    progress = Progress(args.steps)
    for _ in range(args.steps):
        loss = model.loss(*windows(tokens, CONTEXT, BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
        scheduler.step()
        progress(loss.item())

    model.eval()
    sample = torch.tensor([[0]])
    with torch.no_grad():
        for _ in range(80):
            choices = model(sample[:, -CONTEXT:])[:, -1].softmax(-1)
            sample = torch.cat([sample, torch.multinomial(choices, 1, generator=generator)], 1)
    print("".join(alphabet[k] for k in sample[0]))


if __name__ == "__main__":
    main()

"""How far narrow state takes NGN-MDv1 from its float32 trajectory, in a simulation.

Gradients of known sizes stand in for a model's: they fall tenfold over the run, and within each
block of 64 elements their sizes spread over so many decades. Each format has two numbers: the
worst error of Q = Σ g²/D over all steps, and the error of the displacement of the whole run, whose
step size is fixed so that Q's error is not counted twice.

`python -m ngn_bench.lab.formats_study` prints the table; `--keep` also writes the record that
docs/precision.md is made from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngn_kernels.formats import FLOAT32, FORMATS, LARGEST, Format, blocks_of, noise, noise_key

from ..report import Table, columns, print_table

STEPS, ELEMENTS = 1500, 8192
BETA1, EPS, LEARNING_RATE = 0.9, 1e-8, 1e-3
LONE = 16
REACH = (1e5, 1e6)


def root_format(halvings: int) -> Format:
    """v as a byte: `halvings` square roots relative to the block's largest, with stochastic rounding."""
    power = 2.0**halvings

    def encode(v: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
        rows = blocks_of(v)
        largest = rows.amax(1, keepdim=True)
        share = (rows / largest.clamp(min=1e-38)) ** (1 / power)
        code = (255 * share + blocks_of(random) / 2.0**32).floor().clamp(max=255)
        return code.to(torch.uint8).flatten()[: v.numel()], largest.flatten()

    def decode(code: Tensor, largest: Tensor) -> Tensor:
        return ((blocks_of(code) / 255.0) ** power * largest[:, None]).flatten()[: code.numel()]

    return Format(torch.uint8, torch.float32, LARGEST, encode, decode)  # type: ignore[arg-type]


class Stored(NamedTuple):
    """How m and v are stored."""

    m: Format
    v: Format


M, V = FORMATS["momentum_buffer"], FORMATS["exp_avg_sq"]
NEAREST = V["bfloat16"]._replace(encode=lambda v, _: (v.bfloat16(), None))
OFFERED = {
    '`"bfloat16"`': Stored(M["bfloat16"], V["bfloat16"]),
    '`("8bit", "bfloat16")`': Stored(M["8bit"], V["bfloat16"]),
    '`"8bit"`': Stored(M["8bit"], V["8bit"]),
}
REFUSED = {
    "v to the nearest bfloat16": Stored(FLOAT32, NEAREST),
    "v as a byte of its eighth root": Stored(FLOAT32, root_format(3)),
    "v as a byte of its root": Stored(FLOAT32, root_format(1)),
}


@dataclass(frozen=True)
class Case:
    """One kind of gradients: β₂, over how many decades a block's sizes spread, and their mean.

    Each is its size times a standard normal number around `mean`. With `lone`, sizes do not spread:
    all are 1 but for every 16th, which is so many times smaller.
    """

    beta2: float
    decades: float
    mean: float = 1.0
    lone: float = 0.0

    def sizes(self, spread: Tensor) -> Tensor:
        """Of the elements, by their places between 0 and 1."""
        if not self.lone:
            return 10 ** -(self.decades * spread)
        size = torch.ones_like(spread)
        size[::LONE] = 1 / self.lone
        return size

    def __str__(self) -> str:
        zero = ", mean 0" if self.mean == 0 else ""
        return f"β₂ {self.beta2:g}, {self.decades:g} decade{'s' * (self.decades != 1)}{zero}"


CASES = (
    Case(0.999, 1),
    Case(0.999, 2),
    Case(0.999, 5),
    Case(0.95, 2),
    Case(0.95, 5),
    Case(0.999, 2, mean=0),
    Case(0.95, 2, mean=0),
)


class Error(NamedTuple):
    """In per cent of what float32 state gives."""

    q: float
    displacement: float


class Trace(NamedTuple):
    """Q of each step (rows) and case, and where each case's elements ended."""

    q: Tensor
    x: Tensor


def simulate(stored: Stored, cases: Sequence[Case], steps: int, elements: int) -> Trace:
    """NGN-MDv1 with a fixed step size; the cases side by side in one vector."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(cases), elements)

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values).view(-1, 1)

    beta2, mean = column([c.beta2 for c in cases]), column([c.mean for c in cases])
    spread = torch.rand(elements, generator=generator)
    size = torch.stack([case.sizes(spread) for case in cases])
    key, count = noise_key(0), torch.zeros((), dtype=torch.int64)
    total = shape[0] * shape[1]
    x = torch.zeros(shape)
    m, v = (
        form.encode(torch.zeros(total), torch.zeros(total, dtype=torch.int64)) for form in stored
    )
    sums = []
    for step in range(steps):
        fallen = 10 ** -(step / steps)
        g = fallen * size * (mean + torch.randn(elements, generator=generator))
        count.fill_(step)
        random = noise(key, count, total)
        new_v = beta2 * stored.v.decode(*v).view(shape) + (1 - beta2) * g * g
        d = EPS + (new_v / (1 - beta2 ** (step + 1))).sqrt()
        new_m = BETA1 * stored.m.decode(*m).view(shape) + (1 - BETA1) * LEARNING_RATE * g / d
        x -= new_m
        sums.append((g * g / d).sum(1, dtype=torch.float64))
        m, v = stored.m.encode(new_m.flatten(), random), stored.v.encode(new_v.flatten(), random)
    return Trace(torch.stack(sums), x.double())


def study(
    formats: Mapping[str, Stored],
    cases: Sequence[Case] = CASES,
    steps: int = STEPS,
    elements: int = ELEMENTS,
) -> dict[str, list[Error]]:
    """Each format's errors, case by case."""
    exact = simulate(Stored(FLOAT32, FLOAT32), cases, steps, elements)
    errors = {}
    for name, stored in formats.items():
        narrow = simulate(stored, cases, steps, elements)
        worst = 100 * (narrow.q / exact.q - 1).abs().amax(0)
        moved = 100 * (narrow.x - exact.x).norm(dim=1) / exact.x.norm(dim=1)
        errors[name] = [Error(*pair) for pair in zip(worst.tolist(), moved.tolist(), strict=True)]
    return errors


def reach(stored: Stored, steps: int = STEPS, elements: int = ELEMENTS) -> list[float]:
    """How far elements that are `REACH` times smaller than their neighbours move, float32 = 1."""
    cases = [Case(0.999, 0, lone=times) for times in REACH]
    exact = simulate(Stored(FLOAT32, FLOAT32), cases, steps, elements)
    seen = simulate(stored, cases, steps, elements)
    ratio = seen.x[:, ::LONE].mean(1) / exact.x[:, ::LONE].mean(1)
    return ratio.tolist()


def study_table(record: Mapping[str, Any]) -> Table:
    """The record's errors: a row per format, Q / displacement per case."""

    def text(value: float) -> str:
        return f"{value:.0f}" if value >= 10 else f"{value:.2f}"

    rows = [
        [name, *(f"{text(q)} / {text(displacement)}" for q, displacement in errors)]
        for name, errors in record["errors"].items()
    ]
    caption = (
        f"{record['steps']:,} steps, {record['elements']:,} elements; worst error of Q / error of "
        "the displacement, in per cent of what float32 state gives."
    )
    return Table(
        "Narrow state against float32 state", columns("stored as", *record["cases"]), rows, caption
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study, print it, and write it to `--keep`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="ngn_bench.lab.formats_study", description=__doc__
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="also write the record there")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the tensors are too small to share
    record: dict[str, Any] = {
        "steps": STEPS,
        "elements": ELEMENTS,
        "cases": [str(case) for case in CASES],
        "errors": study(OFFERED | REFUSED),
        "reach": dict(zip(map(str, REACH), reach(OFFERED['`"8bit"`']), strict=True)),
    }
    print_table(study_table(record))
    for times, share in record["reach"].items():
        print(
            f'"8bit": elements {float(times):g} times smaller than their neighbours move {share:.2f}'
        )
    if args.keep is not None:
        args.keep.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

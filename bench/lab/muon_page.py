"""docs/muon.md's tables, from the kept records of Muon's kin."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..report import Column, Table, columns, markdown_table
from . import figures
from .results import Cell
from .summary import Kept, Options

INDEX = "muons.json"
WORDS = {("loss_floor", "-1e30"): "at ρ = 1"}
"""Options by their effect: above so low a floor every loss is so large that ρ is 1."""


def _label(name: str, options: Options) -> str:
    words = [
        WORDS.get((key, value), f"{key.replace('_', ' ')} {value}")
        for key, value in options
        if key != "steps"
    ]
    return ", ".join([figures.label(name), *words])


def _mean(cell: Cell | None) -> float | None:
    """The mean final loss over the seeds; None without a run, or where a seed diverged."""
    return statistics.fmean(cell.values("loss")) if cell and not cell.diverged else None


def losses_table(sweep: Kept) -> Table:
    """The final loss of each optimizer by step size, the best of a row in bold."""
    rows = [
        (_label(name, options), results.cells[name])
        for options, results in sweep.by_options().items()
        for name in results.cells
    ]
    lrs = sorted({lr for _, cells in rows for lr in cells})
    lines = []
    for label, cells in rows:
        means = [_mean(cells.get(lr)) for lr in lrs]
        best = min((mean for mean in means if mean is not None), default=None)
        line = [label]
        for lr, mean in zip(lrs, means, strict=True):
            if mean is None:
                line.append("diverged" if lr in cells else "–")
            else:
                line.append(f"**{mean:.3f}**" if mean == best else f"{mean:.3f}")
        seeds = {len(cell.runs) for cell in cells.values()}
        lines.append([*line, " to ".join(map(str, sorted({min(seeds), max(seeds)})))])
    headings = [*columns("optimizer"), *(Column(f"{lr:g}") for lr in lrs), Column("seeds")]
    return Table(sweep.title, headings, lines)


def sections(kept: Sequence[Kept]) -> dict[str, str]:
    """The generated parts of docs/muon.md, by the name of their markers."""
    parts = {}
    for sweep in kept:
        commands = "".join(f"{command}\n" for command in sweep.commands)
        missing = f"\n**Not finished**: {sweep.missing_text()}.\n" if sweep.missing else ""
        table = f"{markdown_table(losses_table(sweep))}\n" if sweep.runs else ""
        parts[sweep.folder.name] = f"{table}```sh\n{commands}```\n{missing}"
    return parts

"""The paper's ablations: what betas and weight decay do at each step size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..report import Column, Table, columns
from . import figures
from .paper import BETA_ABLATION, BETAS
from .results import Cell, Results, number, skipped_note
from .train import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETA_OPTIMIZERS = "ngn-mdv1,adam"
DECAY_OPTIMIZERS = "adamw,momo-adam,dec-ngn-mdv1,ngn-mdv1w"
FIXED_BETA1, FIXED_BETA2 = 0.9, 0.95

Cells = dict[tuple[float, float], Cell]
"""By step size and the value under study."""


def beta_pairs(beta1: Sequence[float], beta2: Sequence[float]) -> list[tuple[float, float]]:
    """All β₁ at the paper's β₂, and all β₂ at its β₁."""
    pairs = [(b, FIXED_BETA2) for b in beta1] + [(FIXED_BETA1, b) for b in beta2]
    return list(dict.fromkeys(pairs))


def _cells(runs: Sequence[Run], value: Callable[[Run], float]) -> Cells:
    grouped: dict[tuple[float, float], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run["spec"]["lr"], value(run)), []).append(run)
    return {key: Cell(key[0], tuple(group)) for key, group in sorted(grouped.items())}


def _table(title: str, symbol: str, cells: Cells) -> Table:
    lrs = sorted({lr for lr, _ in cells})
    values = sorted({value for _, value in cells})
    rows = [
        [f"{lr:g}", *(str(cells[lr, v]) if (lr, v) in cells else "" for v in values)] for lr in lrs
    ]
    caption = skipped_note([run for cell in cells.values() for run in cell.runs])
    return Table(title, _columns(symbol, values), [*rows], caption)


def _columns(symbol: str, values: Sequence[float]) -> list[Column]:
    return columns("lr", *(f"{symbol} = {value:g}" for value in values), text=())


def _paper_tables(name: str) -> list[Table]:
    """The paper's tables of an optimizer's betas, if it has any."""
    fixed = {"β₁": f"β₂ = {FIXED_BETA2:g}", "β₂": f"β₁ = {FIXED_BETA1:g}"}
    return [
        Table(
            f"the paper: perplexity of {figures.label(name)}, {fixed[symbol]}",
            _columns(symbol, BETAS[symbol]),
            [[f"{lr:g}", *row] for lr, row in BETA_ABLATION[name, symbol].items()],
            "A language model of 70M parameters on FineWeb, 4800 batches of 128, 3 seeds.",
        )
        for symbol in BETAS
        if (name, symbol) in BETA_ABLATION
    ]


def betas(runs: Sequence[Run]) -> tuple[list[Table], dict[str, Figure]]:
    """One table and one heat map per optimizer and beta, and the paper's tables after ours."""
    panels: list[tuple[str, str, Cells]] = []
    for name in Results(runs).cells:
        own = [run for run in runs if run["spec"]["optimizer"] == name]
        first = [run for run in own if run["spec"]["betas"][1] == FIXED_BETA2]
        second = [run for run in own if run["spec"]["betas"][0] == FIXED_BETA1]
        title = figures.label(name)
        by_first = _cells(first, lambda run: run["spec"]["betas"][0])
        by_second = _cells(second, lambda run: run["spec"]["betas"][1])
        panels.append((f"{title}, β₂ = {FIXED_BETA2:g}", "β₁", by_first))
        panels.append((f"{title}, β₁ = {FIXED_BETA1:g}", "β₂", by_second))
    task, metric = runs[0]["spec"]["task"], runs[0]["metric"]
    tables = [_table(f"{task}: {metric} of {title}", s, cells) for title, s, cells in panels]
    for name in Results(runs).cells:
        tables += _paper_tables(name)
    return tables, {"betas": _heat_maps(panels, task, metric)}


def _heat_maps(panels: Sequence[tuple[str, str, Cells]], task: str, metric: str) -> Figure:
    plt = figures.pyplot()
    rows = math.ceil(len(panels) / 2)
    figure, axes = plt.subplots(
        rows, 2, figsize=(10.5, 0.8 + 2.9 * rows), squeeze=False, layout="constrained"
    )
    badness = {
        (title, key): _badness(cell, metric)
        for title, _, cells in panels
        for key, cell in cells.items()
    }
    finite = [value for value in badness.values() if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    for axis, (title, symbol, cells) in zip(axes.flat, panels, strict=False):
        lrs = sorted({lr for lr, _ in cells})
        values = sorted({value for _, value in cells})
        grid = np.array([[badness.get((title, (lr, v)), math.nan) for v in values] for lr in lrs])
        colours = plt.get_cmap("RdYlGn_r").with_extremes(bad="#555555")
        axis.imshow(grid, aspect="auto", cmap=colours, vmin=low, vmax=high, alpha=0.75)
        for (row, column), shade in np.ndenumerate(grid):
            cell = cells.get((lrs[row], values[column]))
            if cell is not None:
                text = "diverged" if cell.diverged else number(cell.mean)
                colour = "black" if math.isfinite(shade) else "white"
                axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        axis.set_yticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
        axis.set_xlabel(symbol)
        axis.set_ylabel("lr")
        axis.set_title(title)
        axis.grid(visible=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.suptitle(f"{task}: final {metric}; green is better", fontsize=9)
    return figure


def _badness(cell: Cell, metric: str) -> float:
    """Logarithm of the error or of the perplexity: a scale on which colours make sense."""
    if cell.diverged:
        return math.nan
    return math.log10(max(100.05 - cell.mean, 0.05) if metric == "accuracy" else cell.mean)


def weight_decay(runs: Sequence[Run]) -> tuple[list[Table], dict[str, Figure]]:
    """One table per optimizer; one panel per λ with a line per optimizer."""
    task, metric = runs[0]["spec"]["task"], runs[0]["metric"]
    tables = []
    for name in Results(runs).cells:
        own = [run for run in runs if run["spec"]["optimizer"] == name]
        cells = _cells(own, lambda run: run["spec"]["weight_decay"])
        tables.append(_table(f"{task}: {metric} of {figures.label(name)}", "λ", cells))
    plt = figures.pyplot()
    decays = sorted({run["spec"]["weight_decay"] for run in runs})
    figure, axes = plt.subplots(
        1,
        len(decays),
        figsize=(1 + 3 * len(decays), 3.6),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, decay in zip(axes.flat, decays, strict=True):
        results = Results([run for run in runs if run["spec"]["weight_decay"] == decay])
        figures.score_lines(axis, results, list(results.cells))
        axis.set_title(f"λ = {decay:g}")
        axis.set_xscale("log")
        axis.set_xlabel("lr")
    figures.score_axis(axes.flat[0], Results(runs))
    for axis in axes.flat[1:]:
        axis.set_ylabel("")
    axes.flat[0].legend()
    figure.suptitle(f"{task}: weight decay. ✕: diverged, ▲: above the picture", fontsize=9)
    return tables, {"weight-decay": figure}

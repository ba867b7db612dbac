"""Scores of a record by optimizer and step size, and the width of the good range."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..report import Table, columns
from . import optimizers
from .paper import paper_scores
from .tasks import Scale
from .train import EARLY, Run


@dataclass(frozen=True)
class Cell:
    """All seeds of one optimizer at one step size."""

    lr: float
    runs: tuple[Run, ...]

    @property
    def diverged(self) -> int:
        return sum(run["status"] == "diverged" for run in self.runs)

    def values(self, key: str) -> list[float]:
        """The last `score`, `loss` or `train_loss` of each seed that has one."""
        return [run["curve"][-1][key] for run in self.runs if run["status"] == "finished"]

    @property
    def mean(self) -> float:
        """Mean score over seeds; NaN as soon as one seed diverged."""
        return math.nan if self.diverged else statistics.fmean(self.values("score"))

    @property
    def sd(self) -> float:
        values = self.values("score")
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def __str__(self) -> str:
        if self.diverged == len(self.runs):
            return "diverged"
        if self.diverged:
            return f"diverged ({self.diverged}/{len(self.runs)})"
        deviation = f" ± {self.sd:.2f}" if len(self.runs) > 1 else ""
        mark = " †" if _skipped(self.runs) else ""
        return f"{number(self.mean)}{deviation}{mark}"


def _skipped(runs: Iterable[Run]) -> int:
    return sum(run["skipped_steps"] or 0 for run in runs)


def skipped_note(runs: Iterable[Run]) -> str:
    """What † means, if any of these runs needs it."""
    total = _skipped(run for run in runs if run["status"] == "finished")
    return f"†: the optimizer skipped steps as not finite, {total} in all." if total else ""


def number(value: float) -> str:
    """A score in at most six characters or so."""
    return f"{value:.2f}" if value < 1000 else f"{value:.3g}"


@dataclass(frozen=True)
class Range:
    """Neighbouring step sizes with good scores; an end is open where the grid ends with it."""

    low: float
    high: float
    open_low: bool
    open_high: bool

    @property
    def decades(self) -> float:
        return math.log10(self.high / self.low)

    @property
    def width(self) -> str:
        return ("≥ " if self.open_low or self.open_high else "") + f"{round(self.decades, 1):g}"

    def __str__(self) -> str:
        low, high = f"{self.low:g}", f"{self.high:g}"
        return low if low == high else f"{low} … {high}"


class Results:
    """The runs of one task, by optimizer and step size.

    `planned` holds the step sizes of each optimizer's whole grid, if some of it may be missing.
    """

    def __init__(
        self, runs: Iterable[Run], planned: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        runs = list(runs)
        self.planned = planned or {}
        if not runs:
            raise ValueError("no runs to show")
        self.metric: str = runs[0]["metric"]
        self.task: str = runs[0]["spec"]["task"]
        options = runs[0]["spec"]["options"]
        shown = {
            key: options[key]
            for key in (
                *("loss_floor", "loss_target", "step_cap", "schedule"),
                *("state", "dtype", "rounding"),
            )
            if key in options
        }
        self.title = ", ".join(
            [self.task, *(f"{k.replace('_', ' ')} {v}" for k, v in shown.items())]
        )
        self.runs = runs
        grouped: dict[str, dict[float, list[Run]]] = {}
        for run in runs:
            spec = run["spec"]
            grouped.setdefault(spec["optimizer"], {}).setdefault(spec["lr"], []).append(run)
        order = [*optimizers.OPTIMIZERS]
        self.cells: dict[str, dict[float, Cell]] = {
            name: {lr: Cell(lr, tuple(by_lr[lr])) for lr in sorted(by_lr)}
            for name, by_lr in sorted(grouped.items(), key=lambda item: order.index(item[0]))
        }

    @property
    def higher_is_better(self) -> bool:
        return self.metric == "accuracy"

    @property
    def default_margin(self) -> float:
        return 0.5 if self.metric == "accuracy" else 5.0

    def margin_text(self, margin: float) -> str:
        unit = "points of accuracy" if self.metric == "accuracy" else "% of perplexity"
        return f"{margin:g} {unit}"

    def families(self) -> dict[str, list[str]]:
        """The optimizers present, by family, without empty families."""
        members = {
            family: [n for n in self.cells if optimizers.OPTIMIZERS[n].family == family]
            for family in optimizers.GRIDS
        }
        return {family: names for family, names in members.items() if names}

    def best(self, name: str) -> Cell | None:
        """The step size with the best mean score; None if no run of the optimizer has one."""
        cells = self.cells.get(name, {})
        finite = [cell for cell in cells.values() if math.isfinite(cell.mean)]
        pick = max if self.higher_is_better else min
        return pick(finite, key=lambda cell: cell.mean, default=None)

    def best_of_all(self) -> float:
        scores = [cell.mean for name in self.cells if (cell := self.best(name)) is not None]
        return (max if self.higher_is_better else min)(scores, default=math.nan)

    def good(self, score: float, reference: float, margin: float) -> bool:
        """Whether a score is within `margin` of `reference`, or better."""
        if self.higher_is_better:
            return score >= reference - margin
        return score <= reference * (1 + margin / 100)

    def good_range(self, name: str, margin: float, reference: float | None = None) -> Range | None:
        """The step sizes around the best one whose score is within `margin` of `reference`,
        by default the optimizer's own best. Points of accuracy, or per cent of perplexity."""
        best = self.best(name)
        if best is None:
            return None
        cells = self.cells[name]
        wanted = best.mean if reference is None else reference
        if not self.good(best.mean, wanted, margin):
            return None
        grid = self.grid(name)

        def end(direction: int) -> tuple[float, bool]:
            """The last good step size on one side, and whether nothing beyond it is known."""
            place = grid.index(best.lr)
            while True:
                beyond = place + direction
                if not 0 <= beyond < len(grid) or grid[beyond] not in cells:
                    return grid[place], True
                if not self.good(cells[grid[beyond]].mean, wanted, margin):
                    return grid[place], False
                place = beyond

        (low, open_low), (high, open_high) = end(-1), end(1)
        return Range(low, high, open_low, open_high)

    def grid(self, name: str) -> list[float]:
        """The optimizer's step sizes, those whose runs are missing among them."""
        return sorted({*self.cells.get(name, ()), *self.planned.get(name, ())})

    def best_is_sure(self, name: str) -> bool:
        """Whether the step sizes next to the best one are there as well."""
        best, grid = self.best(name), self.grid(name)
        if best is None:
            return False
        place = grid.index(best.lr)
        return all(lr in self.cells[name] for lr in grid[max(0, place - 1) : place + 2])

    def at_multiple(self, name: str, factor: float) -> str:
        """The score at `factor` times the best step size, if the sweep has it."""
        cell = self.cell_at_multiple(name, factor)
        if cell is None:
            return "–"
        return "diverged" if cell.diverged else number(cell.mean)

    def cell_at_multiple(self, name: str, factor: float) -> Cell | None:
        """The runs at `factor` times the best step size, if there are any."""
        best = self.best(name)
        wanted = math.nan if best is None else best.lr * factor
        cells = self.cells.get(name, {}).items()
        return next((c for lr, c in cells if math.isclose(lr, wanted, rel_tol=1e-6)), None)

    def at_bound(self, name: str, factor: float) -> str:
        """Per cent of the first seed's steps at the bound there: the first ones / the later ones."""
        cell = self.cell_at_multiple(name, factor)
        shares = () if cell is None else bound_shares(cell.runs[0])
        return " / ".join("–" if s is None else f"{100 * s:.0f}" for s in shares) or "–"


def range_table(results: Results, margin: float) -> Table:
    """The headline: best score, the paper's, and the width of the good range."""
    spec = results.runs[0]["spec"]
    paper = paper_scores(results.task, spec["options"])
    headings = ["optimizer", "at lr", f"best {results.metric}"]
    if paper:
        full_size = Scale.parse(spec["scale"]) == Scale() and "steps" not in spec["options"]
        headings.append("paper" if full_size else "paper, full size")
    headings += ["good range", "decades", "to best of all", "at 10× lr", "at 100× lr"]
    rows = []
    for name in results.cells:
        best = results.best(name)
        own = results.good_range(name, margin)
        common = results.good_range(name, margin, results.best_of_all())
        row = [optimizers.OPTIMIZERS[name].label]
        row += ["–", "diverged"] if best is None else [f"{best.lr:g}", str(best)]
        row += [_paper_text(paper.get(name))] if paper else []
        row += ["–", "–"] if own is None else [str(own), own.width]
        row += ["–" if common is None else common.width]
        row += [results.at_multiple(name, factor) for factor in (10, 100)]
        rows.append(row)
    caption = (
        "good range: the step sizes around the best one that stay within "
        f"{results.margin_text(margin)} of it; decades: its width in powers of ten; to best of all: "
        "that width when the best score of all optimizers is the mark; ≥: the grid ends inside the "
        "range."
    )
    entries = [optimizers.OPTIMIZERS[name] for name in results.cells]
    notes = [f"{entry.label}: {entry.note}." for entry in entries if entry.note]
    caption = " ".join([caption, *notes, skipped_note(results.runs)]).strip()
    title = f"{results.title}: how wide the range of good step sizes is"
    return Table(title, columns(*headings), rows, caption)


def _paper_text(score: tuple[float, float | None] | None) -> str:
    if score is None:
        return "–"
    mean, sd = score
    return f"{mean:.2f}" if sd is None else f"{mean:.2f} ± {sd:.2f}"


def grid_table(results: Results, names: Sequence[str]) -> Table:
    """Mean score ± deviation of each optimizer at each step size."""
    lrs = sorted({lr for name in names for lr in results.grid(name)})
    rows = []
    for name in names:
        cells, planned = results.cells[name], results.planned.get(name, ())
        scores = [str(cells[lr]) if lr in cells else "–" * (lr in planned) for lr in lrs]
        rows.append([optimizers.OPTIMIZERS[name].label, *scores])
    title = f"{results.title}: final {results.metric} by step size"
    runs = [run for name in names for cell in results.cells[name].values() for run in cell.runs]
    headings = columns("optimizer", *(f"{lr:g}" for lr in lrs))
    return Table(title, headings, rows, skipped_note(runs))


AT_BOUND = 0.99
"""Of c, or of α₀: there NGN-M and Momo are SGDM, and NGN-MDv1 and Momo-Adam are Adam."""


def bound_shares(run: Run) -> tuple[float | None, float | None]:
    """The share of steps at the bound among the first ones and among the later ones."""
    telemetry = run["telemetry"]
    if "at_bound" in telemetry:
        early, later = telemetry["at_bound"]
        return early, later
    spec = run["spec"]
    beta1 = (spec["betas"] or (0.9,))[0] if spec["optimizer"] == "momo-adam" else 0.0
    parts: tuple[list[bool], list[bool]] = ([], [])
    for step, size in zip(telemetry["step"], telemetry["step_size"], strict=True):
        if size is not None:
            bound = spec["lr"] / (1 - beta1**step)
            parts[step > EARLY].append(size >= AT_BOUND * bound)
    early, later = (statistics.fmean(part) if part else None for part in parts)
    return early, later


def tables(results: Results, margin: float) -> list[Table]:
    """The tables of a sweep, the headline first."""
    grids = [grid_table(results, names) for names in results.families().values()]
    return [range_table(results, margin), *grids]

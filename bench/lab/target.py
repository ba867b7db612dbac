"""docs/loss-target.md's tables and picture, and README's, from the kept records of runs with a loss target.

`targets.json` in the folder of kept records lists the sweeps, as `sweeps.json` does for
docs/stability.md. Each has runs of several options: loss targets, schedules, other optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..pages.plots import record_digest
from ..report import Column, Table, columns, markdown_table
from . import figures, optimizers
from .results import Cell, Results, number, skipped_note
from .summary import UNSURE, Kept, Options, quality

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INDEX = "targets.json"
PICTURE = "loss-target.png"
GOAL = {"accuracy": 0.5, "perplexity": 2.0}
"""How far from tuned Adam one setting may be: points of accuracy, or per cent of perplexity."""


@dataclass(frozen=True)
class Line:
    """An optimizer with its options: what one line of a picture or row of a table shows."""

    name: str
    target: str = ""
    schedule: str = "cosine"
    lr: float = math.nan
    """Where a table looks at one step size alone."""

    @property
    def options(self) -> Options:
        """The options of its runs."""
        given = {"loss_target": self.target} if self.target else {}
        if self.schedule:
            given["schedule"] = self.schedule
            if optimizers.find(self.name).own:
                given["step_cap"] = "lr"
        return tuple(sorted(given.items()))

    @property
    def label(self) -> str:
        text = figures.label(self.name)
        if optimizers.find(self.name).own:
            text += f", target {self.target or 0}"
        return text if math.isnan(self.lr) else f"{text}, lr {self.lr:g}"

    def results(self, sweep: Kept) -> Results | None:
        for options, found in sweep.by_options().items():
            # All runs of a sweep have the same number of steps.
            if (
                tuple(o for o in options if o[0] != "steps") == self.options
                and self.name in found.cells
            ):
                return found
        return None

    def cell(self, sweep: Kept) -> Cell | None:
        results = self.results(sweep)
        return None if results is None else results.cells[self.name].get(self.lr)


ADAM = Line("adam")
AT_ONE = (
    *(Line("ngn-mdv1", target, lr=1.0) for target in ("0.9", "0.8", "0.6", "")),
    Line("ngn-mdv1", lr=1e-2),
    Line("ngn-mdv1", "0.2", lr=1e-2),
)
"""NGN-MDv1 at one step size for all tasks: one far too large, and its default."""
HEADLINE_SETTINGS = (
    Line("ngn-mdv1", "0.2", lr=1e-2),
    Line("ngn-mdv1", "0.8", lr=1.0),
    Line("adam", lr=1e-3),
    Line("adam", lr=3e-3),
    Line("prodigy", lr=1.0),
    Line("schedulefree", lr=2.5e-3),
)
"""README's."""
HELD = (ADAM, Line("ngn-mdv1", "0.8"))
"""Those of which README says how wide their range of good step sizes is."""
UNTUNED = (*HEADLINE_SETTINGS, Line("momo-adam", lr=1e-2), Line("dadapt-adam", lr=1.0))
"""Each optimizer at one setting: that of this page, the defaults of the others, and a larger lr of
Adam, which in hindsight suits these tasks better than its default."""
SHORT = {
    "target-digits": "digits",
    "target-digits-smoothed": "smoothed labels",
    "target-digits-noisy": "noisy labels",
    "target-long-smoothed": "smoothed, 10 × the steps",
    "target-long-noisy": "noisy, 5 × the steps",
    "target-mnist": "MNIST",
    "target-cnn": "CNN",
    "target-resnet20": "ResNet-20",
    "target-ptb": "LSTM",
    "target-gpt": "3 layers",
    "target-quarter": "24 layers, a quarter",
    "target-shakespeare": "24 layers",
}
"""What README calls the tasks, by the folders of their records."""
TARGETS = ("", "0.2", "0.6", "0.8", "0.9")
SWEPT = (ADAM, *(Line("ngn-mdv1", target) for target in TARGETS), Line("ngn-m", "0.8"))
UNSCHEDULED = tuple(
    Line(name, target, "") for name, target in (("adam", ""), ("ngn-mdv1", ""), ("ngn-mdv1", "0.8"))
)


def untuned_table(kept: Sequence[Kept], lines: Sequence[Line]) -> Table:
    """Each line at its one step size for all tasks, beside Adam at its best one for each."""
    rows = []
    within = dict.fromkeys(lines, 0)
    shown = dict.fromkeys(lines, 0)
    for sweep in kept:
        tuned = ADAM.results(sweep)
        best = None if tuned is None else tuned.best("adam")
        if tuned is None or best is None:
            rows.append([sweep.title, "–", *("–" for _ in lines)])
            continue
        sure = tuned.best_is_sure("adam")
        row = [sweep.title, f"{number(best.mean)}{'' if sure else UNSURE} ({best.lr:g})"]
        for line in lines:
            cell = line.cell(sweep)
            good = sure and cell is not None and _as_good(cell, tuned, best)
            shown[line] += sure and cell is not None
            within[line] += good
            row.append(_score(cell, good))
        rows.append(row)
    counts = (f"{within[ln]} of {shown[ln]}" if shown[ln] else "–" for ln in lines)
    rows.append(["within the goal", "", *counts])
    caption = (
        "Mean accuracy in per cent, or perplexity where it is text (lower is better), after the last "
        "step; in brackets Adam's best step size of those tried. Bold: within "
        f"{GOAL['accuracy']:g} points of accuracy or {GOAL['perplexity']:g} % of perplexity of tuned "
        f"Adam, or better. {UNSURE}: a step size next to Adam's best has no run, so nothing is compared "
        "with it. –: no run."
    )
    headings = columns("task", "Adam, tuned", *(line.label for line in lines))
    return Table("One setting for all tasks", headings, rows, caption)


def _as_good(cell: Cell, tuned: Results, best: Cell) -> bool:
    """Whether a score is as good as that of Adam at its best step size."""
    return tuned.good(cell.mean, best.mean, GOAL[tuned.metric])


def _score(cell: Cell | None, good: bool) -> str:
    if cell is None:
        return "–"
    text = "diverged" if cell.diverged else number(cell.mean)
    return f"**{text}**" if good else text


def headline_table(kept: Sequence[Kept], lines: Sequence[Line]) -> Table:
    """README's: the tasks on which a tuned Adam is known, shorter, and the decades that two lines hold."""
    rows = []
    within, shown = dict.fromkeys(lines, 0), dict.fromkeys(lines, 0)
    for sweep in kept:
        tuned = ADAM.results(sweep)
        best = None if tuned is None else tuned.best("adam")
        if tuned is None or best is None or not tuned.best_is_sure("adam"):
            continue
        row = [SHORT.get(sweep.folder.name, sweep.title), number(best.mean)]
        for line in lines:
            cell = line.cell(sweep)
            good = cell is not None and _as_good(cell, tuned, best)
            shown[line] += cell is not None
            within[line] += good
            row.append(_score(cell, good))
        rows.append([*row, *(_decades(line.results(sweep), line.name) for line in HELD)])
    counts = (f"{within[ln]} of {shown[ln]}" if shown[ln] else "–" for ln in lines)
    rows.append(["as good", "", *counts, *("" for _ in HELD)])
    decades = (f"decades, {line.label}" for line in HELD)
    headings = columns("task", "Adam, tuned", *(line.label for line in lines), *decades)
    return Table("One setting", headings, rows)


def _decades(results: Results | None, name: str) -> str:
    found = None if results is None else results.good_range(name, results.default_margin)
    return "–" if found is None else str(found.width)


def decades_table(kept: Sequence[Kept], lines: Sequence[Line]) -> Table:
    """The best score of each line on each task, and the width of its good range."""
    rows = [
        [sweep.title, *(quality(line.results(sweep), line.name) for line in lines)]
        for sweep in kept
        if any(line.results(sweep) is not None for line in lines)
    ]
    caption = (
        "The best score, then the decades of step sizes within 0.5 points of accuracy or 5 % of "
        "perplexity of it; ≥: the grid of step sizes ends inside the range. "
        f"{UNSURE}: a step size next to the best one has no run. –: no run."
    )
    headings = columns("task", *(line.label for line in lines))
    return Table("Decades", headings, rows, caption)


def status_table(kept: Sequence[Kept]) -> Table:
    """How much of each sweep is done."""
    rows = [
        [
            sweep.title,
            sweep.reaches_zero,
            str(len(sweep.runs)),
            str(len(sweep.wanted)),
            f"{sum(run['seconds'] for run in sweep.runs) / 60:.0f}",
        ]
        for sweep in kept
    ]
    headings = columns("task", "can the loss reach 0?", "runs", "planned", "minutes", text=(0, 1))
    return Table("What is done", headings, rows)


def _words(options: Options, own: bool) -> str:
    """A variant's options in words, without the loss target; a cap at lr is not mentioned."""
    given = dict(options)
    words = [given.get("schedule", "none")]
    cap = given.get("step_cap", "lr" if words == ["none"] else "no")
    if own and cap != "lr":
        words.append("no cap" if cap == "no" else f"cap {cap}")
    if "weight_decay" in given:
        words.append(f"decay {given['weight_decay']}")
    if "loss_floor" in given:
        words.append(f"floor {given['loss_floor']}")
    return ", ".join(words)


def grid_tables(sweep: Kept) -> list[Table]:
    """Scores by step size, a row per optimizer and options; those with lr around 1 first."""
    tables = []
    for around_one in (True, False):
        rows: list[tuple[list[str], Results, str]] = []
        for options, results in sweep.by_options().items():
            for name in results.cells:
                entry = optimizers.find(name)
                if (entry.own or entry.family != "coordinate") == around_one:
                    target = dict(options).get("loss_target", "0") if entry.own else ""
                    head = [entry.label, target, _words(options, entry.own)]
                    rows.append((head, results, name))
        if not rows:
            continue
        lrs = sorted({lr for _, results, name in rows for lr in results.grid(name)})
        cells = [
            [
                *head,
                *(
                    str(results.cells[name][lr])
                    if lr in results.cells[name]
                    else "–" * (lr in results.planned.get(name, ()))
                    for lr in lrs
                ),
            ]
            for head, results, name in rows
        ]
        headings = [
            *columns("optimizer", "target", "schedule", text=(0, 2)),
            *(Column(f"{lr:g}") for lr in lrs),
        ]
        tables.append(Table(sweep.title, headings, cells))
    return tables


COLOURS = ("#1f4e9c", "#222222", "#8a5fb0", "#e0a100", "#c1272d", "#2a9d57")
PER_ROW = 4


def _drawn(kept: Sequence[Kept]) -> list[tuple[Kept, list[tuple[Line, Results]]]]:
    """The lines of the picture: Adam and NGN-MDv1 at each target, with the schedule."""
    lines = [
        (sweep, [(ln, ln.results(sweep)) for ln in SWEPT if ln.name != "ngn-m"]) for sweep in kept
    ]
    found = [(sweep, [(ln, r) for ln, r in pairs if r is not None]) for sweep, pairs in lines]
    return [(sweep, pairs) for sweep, pairs in found if len(pairs) > 1]


def picture_source(kept: Sequence[Kept]) -> str | None:
    """A fingerprint of what the picture shows; None if there is nothing to show."""
    shown = {
        sweep.title: {
            line.label: [(lr, str(cell)) for lr, cell in results.cells[line.name].items()]
            for line, results in pairs
        }
        for sweep, pairs in _drawn(kept)
    }
    return record_digest(shown) if shown else None


def figure(kept: Sequence[Kept]) -> Figure:
    """Final score against step size, a panel per task, a line per loss target, and Adam."""
    plt = figures.pyplot()
    shown = _drawn(kept)
    count = -(-len(shown) // PER_ROW)
    drawn, axes = plt.subplots(
        count, PER_ROW, figsize=(3.1 * PER_ROW, 2.7 * count), squeeze=False, layout="constrained"
    )
    order = [line for line in SWEPT if line.name != "ngn-m"]
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, (sweep, pairs) in zip(axes.flat, shown, strict=False):
        worst_at_top = not pairs[0][1].higher_is_better
        for line, results in pairs:
            rank = order.index(line)
            figures.line(
                axis, results, line.name, "score", rank, COLOURS[rank], line.label, worst_at_top
            )
        together = Results(
            [run for line, r in pairs for c in r.cells[line.name].values() for run in c.runs]
        )
        axis.set_xscale("log")
        figures.score_axis(axis, together)
        axis.set_title(sweep.title, fontsize=9)
        axis.set_xlabel("lr")
    handles = [
        plt.Line2D(
            [], [], color=COLOURS[rank], marker=figures.MARKERS[rank], ms=5, label=line.label
        )
        for rank, line in enumerate(order)
    ]
    drawn.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return drawn


HEADLINE_PICTURE = "step-sizes.png"
HEADLINE = {
    "target-mnist": "the loss can reach 0",
    "target-shakespeare": "the loss cannot reach 0",
}
"""The sweeps of README's picture, by their folder, and what their titles add."""
HEADLINE_LINES = (
    (ADAM, "Adam", "#1f4e9c"),
    (Line("ngn-mdv1"), "NGN-MDv1", "#e0a100"),
    (Line("ngn-mdv1", "0.8"), "NGN-MDv1, loss_target=0.8", "#c1272d"),
)


def _headline(kept: Sequence[Kept]) -> list[tuple[Kept, list[tuple[Line, str, str, Results]]]]:
    shown = [
        (sweep, [(*ln, r) for ln in HEADLINE_LINES if (r := ln[0].results(sweep)) is not None])
        for sweep in kept
        if sweep.folder.name in HEADLINE
    ]
    return [(sweep, lines) for sweep, lines in shown if lines]


def headline_source(kept: Sequence[Kept]) -> str | None:
    """A fingerprint of what README's picture shows; None if there is nothing to show."""
    shown = {
        sweep.title: {text: _means(results, line.name) for line, text, _, results in lines}
        for sweep, lines in _headline(kept)
    }
    return record_digest(shown) if shown else None


def _means(results: Results, name: str) -> list[tuple[float, float | None]]:
    """Step sizes with the mean final scores; None where a seed diverged."""
    return [(lr, None if cell.diverged else cell.mean) for lr, cell in results.cells[name].items()]


def headline_figure(kept: Sequence[Kept]) -> Figure:
    """README's picture: final score against step size."""
    plt = figures.pyplot()
    shown = _headline(kept)
    sizes = {"font.size": 15, "axes.titlesize": 15, "lines.linewidth": 3, "lines.markersize": 8}
    with plt.rc_context(sizes):
        drawn, axes = plt.subplots(
            1, len(shown), figsize=(6.6 * len(shown), 5.0), squeeze=False, layout="constrained"
        )
        for axis, (sweep, lines) in zip(axes.flat, shown, strict=True):
            _headline_panel(axis, lines)
            axis.set_title(f"{sweep.title}:\n{HEADLINE[sweep.folder.name]}", loc="left")
        drawn.supxlabel(
            "step size (lr)      ▲ beyond the picture   ✕ diverged", fontsize=15, color="#444444"
        )
        handles = [
            plt.Line2D([], [], color=colour, marker="osD"[place], label=text)
            for place, (_, text, colour) in enumerate(HEADLINE_LINES)
        ]
        drawn.legend(handles=handles, loc="outside upper center", fontsize=15, ncols=len(handles))
    return drawn


def _headline_panel(axis: Axes, lines: Sequence[tuple[Line, str, str, Results]]) -> None:
    """A line each; marks at the edge for what diverged or lies beyond it."""
    accuracy = lines[0][-1].higher_is_better
    low, high = (0.0, 105.0) if accuracy else (5.0, 40.0)
    edge = 0.05 if accuracy else 0.95
    axis.set_xscale("log")
    if not accuracy:
        axis.set_yscale("log")
        axis.set_yticks([5, 10, 20, 40], ["5", "10", "20", "40"])
    axis.minorticks_off()
    axis.set_ylim(low, high)
    axis.set_ylabel("test accuracy (%)" if accuracy else "perplexity (lower is better)")
    transform = axis.get_xaxis_transform()
    for line, text, colour, results in lines:
        place = [known for _, known, _ in HEADLINE_LINES].index(text)
        means = _means(results, line.name)
        inside = [(lr, mean) for lr, mean in means if mean is not None and low <= mean <= high]
        axis.plot(*zip(*inside, strict=True), "osD"[place] + "-", color=colour)
        for mark, lrs in {
            "x": [lr for lr, mean in means if mean is None],
            "^": [lr for lr, mean in means if mean is not None and not low <= mean <= high],
        }.items():
            # Side by side, where several have a mark.
            xs = [lr * (0.75, 1.0, 1.33)[place] for lr in lrs]
            axis.plot(xs, [edge] * len(xs), mark, color=colour, transform=transform, ms=9, mew=3)


def sections(kept: Sequence[Kept]) -> dict[str, str]:
    """The generated parts of docs/loss-target.md, by the name of their markers."""
    if not kept:
        return {}
    parts = {}
    for name, table in {
        "target-at-one": untuned_table(kept, AT_ONE),
        "untuned": untuned_table(kept, UNTUNED),
        "target-decades": decades_table(kept, SWEPT),
        "target-unscheduled": decades_table(kept, UNSCHEDULED),
        "target-status": status_table(kept),
        "one-setting": headline_table(kept, HEADLINE_SETTINGS),
    }.items():
        parts[name] = f"{markdown_table(table)}\n{table.caption}\n".rstrip() + "\n"
    for sweep in kept:
        tables = "\n".join(markdown_table(table) for table in grid_tables(sweep))
        missing = ""
        if sweep.missing:
            missing = (
                f"**Not finished**: {len(sweep.missing)} of {len(sweep.wanted)} planned runs, each of one "
                "step size and seed, are missing; `ngn-bench summary` lists them.\n\n"
            )
        note = skipped_note(sweep.runs)
        parts[sweep.folder.name] = missing + tables + (f"\n{note}\n" if note else "")
    return parts

"""All kept records: one table, one picture, and the runs that are still missing.

`sweeps.json` in the folder of kept records lists the sweeps: a title, the folder of the record, the
commands that make it, the pictures that the docs show. The commands say which runs there should be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BenchError
from ..report import Table, columns, markdown_table, parse_json
from . import figures
from .results import AT_BOUND, Results, bound_shares, grid_table, number, skipped_note
from .sweep import Record, require_one_problem
from .train import EARLY, Run, RunSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("ngn-m", "sgdm", "momo", "ngn-mdv1", "adam", "momo-adam")
PAIRS = (("ngn-m", "sgdm", "momo"), ("ngn-mdv1", "adam", "momo-adam"))
UNSURE = "*"


Options = tuple[tuple[str, str], ...]
"""What else than its step size sets a run of an optimizer apart."""


def options_of(spec: RunSpec) -> Options:
    """The options of a run, its weight decay among them."""
    decay = {"weight_decay": f"{spec.weight_decay:g}"} if spec.weight_decay else {}
    return tuple(sorted((dict(spec.options) | decay).items()))


@dataclass(frozen=True)
class Kept:
    """A sweep whose record is kept: the runs of its commands, and those that are recorded."""

    title: str
    folder: Path
    commands: tuple[str, ...]
    pictures: tuple[str, ...]
    wanted: tuple[RunSpec, ...]
    runs: tuple[Run, ...]
    reaches_zero: str = "–"

    @property
    def missing(self) -> list[RunSpec]:
        done = {RunSpec.from_json(run["spec"]) for run in self.runs}
        return [spec for spec in self.wanted if spec not in done]

    @property
    def results(self) -> Results | None:
        """None before the first run."""
        planned: dict[str, list[float]] = {}
        for spec in self.wanted:
            planned.setdefault(spec.optimizer, []).append(spec.lr)
        return Results(self.runs, planned) if self.runs else None

    def by_options(self) -> dict[Options, Results]:
        """The results of the runs with the same options, in the order of the commands."""
        planned: dict[Options, dict[str, list[float]]] = {}
        for spec in self.wanted:
            planned.setdefault(options_of(spec), {}).setdefault(spec.optimizer, []).append(spec.lr)
        runs: dict[Options, list[Run]] = {}
        for run in self.runs:
            runs.setdefault(options_of(RunSpec.from_json(run["spec"])), []).append(run)
        return {
            options: Results(runs[options], grids)
            for options, grids in planned.items()
            if options in runs
        }

    def missing_text(self) -> str:
        """How many runs are missing, and which; with their options, if there are several."""
        several = len(set(map(options_of, self.wanted))) > 1
        steps: dict[str, list[float]] = {}
        for spec in self.missing:
            words = [f"{k.replace('_', ' ')} {v}" for k, v in options_of(spec) if several]
            name = ", ".join([figures.label(spec.optimizer), *words])
            steps.setdefault(name, []).append(spec.lr)
        which = "; ".join(
            f"{name} at {', '.join(f'{lr:g}' for lr in sorted(set(lrs)))}"
            for name, lrs in steps.items()
        )
        return f"{len(self.missing)} of {len(self.wanted)} runs are missing: {which}"


def load(
    folder: Path, planned: Callable[[str], Sequence[RunSpec]], index: str = "sweeps.json"
) -> list[Kept]:
    """All kept sweeps; `planned` turns a command into the runs that it does.

    A sweep of the index may use the runs of other folders `also`.
    """
    kept = []
    for entry in parse_json(folder / index):
        wanted = [spec for command in entry["commands"] for spec in planned(command)]
        chosen = set(wanted)
        runs = [
            run
            for place in (entry["folder"], *entry.get("also", ()))
            for run in Record(folder / place / "runs.jsonl").read()
            if RunSpec.from_json(run["spec"]) in chosen
        ]
        require_one_problem(runs)
        kept.append(
            Kept(
                entry["title"],
                folder / entry["folder"],
                tuple(entry["commands"]),
                tuple(entry["pictures"]),
                tuple(dict.fromkeys(wanted)),
                tuple(runs),
                entry.get("reaches_zero", "–"),
            )
        )
    return kept


def _row(results: Results | None, name: str) -> list[str]:
    """Best score, its step size, decades, and the scores at 10 and 100 times the step size."""
    best = results.best(name) if results is not None else None
    if results is None or best is None:
        tried = results is not None and name in results.cells
        return ["diverged" if tried else "–", "–", "–", "–", "–"]
    found = results.good_range(name, results.default_margin)
    mark = "" if results.best_is_sure(name) else UNSURE
    assert found is not None
    return [
        number(best.mean) + mark,
        f"{best.lr:g}",
        found.width,
        *(results.at_multiple(name, factor) for factor in (10, 100)),
    ]


def quality(results: Results | None, name: str) -> str:
    """The best score with the deviation over the seeds, and the width of the good range."""
    best = None if results is None else results.best(name)
    if results is None or best is None:
        return "–"
    found = results.good_range(name, results.default_margin)
    assert found is not None
    mark = "" if results.best_is_sure(name) else UNSURE
    return f"{best}{mark}; {found.width}"


DECADES = (
    "the width of the range of step sizes around the best one that stay within 0.5 points of "
    "accuracy, or 5 % of perplexity, in powers of ten. 0: no neighbour of the best step size is in "
    "the range; ≥: the grid of step sizes ends inside it."
)


def summary_table(kept: Sequence[Kept]) -> Table:
    """Six optimizers on every task."""
    rows = []
    for sweep in kept:
        results = sweep.results
        names = [name for name in NAMES if any(s.optimizer == name for s in sweep.wanted)]
        for name in names:
            title = sweep.title if name == names[0] else ""
            rows.append([title, figures.label(name), *_row(results, name)])
    headings = columns(
        *("task", "optimizer", "best", "at lr", "decades", "at 10× lr", "at 100× lr"), text=(0, 1)
    )
    caption = (
        "best: accuracy in per cent, or perplexity on Shakespeare (lower is better), after the last "
        f"step; decades: {DECADES} –: no run."
    )
    if any(UNSURE in row[2] for row in rows):
        caption += f" {UNSURE}: a step size next to it has no run yet, and may be better."
    return Table("Six optimizers on all tasks", headings, rows, caption)


def decades_table(kept: Sequence[Kept]) -> Table:
    """The widths alone: a row per task, a column per optimizer."""
    rows = []
    for sweep in kept:
        widths = [_row(sweep.results, name)[2] for name in NAMES]
        title = sweep.title + f" {UNSURE}" * bool(sweep.missing)
        rows.append([title, sweep.reaches_zero, *widths])
    labels = map(figures.label, NAMES)
    headings = columns("task", "can the loss reach 0?", *labels, text=(0, 1))
    caption = f"Each number is {DECADES} –: no run."
    if any(sweep.missing for sweep in kept):
        caption += f" {UNSURE}: not all runs are done."
    return Table("Decades of good step sizes", headings, rows, caption)


RIVAL_BOUNDS = (("momo", (1, 10, 100)), ("momo-adam", (1, 10, 100)))
OWN_BOUNDS = (("ngn-m", (1, 10)), ("ngn-mdv1", (1, 10)))


def bounds_table(kept: Sequence[Kept], shown: Sequence[tuple[str, Sequence[int]]]) -> Table:
    """How often the step sizes are at their bounds, at the best c or α₀ and at multiples of it."""
    rows = []
    for sweep in kept:
        results = sweep.results
        if results is not None:
            cells = [
                results.at_bound(name, factor) for name, factors in shown for factor in factors
            ]
            rows.append([sweep.title, *cells])
    cells = [
        f"{figures.label(name)}{f', {factor}×' if factor > 1 else ''}"
        for name, factors in shown
        for factor in factors
    ]
    caption = (
        f"Per cent of steps whose step size is at least {AT_BOUND:g} of c or α₀ (Momo-Adam: of "
        f"α₀ / (1 − β₁ᵗ)): among the first {EARLY} / among the later ones that were looked at, first "
        "seed. At the best c or α₀, at 10 and at 100 times it; –: no run."
    )
    return Table("Steps at the bound", columns("task", *cells), rows, caption)


PER_ROW = 3


def summary_figure(kept: Sequence[Kept]) -> Figure:
    """Final score against step size: two panels per task, one below the other, one per family."""
    plt = figures.pyplot()
    shown = [(sweep, results) for sweep in kept if (results := sweep.results) is not None]
    blocks = -(-len(shown) // PER_ROW)
    figure, axes = plt.subplots(
        2 * blocks,
        PER_ROW,
        figsize=(1.8 + 2.5 * PER_ROW, 0.4 + 4.6 * blocks),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for place, (sweep, results) in enumerate(shown):
        block, column = divmod(place, PER_ROW)
        pair = axes[2 * block : 2 * block + 2, column]
        for axis, family in zip(pair, PAIRS, strict=True):
            names = [name for name in family if name in results.cells]
            if not names:
                continue
            axis.set_axis_on()
            figures.score_lines(axis, results, names)
            axis.set_xscale("log")
            lrs = [lr for name in names for lr in results.grid(name)]
            axis.set_xlim(min(lrs) / 2, max(lrs) * 2)
            figures.score_axis(axis, results, names)
        note = f"\n({len(sweep.runs)} of {len(sweep.wanted)} runs)" if sweep.missing else ""
        pair[0].set_title(sweep.title.replace(", ", ",\n", 1) + note, fontsize=9)
        pair[1].set_xlabel("c, lr or α₀")
    for row in range(2 * blocks):
        handles = [
            plt.Line2D([], [], color=figures.COLOURS[name], label=figures.label(name))
            for name in PAIRS[row % 2]
        ]
        axes[row, -1].legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5))
    title = "Final score against the step size. ✕: diverged, ▲: above the picture"
    figure.suptitle(title, fontsize=9)
    return figure


def sections(kept: Sequence[Kept]) -> dict[str, str]:
    """The generated parts of the docs, by the name of their markers."""
    parts = {"summary": markdown_table(summary_table(kept)) + f"\n{summary_table(kept).caption}\n"}
    unfinished = [
        f"{sweep.title} ({len(sweep.runs)} of {len(sweep.wanted)} runs)"
        for sweep in kept
        if sweep.missing
    ]
    if unfinished:
        parts["summary"] += f"\n**Not finished**: {'; '.join(unfinished)}.\n"
    small = decades_table(kept)
    parts["decades"] = f"{markdown_table(small)}\n{small.caption}\n"
    bounds = [bounds_table(kept, shown) for shown in (RIVAL_BOUNDS, OWN_BOUNDS)]
    tables = "\n".join(map(markdown_table, bounds))
    parts["bounds"] = f"{tables}\n{bounds[0].caption}\n"
    for sweep in kept:
        parts[sweep.folder.name] = _section(sweep)
    return parts


def provenance(sweep: Kept) -> str:
    """A sweep's commands, how long its runs took, and which are missing."""
    seconds = sum(run["seconds"] for run in sweep.runs)
    text = "```console\n" + "".join(f"$ {command}\n" for command in sweep.commands) + "```\n\n"
    text += f"{len(sweep.runs)} runs, {seconds / 60:.0f} minutes of training.\n"
    if sweep.missing:
        text += f"**Not finished**: {sweep.missing_text()}.\n"
    return text


def _section(sweep: Kept) -> str:
    """A sweep's own commands, what is missing, and its scores by step size."""
    results = sweep.results
    text = provenance(sweep)
    if results is None:
        return text
    shown = [grid_table(results, names) for names in results.families().values()]
    text += "".join(f"\n{markdown_table(table)}" for table in shown)
    note = skipped_note(sweep.runs)
    return f"{text}\n{note}\n" if note else text


def replaced(text: str, parts: dict[str, str], path: Path) -> str:
    """The text with each of its generated parts replaced; raises for an unknown part."""

    def part(match: re.Match[str]) -> str:
        name = match[1]
        if name not in parts:
            raise BenchError(f"{path} has a part {name!r} that no kept sweep makes")
        return f"<!-- lab:{name} -->\n{parts[name]}<!-- /lab:{name} -->"

    return re.sub(r"<!-- lab:(\S+) -->\n.*?<!-- /lab:\1 -->", part, text, flags=re.DOTALL)


def pictures(sweep: Kept) -> dict[str, Figure]:
    """The sweep's pictures that the docs show, by file name."""
    results = sweep.results
    if results is None:
        return {}
    drawn = {}
    for name in sweep.pictures:
        figure = figures.FIGURES[name](results, results.default_margin)
        if figure is not None:
            drawn[f"stability-{sweep.folder.name}-{name}.png"] = figure
    return drawn


EARLY_KEPT = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50)
LATER_KEPT = 25
ENVIRONMENT_KEPT = (
    "revision",
    "python",
    "platform",
    "cpu",
    "cores",
    "threads",
    "device",
    "packages",
)


def thin(run: Run) -> Run:
    """A run small enough to keep: fewer samples and digits, telemetry of the first seed alone."""
    telemetry = run["telemetry"]
    steps = telemetry["step"]
    early = [i for i, step in enumerate(steps) if step in EARLY_KEPT]
    later = [i for i, step in enumerate(steps) if step > EARLY_KEPT[-1]]
    stride = max(1, -(-len(later) // LATER_KEPT))
    places = early + later[::-stride][::-1] if run["spec"]["seed"] == 0 else []

    def some(series: Any) -> Any:
        if isinstance(series, dict):
            return {name: some(values) for name, values in series.items()}
        return [_rounded(series[place], 4) for place in places]

    kept = {key: some(series) for key, series in telemetry.items() if key != "at_bound"}
    kept["at_bound"] = list(bound_shares(run))
    curve = [{key: _rounded(v, 7) for key, v in point.items()} for point in run["curve"]]
    environment = {key: run["environment"].get(key) for key in ENVIRONMENT_KEPT}
    return run | {
        "telemetry": kept,
        "curve": curve,
        "environment": environment,
        "command": _without_places(run["command"]),
    }


def _without_places(command: Sequence[str]) -> list[str]:
    """A command without the folders of the machine that it was given on."""
    kept: list[str] = []
    for word in command:
        if kept and kept[-1] == "--out":
            kept.pop()
        else:
            kept.append("DATA" if kept and kept[-1] == "--data-dir" else word)
    return kept


def _rounded(value: Any, digits: int) -> Any:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def keep(source: Path, kept: Sequence[Kept]) -> int:
    """Add the runs of a sweep's record to the kept records that they belong to, thinned.

    Returns how many were added. A run that is kept already stays as it is.
    """
    if not source.exists():
        raise BenchError(f"no record {source}: give the folder that a sweep wrote to")
    found = {RunSpec.from_json(run["spec"]): run for run in Record(source).read()}
    added = 0
    for sweep in kept:
        new = [found[spec] for spec in sweep.missing if spec in found]
        require_one_problem([*sweep.runs, *new])
        if new:
            with Record(sweep.folder / "runs.jsonl").writer() as append:
                for run in new:
                    append(thin(run))
        added += len(new)
    return added

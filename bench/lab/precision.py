"""docs/precision.md's tables and picture, from the kept records of runs with narrow state.

`precision.json` in the folder of kept records lists the sweeps, as `sweeps.json` does for
docs/stability.md; one of them has runs of several formats, which differ in their options.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..contenders.registry import CONTENDERS, stored_as
from ..report import Table, columns, markdown_table
from . import figures
from .formats_study import study_table
from .results import Results
from .summary import UNSURE, Kept, Options, provenance, quality

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INDEX = "precision.json"
STUDY = "formats.json"
REFERENCE = "bench/results/reference.json"
WORKLOAD = "transformer++-70m"
NAMES = ("ngn-m", "ngn-mdv1")
CONTENDER = {"ngn-m": "ngnm:cpu", "ngn-mdv1": "ngnmdv1:cpu"}
STATES = ("float32", "bfloat16", "8bit+bfloat16", "8bit")
COLOURS = ("#222222", "#2a9d57", "#e0a100", "#c1272d")
"""By the place of a format in its sweep, the widest first."""


def stored(options: Options) -> str:
    """How a run stores its numbers, in the words of the options of an optimizer."""
    given = dict(options)
    if "dtype" in given:
        if given["dtype"] == "mixed":
            return "float32 parameters"
        return f'`rounding="{given.get("rounding", "nearest")}"`'
    return state_text(given.get("state", "float32"))


def state_text(state: str) -> str:
    """`8bit+bfloat16` as it is written in Python."""
    names = ", ".join(f'"{name}"' for name in state.split("+"))
    return f"`({names})`" if "+" in state else f"`{names}`"


def by_format(sweep: Kept) -> dict[str, Results]:
    """The results of each format of a sweep, in the order of its commands."""
    return {stored(options): results for options, results in sweep.by_options().items()}


def _ratios(root: Path) -> dict[str, float]:
    """Times of a step on the largest workload of the stored reference run, by contender."""
    path = root / REFERENCE
    rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    return {
        row["contender"]: row["ratio"]
        for row in rows
        if row["workload"] == WORKLOAD and row["dtype"] == "float32" and row["ratio"] is not None
    }


def choice_table(kept: Sequence[Kept], root: Path) -> Table:
    """Bytes, time and scores of each format."""
    shown = [sweep for sweep in kept if all("dtype" not in dict(s.options) for s in sweep.wanted)]
    results = [by_format(sweep) for sweep in shown]
    ratios = _ratios(root)
    rows = []
    for name in NAMES:
        for state in STATES:
            contender = stored_as(CONTENDERS[CONTENDER[name]], state, "nearest")
            passes = contender.passes
            if "v" not in passes.apply and "+" in state:
                continue
            ratio = ratios.get(contender.name)
            rows.append(
                [
                    figures.label(name),
                    state_text(state),
                    f"{passes.state_bytes(torch.float32):.4g}",
                    f"{passes.floor_bytes(torch.float32):.4g}",
                    "–" if ratio is None else f"{ratio:.2f}",
                    *(quality(by.get(state_text(state)), name) for by in results),
                ]
            )
    headings = columns(
        *("optimizer", "`state=`", "bytes of state", "bytes moved", "time"),
        *(sweep.title for sweep in shown),
        text=(0, 1),
    )
    caption = (
        "Bytes are per parameter of float32, a step of fused AdamW moves 28; time: a step on "
        f"{WORKLOAD}, fused AdamW = 1, –: not in the stored reference run. Scores: the best mean "
        "over the seeds ± their deviation (accuracy in per cent; perplexity on Shakespeare), then "
        "the width of the range of good step sizes in decades, as docs/stability.md has it."
    )
    if any(UNSURE in cell for row in rows for cell in row):
        caption += f" {UNSURE}: a step size next to it has no run."
    return Table("Formats", headings, rows, caption)


def grid_tables(sweep: Kept) -> list[Table]:
    """A table for each optimizer: final scores, a row per format, a column per step size."""
    formats = by_format(sweep)
    tables = []
    for name in NAMES:
        present = {text: r for text, r in formats.items() if name in r.cells}
        lrs = sorted({lr for r in present.values() for lr in r.grid(name)})
        rows = [
            [text, *(str(r.cells[name][lr]) if lr in r.cells[name] else "–" for lr in lrs)]
            for text, r in present.items()
        ]
        headings = columns(figures.label(name), *(f"{lr:g}" for lr in lrs))
        tables.append(Table(f"{sweep.title}, {figures.label(name)}", headings, rows))
    return [table for table in tables if table.rows]


def figure(kept: Sequence[Kept]) -> Figure:
    """Final score against step size: a row per sweep, a column per optimizer, a line per format."""
    plt = figures.pyplot()
    shown = [(sweep, by_format(sweep)) for sweep in kept if sweep.runs]
    drawn, axes = plt.subplots(
        len(shown),
        len(NAMES),
        figsize=(4 * len(NAMES), 0.8 + 2.5 * len(shown)),
        squeeze=False,
        layout="constrained",
    )
    for row, (sweep, formats) in zip(axes, shown, strict=True):
        for axis, name in zip(row, NAMES, strict=True):
            for rank, (text, results) in enumerate(formats.items()):
                if name in results.cells:
                    plain = text.replace("`", "")
                    figures.line(axis, results, name, "score", rank, COLOURS[rank], plain)
            if not axis.lines:
                axis.set_axis_off()
                continue
            axis.set_xscale("log")
            figures.score_axis(axis, Results(sweep.runs), [name])
            axis.set_title(f"{sweep.title}, {figures.label(name)}", fontsize=10)
            axis.legend(loc="best")
    for axis in axes[-1]:
        axis.set_xlabel("c")
    drawn.suptitle("Final score against the step size, one line per format", fontsize=11)
    return drawn


def sections(kept: Sequence[Kept], root: Path) -> dict[str, str]:
    """The generated parts of docs/precision.md, by the name of their markers."""
    if not kept:
        return {}
    table = choice_table(kept, root)
    parts = {"formats": f"{markdown_table(table)}\n{table.caption}\n"}
    for sweep in kept:
        tables = "".join(f"\n{markdown_table(table)}" for table in grid_tables(sweep))
        parts[sweep.folder.name] = provenance(sweep) + tables
    study = root / "bench" / "results" / STUDY
    if study.exists():
        simulated = study_table(json.loads(study.read_text("utf-8")))
        parts["simulation"] = f"{markdown_table(simulated)}\n{simulated.caption}\n"
    return parts

"""Pictures of results, made from their JSON records."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contenders.registry import BASELINE, base_name, is_ngn, is_reference
from ..environment import machine_line
from ..errors import BenchError, missing_package
from ..report import duration, rows_of, workload_names
from ..timing.roofline import memory_speed
from ..timing.step_tables import headline_rows, workload_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"
MUTED = "#7b8794"
FASTER = "#1b998b"
SLOWER = "#e07a5f"
PALE = "#d5dbe1"
SOURCE_KEY = "Source"
RATIO_TICKS = {0.0: "0", 0.5: "½×", 1.0: "1×", 1.5: "1½×"}
CUT = 2.0


def has_matplotlib() -> bool:
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    return True


def require_matplotlib() -> None:
    if not has_matplotlib():
        raise missing_package("a picture", "matplotlib")


def _figure(width: float, height: float) -> Figure:
    require_matplotlib()
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["font.size"] = 9
    rcParams["axes.edgecolor"] = MUTED
    return Figure(figsize=(width, height), layout="constrained")


def _plain(axes: Axes, *spines: str) -> None:
    """Without tick marks and these sides of the frame."""
    axes.tick_params(length=0, colors=INK)
    axes.spines[list(spines)].set_visible(False)


def _heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, weight="bold")


def _beside(axes: Axes, text: str, point: tuple[float, float], by: int, **style: Any) -> None:
    """A text some points to the right of a point."""
    offset: dict[str, Any] = {"xytext": (by, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, point, **offset, color=INK, **style)


def _signed(figure: Figure, record: dict[str, Any]) -> None:
    figure.supxlabel(machine_line(record["environment"]), fontsize=8, color=MUTED)


def record_digest(record: dict[str, Any]) -> str:
    """A fingerprint of a record, stored in its picture."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def save(figure: Figure, path: Path, record: dict[str, Any]) -> None:
    """Write the picture; a PNG carries the fingerprint of the record it was made from."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {SOURCE_KEY: record_digest(record)} if path.suffix == ".png" else None
        figure.savefig(path, dpi=160, facecolor="white", metadata=metadata)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from None
    except ValueError as error:
        raise BenchError(f"cannot write {path}: {error}") from None


def plot_step(record: dict[str, Any], path: Path) -> None:
    """A panel of bars for each workload, with a line for each contender through all of them."""
    panels = {
        workload: {row["contender"]: row for row in rows}
        for workload in workload_names(record)
        if (rows := headline_rows(rows_of(record, workload)))
    }
    if not panels:
        raise BenchError("nothing was measured against fused AdamW, so there is nothing to plot")
    labels = {name: row["label"] for rows in panels.values() for name, row in rows.items()}
    names = sorted(labels, key=lambda name: (name != BASELINE, not is_ngn(name)))
    height = 0.26 * len(names)
    figure = _figure(3.4 + 1.55 * max(2, len(panels)), 2.0 + height)
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(all_axes, panels.values(), strict=True):
        _ratio_panel(axes, names, panel, record)
    first = all_axes[0]
    first.set_ylim(len(names) - 0.4, -0.6)
    first.set_yticks(range(len(names)), [labels[name] for name in names])
    for label, name in zip(first.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name == BASELINE else "normal")
    title = "Time of one optimizer step, relative to torch's fused AdamW"
    figure.suptitle(title, fontsize=13, weight="bold", color=INK)
    handles = _step_legend(record, panels)
    title, ncols = machine_line(record["environment"]), len(handles) if len(panels) > 3 else 2
    legend: dict[str, Any] = {"handles": handles, "ncols": ncols, "title": title}
    style: dict[str, Any] = {"frameon": False, "fontsize": 9.5, "title_fontproperties": {"size": 9}}
    figure.legend(loc="outside lower center", **legend, **style)
    save(figure, path, record)


def _step_legend(record: dict[str, Any], panels: dict[str, dict[str, dict[str, Any]]]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [row for rows in panels.values() for row in rows.values()]
    colours = {_bar_colour(row) for row in shown}
    named = {FASTER: "NGN, faster than fused AdamW", SLOWER: "NGN, slower"}
    named |= {MUTED: "fused AdamW", PALE: "others"}
    handles: list[Any] = [
        Patch(color=colour, label=label) for colour, label in named.items() if colour in colours
    ]
    if any(not _in_cache(row, record) for row in shown):
        label = "the rule's bytes at memory speed"
        handles.append(Line2D([], [], color=INK, marker="|", ls="", ms=9, mew=1.8, label=label))
    return handles


def _ratio_panel(
    axes: Axes, names: Sequence[str], rows: dict[str, dict[str, Any]], record: dict[str, Any]
) -> None:
    """One workload: a bar for each name that has a row, with its ratio; longer ones are cut."""
    baseline = rows[BASELINE]
    speed = memory_speed(record["memory_bandwidth"])
    for position, name in enumerate(names):
        if position and base_name(name) != base_name(names[position - 1]):
            axes.axhline(position - 0.5, color=PALE, lw=0.6)
        row = rows.get(name)
        if row is None:
            continue
        axes.barh(position, min(row["ratio"], CUT), height=0.7, color=_bar_colour(row))
        if row["ratio"] > CUT:
            _cut_bar(axes, position)
        if speed and not _in_cache(row, record):
            floor = row["bytes_floor"] * row["parameters"] / speed / baseline["time"]["median"]
            axes.plot([floor, floor], [position - 0.35, position + 0.35], color=INK, lw=1.8)
        ratio = f"{row['ratio']:.{2 if row['ratio'] < 9.995 else 1}f}"
        weight = "bold" if name == BASELINE else "normal"
        _beside(axes, ratio, (CUT, position), 4, weight=weight)
    axes.axvline(1, color=INK, lw=1, ls="--")
    axes.set_xlim(0, CUT)
    axes.set_xticks(list(RATIO_TICKS), list(RATIO_TICKS.values()))
    axes.grid(axis="x", color=PALE, lw=0.6)
    axes.set_axisbelow(True)
    _plain(axes, "top", "right", "left")
    name, _, size = workload_title(baseline).partition(": ")
    time = f"fused AdamW {duration(baseline['time']['median'])}"
    size = size.replace(" parameters", "")
    axes.set_title(f"{name}\n{size}\n{time}", loc="left", fontsize=9, color=INK)


def _cut_bar(axes: Axes, position: int) -> None:
    """Two white strokes across a bar that goes on beyond the picture."""
    for x in (CUT - 0.3, CUT - 0.18):
        axes.plot([x - 0.04, x + 0.04], [position - 0.42, position + 0.42], color="white", lw=2.5)


def _bar_colour(row: dict[str, Any]) -> str:
    name = row["contender"]
    if is_ngn(name) and not is_reference(name):
        return FASTER if row["ratio"] <= 1 else SLOWER
    return MUTED if name == BASELINE else PALE


def _in_cache(row: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether parameters, gradients and state may all stay in the last-level cache."""
    last_level = max(record["environment"]["caches"].values(), default=0)
    return bool(row["parameters"] * 16 < 2 * last_level)


def plot_train(record: dict[str, Any], path: Path) -> None:
    """Iterations split into model and optimizer, one bar per optimizer."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in filter(lambda row: row["time"], record["rows"]):
        tasks.setdefault(row["workload"], []).append(row)
    if not tasks:
        raise BenchError("nothing was measured, so there is nothing to plot")
    counts = [len(rows) for rows in tasks.values()]
    figure = _figure(8.5, 1.2 + sum(0.42 * n + 0.75 for n in counts))
    all_axes = figure.subplots(
        len(tasks), 1, squeeze=False, gridspec_kw={"height_ratios": [n + 1.2 for n in counts]}
    )
    for axes, (task, rows) in zip(all_axes[:, 0], tasks.items(), strict=True):
        for position, row in enumerate(reversed(rows)):
            total, update = row["time"]["median"] * 1e3, row["update"] * 1e3
            axes.barh(position, total - update, height=0.62, color=PALE)
            axes.barh(position, update, left=total - update, height=0.62, color=FASTER)
            ratio = "" if row["ratio"] is None else f"   {row['ratio']:.3f}×"
            text = f" {duration(total / 1e3)}, update {duration(update / 1e3)}{ratio}"
            axes.text(total, position, text, va="center", fontsize=8, color=INK)
        longest = max(row["time"]["median"] for row in rows) * 1e3
        axes.set_xlim(0, longest * 1.45)
        axes.set_yticks(range(len(rows)), [row["label"] for row in reversed(rows)])
        axes.set_xlabel("ms per iteration", color=MUTED, fontsize=8)
        _plain(axes, "top", "right", "left")
        axes.set_title(f"{task}, {rows[0]['description']}", loc="left", fontsize=9, color=INK)
    title = "A training iteration: forward and backward (grey), optimizer (green)"
    figure.suptitle(title, fontsize=12, weight="bold")
    _signed(figure, record)
    save(figure, path, record)


def plot_roofline(record: dict[str, Any], path: Path) -> None:
    """Bandwidth over array size, and each rule's shortest step."""
    figure = _figure(11.5, 4.4)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1, 1.15]})
    colours = {"read": FASTER, "copy": INK, "triad": SLOWER, "update": MUTED}
    for kernel, colour in colours.items():
        points = [(p["bytes"], p[kernel] / 1e9) for p in record["sweep"] if kernel in p]
        left.plot(*zip(*points, strict=True), "o-", color=colour, lw=1.6, ms=3.5, label=kernel)
    left.set_xscale("log", base=2)
    left.set_ylim(bottom=0)
    top = left.get_ylim()[1]
    for level, number in record["environment"]["caches"].items():
        left.axvline(number, color=MUTED, lw=0.8, ls=":")
        left.text(number, top * 0.98, f" {level}", fontsize=8, color=MUTED, va="top")
    ticks = [2**e for e in range(14, 34, 3) if left.get_xlim()[0] <= 2**e <= left.get_xlim()[1]]
    left.set_xticks(ticks, [_binary(tick) for tick in ticks])
    left.set_xlabel("size of each array", color=INK)
    left.set_ylabel("GB/s", color=INK)
    _heading(left, "Memory bandwidth")
    left.legend(frameon=False)
    left.grid(color=PALE, lw=0.6)

    floors = record["floors"][::-1]
    adamw = next(f for f in floors if f["rule"] == "AdamW")
    adamw_time = adamw["reduce"] + adamw["apply"]
    for position, floor in enumerate(floors):
        reduce, apply = floor["reduce"] * 1e9, floor["apply"] * 1e9
        right.barh(position, reduce, height=0.66, color=SLOWER)
        colour = FASTER if "NGN" in floor["rule"] else PALE
        right.barh(position, apply, left=reduce, height=0.66, color=colour)
        total = reduce + apply
        text = f"{total:.2f} ns   {total / adamw_time / 1e9:.2f}×"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        _beside(right, text, (total, position), 6, fontsize=8, bbox=box)
    right.axvline(adamw_time * 1e9, color=INK, lw=1, ls="--", zorder=2)
    right.set_xlim(0, max(f["reduce"] + f["apply"] for f in floors) * 1.3e9)
    right.set_yticks(range(len(floors)), [floor["rule"] for floor in floors])
    right.set_xlabel(f"ns per {record['dtype']} parameter, and ratio to AdamW", color=INK)
    _heading(right, "Shortest step the memory allows: reduce (orange), apply")
    for axes in (left, right):
        _plain(axes, "top", "right")
    _signed(figure, record)
    save(figure, path, record)


def plot_projection(record: dict[str, Any], path: Path) -> None:
    """The exchange's time, and its share of an iteration, over the number of GPUs."""
    rows = record["projection"]
    gpus = [row["gpus"] for row in rows]
    figure = _figure(11.5, 4.6)
    left, right = figure.subplots(1, 2)
    contenders = {
        "gather": (FASTER, "NGN: all-gather of 64 bytes per rank (ring)"),
        "clip": (MUTED, "AdamW with clipping: all-reduce of the norm"),
    }
    for what, (colour, label) in contenders.items():
        left.plot(gpus, [row[what] * 1e3 for row in rows], "o-", color=colour, ms=3.5, label=label)
        for name, dashes in zip(rows[0]["shares"][what], ("-", "--", ":", "-."), strict=True):
            shares = [row["shares"][what][name] * 100 for row in rows]
            right.plot(gpus, shares, dashes, color=colour, lw=1.5)
            if what == "gather":
                text = name if name.endswith("s") else f"{name} model"
                right.annotate(text, (gpus[-1], shares[-1]), (5, -3), textcoords="offset points")
    left.legend(frameon=False, loc="upper left")
    left.set_ylabel("ms per exchange", color=INK)
    _heading(left, "One exchange")
    right.set_ylabel("% of an iteration", color=INK)
    _heading(right, "Its share of an iteration (colours as left)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(gpus[::2], [f"{number:,}" for number in gpus[::2]])
        axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
        axes.minorticks_off()
        axes.set_xlabel("GPUs, 8 in a node", color=INK)
        axes.grid(color=PALE, lw=0.6)
        _plain(axes, "top", "right")
    right.set_xlim(right=gpus[-1] * 4)
    figure.suptitle("PROJECTION from latencies, not measured", fontsize=12, weight="bold")
    source = (
        "Latencies: NCCL's tuning.cc (LL). Iterations: the paper's on 8 H100 (1.63, 3.33 and 8.41 s), "
        "and one of 0.1 s."
    )
    figure.supxlabel(source, fontsize=8, color=MUTED)
    save(figure, path, record)


def _binary(number: int) -> str:
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= scale:
            return f"{number // scale} {unit}"
    return f"{number} B"

"""The lab's pictures. Each function draws one figure from results and returns it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import BenchError, missing_package
from ..pages.plots import SOURCE_KEY
from . import optimizers
from .results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

COLOURS = {
    "ngn": "#e0a100",
    "ngn-m": "#c1272d",
    "ngn-d": "#8c6bb1",
    "ngn-d-plain": "#8c6bb1",
    "ngn-mdv1": "#c1272d",
    "ngn-mdv2": "#f08a24",
    "dec-ngn-mdv1": "#e7298a",
    "ngn-mdv1w": "#7a0177",
    "ngn-muon": "#c1272d",
    "ngn-muon-nesterov": "#7a1a1e",
    "ngn-ver2": "#8c564b",
    "sgd": "#b3b3b3",
    "sgdm": "#1f4e9c",
    "sgdm-zero": "#56b4e9",
    "momo": "#2a9d57",
    "momsps": "#8fce00",
    "alr-smag": "#00a6a6",
    "adam": "#1f4e9c",
    "adamw": "#56b4e9",
    "muon": "#1f4e9c",
    "muonmax-momo": "#2a9d57",
    "ngn-scion": "#e0a100",
    "momo-adam": "#2a9d57",
    "lion": "#333333",
    "adabelief": "#00a6a6",
    "adabound": "#b3b3b3",
    "rmsprop": "#8c564b",
    "adagrad": "#b5bd00",
    "schedulefree": "#d6604d",
    "prodigy": "#e0a100",
    "dadapt-adam": "#00a6a6",
}
"""One colour per optimizer; the families never share an axis, so they may share a colour."""

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
}

FAMILY_TITLES = {
    "gradient": "step along the gradient or its average",
    "coordinate": "step scaled per coordinate",
    "adapted": "step size estimated",
    "matrices": "matrices orthogonalised",
}


def pyplot() -> ModuleType:
    """matplotlib without a screen; raises with the install command if it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise missing_package("a picture", "matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def save(figure: Figure, path: Path, source: str = "") -> Path:
    """Write a PNG of 256 colours, a third of the size of a full one.

    `source` is the fingerprint of what it shows, which `readme.picture_source` reads.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", facecolor="white")
    metadata = PngInfo()
    if source:
        metadata.add_text(SOURCE_KEY, source)
    picture = Image.open(buffer).convert("RGB").quantize(256)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, optimize=True, pnginfo=metadata)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from None
    pyplot().close(figure)
    return path


def label(name: str) -> str:
    return optimizers.OPTIMIZERS[name].label


ACCURACY_TICKS = (0, 20, 30, 40, 50, 60, 70, 80, 90, 95, 97, 98, 99, 99.5, 99.9)


def _accuracy_axis(axis: Axes) -> None:
    """Accuracy with the logarithm of the error as scale, so that 98 and 97 stay apart."""

    def forward(values: ArrayLike) -> np.ndarray:
        return -np.log10(np.maximum(100.0 - np.asarray(values, dtype=float), 1e-3))

    def backward(values: ArrayLike) -> np.ndarray:
        return 100.0 - 10.0 ** -np.asarray(values, dtype=float)

    axis.set_yscale("function", functions=(forward, backward))


def score_axis(axis: Axes, results: Results, names: Sequence[str] | None = None) -> None:
    """Scale, limits and label for the scores of these optimizers."""
    scores = [
        score
        for name in names or results.cells
        for cell in results.cells[name].values()
        for score in cell.values("score")
        if math.isfinite(score)
    ]
    if results.metric == "accuracy":
        _accuracy_axis(axis)
        top = max(scores, default=100.0)
        bottom = min(min(scores, default=0.0), top - 2)
        margin = 10 ** (0.06 * (math.log10(100 - bottom + 1e-3) - math.log10(100 - top + 1e-3)))
        axis.set_ylim(100 - (100 - bottom) * margin, 100 - max(100 - top, 0.05) / margin)
        low, high = axis.get_ylim()
        ticks = _apart([tick for tick in ACCURACY_TICKS if low <= tick <= high], low, high)
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_yticks([], minor=True)
        axis.set_ylabel("test accuracy (%)")
    else:
        axis.set_yscale("log")
        axis.set_ylabel("test perplexity")
        _cap(axis, scores, 1e2)


def _apart(ticks: Sequence[float], low: float, high: float) -> list[float]:
    """Those of the ticks, from the top, whose labels do not overlap."""
    kept: list[float] = []
    height = math.log10((100 - low) / (100.001 - high))
    for tick in reversed(ticks):
        if not kept or math.log10((100.001 - tick) / (100.001 - kept[-1])) > 0.08 * height:
            kept.append(tick)
    return kept


def score_lines(axis: Axes, results: Results, names: Sequence[str]) -> None:
    """Final score against step size, a line per optimizer."""
    _lines(axis, results, names, "score", worst_at_top=not results.higher_is_better)


def _cap(axis: Axes, values: Sequence[float], ratio: float) -> None:
    """Keep a few huge values from squeezing everything else; a triangle stands for each of them."""
    if values:
        low = min(values)
        high = min(max(values) * 1.3, low * ratio)
        axis.set_ylim(low * 0.85, high)
        for sibling in axis.get_shared_y_axes().get_siblings(axis):
            _mark_above(sibling, high)
        if high < 30 * low:
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}" if high < 3 * low else _few_plain_labels)


def _mark_above(axis: Axes, high: float) -> None:
    transform = axis.get_xaxis_transform()
    for line in [line for line in axis.lines if line.get_transform() == axis.transData]:
        xs = [x for x, y in np.asarray(line.get_xydata()) if y > high]
        axis.plot(xs, [0.97] * len(xs), "^", color=line.get_color(), transform=transform, ms=6)


def _few_plain_labels(value: float, position: float | None = None) -> str:
    """20, 30 and 50 as such, not as multiples of powers of ten; nothing at the other ticks."""
    return f"{value:g}" if f"{value:e}"[0] in "235" else ""


MARKERS = "osD^vPX*"


def _lines(
    axis: Axes, results: Results, names: Sequence[str], key: str, worst_at_top: bool
) -> None:
    """A line per optimizer."""
    for rank, name in enumerate(names):
        line(axis, results, name, key, rank, COLOURS[name], label(name), worst_at_top)


def line(
    axis: Axes,
    results: Results,
    name: str,
    key: str,
    rank: int,
    colour: str,
    text: str,
    worst_at_top: bool = False,
) -> None:
    """Mean over seeds with a band from the worst to the best; a cross where a seed diverged, a gap
    where a run is missing.

    Markers differ, those of later lines are smaller, and every second line is dashed: so lines that
    coincide are all seen.
    """
    edge = 0.97 if worst_at_top else 0.03
    lrs, cells = results.grid(name), results.cells[name]
    values = [
        [math.nan] if lr not in cells or cells[lr].diverged else cells[lr].values(key) for lr in lrs
    ]
    axis.plot(
        lrs,
        [np.mean(seeds) for seeds in values],
        marker=MARKERS[rank % len(MARKERS)],
        ms=max(3.0, 6.5 - 0.8 * rank),
        ls="-" if rank % 2 == 0 else (0, (4, 1.5)),
        color=colour,
        label=text,
    )
    if any(len(seeds) > 1 for seeds in values):
        low, high = ([pick(seeds) for seeds in values] for pick in (min, max))
        axis.fill_between(lrs, low, high, color=colour, alpha=0.18, linewidth=0)
    crosses = [lr for lr, cell in cells.items() if cell.diverged]
    transform = axis.get_xaxis_transform()
    axis.plot(crosses, [edge] * len(crosses), "x", color=colour, transform=transform, ms=6, mew=2)


def resilience(results: Results, margin: float) -> Figure:
    """Score and training loss against the step size, and the good ranges as bars."""
    plt = pyplot()
    families = results.families()
    bars = max(len(names) for names in families.values())
    figure, axes = plt.subplots(
        3,
        len(families),
        figsize=(1.2 + 4.8 * len(families), 6.6 + 0.26 * bars),
        squeeze=False,
        sharex="col",
        layout="constrained",
        height_ratios=[3, 3, 0.6 + 0.34 * bars],
    )
    for column, (family, names) in enumerate(families.items()):
        score, loss, ranges = axes[:, column]
        score_lines(score, results, names)
        _lines(loss, results, names, "train_loss", worst_at_top=True)
        losses = [
            value
            for name in names
            for cell in results.cells[name].values()
            for value in cell.values("train_loss")
        ]
        score_axis(score, results, names)
        loss.set_yscale("log")
        _cap(loss, [value for value in losses if value > 0], 1e4)
        loss.set_ylabel("training loss")
        score.set_title(FAMILY_TITLES[family])
        score.legend(loc="best")
        ranges.set_xscale("log")
        lrs = [lr for name in names for lr in results.grid(name)]
        ranges.set_xlim(min(lrs) / 2, max(lrs) * 6)
        _range_bars(ranges, results, names, margin)
        ranges.set_xlabel("step-size hyper-parameter (c, lr, α₀)")
    text = results.margin_text(margin)
    figure.suptitle(
        f"{results.title}: final score against the step size. ✕: diverged, ▲: above the picture. "
        f"Bars: within {text} of the optimizer's best, width in decades",
        fontsize=9,
    )
    return figure


def _range_bars(axis: Axes, results: Results, names: Sequence[str], margin: float) -> None:
    for row, name in enumerate(reversed(names)):
        found = results.good_range(name, margin)
        if found is not None:
            grow = 10**0.12
            low, high = found.low / grow, found.high * grow
            axis.barh(row, high - low, left=low, height=0.62, color=COLOURS[name])
            axis.text(high * 1.15, row, found.width, va="center", fontsize=8, color=COLOURS[name])
    axis.set_yticks(range(len(names)), [label(name) for name in reversed(names)])
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.grid(axis="y", visible=False)


def curves(results: Results) -> Figure:
    """Training loss and score over time, each optimizer at its best step size."""
    plt = pyplot()
    families = results.families()
    size = (1.2 + 4.8 * len(families), 5.4)
    figure, axes = plt.subplots(
        2, len(families), figsize=size, squeeze=False, sharex="col", layout="constrained"
    )
    for column, (family, names) in enumerate(families.items()):
        loss_axis, score_axis = axes[:, column]
        for name in names:
            best = results.best(name)
            if best is None:
                continue
            steps = [point["step"] for point in best.runs[0]["curve"]]
            for axis, key in ((loss_axis, "train_loss"), (score_axis, "score")):
                values = np.array([[point[key] for point in run["curve"]] for run in best.runs])
                text = f"{label(name)}, {best.lr:g}"
                axis.plot(steps, values.mean(0), "-", color=COLOURS[name], label=text)
                if len(values) > 1:
                    axis.fill_between(
                        steps,
                        values.min(0),
                        values.max(0),
                        color=COLOURS[name],
                        alpha=0.15,
                        linewidth=0,
                    )
        loss_axis.set_yscale("log")
        loss_axis.set_ylabel("training loss")
        loss_axis.set_title(FAMILY_TITLES[family])
        loss_axis.legend()
        if results.metric == "accuracy":
            score_axis.set_ylabel("test accuracy (%)")
        else:
            score_axis.set_yscale("log")
            score_axis.set_ylabel("test perplexity")
        score_axis.set_xlabel("step")
    figure.suptitle(f"{results.title}: training at the best step size", fontsize=9)
    return figure


def _lr_colours(plt: ModuleType, lrs: Collection[float]) -> dict[float, Any]:
    shades = plt.get_cmap("turbo")(np.linspace(0.05, 0.95, len(lrs)))
    return dict(zip(sorted(lrs), shades, strict=True))


def _telemetry_panels(
    results: Results, names: Sequence[str], rows: Sequence[tuple[str, str]], title: str, ylabel: str
) -> Figure:
    """A panel per optimizer and row, a line per step size, first seed only.

    A row is a layer's name and a quantity of it, or an empty name and a quantity of the whole run.
    """
    plt = pyplot()
    figure, axes = plt.subplots(
        len(rows),
        len(names),
        figsize=(1.8 + 2.3 * len(names), 1.0 + 1.9 * len(rows)),
        squeeze=False,
        sharex=True,
        sharey="row",
        layout="constrained",
    )
    colours = _lr_colours(plt, {lr for name in names for lr in results.cells[name]})
    for column, name in enumerate(names):
        for row, (layer, key) in enumerate(rows):
            axis = axes[row, column]
            for lr, cell in results.cells[name].items():
                telemetry = cell.runs[0]["telemetry"]
                source = telemetry["layers"][layer] if layer else telemetry
                axis.plot(telemetry["step"], source[key], "-", lw=1.1, color=colours[lr])
            axis.set_yscale("log")
            if row == 0:
                axis.set_title(label(name))
            if column == 0:
                axis.set_ylabel(f"{layer}\n{ylabel}" if layer else ylabel, fontsize=8)
            if row == len(rows) - 1:
                axis.set_xlabel("step")
    handles = [plt.Line2D([], [], color=colour, label=f"{lr:g}") for lr, colour in colours.items()]
    figure.legend(handles=handles, title="c, lr or α₀", loc="outside right upper")
    for row_axes in axes:
        _limit_to_typical(row_axes)
    figure.suptitle(f"{results.title}: {title}", fontsize=9)
    return figure


def _limit_to_typical(row: Sequence[Axes]) -> None:
    """Keep lines that die out, blow up or end early from squeezing the others of a row."""
    lines = [np.array(line.get_ydata(), dtype=float) for axis in row for line in axis.lines]
    longest = max(len(values) for values in lines)
    medians = [np.median(np.nan_to_num(values)) for values in lines if len(values) == longest]
    typical = [float(median) for median in medians if median > 0]
    if typical:
        low, high = row[0].get_ylim()
        row[0].set_ylim(max(low, min(typical) / 30), min(high, max(typical) * 100))


def step_sizes(results: Results) -> Figure | None:
    """The effective scalar step size over time, for those optimizers that adapt it."""
    names = [name for name in _by_family(results) if _adapts(results, name)]
    if not names:
        return None
    rows = [("", "step_size")]
    return _telemetry_panels(results, names, rows, "effective step size over time", "γ or τ")


def _by_family(results: Results) -> list[str]:
    return [name for names in results.families().values() for name in names]


def _has_scalar(results: Results, name: str) -> bool:
    sizes = [cell.runs[0]["telemetry"]["step_size"] for cell in results.cells[name].values()]
    return any(size is not None for series in sizes for size in series)


def _adapts(results: Results, name: str) -> bool:
    for cell in results.cells[name].values():
        sizes = [size for size in cell.runs[0]["telemetry"]["step_size"] if size is not None]
        if sizes and not all(math.isclose(size, cell.lr, rel_tol=1e-6) for size in sizes):
            return True
    return False


def _layers(results: Results) -> list[str]:
    return list(results.runs[0]["telemetry"]["layers"])


def layer_step_sizes(results: Results) -> Figure | None:
    """Median step size per coordinate (γ/D) of the watched layers."""
    names = [
        name for name in results.families().get("coordinate", []) if _has_scalar(results, name)
    ]
    rows = [(layer, "step_size") for layer in _layers(results)]
    if not names or not rows:
        return None
    title = "median of γ/D over the coordinates of a layer"
    return _telemetry_panels(results, names, rows, title, "γ/D")


def updates(results: Results) -> Figure | None:
    """Size of the update of the watched layers."""
    rows = [(layer, "update") for layer in _layers(results)]
    if not rows:
        return None
    return _telemetry_panels(
        results, _by_family(results), rows, "size of the update of a layer", "‖Δx‖"
    )


FIGURES: dict[str, Callable[[Results, float], Figure | None]] = {
    "resilience": resilience,
    "curves": lambda results, margin: curves(results),
    "step-sizes": lambda results, margin: step_sizes(results),
    "layer-step-sizes": lambda results, margin: layer_step_sizes(results),
    "updates": lambda results, margin: updates(results),
}


def all_figures(results: Results, margin: float) -> dict[str, Figure]:
    """All figures that these results have, by file name."""
    drawn = {name: draw(results, margin) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}

"""The paper's toy problems: each runs, and returns its tables and figures.

All work in float64 with gradients written out by hand, through the same optimizers as the networks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..report import Table, columns
from . import data, figures, optimizers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Function = Callable[[Tensor], tuple[float, Tensor]]
"""Value and gradient at a point."""


@dataclass
class Toy:
    """What a toy shows: tables, figures by name, and a line on what was run."""

    note: str
    tables: list[Table]
    figures: dict[str, Figure]


@dataclass
class Descent:
    """One minimisation: the loss at each evaluation, the points if they were kept, how it ended."""

    losses: np.ndarray
    points: np.ndarray
    reached: bool

    @property
    def evaluations(self) -> int:
        return len(self.losses)

    @property
    def final(self) -> float:
        return float(self.losses[-1])


def minimise(
    function: Function,
    start: Sequence[float],
    optimizer: str,
    lr: float | Callable[[int], float],
    iterations: int,
    *,
    threshold: float = 0.0,
    ceiling: float = 1e10,
    beta: float = 0.9,
    keep_points: bool = False,
) -> Descent:
    """Evaluate and step until the loss is below `threshold` or above `ceiling`.

    The first evaluation, at the start, counts. `lr` may depend on the iteration, from 1.
    """
    x = torch.tensor(start, dtype=torch.float64)
    schedule = lr if callable(lr) else None
    first = schedule(1) if schedule else lr
    made = optimizers.make(optimizer, [x], first, (beta, 0.999))  # type: ignore[arg-type]
    losses: list[float] = []
    points: list[list[float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for iteration in range(1, iterations + 1):
            value, x.grad = function(x)
            losses.append(value)
            if keep_points:
                points.append(x.tolist())
            if not value < ceiling or value <= threshold:
                break
            if schedule:
                made.param_groups[0]["lr"] = schedule(iteration)
            optimizers.step(optimizer, made, value)
    return Descent(np.array(losses), np.array(points), losses[-1] <= threshold)


def x2x4_function(x: Tensor) -> tuple[float, Tensor]:
    """f(x) = x² + x⁴."""
    v = float(x)
    return v * v + v**4, torch.tensor([2 * v + 4 * v**3], dtype=torch.float64)


def x2x4(data_dir: Path, iterations: int = 100_000) -> Toy:
    """x² + x⁴ from x = 10: evaluations until the loss is below 1e-15, or above 1e10."""
    contenders = ("ngn-m", "sgdm-zero", "sgdm")
    lrs = [float(f"1e{k}") for k in range(-4, 5)]
    runs = {
        (name, lr): minimise(x2x4_function, [10.0], name, lr, iterations, threshold=1e-15)
        for name in contenders
        for lr in lrs
    }

    def outcome(run: Descent) -> str:
        if run.reached:
            return str(run.evaluations)
        if not run.final < 1e10:
            return f"diverged at {run.evaluations}"
        return f"{run.final:.1e} at the end"

    rows = [[f"{lr:g}", *(outcome(runs[name, lr]) for name in contenders)] for lr in lrs]
    table = Table(
        "x² + x⁴: evaluations until the loss is below 1e-15",
        columns("c or lr", *(figures.label(name) for name in contenders)),
        rows,
        "The first evaluation counts. The paper: NGN-M 269 at c = 10, SGDM 691 at lr = 1e-2. "
        "SGDM is torch's with dampening 0.9; the zero buffer is what the paper's count needs.",
    )
    plt = figures.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    shades = plt.get_cmap("plasma")(np.linspace(0, 0.9, len(lrs)))
    for axis, name in zip(axes, contenders, strict=False):
        for lr, shade in zip(lrs, shades, strict=True):
            run = runs[name, lr]
            axis.loglog(np.arange(1, run.evaluations + 1), run.losses, color=shade, label=f"{lr:g}")
            marker = "*" if run.reached else "x" if not run.final < 1e10 else "o"
            axis.plot(run.evaluations, min(max(run.final, 1e-16), 1e11), marker, color=shade, ms=7)
        axis.set_title(figures.label(name))
        axis.set_xlabel("evaluation")
        axis.set_ylim(1e-17, 1e12)
        axis.axhline(1e-15, color="#999999", lw=0.8, ls=":")
    axes[0].set_ylabel("x² + x⁴")
    figure.legend(*axes[0].get_legend_handles_labels(), title="c or lr", loc="outside right upper")
    figure.suptitle("x² + x⁴ from x = 10. ★ reached 1e-15, ✕ diverged", fontsize=9)
    note = f"x² + x⁴ from x = 10, β = 0.9, at most {iterations:,} evaluations"
    return Toy(note, [table], {"x2x4": figure})


def rosenbrock_function(x: Tensor) -> tuple[float, Tensor]:
    """f(x, y) = (x − 1)² + 100 (y − x²)²."""
    a, b = x.tolist()
    valley = b - a * a
    value = (a - 1) ** 2 + 100 * valley**2
    gradient = [2 * (a - 1) - 400 * a * valley, 200 * valley]
    return value, torch.tensor(gradient, dtype=torch.float64)


def rosenbrock(data_dir: Path, iterations: int = 100_000) -> Toy:
    """Rosenbrock from (−1.2, 1): the trajectory to (1, 1), for each step size."""
    contenders, lrs = ("ngn-m", "sgdm"), [float(f"1e{k}") for k in range(-3, 3)]
    threshold = 1e-10
    runs = {
        (name, lr): minimise(
            rosenbrock_function,
            [-1.2, 1.0],
            name,
            lr,
            iterations,
            threshold=threshold,
            keep_points=True,
        )
        for name in contenders
        for lr in lrs
    }

    def outcome(run: Descent) -> str:
        if run.reached:
            return f"converged in {run.evaluations}"
        return "diverged" if not run.final < 1e10 else f"loss {run.final:.1e}"

    rows = [[f"{lr:g}", *(outcome(runs[name, lr]) for name in contenders)] for lr in lrs]
    table = Table(
        f"Rosenbrock from (−1.2, 1): evaluations until the loss is below {threshold:g}",
        columns("c or lr", *(figures.label(name) for name in contenders)),
        rows,
        "The paper: NGN-M converges for every c, SGDM diverges from 1e-2 on.",
    )
    return Toy(
        f"Rosenbrock from (−1.2, 1), β = 0.9, at most {iterations:,} evaluations",
        [table],
        {
            "rosenbrock-trajectories": _rosenbrock_trajectories(runs, contenders, lrs),
            "rosenbrock-losses": _rosenbrock_losses(runs, contenders, lrs),
        },
    )


Runs = dict[tuple[str, float], Descent]


def _rosenbrock_trajectories(runs: Runs, names: Sequence[str], lrs: Sequence[float]) -> Figure:
    plt = figures.pyplot()
    xs, ys = np.meshgrid(np.linspace(-2.2, 2.2, 300), np.linspace(-1.2, 3.2, 300))
    levels = np.logspace(-1.5, 3.5, 16)
    size = (1 + 2.3 * len(lrs), 1 + 2.2 * len(names))
    figure, axes = plt.subplots(
        len(names), len(lrs), figsize=size, sharex=True, sharey=True, layout="constrained"
    )
    for row, name in enumerate(names):
        for column, lr in enumerate(lrs):
            axis, run = axes[row, column], runs[name, lr]
            axis.contourf(
                xs,
                ys,
                np.log10((xs - 1) ** 2 + 100 * (ys - xs**2) ** 2 + 1e-3),
                levels=np.log10(levels),
                cmap="Blues_r",
                alpha=0.55,
                extend="both",
            )
            points = np.clip(run.points, -1e5, 1e5)
            axis.plot(
                points[:, 0], points[:, 1], "-", lw=0.9, color=figures.COLOURS[name], zorder=3
            )
            axis.plot(-1.2, 1, "o", color="black", ms=4, zorder=4)
            axis.plot(1, 1, "*", color="#ffcc00", mec="black", mew=0.5, ms=10, zorder=5)
            axis.set_xlim(-2.2, 2.2)
            axis.set_ylim(-1.2, 3.2)
            axis.grid(visible=False)
            ending = f"{run.evaluations} steps" if run.reached else "diverged"
            if not run.reached and run.final < 1e10:
                ending = f"loss {run.final:.0e}"
            axis.set_title(f"{figures.label(name)}, {lr:g}: {ending}", fontsize=8)
    figure.suptitle("Rosenbrock: from ● (−1.2, 1) to ★ (1, 1)", fontsize=9)
    return figure


def _rosenbrock_losses(runs: Runs, names: Sequence[str], lrs: Sequence[float]) -> Figure:
    plt = figures.pyplot()
    figure, axes = plt.subplots(1, len(names), figsize=(10, 3.6), sharey=True, layout="constrained")
    shades = plt.get_cmap("plasma")(np.linspace(0, 0.9, len(lrs)))
    for axis, name in zip(axes, names, strict=True):
        for lr, shade in zip(lrs, shades, strict=True):
            losses = np.minimum(runs[name, lr].losses, 1e9)
            axis.loglog(np.arange(1, len(losses) + 1), losses, color=shade, label=f"{lr:g}")
        axis.set_title(figures.label(name))
        axis.set_xlabel("evaluation")
    axes[0].set_ylabel("loss")
    axes[0].legend(title="c or lr")
    figure.suptitle("Rosenbrock: loss along the way", fontsize=9)
    return figure


def many_minima_function(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f(x) = (sin(1 + cos(x − π)) − 0.2x)² + (sin(1 + cos(π − x)) + 0.2x)⁴, and its derivative."""
    wave = np.sin(1 + np.cos(x - np.pi))
    slope = -np.sin(x - np.pi) * np.cos(1 + np.cos(x - np.pi))
    below, above = wave - 0.2 * x, wave + 0.2 * x
    value = below**2 + above**4
    return value, 2 * below * (slope - 0.2) + 4 * above**3 * (slope + 0.2)


def many_starts(method: str, starts: np.ndarray, lr: float, iterations: int) -> np.ndarray:
    """End points of NGN-M or SGDM (zero buffer) from many starts at once, in float64.

    Written out for speed; tests compare it with `NGNM` and the lab's SGDM.
    """
    x, m = starts.astype(np.float64).copy(), np.zeros(len(starts))
    with np.errstate(all="ignore"):
        for _ in range(iterations):
            f, g = many_minima_function(x)
            if method == "ngn-m":
                denominator = 2 * f + lr * g * g
                rho = np.where(denominator == 0, 1.0, 2 * f / denominator)
                m = 0.9 * m + 0.1 * lr * rho * g
                x = x - m
            else:
                m = 0.9 * m + 0.1 * g
                x = x - lr * m
    return x


def global_basin() -> tuple[float, float]:
    """The basin of the global minimum 0 at x = 0: up to the first real maximum on either side.

    The maximum at 0.21 that parts it from its twin at 0.32 is only 4e-4 high: they are one basin.
    """
    grid = np.linspace(-20, 20, 400_001)
    f = many_minima_function(grid)[0]
    maxima = grid[1:-1][(f[1:-1] > f[:-2]) & (f[1:-1] > f[2:]) & (f[1:-1] > 1e-2)]
    return float(maxima[maxima < 0].max()), float(maxima[maxima > 0].min())


def many_minima(data_dir: Path, iterations: int = 10_000) -> Toy:
    """Many sharp local minima and a flat global one: the share of 301 starts that find it."""
    starts = np.linspace(-20, 20, 301)
    lrs = [1.0, 10.0, 100.0, 1000.0]
    left, right = global_basin()
    methods = ("ngn-m", "sgdm-zero")
    ends = {(m, lr): many_starts(m, starts, lr, iterations) for m in methods for lr in lrs}
    shares = {key: float(((x > left) & (x < right)).mean()) for key, x in ends.items()}
    lost = {key: float((~np.isfinite(x)).mean()) for key, x in ends.items()}
    rows = [
        [f"{lr:g}", *(f"{100 * shares[m, lr]:.1f} %" for m in methods),
         *(f"{100 * lost[m, lr]:.1f} %" for m in methods)]
        for lr in lrs
    ]  # fmt: skip
    table = Table(
        f"many minima: starts that end in the global basin ({left:.2f}, {right:.2f})",
        columns("c or lr", "NGN-M", "SGDM", "NGN-M non-finite", "SGDM non-finite"),
        rows,
        f"301 starts in [−20, 20], {iterations} iterations, β = 0.9.",
    )
    figure = _many_minima_figure(starts, ends, shares, methods, lrs)
    note = f"301 starts in [−20, 20], {iterations} iterations, β = 0.9"
    return Toy(note, [table], {"many-minima": figure})


def _many_minima_figure(
    starts: np.ndarray,
    ends: dict[tuple[str, float], np.ndarray],
    shares: dict[tuple[str, float], float],
    methods: Sequence[str],
    lrs: Sequence[float],
) -> Figure:
    plt = figures.pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    grid = np.linspace(-20, 20, 4000)
    axes[0].semilogy(grid, many_minima_function(grid)[0], color="#444444", lw=1)
    axes[0].set_title("the function")
    axes[0].set_xlabel("x")
    for axis, method in zip(axes[1:], methods, strict=True):
        for row, lr in enumerate(lrs):
            reached = ends[method, lr]
            with np.errstate(all="ignore"):
                values = np.where(np.isfinite(reached), many_minima_function(reached)[0], np.nan)
            shades = axis.scatter(
                starts,
                np.full(len(starts), row),
                c=np.log10(np.maximum(values, 1e-6)),
                cmap="viridis_r",
                vmin=-4,
                vmax=3,
                marker="|",
                s=220,
                linewidths=1.6,
            )
            axis.text(21.5, row, f"{100 * shares[method, lr]:.1f} %", va="center", fontsize=8)
        axis.set_yticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
        axis.set_xlim(-21, 28)
        axis.set_xticks(range(-20, 21, 10))
        axis.set_ylim(-0.6, len(lrs) - 0.4)
        axis.set_xlabel("start")
        axis.grid(visible=False)
        axis.set_ylabel("c or lr")
        axis.set_title(figures.label(method))
    figure.colorbar(shades, ax=axes[1:], label="log₁₀ of the final loss")
    figure.suptitle(
        "301 starts and the share that ends in the global basin; blank: became non-finite",
        fontsize=9,
    )
    return figure


def quadratic(data_dir: Path, lengths: Sequence[int] = (1000, 10_000)) -> Toy:
    """½‖(A + rI)x − y‖²: the theoretical c = 1/√K and c_k = 1/√k against fixed ones."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(400, 400, generator=generator, dtype=torch.float64)
    y = torch.randn(400, generator=generator, dtype=torch.float64)
    rows: list[Sequence[str]] = []
    plt = figures.pyplot()
    shifts = (30.0, 22.0, 10.0)
    figure, axes = plt.subplots(
        len(lengths),
        len(shifts),
        figsize=(12, 3.2 * len(lengths)),
        squeeze=False,
        layout="constrained",
    )
    for column, shift in enumerate(shifts):
        shifted = matrix + shift * torch.eye(400, dtype=torch.float64)
        condition = float(torch.linalg.cond(shifted))

        def function(x: Tensor, a: Tensor = shifted) -> tuple[float, Tensor]:
            residual = a @ x - y
            return 0.5 * float(residual @ residual), a.T @ residual

        for row, length in enumerate(lengths):
            choices: dict[str, float | Callable[[int], float]] = {
                "1/√k": lambda k: 1 / math.sqrt(k),
                "1/√K": 1 / math.sqrt(length),
                "1e-3": 1e-3,
                "1e-4": 1e-4,
            }
            finals = []
            styles = (("#c1272d", "-"), ("#e0a100", "--"), ("#1f4e9c", ":"), ("#56b4e9", "-."))
            for (text, lr), (colour, style) in zip(choices.items(), styles, strict=True):
                run = minimise(function, [0.0] * 400, "ngn-m", lr, length, threshold=1e-25)
                axes[row, column].semilogy(run.losses, style, color=colour, label=text)
                finals.append(f"{run.final:.1e}")
            rows.append([f"{condition:.3g}", f"{shift:g}", str(length), *finals])
            axes[row, column].set_title(f"condition number {condition:.3g}, K = {length}")
            axes[row, column].set_xlabel("iteration")
    axes[0, 0].legend(title="c")
    for axis in axes[:, 0]:
        axis.set_ylabel("loss")
    figure.suptitle("½‖(A + rI)x − y‖² with NGN-M, β = 0.9", fontsize=9)
    table = Table(
        "quadratic: final loss of NGN-M",
        columns("condition", "r", "K", "c = 1/√k", "c = 1/√K", "c = 1e-3", "c = 1e-4"),
        rows,
        "A and y standard normal, 400×400; the paper: 1/√k is the fastest, 1/√K close behind.",
    )
    return Toy("½‖(A + rI)x − y‖², from x = 0", [table], {"quadratic": figure})


def diabetes(data_dir: Path, iterations: int = 1000) -> Toy:
    """½‖Ax − b‖² on normalised diabetes data: NGN, NGN-M, SGDM, and the rejected Ver. 2."""
    table = data.diabetes(data_dir)
    features = table.features - table.features.mean(0)
    features = torch.tensor(features / np.linalg.norm(features, axis=0))
    targets = torch.tensor(table.targets, dtype=torch.float64)
    optimum = float(
        0.5 * (features @ torch.linalg.lstsq(features, targets).solution - targets).square().sum()
    )

    def function(x: Tensor) -> tuple[float, Tensor]:
        residual = features @ x - targets
        return 0.5 * float(residual @ residual), features.T @ residual

    names, lrs = ("sgdm", "ngn", "ngn-m", "ngn-ver2"), [float(f"1e{k}") for k in range(-1, 5)]
    start = [0.0] * features.shape[1]
    runs = {
        (name, lr): minimise(function, start, name, lr, iterations, ceiling=1e20)
        for name in names
        for lr in lrs
    }

    def outcome(run: Descent) -> str:
        if not run.final < 1e20:
            return f"diverged at {run.evaluations}"
        return f"{run.final - optimum:.1e}"

    rows = [[f"{lr:g}", *(outcome(runs[name, lr]) for name in names)] for lr in lrs]
    shown = Table(
        f"diabetes: loss above the optimum {optimum:.4g} after {iterations} iterations",
        columns("c or lr", *(figures.label(name) for name in names)),
        rows,
        f"Data: {table.name}. Features centred, columns of norm 1.",
    )
    plt = figures.pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.6), sharey=True, layout="constrained")
    shades = plt.get_cmap("plasma")(np.linspace(0, 0.9, len(lrs)))
    for axis, name in zip(axes, names, strict=True):
        for lr, shade in zip(lrs, shades, strict=True):
            run = runs[name, lr]
            gap = np.clip(run.losses - optimum, 1e-12, 1e6)
            axis.loglog(np.arange(1, len(gap) + 1), gap, color=shade, lw=0.7, label=f"{lr:g}")
            if not run.final < 1e20:
                axis.plot(len(gap), gap[-1], "x", color=shade, ms=6, mew=2)
        axis.set_title(figures.label(name))
        axis.set_xlabel("iteration")
    axes[0].set_ylabel("loss − optimum")
    figure.legend(*axes[0].get_legend_handles_labels(), title="c or lr", loc="outside right upper")
    figure.suptitle(f"½‖Ax − b‖² on {table.name}. ✕: diverged", fontsize=9)
    return Toy(f"data: {table.name}", [shown], {"diabetes": figure})


TOYS: dict[str, Callable[[Path], Toy]] = {
    "diabetes": diabetes,
    "rosenbrock": rosenbrock,
    "x2x4": x2x4,
    "many-minima": many_minima,
    "quadratic": quadratic,
}

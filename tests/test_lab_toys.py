"""The toy problems reproduce what the paper says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from ngn_bench.lab import figures, toys


@pytest.mark.parametrize(
    ("optimizer", "lr", "evaluations"), [("ngn-m", 10.0, 269), ("sgdm-zero", 1e-2, 691)]
)
def test_x2x4_takes_the_papers_number_of_evaluations(
    optimizer: str, lr: float, evaluations: int
) -> None:
    run = toys.minimise(toys.x2x4_function, [10.0], optimizer, lr, 2000, threshold=1e-15)
    assert run.reached
    assert run.evaluations == evaluations


def test_x2x4_large_step_sizes() -> None:
    ngn = toys.minimise(toys.x2x4_function, [10.0], "ngn-m", 1e4, 2000, threshold=1e-15)
    sgdm = toys.minimise(toys.x2x4_function, [10.0], "sgdm-zero", 0.1, 2000, threshold=1e-15)
    assert ngn.reached
    assert not sgdm.reached and not sgdm.final < 1e10


def test_the_toys_gradients_are_the_derivatives_of_their_values() -> None:
    x = torch.tensor([0.7, -0.4], dtype=torch.float64)
    for function, point in ((toys.x2x4_function, x[:1]), (toys.rosenbrock_function, x)):
        for index in range(len(point)):
            step = torch.zeros_like(point)
            step[index] = 1e-6
            slope = (function(point + step)[0] - function(point - step)[0]) / 2e-6
            assert float(function(point)[1][index]) == pytest.approx(slope, rel=1e-6)
    points = np.linspace(-20, 20, 41)
    up, down = (toys.many_minima_function(points + h)[0] for h in (1e-6, -1e-6))
    np.testing.assert_allclose(
        toys.many_minima_function(points)[1], (up - down) / 2e-6, rtol=1e-4, atol=1e-4
    )


def test_rosenbrock_ngn_m_converges_where_sgdm_diverges() -> None:
    start = [-1.2, 1.0]
    for c in (0.1, 100.0):
        run = toys.minimise(
            toys.rosenbrock_function, start, "ngn-m", c, 5000, threshold=1e-10, keep_points=True
        )
        assert run.reached
        np.testing.assert_allclose(run.points[-1], [1, 1], atol=1e-4)
    assert not toys.minimise(toys.rosenbrock_function, start, "sgdm", 1e-2, 5000).final < 1e10


@pytest.mark.parametrize("method", ["ngn-m", "sgdm-zero"])
@pytest.mark.parametrize("lr", [1.0, 100.0])
def test_the_batched_loop_equals_the_optimizers(method: str, lr: float) -> None:
    starts = np.array([-17.0, -3.1, 0.05, 2.5, 11.3])

    def function(x: torch.Tensor) -> tuple[float, torch.Tensor]:
        value, slope = toys.many_minima_function(x.numpy())
        return float(value[0]), torch.from_numpy(slope)

    iterations = 12  # rounding differences grow with every step of a chaotic path
    together = toys.many_starts(method, starts, lr, iterations)
    for start, end in zip(starts, together, strict=True):
        alone = toys.minimise(
            function, [start], method, lr, iterations + 1, ceiling=np.inf, keep_points=True
        )
        if np.isfinite(end):
            assert alone.points[-1][0] == pytest.approx(end, rel=1e-9, abs=1e-12)
        else:
            assert not np.isfinite(alone.points[-1][0]) or alone.evaluations <= iterations


def test_many_minima_shares() -> None:
    left, right = toys.global_basin()
    assert left == pytest.approx(-4.349, abs=1e-2)
    assert right == pytest.approx(4.346, abs=1e-2)
    starts = np.linspace(-20, 20, 301)

    def share(method: str) -> float:
        ends = toys.many_starts(method, starts, 10.0, 10_000)
        return float(((ends > left) & (ends < right)).mean())

    assert share("ngn-m") > 0.9
    assert share("sgdm-zero") < 0.15


def test_diabetes_prints_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    toy = toys.diabetes(tmp_path, iterations=60)
    assert "not the paper's Pima set" in toy.note
    by_lr = {row[0]: row[1:] for row in toy.tables[0].rows}
    sgdm, _, ngn_m, ver2 = by_lr["1000"]
    assert "diverged" in sgdm
    assert "diverged" in ver2
    assert "diverged" not in ngn_m
    path = figures.save(toy.figures["diabetes"], tmp_path / "diabetes.png")
    assert path.read_bytes().startswith(b"\x89PNG")

"""The toy problems reproduce the paper's numbers."""

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


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def drawn(toy: toys.Toy, folder: Path) -> set[str]:
    """The names of the toy's figures; each is a PNG of a size that one can read."""
    for name, figure in toy.figures.items():
        width, height = png_size(figures.save(figure, folder / f"{name}.png"))
        assert 700 < width < 4000 and 300 < height < 2000, name
    return set(toy.figures)


def by_first_column(toy: toys.Toy) -> dict[str, list[str]]:
    (table,) = toy.tables
    return {row[0]: list(row[1:]) for row in table.rows}


def test_x2x4_prints_and_draws(tmp_path: Path) -> None:
    toy = toys.x2x4(tmp_path, iterations=700)
    rows = by_first_column(toy)
    assert rows["10"] == ["269", "diverged at 2", "diverged at 2"]
    assert rows["0.01"][1] == "691"
    assert rows["0.0001"][0].endswith("at the end")
    assert drawn(toy, tmp_path) == {"x2x4"}


def test_rosenbrock_prints_and_draws(tmp_path: Path) -> None:
    toy = toys.rosenbrock(tmp_path, iterations=4000)
    rows = by_first_column(toy)
    assert rows["0.1"][0].startswith("converged in 1")
    assert all(rows[lr][1] == "diverged" for lr in ("0.01", "0.1", "1", "10", "100"))
    assert rows["0.001"][1].startswith("loss ")
    assert drawn(toy, tmp_path) == {"rosenbrock-trajectories", "rosenbrock-losses"}


def test_many_minima_prints_and_draws(tmp_path: Path) -> None:
    toy = toys.many_minima(tmp_path, iterations=300)
    rows = by_first_column(toy)
    assert list(rows) == ["1", "10", "100", "1000"]
    ngn_m, sgdm, ngn_m_lost, sgdm_lost = (float(cell.split()[0]) for cell in rows["1000"])
    assert ngn_m > 50 and sgdm < 1
    assert ngn_m_lost == 0 and sgdm_lost > 99
    assert drawn(toy, tmp_path) == {"many-minima"}


def test_quadratic_prints_and_draws(tmp_path: Path) -> None:
    """The theoretical choices beat the fixed ones, the more the worse the condition."""
    toy = toys.quadratic(tmp_path, lengths=(300,))
    (table,) = toy.tables
    numbers = [[float(cell) for cell in row] for row in table.rows]
    conditions, shifts, lengths, *finals = zip(*numbers, strict=True)
    assert conditions == tuple(sorted(conditions)) and conditions[0] < 10 < 400 < conditions[-1]
    assert shifts == (30, 22, 10) and set(lengths) == {300}
    per_sqrt_k, per_sqrt_total, fixed, small = finals
    for k in (1, 2):
        assert max(per_sqrt_k[k], per_sqrt_total[k]) < fixed[k] < small[k]
    assert drawn(toy, tmp_path) == {"quadratic"}


def test_the_quadratics_step_sizes_follow_their_schedules() -> None:
    """With β = 0 and one coordinate, each step is c_k / (1 + c_k g² / 2f) times the gradient."""

    def function(x: torch.Tensor) -> tuple[float, torch.Tensor]:
        return 0.5 * float(x) ** 2, x.clone()

    run = toys.minimise(function, [4.0], "ngn-m", lambda k: k**-0.5, 5, beta=0.0, keep_points=True)
    x = 4.0
    for k in range(1, 5):
        x -= x * k**-0.5 / (1 + k**-0.5)
        assert run.points[k][0] == pytest.approx(x)


def test_diabetes_prints_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    toy = toys.diabetes(tmp_path, iterations=60)
    assert "not the paper's Pima set" in toy.note
    sgdm, _, ngn_m, ver2 = by_first_column(toy)["1000"]
    assert "diverged" in sgdm
    assert "diverged" in ver2
    assert "diverged" not in ngn_m
    assert drawn(toy, tmp_path) == {"diabetes"}

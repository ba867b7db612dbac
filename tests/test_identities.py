"""What the paper and the design claim of the algorithms, tested as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from algorithms import (
    EVERY,
    NGN,
    NGND,
    NGND_RMS,
    NGNM,
    SCALAR,
    Algorithm,
    DecNGNMDv1,
    Hyper,
    NGNMDv1,
    NGNMDv1W,
    NGNMDv2,
)
from helpers import SHAPES, params_of, random_columns, random_gradients, real64, with_grad
from pair import Pair
from torch.nn import Parameter

WIDE = pytest.mark.dtypes(torch.float64)


def run(
    algorithm: Algorithm, hypers: tuple[Hyper, ...], backend: str, dtype: torch.dtype, steps: int
) -> list[torch.Tensor]:
    """Parameters after some steps on one sequence of gradients and losses."""
    columns = random_columns(SHAPES, dtype)
    optimizer = algorithm.build(columns, hypers, backend=backend)
    for k in range(steps):
        random_gradients(params_of(optimizer), seed=k)
        optimizer.step(loss=1.0 / (k + 1))
    return params_of(optimizer)


def assert_bit_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@WIDE
def test_ngnm_is_iterate_moving_average(backend: str, dtype: torch.dtype) -> None:
    """z ← z − γ∇f(x), x ← λ/(1+λ) x + 1/(1+λ) z, with λ = β/(1−β) (equation ima_update)."""
    beta, c = 0.9, 2.0
    weight = beta / (1 - beta)
    p = Parameter(torch.linspace(-2, 3, 8, dtype=dtype))
    optimizer = NGNM.simple([p], lr=c, momentum=beta, backend=backend)
    curvature = np.linspace(0.1, 4, 8)
    x = real64(p)
    z = x.copy()
    for _ in range(100):
        f, g = 0.5 * float(np.sum(curvature * x * x)), curvature * x
        z = z - c / (1 + c / (2 * f) * float(g @ g)) * g
        x = weight / (1 + weight) * x + z / (1 + weight)

        loss = 0.5 * (torch.from_numpy(curvature) * p * p).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
        np.testing.assert_allclose(real64(p), x, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("decayed", [DecNGNMDv1, NGNMDv1W], ids=str)
def test_without_decay_dec_and_w_are_mdv1(
    decayed: Algorithm, backend: str, dtype: torch.dtype
) -> None:
    hypers = (Hyper(0.3), Hyper(0.05, 0.5, 0.99))
    assert_bit_equal(
        run(decayed, hypers, backend, dtype, 5), run(NGNMDv1, hypers, backend, dtype, 5)
    )


def test_decay_of_mdv1_is_that_of_dec(backend: str) -> None:
    hypers = (Hyper(0.3, weight_decay=0.1), Hyper(0.05, weight_decay=0.2))
    assert_bit_equal(
        run(DecNGNMDv1, hypers, backend, torch.float32, 5),
        run(NGNMDv1, hypers, backend, torch.float32, 5),
    )


def test_mdv2_without_momentum_is_ngnd_rms(backend: str, dtype: torch.dtype) -> None:
    hypers = (Hyper(0.3, 0.0, 0.9), Hyper(0.05, 0.0, 0.99, weight_decay=0.1))
    assert_bit_equal(
        run(NGNMDv2, hypers, backend, dtype, 5), run(NGND_RMS, hypers, backend, dtype, 5)
    )


def test_ngnm_without_momentum_is_ngn(backend: str, dtype: torch.dtype) -> None:
    hypers = (Hyper(0.3, 0.0), Hyper(0.05, 0.0, weight_decay=0.1))
    assert_bit_equal(run(NGNM, hypers, backend, dtype, 5), run(NGN, hypers, backend, dtype, 5))


@WIDE
@EVERY
def test_groups_with_equal_values_are_one_group(
    algorithm: Algorithm, backend: str, dtype: torch.dtype
) -> None:
    hyper = Hyper(0.3, 0.9, 0.99, 1e-6, 0.05, spectral="flat")
    split = run(algorithm, (hyper, hyper), backend, dtype, 5)
    columns = random_columns(SHAPES, dtype)
    optimizer = algorithm.build([columns[0] + columns[1]], (hyper,), backend=backend)
    for k in range(5):
        random_gradients(params_of(optimizer), seed=k)
        optimizer.step(loss=1.0 / (k + 1))
    for a, b in zip(split, params_of(optimizer), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


@WIDE
def test_ngnd_step_sizes_satisfy_the_paper(backend: str, dtype: torch.dtype) -> None:
    """γ_j g_j² = 2 (c − γ_j)/c · f for every coordinate."""
    (p,) = random_columns([[(50,)]], dtype)[0]
    before, f, c = real64(p), 0.8, 0.7
    optimizer = NGND.simple([p], lr=c, backend=backend)
    random_gradients([p], seed=1, norm=10.0)
    optimizer.step(loss=f)
    assert p.grad is not None
    g = real64(p.grad)
    gamma = (before - real64(p)) / g
    np.testing.assert_allclose(gamma * g * g, 2 * (c - gamma) / c * f, rtol=1e-10)


@WIDE
@pytest.mark.parametrize("algorithm", [NGN, NGNM], ids=str)
@pytest.mark.parametrize("c", [1e-3, 1.0, 1e3])
def test_step_size_bounds_on_a_smooth_problem(
    algorithm: Algorithm, backend: str, dtype: torch.dtype, c: float
) -> None:
    """c/(1 + cL) ≤ γ ≤ c where f is L-smooth and non-negative."""
    curvature = torch.linspace(0.01, 5, 20, dtype=dtype)
    smoothness = float(curvature.max())
    p = Parameter(torch.ones(20, dtype=dtype))
    optimizer = algorithm.simple([p], lr=c, backend=backend)
    for _ in range(20):
        optimizer.zero_grad()
        loss = 0.5 * (curvature * p * p).sum()
        loss.backward()
        optimizer.step(loss=loss)
        gamma = float(optimizer.step_sizes()[0])
        assert c / (1 + c * smoothness) * (1 - 1e-6) <= gamma <= c * (1 + 1e-6)


@WIDE
@pytest.mark.parametrize("algorithm", [a for a in SCALAR if not a.spectral], ids=str)
def test_groups_share_the_minimiser_of_one_model(
    algorithm: Algorithm, backend: str, dtype: torch.dtype
) -> None:
    """Without momentum a step minimises (r + ∇rᵀp)² + Σ_j ‖p_j‖²_D/(2c_j), r = sqrt(f)."""
    hypers = (Hyper(0.3, 0.0), Hyper(0.05, 0.0))
    columns = random_columns([[(4,)], [(6,)]], dtype)
    optimizer = algorithm.build(columns, hypers, backend=backend)
    random_gradients(params_of(optimizer), seed=2)
    before = np.concatenate([real64(p) for p in params_of(optimizer)])
    g = np.concatenate([real64(p.grad) for p in params_of(optimizer) if p.grad is not None])
    f = 0.6
    optimizer.step(loss=f)
    moved = np.concatenate([real64(p) for p in params_of(optimizer)]) - before

    diagonal = np.abs(g) + 1e-8 if algorithm.rms else np.ones(10)
    c = np.repeat([h.lr for h in hypers], [4, 6])
    np.testing.assert_allclose(moved, minimise(f, g, np.diag(diagonal / c)), rtol=1e-10)


def minimise(
    f: float, g: np.ndarray, penalty: np.ndarray, pull: np.ndarray | float = 0.0
) -> np.ndarray:
    """argmin over p of (r + ∇rᵀp)² + pᵀ penalty p/2 + pullᵀ p, by a dense solve."""
    r = np.sqrt(f)
    grad_r = g / (2 * r)
    return -np.linalg.solve(2 * np.outer(grad_r, grad_r) + penalty, 2 * r * grad_r + pull)


@WIDE
@pytest.mark.parametrize("weight_decay", [1e-2, 1.0])
def test_erratum_of_mdv1w(backend: str, dtype: torch.dtype, weight_decay: float) -> None:
    """The printed bracket has c λ⟨g,x⟩ where the model's minimiser has a λ⟨g,x⟩, a = c/(1+λc).

    The package follows the print.  The two displacements differ by a λ²c a⟨g,x⟩/(2h + Q) · g/D.
    """
    c, f = 0.5, 1.3
    (p,) = random_columns([[(12,)]], dtype, scale=1.0)[0]
    optimizer = NGNMDv1W.simple(
        [p], lr=c, betas=(0.0, 0.999), weight_decay=weight_decay, backend=backend
    )
    random_gradients([p], seed=5)
    assert p.grad is not None
    x, g = real64(p), real64(p.grad)
    optimizer.step(loss=f)
    moved = real64(p) - x

    D = np.abs(g) + 1e-8
    derived = minimise(f, g, np.diag(D * (1 / c + weight_decay)), weight_decay * D * x)
    a = c / (1 + weight_decay * c)
    lost = a * weight_decay**2 * c * a * float(g @ x) / (2 * f + a * float(np.sum(g * g / D)))
    np.testing.assert_allclose(moved - derived, lost * g / D, rtol=1e-6, atol=1e-14)
    assert np.abs(moved - derived).max() > 1e-7 * np.abs(moved).max()


def evaluations_to_reach(
    threshold: float, problem: Callable[[torch.Tensor], torch.Tensor], optimizer: Any
) -> int:
    (p,) = params_of(optimizer)
    for count in range(1, 10_000):
        optimizer.zero_grad()
        loss = problem(p)
        if loss.item() <= threshold:
            return count
        loss.backward()
        optimizer.step(loss=loss)
    raise AssertionError(f"{threshold} was not reached")


@WIDE
def test_one_dimensional_problem_of_the_paper(backend: str, dtype: torch.dtype) -> None:
    """f(x) = x² + x⁴ from x = 10 reaches 1e-15 at the paper's 269th evaluation."""
    p = Parameter(torch.tensor([10.0], dtype=dtype))
    optimizer = NGNM.simple([p], lr=10.0, momentum=0.9, backend=backend)
    assert evaluations_to_reach(1e-15, lambda x: (x**2 + x**4).sum(), optimizer) == 269


@pytest.mark.essential
@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1], ids=str)
def test_large_lr_does_not_diverge(algorithm: Algorithm, backend: str) -> None:
    """The paper's point: on a convex problem any lr is stable."""
    p = Parameter(torch.tensor([3.0, -2.0]))
    optimizer = algorithm.simple([p], lr=1e4, backend=backend)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (p * p * torch.tensor([1.0, 10.0])).sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step(loss=loss)
    assert losses[-1] < losses[0]


@WIDE
@pytest.mark.parametrize("algorithm", SCALAR, ids=str)
def test_telemetry_is_the_oracles(algorithm: Algorithm, backend: str, dtype: torch.dtype) -> None:
    pair = Pair(algorithm, algorithm.build(random_columns(SHAPES, dtype), backend=backend))
    for k in range(3):
        random_gradients(params_of(pair.optimizer), seed=k)
        pair.step(0.5)
        expected = pair.oracle.step_sizes
        assert expected is not None
        sizes = [float(size) for size in pair.optimizer.step_sizes()]
        np.testing.assert_allclose(sizes, expected, rtol=1e-6)
        cap = pair.optimizer.param_groups[0]["lr"]
        if algorithm is NGNMDv1W:
            cap /= 1 + cap * pair.optimizer.param_groups[0]["weight_decay"]
        assert float(pair.optimizer.shrink) == pytest.approx(expected[0] / cap, rel=1e-6)


@pytest.mark.parametrize("algorithm", SCALAR, ids=str)
def test_shrink_at_the_minimum_is_one(algorithm: Algorithm, backend: str) -> None:
    """0/0: at the minimum nothing holds the step back, and without a gradient nothing moves."""
    p = with_grad(torch.ones(3), 0.0)
    optimizer = algorithm.simple([p], weight_decay=0.0, backend=backend)
    optimizer.step(loss=0.0)
    assert float(optimizer.shrink) == 1.0
    assert torch.equal(p, torch.ones(3))

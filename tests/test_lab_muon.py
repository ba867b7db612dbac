"""The lab's optimizers that orthogonalise matrices: their formulas, and where one is another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import TORCHS_MUON, real64
from oracle import Spectral
from torch import nn
from torch.nn import Parameter

pytest.importorskip("momo")

from ngn_bench.lab import muon, optimizers

POLYNOMIALS = muon.STEPS
SHAPES = ((6, 4), (5,))


def start() -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES
    ]


def give(params: list[Parameter], k: int) -> float:
    """Gradients of a step; its loss."""
    generator = torch.Generator().manual_seed(10 + k)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return 1.0 + 0.3 * k


def polar(values: Any) -> Any:
    judge = Spectral(flat=True, match_rms=False, polynomials=POLYNOMIALS)
    rows, columns = values.shape
    return judge.direction(values, pairs=False) / max(1, rows / columns) ** 0.5


@pytest.mark.parametrize("alpha", [1.0, 0.07])
def test_ngn_scion_without_momentum_is_ngn_muon(alpha: float) -> None:
    """Of matrices alone that are not wider than long, at a target of 1 - alpha."""
    ours, theirs = start()[:1], start()[:1]
    scion = muon.NGNScion(theirs, 0.3, (0.0, 0.9), 0.0, alpha=alpha)
    optimizer = muon.ngn_muon(ours, 0.3, (0.0, 0.9), 0.0, loss_target=1 - alpha)
    for k in range(4):
        for params, step in ((ours, optimizer.step), (theirs, scion.step)):
            step(loss=give(params, k))  # type: ignore[call-arg]
        np.testing.assert_allclose(real64(ours[0]), real64(theirs[0]), rtol=1e-10)
    assert float(optimizer.shrink) * 0.3 == pytest.approx(scion.last_step_size)  # type: ignore[attr-defined]


def test_ngn_scion() -> None:
    params = start()
    scion = muon.NGNScion(params, 0.3, (0.6, 0.9), 0.0)
    x, m = [real64(p) for p in params], [np.zeros(shape) for shape in SHAPES]
    for k in range(3):
        f = give(params, k)
        g = [real64(p.grad) for p in params if p.grad is not None]
        m = [0.6 * old + 0.4 * new for old, new in zip(m, g, strict=True)]
        s = 1.5**0.5, muon.OTHERS
        total = s[0] * np.sum(g[0] * polar(g[0])) + s[1] * np.abs(g[1]).sum()
        rho = 2 * 0.07 * f / total
        gamma = 0.3 * rho / (0.3 + rho)
        x = [x[0] - gamma * s[0] * polar(m[0]), x[1] - gamma * s[1] * np.sign(m[1])]
        scion.step(loss=f)
        for p, wanted in zip(params, x, strict=True):
            np.testing.assert_allclose(real64(p), wanted, rtol=1e-10)


@pytest.mark.parametrize("lr", [1e-4, 10.0])
def test_muonmax_momo(lr: float) -> None:
    """Where lr is below the cap, and where it is above."""
    params, capped = start(), []
    optimizer = muon.MuonMaxMomo(params, lr / muon.OTHERS, (0.6, 0.9), 0.0)
    x = [real64(p) for p in params]
    m: list[Any] = []
    v, model = np.zeros(5), 0.0
    for k in range(3):
        f = give(params, k)
        g = [real64(p.grad) for p in params if p.grad is not None]
        m = [0.6 * a + 0.4 * b for a, b in zip(m or g, g, strict=True)]
        v = 0.9 * (v if k else g[1] ** 2) + 0.1 * g[1] ** 2
        offset = f - sum(float(np.sum(a * b)) for a, b in zip(x, g, strict=True))
        model = 0.6 * (model if k else offset) + 0.4 * offset
        nuclear = float(np.sum(m[0] * polar(m[0])))
        d = m[1] / (1e-8 + np.sqrt(v))
        norm = 10 * nuclear**2 + float(np.sum(m[1] * d))
        above = model + sum(float(np.sum(a * b)) for a, b in zip(x, m, strict=True))
        step = min(lr, max(0.0, above) / norm)
        capped.append(step < lr)
        x = [x[0] - step * 10 * nuclear * polar(m[0]), x[1] - step * d]
        optimizer.step(loss=f)
        for p, wanted in zip(params, x, strict=True):
            np.testing.assert_allclose(real64(p), wanted, rtol=1e-9)
    assert any(capped) == (lr == 10.0)


@TORCHS_MUON
def test_muon_and_adam_are_torchs() -> None:
    params, (matrix, vector) = start(), start()
    both = muon.MuonAdam(params, 0.1, (0.9, 0.99), 0.0)
    alone = torch.optim.Muon([matrix], 0.1, weight_decay=0.0, momentum=0.9)
    adam = torch.optim.Adam([vector], 0.1 * muon.OTHERS, (0.9, 0.99))
    for k in range(3):
        give(params, k), give([matrix, vector], k)
        both.step()
        alone.step()
        adam.step()
    assert torch.equal(params[0], matrix)
    torch.testing.assert_close(params[1], vector)


@pytest.mark.parametrize(
    "name",
    [
        "ngn-muon",
        "ngn-muon-nesterov",
        pytest.param("muon", marks=TORCHS_MUON),
        "muonmax-momo",
        "ngn-scion",
    ],
)
def test_models_are_split_alike(name: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    optimizer = optimizers.make(name, model, 0.02)
    matrices = [g["params"] for g in optimizer.param_groups if g["spectral"]]
    assert len(matrices) == 1 and len(matrices[0]) == 1 and matrices[0][0] is model[1].weight
    assert {g["lr"] for g in optimizer.param_groups} == {0.02, 0.02 * muon.OTHERS}

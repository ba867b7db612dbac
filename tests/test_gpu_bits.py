"""Which engines have the same bits: docs/gpu.md says why.

The CUDA engine has those of the C++ engine's baseline, whose element math it compiles, and those of Triton
wherever both take the same operations: everything without RMS, and v. The sums are added in an order that
each engine has of its own, so that rho may differ in its last bits: the loss here is so large that it is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from algorithms import EVERY, Algorithm, NGNMDv1, NGNMDv1W, NGNMDv2
from gpu_engines import CUDA, simulated
from helpers import bits, params_of, random_columns, random_gradients

from ngn_kernels.extension import why_missing

# Vectors, tails, several chunks, and a small parameter.
SHAPES = ([(4161,), (3,)], [(64, 70)])
STEPS = 3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with simulated(CUDA, monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def baseline() -> Iterator[None]:
    """The C++ engine as it is on any processor."""
    if why_missing() is not None:
        pytest.skip(str(why_missing()))
    from ngn_kernels import _cpu

    before = _cpu.isa()
    _cpu.use_isa("baseline")
    yield
    _cpu.use_isa(before)


def after(
    algorithm: Algorithm, backend: str, dtype: torch.dtype, **options: Any
) -> list[dict[str, bytes]]:
    """Parameters and state after some steps, the bits of each."""
    optimizer = algorithm.build(random_columns(SHAPES, dtype), backend=backend, **options)
    for k in range(STEPS):
        random_gradients(params_of(optimizer), seed=k, norm=2.0)
        optimizer.step(loss=1e15)
    return [
        {"x": bits(p)} | {key: bits(torch.as_tensor(v)) for key, v in optimizer.state[p].items()}
        for p in params_of(optimizer)
    ]


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cuda_has_the_bits_of_the_baseline(
    algorithm: Algorithm, dtype: torch.dtype, cuda: Any, baseline: None
) -> None:
    found, wanted = (after(algorithm, name, dtype) for name in ("cuda", "cpu"))
    assert found == wanted


NARROW = {
    "bfloat16": ({"state": "bfloat16"}, torch.float32),
    "8bit": ({"state": "8bit"}, torch.float32),
    "8bit, bfloat16, stochastic": (
        {"state": ("8bit", "bfloat16"), "rounding": "stochastic"},
        torch.float16,
    ),
    "exact": ({"state": "8bit", "rounding": "exact"}, torch.bfloat16),
}


@pytest.mark.parametrize(("options", "dtype"), NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("algorithm", [NGNMDv1, NGNMDv2, NGNMDv1W], ids=str)
def test_cuda_has_the_bits_of_the_baseline_in_every_format(
    algorithm: Algorithm, options: dict[str, Any], dtype: torch.dtype, cuda: Any, baseline: None
) -> None:
    found, wanted = (after(algorithm, name, dtype, **options) for name in ("cuda", "cpu"))
    assert found == wanted


@EVERY
def test_cuda_has_the_bits_of_triton_where_both_compute_alike(
    algorithm: Algorithm, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of v always; of x and m only without RMS, whose bias correction the two take apart differently."""
    with simulated("triton-90", monkeypatch):
        found, wanted = (after(algorithm, name, torch.float32) for name in ("cuda", "triton"))
    for row, other in zip(found, wanted, strict=True):
        if "exp_avg_sq" in row:
            assert row["exp_avg_sq"] == other["exp_avg_sq"]
        else:
            assert row == other
    assert (found != wanted) == algorithm.rms, "the page says which differ"

"""The host's time of a step() of 300 tensors on a GPU, without the launches and small copies.

The GPU path runs on CPU tensors, with launches that do nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ngn_bench.gpu.stub_kernels import counting_backend

import ngn_kernels
from ngn_kernels import backends

pytest.importorskip("pytest_benchmark")
pytest.importorskip("triton")


@pytest.mark.parametrize("groups", [1, 20])
@pytest.mark.parametrize("gradients", ["in place", "new"])
@pytest.mark.parametrize("rule", ["NGNMDv1", "NGNMDv2"])
def test_host(
    rule: str, gradients: str, groups: int, benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, backend = counting_backend("cpu")
    monkeypatch.setattr(backends, "_load", lambda name: backend)
    params = [torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(300)]
    columns = [{"params": params[i::groups]} for i in range(groups)]
    optimizer = getattr(ngn_kernels, rule)(columns, backend="triton")

    def new_gradients() -> None:
        for p in params:
            p.grad = torch.zeros_like(p)

    new_gradients()
    benchmark.pedantic(
        lambda: optimizer.step(loss=1.0),
        setup=new_gradients if gradients == "new" else None,
        rounds=1000,
        warmup_rounds=100,
    )
    launches.clear()
    optimizer.step(loss=1.0)
    assert len(launches) == (2 if rule == "NGNMDv1" else 1)

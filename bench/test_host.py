"""What step() costs the host for 300 tensors on a GPU, apart from the launches and small copies.

The GPU path runs on CPU tensors, with launches that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ngn_kernels
from ngn_kernels import backends
from ngn_kernels.backends.triton import TritonBackend

pytest.importorskip("pytest_benchmark")
pytest.importorskip("triton")


class NoLaunch:
    """Stands for a kernel, compiled or not."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., NoLaunch]:
        return self._launch

    def _launch(self, *args: Any, **options: Any) -> NoLaunch:
        self.launches += 1
        return self


@pytest.mark.parametrize("groups", [1, 20])
@pytest.mark.parametrize("gradients", ["in place", "new"])
@pytest.mark.parametrize("rule", ["NGNMDv1", "NGNMDv2"])
def test_host(
    rule: str, gradients: str, groups: int, benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = NoLaunch()
    target = SimpleNamespace(backend="cuda", warp_size=32)
    kernels = SimpleNamespace(reduce=kernel, apply=kernel)
    backend = TritonBackend(kernels, lambda: target, device_type="cpu")
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
    kernel.launches = 0
    optimizer.step(loss=1.0)
    assert kernel.launches == (2 if rule == "NGNMDv1" else 1)

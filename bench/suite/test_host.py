"""The host's time of a step() on a GPU, of each engine, whose launches reach no GPU.

The GPU path runs on CPU tensors. Of Triton the launch goes through its own binding and stops before its
launcher, of CUDA it goes through a library that stands in for the driver. Small copies are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ngn_kernels
from ngn_kernels import backends
from ngn_kernels.extension import why_missing

pytest.importorskip("pytest_benchmark")


@contextmanager
def idle(engine: str) -> Iterator[Any]:
    """The engine for CPU tensors, without a GPU."""
    if engine == "triton":
        pytest.importorskip("triton")
        from ngn_bench.gpu.idle_triton import IdleTriton

        with IdleTriton().active() as driver:
            yield driver.backend()
        return
    if why_missing("_cuda") is not None:
        pytest.skip(str(why_missing("_cuda")))
    from ngn_bench.gpu.stub_driver import StubDriver

    yield StubDriver().backend("cpu")


@pytest.mark.parametrize("tensors", [1, 100, 10_000])
@pytest.mark.parametrize("gradients", ["in place", "new"])
@pytest.mark.parametrize("rule", ["NGNMDv1", "NGNMDv2"])
@pytest.mark.parametrize("engine", ["cuda", "triton"])
def test_host(
    engine: str,
    rule: str,
    gradients: str,
    tensors: int,
    benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with idle(engine) as backend:
        monkeypatch.setattr(backends, "_load", lambda name: backend)
        params = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(tensors)]
        optimizer = getattr(ngn_kernels, rule)(params, backend=engine)

        def new_gradients() -> None:
            for p in params:
                p.grad = torch.zeros_like(p)

        new_gradients()
        benchmark.pedantic(
            lambda: optimizer.step(loss=1.0),
            setup=new_gradients if gradients == "new" else None,
            rounds=1000 if tensors < 1000 else 100,
            warmup_rounds=100,
        )


@pytest.mark.parametrize("engine", ["cuda", "triton"])
def test_launches(engine: str, benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two launches of an NGNMDv1 step alone."""
    with idle(engine) as backend:
        monkeypatch.setattr(backends, "_load", lambda name: backend)
        p = torch.nn.Parameter(torch.zeros(64))
        p.grad = torch.zeros_like(p)
        optimizer = ngn_kernels.NGNMDv1([p], backend=engine)
        optimizer.step(loss=1.0)
        (prepared,) = optimizer._plan._prepared

        def launch() -> None:
            prepared.reduce(0)
            prepared.apply(True)

        benchmark.pedantic(launch, rounds=5000, warmup_rounds=500)

"""Step times for pytest-benchmark: `pytest bench/suite --benchmark-autosave`, later with
`--benchmark-compare --benchmark-compare-fail=median:10%`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ngn_bench.contenders.check import check
from ngn_bench.contenders.registry import CONTENDERS, NGN_VARIANTS
from ngn_bench.environment import backend_status
from ngn_bench.timing.workloads import find_workload

pytest.importorskip("pytest_benchmark")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKEND_STATUS = backend_status(DEVICE)
WORKLOADS = ("resnet20", "many-small", "one:1M", "one:16M")
FUSED = [f"{rule}:{backend}" for backend in ("cpu", "triton") for rule in NGN_VARIANTS]


@pytest.fixture(scope="module", params=WORKLOADS)
def parameters(request: pytest.FixtureRequest) -> list[torch.Tensor]:
    """Parameters with gradients, shared by all optimizers of a workload."""
    torch.manual_seed(0)
    params = []
    for shape in find_workload(request.param).shapes:
        params.append(torch.randn(shape, device=DEVICE, requires_grad=True))
        params[-1].grad = 1e-3 * torch.randn(shape, device=DEVICE)
    return params


@pytest.mark.parametrize("name", [*FUSED, "adamw:fused", "sgd:fused"])
def test_step(name: str, parameters: list[torch.Tensor], benchmark: Callable[..., Any]) -> None:
    """One whole step() of a contender whose steps are right."""
    backend = name.partition(":")[2]
    if BACKEND_STATUS.get(backend, "ok") != "ok":
        pytest.skip(BACKEND_STATUS[backend])
    contender = CONTENDERS[name]
    verdict = check(contender, torch.float32, DEVICE)
    assert verdict.ok, verdict.text
    step = contender.step_function(contender.build(parameters))
    loss = torch.full((), 2.5, device=DEVICE)
    before = parameters[0].detach().clone()

    def run() -> None:
        step(loss)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    run()
    benchmark(run)
    assert not torch.equal(before, parameters[0])
    assert all(bool(torch.isfinite(p).all()) for p in parameters)

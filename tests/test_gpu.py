"""On a real GPU: results, no waiting, CUDA graphs, several devices. Skipped without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from algorithms import EVERY, Algorithm, NGNMDv1, NGNMDv2
from helpers import (
    bits,
    params_of,
    random_columns,
    random_gradients,
    snapshot,
    warnings_of,
    with_grad,
)
from pair import Pair
from torch import Tensor
from torch.nn import Parameter

import ngn_kernels
from ngn_kernels import spectral
from ngn_kernels.backends import availability

WORK_DTYPE = spectral.work_dtype
REQUIRED = os.environ.get("NGN_REQUIRE_GPU") == "1"
"""Where a GPU is meant to be, what would be skipped for want of one fails."""
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not REQUIRED, reason="torch sees no GPU here"
)

ENGINES = ("cuda", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ([(), (3,), (1030,), (5, 7), (257, 1025)], [(4101,), (0,), (64, 32)])


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """A backend that runs here."""
    name: str = request.param
    reason = availability()[name]
    if reason is not None:
        (pytest.fail if REQUIRED else pytest.skip)(reason)
    return name


@pytest.fixture(autouse=True)
def products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the oracle's tolerances have it."""
    monkeypatch.setattr(spectral, "work_dtype", lambda products, dtype, device: dtype)


def columns_on(device: str, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    columns = random_columns(SHAPES, dtype)
    return [[Parameter(p.detach().to(device)) for p in column] for column in columns]


def gradients(optimizer: Any, seed: int, norm: float = 1.0) -> None:
    """The same on every device."""
    params = params_of(optimizer)
    on_host = [Parameter(p.detach().cpu()) for p in params]
    random_gradients(on_host, seed, norm)
    for p, host in zip(params, on_host, strict=True):
        p.grad = host.grad.to(p.device)  # type: ignore[union-attr]


@EVERY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_every_rule(
    algorithm: Algorithm, dtype: torch.dtype, max_grad_norm: float | None, engine: str
) -> None:
    optimizer = algorithm.build(
        columns_on("cuda", dtype), backend=engine, max_grad_norm=max_grad_norm
    )
    pair = Pair(algorithm, optimizer, max_grad_norm=max_grad_norm)
    for k in range(3):
        gradients(optimizer, seed=k, norm=2.0)
        pair.sync()
        pair.expect(0.5 + k)
        optimizer.step(loss=torch.tensor(0.5 + k, device="cuda"))
        pair.check_step()


@EVERY
def test_a_large_tensor(algorithm: Algorithm, engine: str) -> None:
    """More chunks than are added at a time, and an odd end."""
    p = Parameter(0.1 * torch.randn(3_000_001, device="cuda"))
    pair = Pair(algorithm, algorithm.simple([p], backend=engine))
    for k in range(2):
        gradients(pair.optimizer, seed=k)
        pair.checked_step(1.0)


@EVERY
def test_unaligned_views(algorithm: Algorithm, engine: str) -> None:
    n = 100_003
    for at_x, at_g in ((1, 0), (0, 3), (2, 2)):
        x, g = torch.zeros(n + 64, device="cuda"), torch.zeros(n + 64, device="cuda")
        p = Parameter(x[at_x : at_x + n].normal_())
        optimizer = algorithm.simple([p], backend=engine)
        p.grad = g[at_g : at_g + n].normal_().div_(n**0.5)
        Pair(algorithm, optimizer).checked_step(1.0)
        assert not x[:at_x].any() and not x[at_x + n :].any()


@EVERY
def test_two_runs_have_the_same_bits(algorithm: Algorithm, engine: str) -> None:
    def result() -> Any:
        optimizer = algorithm.build(columns_on("cuda"), backend=engine, max_grad_norm=1.0)
        for k in range(5):
            gradients(optimizer, seed=k)
            optimizer.step(loss=0.5)
        return snapshot(optimizer)

    assert result() == result()


# What a step may be given: the loss, and the gradient scale.
GIVEN: dict[str, Callable[[int], tuple[Any, Tensor | None]]] = {
    "on the device": lambda k: (torch.full((), 0.5 + k, device="cuda"), None),
    "a number": lambda k: (0.5 + k, None),
    "on the host": lambda k: (torch.tensor(0.5 + k), None),
    "scaled, then not": lambda k: (0.5, None if k % 2 else torch.full((), 2.0, device="cuda")),
}


@EVERY
@pytest.mark.parametrize("engine", [*ENGINES, "reference"], indirect=True)
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_step_never_waits(
    algorithm: Algorithm, engine: str, given: Callable[[int], tuple[Any, Tensor | None]]
) -> None:
    """Torch raises at what waits; memory stays as it is; the results are the oracle's."""
    optimizer = algorithm.build(
        columns_on("cuda"), backend=engine, max_grad_norm=1.0, loss_floor=0.25
    )
    gradients(optimizer, seed=0)
    optimizer.step(loss=1.0)
    pair = Pair(algorithm, optimizer, max_grad_norm=1.0, loss_floor=0.25)
    for k in range(4):
        loss, scale = given(k)
        optimizer.grad_scale = scale
        pair.sync()
        pair.expect(loss, grad_scale=1.0 if scale is None else 2.0)
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step(loss=loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() == before
        pair.check_step()


def test_directions_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are made without the fixture: near those of float32."""
    steps = spectral.polynomials((3.4445, -4.775, 2.0315), 5)
    matrices = torch.randn(3, 64, 96, device="cuda")
    exact = spectral.polar(matrices, steps)
    monkeypatch.setattr(spectral, "work_dtype", WORK_DTYPE)
    found = spectral.polar(matrices, steps)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=0.05, rtol=0.0)


def capture(optimizer: Any, loss: Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        optimizer.step(loss=loss)
    return graph


@EVERY
def test_cuda_graph(algorithm: Algorithm, engine: str) -> None:
    """Two graphs, replayed in turns with ordinary steps: the bits of as many ordinary steps."""

    def prepared() -> tuple[Any, Tensor]:
        optimizer = algorithm.build(columns_on("cuda"), backend=engine, max_grad_norm=1.0)
        gradients(optimizer, seed=0)
        loss = torch.tensor(0.5, device="cuda")
        optimizer.step(loss=loss)
        return optimizer, loss

    eager, loss = prepared()
    captured, static_loss = prepared()
    rates = (0.2, 0.05)
    graphs = []
    for lr in rates:  # as a scheduler would between warm-up and capture
        captured.param_groups[0]["lr"] = lr
        graphs.append(capture(captured, static_loss))
    for k in range(6):
        lr = 0.1 if k % 3 == 2 else rates[k % 3]
        eager.param_groups[0]["lr"] = captured.param_groups[0]["lr"] = lr
        eager.step(loss=loss.fill_(0.5 + k))
        static_loss.fill_(0.5 + k)
        if k % 3 == 2:
            captured.step(loss=0.5 + k)
        else:
            graphs[k % 3].replay()
    torch.cuda.synchronize()
    assert snapshot(captured) == snapshot(eager)


def test_a_gradient_left_on_the_host_is_refused(engine: str) -> None:
    p = with_grad(torch.ones(5))
    p.data = p.data.cuda()
    assert p.grad.device.type == "cpu"
    optimizer = NGNMDv1.simple([p], backend=engine)
    with pytest.raises(RuntimeError, match="is on cuda:0, its gradient on cpu: move both"):
        optimizer.step(loss=1.0)
    assert p.tolist() == [1, 1, 1, 1, 1]


def test_a_skipped_step_is_reported_later(engine: str) -> None:
    p = Parameter(torch.ones(5, device="cuda"))
    optimizer = NGNMDv1.simple([p], backend=engine)
    p.grad = torch.full_like(p, float("nan"))
    before = bits(p)

    def step() -> None:
        optimizer.step(loss=torch.ones((), device="cuda"))
        torch.cuda.synchronize()

    said = [warnings_of(step, ngn_kernels.SkippedStepWarning) for _ in range(20)]
    assert bits(p) == before
    assert int(optimizer.skipped_steps) == 20
    assert any(said)


def test_grad_scaler(engine: str) -> None:
    """An overflow skips the step, which the next one tells; then training goes on."""
    p = Parameter(torch.ones(1000, device="cuda"))
    optimizer = NGNMDv2.simple([p], backend=engine)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    before = bits(p)
    scaler.scale((p * float("inf")).sum()).backward()
    scaler.step(optimizer, loss=1.0)
    scaler.update()
    assert bits(p) == before and int(optimizer.state[p]["step"]) == 0
    optimizer.zero_grad()
    loss = (p**2).mean()
    scaler.scale(loss).backward()
    torch.cuda.synchronize()
    with pytest.warns(ngn_kernels.SkippedStepWarning, match="overflow"):
        scaler.step(optimizer, loss=loss)
    assert bits(p) != before and int(optimizer.state[p]["step"]) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@EVERY
def test_two_devices(algorithm: Algorithm, engine: str) -> None:
    columns = [
        [Parameter(p.detach().to(f"cuda:{i}")) for p in column]
        for i, column in enumerate(random_columns(SHAPES))
    ]
    optimizer = algorithm.build(columns, backend=engine, max_grad_norm=1.0)
    pair = Pair(algorithm, optimizer, max_grad_norm=1.0)
    for k in range(2):
        gradients(optimizer, seed=k)
        pair.checked_step(1.0)

"""Every algorithm against the oracle: parameters and state, after every step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from algorithms import EVERY, Algorithm, Hyper
from extent import Extent
from helpers import params_of, random_columns, random_gradients
from pair import Pair
from steps import checked_steps
from torch import Tensor
from torch.nn import Parameter

pytestmark = EVERY

GUARD = 64


@pytest.mark.essential
@pytest.mark.dtypes(torch.float64, torch.float32)
def test_many_steps(algorithm: Algorithm, backend: str, dtype: torch.dtype, extent: Extent) -> None:
    """Two groups, decay, clipping on and off, a parameter that sometimes has no gradient."""
    options: dict[str, Any] = {"loss_floor": 0.25, "max_grad_norm": 1.0}
    columns = random_columns(extent.shapes, dtype)
    large = max(columns[0], key=Tensor.numel)
    pair = Pair(algorithm, algorithm.build(columns, backend=backend, **options), **options)
    draw = random.Random(0)
    for k in range(extent.steps):
        random_gradients(params_of(pair.optimizer), seed=k, norm=10 ** draw.uniform(-1, 1))
        if k % 3 == 1:
            large.grad = None
            columns[1][0].grad = None
        if k == 10:
            for p in params_of(pair.optimizer):
                p.grad = None if p.grad is None else torch.zeros_like(p)
        at_the_floor = k in (10, 20)
        pair.step(0.25 if at_the_floor else 0.25 + 10 ** draw.uniform(-2, 1))
        pair.check_trajectory()
    assert int(pair.optimizer.skipped_steps) == 0


@pytest.mark.essential
def test_sizes(algorithm: Algorithm, backend: str, dtype: torch.dtype, extent: Extent) -> None:
    """Single steps at every size, with nothing written or read outside the tensors."""
    params, buffers = [], []
    for i, size in enumerate(extent.sizes):
        ((values,),) = random_columns([[(size,)]], dtype, seed=i)
        data, buffer = guarded(values.detach())
        params.append(Parameter(data))
        buffers.append(buffer)
    columns = [params[::2], params[1::2]]
    pair = Pair(algorithm, algorithm.build(columns, backend=backend))
    for k in range(extent.steps_from_sync):
        random_gradients(params, seed=k)
        for p in params:
            assert p.grad is not None
            p.grad, buffer = guarded(p.grad)
            buffers.append(buffer)
            state = pair.optimizer.state.get(p, {})
            for key in {"momentum_buffer", "exp_avg_sq"} & set(state):
                state[key], buffer = guarded(state[key])
                buffers.append(buffer)
        pair.checked_step(1.5)
    for buffer in buffers:
        assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all()


def guarded(values: Tensor) -> tuple[Tensor, Tensor]:
    """The values inside a larger buffer of NaN, and that buffer."""
    buffer = torch.full((values.numel() + 2 * GUARD,), float("nan"), dtype=values.dtype)
    inner = buffer[GUARD : GUARD + values.numel()]
    inner.copy_(values)
    return inner, buffer


@pytest.mark.essential
def test_steps_from_identical_state(
    algorithm: Algorithm, backend: str, dtype: torch.dtype, extent: Extent
) -> None:
    """In every dtype, from t = 1 on, with clipping; low-precision parameters have fp32 state."""
    options: dict[str, Any] = {"max_grad_norm": 2.0, "loss_floor": -0.5}
    columns = random_columns(extent.shapes, dtype)
    pair = Pair(algorithm, algorithm.build(columns, backend=backend, **options), **options)
    for k in range(extent.steps_from_sync):
        random_gradients(params_of(pair.optimizer), seed=k, norm=3.0 / (k + 1))
        pair.checked_step(0.7 + k)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for p in params_of(pair.optimizer):
        for key in {"momentum_buffer", "exp_avg_sq"} & set(pair.optimizer.state[p]):
            assert pair.optimizer.state[p][key].dtype == wide
            assert pair.optimizer.state[p][key].shape == p.shape


@pytest.mark.essential
@pytest.mark.dtypes(torch.bfloat16, torch.float16, torch.float32)
@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch ties the two dtypes")
def test_gradients_of_another_dtype(
    algorithm: Algorithm, backend: str, dtype: torch.dtype, extent: Extent
) -> None:
    for grad_dtype in {torch.float32, torch.bfloat16, torch.float16} - {dtype}:
        pair = Pair(
            algorithm, algorithm.build(random_columns(extent.shapes, dtype), backend=backend)
        )
        checked_steps(pair, 0, 1, loss=2.0, dtype=grad_dtype)


@pytest.mark.essential
def test_many_tensors(algorithm: Algorithm, backend: str, extent: Extent) -> None:
    """Small ones in two groups; all of them count, move, and share one denominator."""
    half = [(1,)] * (extent.tensors // 2)
    pair = Pair(algorithm, algorithm.build(random_columns([half, half]), backend=backend))
    checked_steps(pair, 0, loss=0.8, norm=3.0)


@pytest.mark.essential
def test_dtypes_side_by_side(algorithm: Algorithm, backend: str) -> None:
    """float32, bfloat16 and float16 parameters in one group share one denominator."""
    shapes = [(5,), (40, 30), (129,)]
    low = [random_columns([shapes], d, seed=3)[0] for d in (torch.float16, torch.bfloat16)]
    columns = [random_columns([shapes])[0] + low[0], low[1]]
    pair = Pair(algorithm, algorithm.build(columns, backend=backend))
    checked_steps(pair, 0, 1, loss=0.9)


@pytest.mark.essential
@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 1e6])
def test_amp_scale(
    algorithm: Algorithm, backend: str, max_grad_norm: float | None, extent: Extent
) -> None:
    """Scaled gradients with `grad_scale` set are unscaled inside, before clipping."""
    optimizer = algorithm.build(
        random_columns(extent.shapes), backend=backend, max_grad_norm=max_grad_norm
    )
    pair = Pair(algorithm, optimizer, max_grad_norm=max_grad_norm)
    for k in range(2):
        random_gradients(params_of(optimizer), seed=k, norm=1024.0)
        grads = [p.grad.clone() for p in params_of(optimizer) if p.grad is not None]
        optimizer.grad_scale = torch.tensor(1024.0)
        optimizer.found_inf = torch.tensor(0.0)
        pair.checked_step(1.1, grad_scale=1024.0)
        for p, grad in zip(params_of(optimizer), grads, strict=True):
            assert torch.equal(p.grad, grad), "the step must leave gradients as they are"


@pytest.mark.essential
@pytest.mark.parametrize("loss", [0.0, 1e-30, 1e30])
@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_limits_of_the_loss(
    algorithm: Algorithm, backend: str, loss: float, gradient: float
) -> None:
    """Nothing divides by the loss: at h = 0 every formula takes its limit, and stays finite."""
    pair = Pair(algorithm, algorithm.build(random_columns([[(9,)], [(4, 4)]]), backend=backend))
    for k in range(2):
        random_gradients(params_of(pair.optimizer), seed=k, norm=gradient)
        pair.checked_step(loss)


def test_zero_lr_moves_only_by_momentum(algorithm: Algorithm, backend: str) -> None:
    pair = Pair(algorithm, algorithm.build(random_columns([[(9,)], [(4, 4)]]), backend=backend))
    for k, lr in enumerate((0.3, 0.0, 0.0)):
        pair.optimizer.param_groups[0]["lr"] = lr
        random_gradients(params_of(pair.optimizer), seed=k)
        pair.checked_step(0.4)


def test_a_parameter_without_gradient_stands_still(algorithm: Algorithm, backend: str) -> None:
    """Its x, m, v and t all stand still, and go on from there when the gradient is back."""
    (p, q), _ = columns = random_columns([[(5,), (6,)], [(3,)]])
    pair = Pair(algorithm, algorithm.build(columns, backend=backend))
    for k in range(6):
        random_gradients(params_of(pair.optimizer), seed=k)
        before = None
        if k in (2, 3):
            q.grad = None
            before = [t.clone() for t in (q, *pair.optimizer.state[q].values())]
        pair.step(1.0)
        if before is not None:
            after = (q, *pair.optimizer.state[q].values())
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        pair.sync()
    if algorithm.rms:
        assert int(pair.optimizer.state[p]["step"]) == 6
        assert int(pair.optimizer.state[q]["step"]) == 4


@pytest.mark.dtypes(torch.float64)
def test_closed_loop(algorithm: Algorithm, backend: str, dtype: torch.dtype) -> None:
    """A real problem, where loss and gradient come from the parameters."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 6, generator=generator, dtype=dtype)
    target = data @ torch.randn(6, generator=generator, dtype=dtype) + 1.0
    weight, bias = Parameter(torch.zeros(6, dtype=dtype)), Parameter(torch.zeros((), dtype=dtype))
    hypers = (Hyper(0.5, beta2=0.9, weight_decay=1e-3), Hyper(0.1, weight_decay=0.0))
    pair = Pair(algorithm, algorithm.build([[weight], [bias]], hypers, backend=backend))
    losses = []
    for _ in range(30):
        pair.optimizer.zero_grad()
        loss = ((data @ weight + bias - target) ** 2).mean()
        loss.backward()
        losses.append(loss.item())
        pair.step(loss)
        pair.check_trajectory()
    assert losses[-1] < 0.8 * losses[0]


def test_defaults(algorithm: Algorithm, backend: str) -> None:
    """The constructor's defaults, by value and by what one step does."""
    params = random_columns([[(11,)]])[0]
    optimizer = algorithm.simple(params, backend=backend)
    group = optimizer.param_groups[0]
    assert group["lr"] == (1.0 if algorithm.name in ("NGN", "NGNM") else 1e-2)
    assert group["weight_decay"] == (1e-2 if algorithm.name in ("DecNGNMDv1", "NGNMDv1W") else 0)
    if algorithm.momentum == "betas":
        assert tuple(group["betas"]) == (0.9, 0.999) and group["eps"] == 1e-8
    if algorithm.momentum == "momentum":
        assert group["momentum"] == 0.9
    if algorithm.name == "NGND":
        assert group["beta2"] == 0.999 and group["eps"] == 1e-8
    pair = Pair(algorithm, optimizer)
    random_gradients(params, seed=0)
    pair.checked_step(0.5)


def test_state_is_what_the_rule_needs(algorithm: Algorithm, backend: str) -> None:
    params = random_columns([[(4,)]])[0]
    optimizer = algorithm.simple(params, backend=backend)
    random_gradients(params, seed=0)
    optimizer.step(loss=1.0)
    keys = set(optimizer.state[params[0]]) - {"step"}
    wanted = {"momentum_buffer"} if algorithm.momentum else set()
    assert keys == wanted | ({"exp_avg_sq"} if algorithm.rms else set())


def test_the_suite_can_fail(algorithm: Algorithm, backend: str) -> None:
    """A relative error of 1e-5 in one element of float32 is noticed, or what a slack makes of it."""
    pair = Pair(algorithm, algorithm.build(random_columns([[(9,)], [(4, 4)]]), backend=backend))
    random_gradients(params_of(pair.optimizer), seed=0)
    pair.step(1.0)
    with torch.no_grad():
        params_of(pair.optimizer)[1][0, 0] *= 1 + 1e-5 * algorithm.slack
    with pytest.raises(AssertionError, match="parameter"):
        pair.check_step()

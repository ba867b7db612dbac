"""GradScaler as users run it: `scaler.step(opt, loss=loss)` with the loss unscaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithms import EVERY, Algorithm
from helpers import params_of, random_columns, random_gradients, unchanged
from pair import Pair
from steps import train

import ngn_kernels

pytestmark = EVERY

SCALE = 2.0**10


def started(algorithm: Algorithm, backend: str, **options: Any) -> tuple[Pair, Any]:
    optimizer = algorithm.build(random_columns([[(6, 3)], [(6,)]]), backend=backend, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    return Pair(algorithm, optimizer, **options), scaler


def backward(pair: Pair, scaler: Any, seed: int) -> torch.Tensor:
    """A regression with fresh data; gradients are scaled, the returned loss is not."""
    pair.optimizer.zero_grad()
    weight, bias = params_of(pair.optimizer)
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(5, 3, generator=generator) @ weight.T + bias
    loss = ((out - torch.randn(5, 6, generator=generator)) ** 2).mean()
    scaler.scale(loss).backward()
    return loss


def checked_step(pair: Pair, scaler: Any, seed: int, pending: bool = False) -> None:
    """A scaled step beside the oracle, with the loss as argument or given before."""
    loss = backward(pair, scaler, seed)
    pair.sync()
    pair.expect(loss, grad_scale=scaler.get_scale())
    if pending:
        pair.optimizer.set_loss(loss)
        scaler.step(pair.optimizer)
    else:
        scaler.step(pair.optimizer, loss=loss)
    pair.check_step()
    scaler.update()


@pytest.mark.essential
@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
def test_scaler_step(algorithm: Algorithm, backend: str, max_grad_norm: float | None) -> None:
    """Across a growth of the scale; clipping is by the unscaled norm."""
    pair, scaler = started(algorithm, backend, max_grad_norm=max_grad_norm)
    for k in range(4):
        checked_step(pair, scaler, k)
    assert scaler.get_scale() == 4 * SCALE
    assert int(pair.optimizer.skipped_steps) == 0


@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
def test_a_scale_that_has_grown_for_long(
    algorithm: Algorithm, backend: str, max_grad_norm: float | None
) -> None:
    """Squares of the scaled gradients would overflow; those of the gradients do not."""
    scale = 2.0**90
    optimizer = algorithm.build(
        random_columns([[(6, 3)], [(6,)]]), backend=backend, max_grad_norm=max_grad_norm
    )
    pair = Pair(algorithm, optimizer, max_grad_norm=max_grad_norm)
    random_gradients(params_of(optimizer), seed=0, norm=scale)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
    pair.step(1.1, grad_scale=scale)
    pair.check_step()
    assert int(optimizer.skipped_steps) == 0


def test_unscale_before_the_step(algorithm: Algorithm, backend: str) -> None:
    """After `scaler.unscale_` the gradients are final, clipped by the user or not."""
    pair, scaler = started(algorithm, backend)
    for k in range(2):
        loss = backward(pair, scaler, k)
        scaler.unscale_(pair.optimizer)
        torch.nn.utils.clip_grad_norm_(params_of(pair.optimizer), 0.4)
        pair.sync()
        pair.expect(loss)
        scaler.step(pair.optimizer, loss=loss)
        pair.check_step()
        scaler.update()


@pytest.mark.essential
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_overflow_skips_the_whole_step(
    algorithm: Algorithm, backend: str, unscale: bool, value: float
) -> None:
    pair, scaler = started(algorithm, backend)
    optimizer = pair.optimizer
    checked_step(pair, scaler, 0)
    loss = backward(pair, scaler, 1)
    params_of(optimizer)[1].grad[-1] = value
    if unscale:
        scaler.unscale_(optimizer)
    with unchanged(optimizer), pytest.warns(ngn_kernels.SkippedStepWarning):
        scaler.step(optimizer, loss=loss)
    scaler.update()
    assert int(optimizer.skipped_steps) == 1
    assert scaler.get_scale() == SCALE / 2
    checked_step(pair, scaler, 2)


@pytest.mark.essential
@pytest.mark.parametrize("grad_scale", [None, torch.tensor(8.0), torch.tensor([8.0])], ids=str)
def test_found_inf_is_honoured(
    algorithm: Algorithm, backend: str, grad_scale: torch.Tensor | None
) -> None:
    """With and without `grad_scale`, even when every gradient is finite."""
    pair, _ = started(algorithm, backend)
    optimizer = pair.optimizer
    train(optimizer, 0)
    optimizer.found_inf = torch.ones_like(grad_scale) if grad_scale is not None else torch.ones(())
    if grad_scale is not None:
        optimizer.grad_scale = grad_scale
    with unchanged(optimizer), pytest.warns(ngn_kernels.SkippedStepWarning):
        optimizer.step(loss=1.0)
    assert int(optimizer.skipped_steps) == 1

    optimizer.found_inf = torch.zeros(())
    pair.checked_step(1.0, grad_scale=1.0 if grad_scale is None else 8.0)


def test_overflow_of_the_scaled_loss(algorithm: Algorithm, backend: str) -> None:
    """A scale too large for float32 makes gradients infinite; training then goes on."""
    columns = random_columns([[(6, 3)], [(6,)]], scale=1e3)
    pair = Pair(algorithm, algorithm.build(columns, backend=backend))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    loss = backward(pair, scaler, 0)
    with unchanged(pair.optimizer), pytest.warns(ngn_kernels.SkippedStepWarning):
        scaler.step(pair.optimizer, loss=loss)
    scaler.update()
    checked_step(pair, scaler, 0)


def test_disabled_scaler_passes_through(algorithm: Algorithm, backend: str) -> None:
    pair, _ = started(algorithm, backend)
    checked_step(pair, torch.amp.GradScaler("cpu", enabled=False), 0)


def test_set_loss_with_the_scaler(algorithm: Algorithm, backend: str) -> None:
    """Trainers that call `scaler.step(opt)` bring the loss by `set_loss`; a skip consumes it."""
    pair, scaler = started(algorithm, backend)
    checked_step(pair, scaler, 0, pending=True)
    loss = backward(pair, scaler, 1)
    params_of(pair.optimizer)[0].grad[0, 0] = float("inf")
    pair.optimizer.set_loss(loss)
    with pytest.warns(ngn_kernels.SkippedStepWarning):
        scaler.step(pair.optimizer)
    scaler.update()
    checked_step(pair, scaler, 2, pending=True)


def test_half_precision_gradients(algorithm: Algorithm, backend: str) -> None:
    """float16 parameters: gradients are unscaled in fp32, not rounded back to float16."""
    columns = random_columns([[(40,)], [(7, 3)]], torch.float16)
    pair = Pair(algorithm, algorithm.build(columns, backend=backend))
    random_gradients(params_of(pair.optimizer), seed=0, norm=2.0**12)
    pair.optimizer.grad_scale = torch.tensor(2.0**30)
    pair.optimizer.found_inf = torch.tensor(0.0)
    pair.step(1e-3, grad_scale=2.0**30)
    pair.check_step()

"""How the loss reaches the step: by keyword, by closure, by set_loss; and exactly once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from algorithms import EVERY, NGN, NGNM, Algorithm, NGNMDv1, NGNMDv2
from helpers import assert_unchanged, fresh, params_of, random_gradients, snapshot
from pair import Pair
from torch.nn import Parameter

LOSSES = {
    "float": 0.75,
    "int": 2,
    "numpy": np.float64(0.75),
    "tensor": torch.tensor(0.75),
    "float64 tensor": torch.tensor(0.75, dtype=torch.float64),
    "bfloat16 tensor": torch.tensor(0.75, dtype=torch.bfloat16),
    "one-element tensor": torch.tensor([0.75]),
    "requires grad": torch.tensor(0.75, requires_grad=True),
}


@EVERY
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_three_ways_to_pass_the_loss(algorithm: Algorithm, backend: str, loss: Any) -> None:
    expected, by_keyword, by_closure, by_set_loss = (fresh(algorithm, backend) for _ in range(4))
    expected.step(loss=float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
    by_keyword.step(loss=loss)
    returned = by_closure.step(lambda: loss)
    by_set_loss.set_loss(loss)
    by_set_loss.step()
    assert returned is loss
    for other in (by_keyword, by_closure, by_set_loss):
        assert snapshot(other) == snapshot(expected)


def test_closure_runs_once_with_gradients_enabled(backend: str) -> None:
    p = Parameter(torch.ones(4))
    pair = Pair(NGNMDv1, NGNMDv1.simple([p], backend=backend))
    calls = []

    def closure() -> torch.Tensor:
        pair.optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    with torch.no_grad():
        loss = pair.optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == 4.0
    pair.expect(4.0)
    pair.check_step()


@EVERY
def test_set_loss_is_a_weighted_mean(algorithm: Algorithm, backend: str) -> None:
    mean, plain = fresh(algorithm, backend), fresh(algorithm, backend)
    mean.set_loss(torch.tensor(1.0), weight=3)
    mean.set_loss(5.0, weight=1.0)
    mean.step()
    plain.step(loss=2.0)
    assert snapshot(mean) == snapshot(plain)


def test_set_loss_is_consumed(backend: str) -> None:
    optimizer = fresh(NGNM, backend)
    optimizer.set_loss(1.0)
    optimizer.step()
    before = snapshot(optimizer)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="loss"):
        optimizer.step()
    assert_unchanged(optimizer, before)
    optimizer.set_loss(2.0)
    optimizer.step()
    assert snapshot(optimizer) != before


def test_set_loss_keeps_no_graph(backend: str) -> None:
    optimizer = fresh(NGNM, backend)
    loss = (params_of(optimizer)[0] ** 2).sum()
    optimizer.set_loss(loss)
    optimizer.step()
    assert loss.grad_fn is not None
    assert all(p.grad_fn is None for p in params_of(optimizer))


def test_loss_may_alias_nothing_of_the_step(backend: str) -> None:
    """A parameter that is its own loss: the loss is read before the parameter moves."""
    p = Parameter(torch.tensor(2.0))
    pair = Pair(NGN, NGN.simple([p], backend=backend))
    p.grad = torch.tensor(1.0)
    pair.step(p)
    pair.check_step()


TWO_SOURCES = {
    "closure and keyword": lambda opt: opt.step(lambda: 1.0, loss=1.0),
    "set_loss and keyword": lambda opt: (opt.set_loss(1.0), opt.step(loss=1.0)),
    "set_loss and closure": lambda opt: (opt.set_loss(1.0), opt.step(lambda: 1.0)),
}
NO_LOSS = {
    "bare step": lambda opt: opt.step(),
    "loss=None": lambda opt: opt.step(loss=None),
    "closure without a return": lambda opt: opt.step(lambda: None),
}


@pytest.mark.parametrize("call", (TWO_SOURCES | NO_LOSS).values(), ids=TWO_SOURCES | NO_LOSS)
@pytest.mark.parametrize("algorithm", [NGNMDv1, NGNMDv2], ids=str)
def test_exactly_one_loss(algorithm: Algorithm, backend: str, call: Any) -> None:
    optimizer = fresh(algorithm, backend)
    optimizer.step(loss=1.0)
    before = snapshot(optimizer)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="loss"):
        call(optimizer)
    assert_unchanged(optimizer, before)


def test_missing_loss_says_what_to_write(backend: str) -> None:
    with pytest.raises(RuntimeError, match=r"step\(loss="):
        fresh(NGNMDv1, backend).step()
    with pytest.raises(RuntimeError, match=r"closure.*return"):
        fresh(NGNMDv1, backend).step(lambda: None)


def test_pending_loss_does_not_outlive_a_refused_step(backend: str) -> None:
    """`set_loss` is consumed by the next step, also by one that refuses it."""
    optimizer, plain = fresh(NGNMDv1, backend), fresh(NGNMDv1, backend)
    optimizer.set_loss(-1.0)
    with pytest.raises(ValueError, match="loss_floor"):
        optimizer.step()
    optimizer.step(loss=1.0)
    plain.step(loss=1.0)
    assert snapshot(optimizer) == snapshot(plain)


@EVERY
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_bare_step_at_zero_lr_creates_state_only(
    algorithm: Algorithm, backend: str, lr: Any
) -> None:
    """`torch.distributed.checkpoint` initialises optimizers this way."""
    optimizer, twin = fresh(algorithm, backend), fresh(algorithm, backend)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = lr
    before = snapshot(optimizer)
    optimizer.step(closure=None)
    assert_unchanged(optimizer, before)
    for p in params_of(optimizer):
        state = optimizer.state[p]
        assert ("momentum_buffer" in state) == (algorithm.momentum is not None)
        assert ("exp_avg_sq" in state) == algorithm.rms
        assert int(state.get("step", 0)) == 0

    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.step(loss=1.0)
    twin.step(loss=1.0)
    assert snapshot(optimizer) == snapshot(twin)


def test_distributed_checkpoint_initialises_and_loads(backend: str) -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def trained(steps: int) -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        for i, p in enumerate(model.parameters()):
            torch.nn.init.constant_(p, 0.1 * i)
        optimizer = NGNMDv1.simple(model.parameters(), backend=backend)
        for k in range(steps):
            random_gradients(model.parameters(), seed=k)
            optimizer.step(loss=1.0)
        return model, optimizer

    model, optimizer = trained(3)
    saved = get_optimizer_state_dict(model, optimizer)
    other_model, other = trained(0)
    other_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other_model, other, saved)
    assert snapshot(other) == snapshot(optimizer)

"""Whose loss a backward() makes, without any trainer: the rules that all of them share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithms import NGNM, NGNMDv1
from helpers import snapshot
from torch import Tensor
from torch.nn import Parameter

from ngn_kernels.trainers.feed import Feed, telemetry, unwrapped


class Two:
    """Two optimizers of one parameter each, and a feed for both."""

    def __init__(self) -> None:
        self.params = [Parameter(torch.ones(3)), Parameter(torch.full((2,), 2.0))]
        self.optimizers = [NGNM.simple([p], lr=0.1, backend="reference") for p in self.params]
        self.feed = Feed()

    def backward(self, *numbers: int) -> Tensor:
        """A loss of these parameters; its value is 1 + the sum of their numbers."""
        loss = sum((self.params[i] * 0).sum() + i for i in numbers) + torch.tensor(1.0)
        loss = loss + sum((self.params[i] - self.params[i].detach()).sum() for i in numbers)
        self.feed.before_backward(self.optimizers)
        loss.backward()
        self.feed.after_backward(self.optimizers, loss)
        return loss.detach()

    def step(self, number: int) -> None:
        self.feed.before_step(self.optimizers[number])
        self.optimizers[number].step()


def pending(optimizer: Any) -> float | None:
    total = optimizer._pending._total
    return None if total is None else float(total)


def test_each_optimizer_gets_the_loss_of_its_own_gradients() -> None:
    two = Two()
    two.backward(0)
    assert [pending(o) for o in two.optimizers] == [1.0, None]
    two.backward(1)
    assert [pending(o) for o in two.optimizers] == [1.0, 2.0]
    two.step(0)
    two.step(1)
    assert [pending(o) for o in two.optimizers] == [None, None]


def test_a_gradient_that_is_added_to_in_place_is_seen() -> None:
    """The second backward() leaves the same tensor in .grad, with other numbers."""
    two = Two()
    for _ in range(3):
        two.backward(0)
    assert [pending(o) for o in two.optimizers] == [3.0, None]


def test_two_optimizers_do_not_step_on_one_loss() -> None:
    two = Two()
    two.backward(0, 1)
    assert [pending(o) for o in two.optimizers] == [2.0, 2.0]
    two.step(0)
    before = snapshot(two.optimizers[1])
    with pytest.raises(RuntimeError, match="made the gradients of two NGN optimizers"):
        two.step(1)
    assert snapshot(two.optimizers[1]) == before
    assert pending(two.optimizers[1]) is None, "a refused loss must not come back"


def test_a_loss_that_was_dropped_is_forgotten() -> None:
    """zero_grad() drops what a shared backward() gave to both: each then has one of its own."""
    two = Two()
    two.backward(0, 1)
    two.step(0)
    two.optimizers[1].zero_grad()
    assert pending(two.optimizers[1]) is None
    two.backward(1)
    two.step(1)
    two.optimizers[0].zero_grad()
    two.backward(0)
    two.step(0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loss_whose_gradients_the_module_cleared_is_forgotten(set_to_none: bool) -> None:
    """As generators and judges are trained: the one's backward() reaches the other."""
    two = Two()
    module = torch.nn.ParameterList(two.params[1:])
    for _ in range(3):
        module.zero_grad(set_to_none)
        two.backward(1)
        assert pending(two.optimizers[1]) == 2.0
        two.step(1)
        two.optimizers[0].zero_grad()
        two.backward(0, 1)
        two.step(0)


def test_a_loss_of_the_users_own_is_added() -> None:
    """It was given before the feed gave one: the feed had no entry to add its own to."""
    two = Two()
    for k in range(2):
        for optimizer in two.optimizers:
            optimizer.zero_grad()
            optimizer.add_loss(0.25)
        two.backward(0)
        two.backward(1)
        assert [pending(o) for o in two.optimizers] == [1.25, 2.25], k
        two.step(0)
        two.step(1)


def test_a_single_optimizer_may_step_again_and_again() -> None:
    p = Parameter(torch.ones(3))
    optimizer = NGNMDv1.simple([p], backend="reference")
    feed = Feed()
    for _ in range(3):
        optimizer.zero_grad()
        feed.before_backward([optimizer])
        loss = p.square().sum()
        loss.backward()
        feed.after_backward([optimizer], loss)
        assert pending(optimizer) == float(loss.detach())
        feed.before_step(optimizer)
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 3


def test_optimizers_are_found_inside_their_wrappers() -> None:
    ours = NGNM.simple([Parameter(torch.ones(3))])
    other = torch.optim.SGD([Parameter(torch.ones(3))], lr=0.1)
    once = SimpleNamespace(optimizer=ours)
    twice = SimpleNamespace(optimizer=SimpleNamespace(optimizer=ours))
    assert unwrapped([once, other, twice, ours]) == [ours, ours, ours]
    assert unwrapped([other]) == []


def test_what_there_is_to_log() -> None:
    two = Two()
    assert set(telemetry(two.optimizers)) == {f"ngn/{i}/skipped_steps" for i in range(2)}
    two.backward(0)
    two.step(0)
    logs = telemetry(two.optimizers[:1])
    assert set(logs) == {"ngn/shrink", "ngn/step_size", "ngn/grad_norm", "ngn/skipped_steps"}
    assert 0 < float(logs["ngn/shrink"]) <= 1

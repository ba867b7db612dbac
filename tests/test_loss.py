"""How the loss reaches the step: by keyword, by closure, or pending; and exactly once."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from algorithms import EVERY, NGN, NGNM, Algorithm, NGNMDv1, NGNMDv2
from helpers import (
    after_step,
    assert_unchanged,
    fresh,
    params_of,
    random_gradients,
    snapshot,
    unchanged,
)
from pair import Pair
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.nn import Parameter

from ngn_kernels import SkippedStepWarning

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
    mean = fresh(algorithm, backend)
    mean.set_loss(torch.tensor(1.0), weight=3)
    mean.set_loss(5.0, weight=1.0)
    mean.step()
    assert snapshot(mean) == after_step(algorithm, backend, 2.0)


@pytest.mark.parametrize("weight", [torch.tensor(5), torch.tensor([2.5]), np.int64(3)], ids=repr)
def test_weights_may_be_tensors_on_the_host(backend: str, weight: Any) -> None:
    given = fresh(NGNM, backend)
    given.set_loss(1.0, weight=weight)
    given.set_loss(2.0, weight=1)
    given.step()
    assert snapshot(given) == after_step(NGNM, backend, (float(weight) + 2) / (float(weight) + 1))


BAD_WEIGHTS = {
    "negative": (torch.tensor(-1), "weight=-1: must be in"),
    "not a number": (torch.tensor(float("nan")), "weight=nan: must be in"),
    "bool": (torch.tensor(True), "weight=True: must be in"),
    "two": (torch.ones(2), r"weight has shape \(2,\): it must be one number"),
    "on a device": (torch.ones((), device="meta"), "weight is a tensor on meta: pass a number"),
}


@pytest.mark.parametrize(("weight", "says"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_bad_weights_say_what_is_wrong(weight: Any, says: str) -> None:
    optimizer = fresh(NGNM, "reference")
    with pytest.raises((TypeError, ValueError), match=f"^{says}"):
        optimizer.set_loss(1.0, weight=weight)
    assert not optimizer.loss_is_pending()


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
    "closure that adds, and keyword": lambda opt: opt.step(lambda: opt.add_loss(1.0), loss=1.0),
    "set_loss and keyword": lambda opt: (opt.set_loss(1.0), opt.step(loss=1.0)),
    "add_loss and keyword": lambda opt: (opt.add_loss(1.0), opt.step(loss=1.0)),
    "set_loss and add_loss": lambda opt: (opt.set_loss(1.0), opt.add_loss(1.0)),
    "add_loss and set_loss": lambda opt: (opt.add_loss(1.0), opt.set_loss(1.0)),
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
    with unchanged(optimizer), pytest.raises((TypeError, ValueError, RuntimeError), match="loss"):
        call(optimizer)


def test_missing_loss_says_what_to_write(backend: str) -> None:
    with pytest.raises(RuntimeError, match=r"step\(loss="):
        fresh(NGNMDv1, backend).step()
    with pytest.raises(RuntimeError, match=r"closure.*return"):
        fresh(NGNMDv1, backend).step(lambda: None)


def test_pending_loss_does_not_outlive_a_refused_step(backend: str) -> None:
    """`set_loss` is consumed by the next step, also by one that refuses it."""
    optimizer = fresh(NGNMDv1, backend)
    optimizer.set_loss(-1.0)
    with pytest.raises(ValueError, match="loss_floor"):
        optimizer.step()
    optimizer.step(loss=1.0)
    assert snapshot(optimizer) == after_step(NGNMDv1, backend, 1.0)


@EVERY
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_distributed_checkpoint_creates_state_only(
    algorithm: Algorithm, backend: str, lr: Any
) -> None:
    optimizer, twin = fresh(algorithm, backend), fresh(algorithm, backend)
    for each in (optimizer, twin):
        for group in each.param_groups:
            group["lr"] = lr
    given = [p.grad for p in params_of(optimizer)]
    for p in params_of(optimizer):
        p.grad = None
    before = snapshot(optimizer)
    _init_optim_state(optimizer)
    assert_unchanged(optimizer, before)
    spectral = [bool(g.get("spectral")) for g in optimizer.param_groups for _ in g["params"]]
    for p, grad, matrix in zip(params_of(optimizer), given, spectral, strict=True):
        p.grad = grad
        state = optimizer.state[p]
        assert ("momentum_buffer" in state) == (algorithm.momentum is not None)
        assert ("exp_avg_sq" in state) == (algorithm.rms and not matrix)
        assert int(state.get("step", 0)) == 0
    optimizer.step(loss=1.0)
    twin.step(loss=1.0)
    assert snapshot(optimizer) == snapshot(twin)


@EVERY
def test_a_loss_forgotten_during_warm_up(algorithm: Algorithm, backend: str) -> None:
    """At lr 0 the parameters would stay, but m and v would miss a step."""
    optimizer = fresh(algorithm, backend)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="needs the loss of this step"):
            optimizer.step()
        optimizer.step(loss=1.0)
    optimizer.state.clear()
    for p in params_of(optimizer):  # as an upstream stage below a head of zeros has them
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="needs the loss of this step"):
        optimizer.step()


def test_gradients_of_a_step_that_creates_state_are_let_go(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = Parameter(torch.ones(3))
    optimizer = NGNMDv1.simple([p], lr=0.1, backend=backend)
    alive = []
    monkeypatch.setattr(optimizer, "zero_grad", lambda **_: alive.append(weakref.ref(p.grad)))
    _init_optim_state(optimizer)
    p.grad = None
    assert optimizer.state[p] and alive[0]() is None


def test_a_bad_loss_without_gradients_counts_alike_with_and_without_state(backend: str) -> None:
    p = Parameter(torch.ones(3))
    optimizer = NGNMDv1.simple([p], lr=0.1, backend=backend)
    for k in range(2):
        with pytest.warns(SkippedStepWarning, match="the loss is not finite"):
            optimizer.step(loss=float("nan"))
        assert int(optimizer.skipped_steps) == k + 1
        p.grad = torch.ones(3)
        optimizer.step(loss=1.0)
        p.grad = None


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


# What is pending


@EVERY
def test_add_loss_is_a_sum(algorithm: Algorithm, backend: str) -> None:
    added = fresh(algorithm, backend)
    for share in (torch.tensor(0.5), 1.25, torch.tensor(0.25, requires_grad=True)):
        added.add_loss(share)
    assert added.step() is None
    assert snapshot(added) == after_step(algorithm, backend, 2.0)


PENDING: dict[str, Callable[[Any], Any]] = {
    "set before": lambda opt: (opt.set_loss(2.0), opt.step(lambda: 7.0))[1],
    "added before": lambda opt: (opt.add_loss(2.0), opt.step(lambda: 7.0))[1],
    "set in it": lambda opt: opt.step(lambda: (opt.set_loss(2.0), 7.0)[1]),
    "added in it": lambda opt: opt.step(lambda: (opt.add_loss(2.0), 7.0)[1]),
    "added before and in it": lambda opt: (
        opt.add_loss(1.5),
        opt.step(lambda: (opt.add_loss(0.5), 7.0)[1]),
    )[1],
}


@pytest.mark.parametrize("call", PENDING.values(), ids=PENDING)
def test_a_pending_loss_goes_before_the_closure(backend: str, call: Any) -> None:
    """Trainers return the last micro-batch's share; the step still returns what they returned."""
    pending = fresh(NGNMDv1, backend)
    assert call(pending) == 7.0
    assert snapshot(pending) == after_step(NGNMDv1, backend, 2.0)
    with pytest.raises(RuntimeError, match="loss"):
        pending.step()


def test_a_closure_may_return_none_where_a_loss_is_pending(backend: str) -> None:
    pending = fresh(NGNMDv1, backend)
    pending.add_loss(2.0)
    assert pending.step(lambda: None) is None
    assert snapshot(pending) == after_step(NGNMDv1, backend, 2.0)


def test_a_pending_loss_can_be_asked_for_and_dropped(backend: str) -> None:
    optimizer = fresh(NGNMDv1, backend)
    assert not optimizer.loss_is_pending()
    optimizer.set_loss(1.0)
    assert optimizer.loss_is_pending()
    optimizer.drop_loss()
    assert not optimizer.loss_is_pending()
    with pytest.raises(RuntimeError, match="needs the loss"):
        optimizer.step()


def test_a_closure_that_fails_leaves_nothing_pending(backend: str) -> None:
    optimizer = fresh(NGNMDv1, backend)

    def closure() -> None:
        optimizer.add_loss(1.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    with pytest.raises(RuntimeError, match="needs the loss"):
        optimizer.step()


def test_a_refused_pair_of_losses_leaves_nothing_pending(backend: str) -> None:
    optimizer = fresh(NGNMDv1, backend)
    optimizer.add_loss(3.0)
    with pytest.raises(RuntimeError, match="two sources"):
        optimizer.step(loss=1.0)
    optimizer.step(loss=1.0)
    assert snapshot(optimizer) == after_step(NGNMDv1, backend, 1.0)


@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_a_step_without_gradients_is_no_error_and_takes_the_loss(backend: str, lr: float) -> None:
    """Lightning steps so after a training_step that returned None."""
    p = Parameter(torch.ones(3))
    optimizer = NGNMDv1.simple([p], lr=lr, backend=backend)
    for _ in range(2):  # before there is state, and after
        assert optimizer.step() is None
        assert optimizer.step(lambda: None) is None
        optimizer.add_loss(2.0)
        assert optimizer.step() is None
        p.grad = torch.ones(3)
        before = snapshot(optimizer)
        if lr:
            with pytest.raises(RuntimeError, match="needs the loss"):
                optimizer.step()
        assert_unchanged(optimizer, before)
        optimizer.step(loss=1.0)
        optimizer.zero_grad()


def test_proxies_that_copy_the_dict_share_what_is_pending(backend: str) -> None:
    """Lightning's and Fabric's optimizers are made like this one."""
    optimizer = fresh(NGNMDv1, backend)
    proxy = object.__new__(type("Proxy", (type(optimizer),), {}))
    proxy.__dict__ = dict(optimizer.__dict__)
    proxy.add_loss(1.0)
    optimizer.add_loss(1.0)
    optimizer.step()
    assert snapshot(optimizer) == after_step(NGNMDv1, backend, 2.0)
    with pytest.raises(RuntimeError, match="needs the loss"):
        proxy.step()
    random_gradients(params_of(optimizer), seed=2)
    optimizer.add_loss(1.0)
    proxy.zero_grad()
    random_gradients(params_of(optimizer), seed=2)
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.step()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_a_pending_loss_of_its_own(backend: str, copied: Any) -> None:
    optimizer, plain = fresh(NGNMDv1, backend), fresh(NGNMDv1, backend)
    optimizer.add_loss(0.5)
    optimizer.step()
    random_gradients(params_of(optimizer), seed=2)
    optimizer.add_loss(1.5)
    other = copied(optimizer)
    optimizer.add_loss(1.0)
    optimizer.step()
    for p, twin in zip(params_of(plain), params_of(other), strict=True):
        p.data.copy_(twin)
    plain.load_state_dict(other.state_dict())
    random_gradients(params_of(other), seed=2)
    random_gradients(params_of(plain), seed=2)
    other.step()
    plain.step(loss=1.5)
    assert snapshot(other) == snapshot(plain)


class Loop:
    """Two parameters, and a loss whose gradient is known without a network."""

    def __init__(self, backend: str) -> None:
        self.params = [Parameter(torch.full((3,), 0.5)), Parameter(torch.full((2, 2), -1.0))]
        self.optimizer = NGNMDv1.simple(self.params, lr=0.1, backend=backend)

    def loss(self, scale: float) -> torch.Tensor:
        return scale * sum((p * p).sum() for p in self.params)

    def clear(self) -> None:
        """As model.zero_grad() does, which the optimizer does not see."""
        for p in self.params:
            p.grad = None


def by_keyword(loop: Loop, scale: float) -> None:
    loss = loop.loss(scale)
    loop.optimizer.zero_grad()
    loss.backward()
    loop.optimizer.step(loss=loss)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("give", ["add_loss", "set_loss"])
@pytest.mark.parametrize(
    "order",
    [
        "zero loss backward give step",
        "zero loss give backward step",
        "loss zero give backward step",
        "loss give zero backward step",
        "loss give zero zero backward step",
        "loss give backward step zero",
        "loss backward give step zero",
        "loss backward give step clear",
        "loss give clear backward step",
        "clear loss backward give step",
        "zero loss give backward step zero",
        "zero half give backward half give backward step",
        "zero half backward give half backward give step",
        "half give zero backward half give backward step",
        "half give backward half give backward step clear",
        # A step that never came, and that zero_grad() made up for.
        "zero wrong backward give zero loss backward give step",
        "zero wrong give backward zero loss give backward step",
        "zero wrong give backward wrong backward give zero loss give backward step",
        "wrong backward give clear zero loss backward give step",
    ],
)
def test_orders_of_a_loop(backend: str, order: str, give: str, set_to_none: bool) -> None:
    """A pending loss goes with its gradients, in whatever order a loop does things."""
    pending, plain = Loop(backend), Loop(backend)
    optimizer = pending.optimizer
    loss = torch.tensor(0.0)
    for k in range(3):
        for word in order.split():
            if word in ("loss", "wrong", "half"):
                scale = {"loss": 1.0, "wrong": 5.0, "half": 0.5}[word] * (k + 1)
                loss = pending.loss(scale)
            elif word == "give" and give == "add_loss":
                optimizer.add_loss(loss)
            elif word == "give":  # the same by a mean: two halves of one whole
                optimizer.set_loss(loss * (2 if "half" in order else 1))
            elif word == "backward":
                loss.backward()
            elif word == "zero":
                optimizer.zero_grad(set_to_none=set_to_none)
            elif word == "clear":
                pending.clear()
            else:
                optimizer.step()
        by_keyword(plain, k + 1.0)
        assert snapshot(optimizer) == snapshot(plain.optimizer)


def test_a_loss_whose_gradients_were_cleared_is_missed_aloud(backend: str) -> None:
    """The order that no rule can tell from micro-batches: never the sum of two steps' losses."""
    loop = Loop(backend)
    for _ in range(2):
        loss = loop.loss(1.0)
        loop.optimizer.add_loss(loss)
        loop.optimizer.zero_grad()
        loss.backward()  # and its step never comes
    with pytest.raises(RuntimeError, match="give it after zero_grad"):
        loop.optimizer.step()


def test_a_scaler_that_leaves_the_step_out(backend: str) -> None:
    """Without `_step_supports_amp_scaling`, GradScaler does not call step() on an overflow."""
    scaled, plain = Loop(backend), Loop(backend)
    scaled.optimizer._step_supports_amp_scaling = False
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for k, overflow in enumerate([False, True, True, False]):
        scaled.optimizer.zero_grad()
        loss = scaled.loss(k + 1.0)
        scaler.scale(loss).backward()
        if overflow:
            scaled.params[0].grad[0] = float("inf")  # type: ignore[index]
        scaled.optimizer.add_loss(loss)
        scaler.step(scaled.optimizer)
        scaler.update()
        if not overflow:
            by_keyword(plain, k + 1.0)
    assert snapshot(scaled.optimizer) == snapshot(plain.optimizer)


def test_a_pending_loss_keeps_neither_graph_nor_gradient(backend: str) -> None:
    loop = Loop(backend)
    for step in (True, False):
        loss = loop.loss(1.0)
        loss.backward()
        loop.optimizer.add_loss(loss)
        if step:
            loop.optimizer.step()
        kept = [
            weakref.ref(loss),
            *(weakref.ref(p.grad) for p in loop.params if p.grad is not None),
        ]
        assert len(kept) == 3
        del loss
        loop.clear()
        gc.collect()
        assert [ref() for ref in kept] == [None] * 3

"""The optimizer contract: ways to pass the loss, groups, hooks, telemetry, swapped tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    ALGORITHMS,
    COORDINATE,
    NGN,
    NGNM,
    SCALAR,
    Algorithm,
    Hyper,
    NGNMDv1,
    NGNMDv2,
    Pair,
    assert_unchanged,
    parameter,
    params_of,
    random_columns,
    random_gradients,
    real64,
    snapshot,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
SHAPES = ([(3,), (5, 7)], [(40,), ()])


def fresh(algorithm: Algorithm, backend: str, **options: Any) -> Any:
    """An optimizer whose parameters have gradients."""
    optimizer = algorithm.build(random_columns(SHAPES), backend=backend, **options)
    random_gradients(params_of(optimizer), seed=1)
    return optimizer


def assert_same(left: Any, right: Any) -> None:
    assert snapshot(left) == snapshot(right)


# How the loss is passed.

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
    expected.step(loss=float(loss))
    by_keyword.step(loss=loss)
    returned = by_closure.step(lambda: loss)
    by_set_loss.set_loss(loss)
    by_set_loss.step()
    assert returned is loss
    for other in (by_keyword, by_closure, by_set_loss):
        assert_same(other, expected)


def test_closure_runs_once_with_gradients_enabled(backend: str) -> None:
    p = parameter(torch.ones(4))
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
    assert float(loss) == 4.0
    pair.expect(4.0)
    pair.check_step()


@EVERY
def test_set_loss_is_a_weighted_mean(algorithm: Algorithm, backend: str) -> None:
    mean, plain = fresh(algorithm, backend), fresh(algorithm, backend)
    mean.set_loss(torch.tensor(1.0), weight=3)
    mean.set_loss(5.0, weight=1.0)
    mean.step()
    plain.step(loss=2.0)
    assert_same(mean, plain)


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
    p = parameter(torch.tensor(2.0))
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
    assert_same(optimizer, plain)


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
    assert_same(optimizer, twin)


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
    assert_same(other, optimizer)


# Groups.


@EVERY
def test_add_param_group_after_steps(algorithm: Algorithm, backend: str) -> None:
    """New parameters start at t = 1 and share the denominator from then on."""
    first, second = random_columns(SHAPES)
    pair = Pair(
        algorithm, algorithm.build([first], [Hyper(0.3, weight_decay=0.1)], backend=backend)
    )
    random_gradients(first, seed=0)
    pair.step(1.0)
    pair.optimizer.add_param_group(
        {"params": second, **algorithm.values(Hyper(0.05, 0.5, 0.99, 1e-4))}
    )
    for k in range(2):
        random_gradients(first + second, seed=k + 1)
        pair.sync()
        pair.step(0.7)
        pair.check_step()
    if algorithm.rms:
        assert [int(pair.optimizer.state[p]["step"]) for p in (first[0], second[0])] == [3, 2]


def test_add_param_group_takes_the_defaults(backend: str) -> None:
    optimizer = NGNMDv1.simple([parameter(torch.ones(2))], lr=0.5, backend=backend)
    optimizer.add_param_group({"params": [parameter(torch.ones(3))]})
    one, two = optimizer.param_groups
    assert {k: v for k, v in one.items() if k != "params"} == {
        k: v for k, v in two.items() if k != "params"
    }


@EVERY
def test_frozen_parameters(algorithm: Algorithm, backend: str) -> None:
    """A frozen parameter stays as it is, and joins when it is thawed."""
    params = random_columns([[(5,), (6,)]])[0]
    params[1].requires_grad_(False)
    pair = Pair(algorithm, algorithm.simple(params, backend=backend))
    frozen = params[1].clone()
    random_gradients(params[:1], seed=0)
    pair.step(1.0)
    assert torch.equal(params[1], frozen)
    params[1].requires_grad_(True)
    random_gradients(params, seed=1)
    pair.step(1.0)
    pair.check_trajectory()
    assert not torch.equal(params[1], frozen)


def test_named_parameters(backend: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = NGNMDv1.simple(model.named_parameters(), backend=backend)
    random_gradients(model.parameters(), seed=0)
    optimizer.step(loss=1.0)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_algorithm_is_part_of_every_group(backend: str) -> None:
    for algorithm in ALGORITHMS:
        optimizer = fresh(algorithm, backend)
        (name,) = {group["algorithm"] for group in optimizer.param_groups}
        assert name.startswith(algorithm.name)
        assert optimizer.defaults["algorithm"] == name


@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1, NGNMDv2], ids=str)
def test_momentum_switched_on_later_starts_at_zero(algorithm: Algorithm, backend: str) -> None:
    hypers = (Hyper(0.3, 0.0), Hyper(0.05, 0.0))
    pair = Pair(algorithm, algorithm.build(random_columns(SHAPES), hypers, backend=backend))
    for k, beta in enumerate((0.0, 0.0, 0.8, 0.8, 0.0, 0.8)):
        group = pair.optimizer.param_groups[1]
        if algorithm.momentum == "momentum":
            group["momentum"] = beta
        else:
            group["betas"] = (beta, group["betas"][1])
        random_gradients(params_of(pair.optimizer), seed=k)
        pair.sync()
        pair.step(0.5)
        pair.check_step()
        keys = {key for p in params_of(pair.optimizer) for key in pair.optimizer.state[p]}
        assert ("momentum_buffer" in keys) == (k >= 2)


# Hooks, telemetry.


def test_step_hooks(backend: str) -> None:
    optimizer = fresh(NGNMDv1, backend)
    calls: list[str] = []

    def before(opt: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        calls.append("before")
        assert opt is optimizer
        return args, {**kwargs, "loss": 2.0}

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append("after"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global after")),
    ]
    try:
        optimizer.step(loss=1.0)
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(calls) == ["after", "before", "global after", "global before"]
    plain = fresh(NGNMDv1, backend)
    plain.step(loss=2.0)
    assert_same(optimizer, plain)


@EVERY
def test_telemetry(algorithm: Algorithm, backend: str) -> None:
    optimizer = fresh(algorithm, backend)
    assert optimizer.shrink is None
    assert optimizer.step_sizes() is None
    assert int(optimizer.skipped_steps) == 0
    optimizer.step(loss=1.0)
    skipped = optimizer.skipped_steps
    assert skipped.shape == () and skipped.dtype == torch.int64
    if algorithm in COORDINATE:
        assert optimizer.shrink is None and optimizer.step_sizes() is None
        return
    assert algorithm in SCALAR
    shrink = optimizer.shrink
    assert shrink.shape == () and 0 < float(shrink) < 1
    assert len(optimizer.step_sizes()) == len(optimizer.param_groups)


def test_telemetry_is_not_rewritten_by_later_steps(backend: str) -> None:
    optimizer = fresh(NGNM, backend)
    optimizer.step(loss=1.0)
    kept = float(optimizer.shrink)
    optimizer.step(loss=1e-3)
    assert float(optimizer.shrink) < kept


def test_gradients_stay_as_they_are(backend: str) -> None:
    for algorithm in ALGORITHMS:
        optimizer = fresh(algorithm, backend, max_grad_norm=1e-3)
        grads = [p.grad for p in params_of(optimizer)]
        copies = [g.clone() for g in grads]
        optimizer.step(loss=1.0)
        for p, g, copy in zip(params_of(optimizer), grads, copies, strict=True):
            assert p.grad is g and torch.equal(g, copy)


def test_parameters_are_updated_in_place(backend: str) -> None:
    for algorithm in ALGORITHMS:
        optimizer = fresh(algorithm, backend)
        addresses = [p.data_ptr() for p in params_of(optimizer)]
        versions = [p._version for p in params_of(optimizer)]
        optimizer.step(loss=1.0)
        assert [p.data_ptr() for p in params_of(optimizer)] == addresses
        for p, version in zip(params_of(optimizer), versions, strict=True):
            assert p._version > version, "autograd must notice that a saved tensor was changed"


def test_autograd_notices_the_step(backend: str) -> None:
    p = parameter(torch.ones(3))
    optimizer = NGN.simple([p], backend=backend)
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    optimizer.step(loss=loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Tensors that are swapped between steps.


@EVERY
def test_model_turned_double(algorithm: Algorithm, backend: str) -> None:
    """`model.double()` changes the parameters under the optimizer; the state goes on."""
    model = torch.nn.Linear(6, 4)
    pair = Pair(algorithm, algorithm.simple(model.parameters(), backend=backend))
    for k in range(4):
        if k == 2:
            if backend == "triton":
                break
            model.double()
        random_gradients(model.parameters(), seed=k)
        pair.step(1.0)
        for p, x in zip(params_of(pair.optimizer), pair.oracle.groups[0].variables, strict=True):
            np.testing.assert_allclose(real64(p), x.x, rtol=1e-5, atol=1e-7)


@EVERY
def test_state_replaced_between_steps(algorithm: Algorithm, backend: str) -> None:
    optimizer = fresh(algorithm, backend)
    pair = Pair(algorithm, optimizer)
    pair.step(1.0)
    for p in params_of(optimizer):
        for key in {"momentum_buffer", "exp_avg_sq"} & set(optimizer.state[p]):
            optimizer.state[p][key] = optimizer.state[p][key] * 2 + 1e-3
    pair.sync()
    pair.step(1.0)
    pair.check_step()
    for p in params_of(optimizer):
        for key in {"momentum_buffer", "exp_avg_sq"} & set(optimizer.state[p]):
            optimizer.state[p][key].mul_(0.5)
    pair.sync()
    pair.step(1.0)
    pair.check_step()


@EVERY
def test_state_cleared_between_steps(algorithm: Algorithm, backend: str) -> None:
    optimizer = fresh(algorithm, backend)
    pair = Pair(algorithm, optimizer)
    pair.step(1.0)
    optimizer.state.clear()
    pair.sync()
    pair.step(1.0)
    pair.check_step()


@EVERY
def test_parameter_replaced_in_its_group(algorithm: Algorithm, backend: str) -> None:
    """Trainers that swap tensors inside `param_groups` get what they put there."""
    optimizer = fresh(algorithm, backend)
    optimizer.step(loss=1.0)
    replaced = parameter(torch.linspace(-1, 1, 35).view(5, 7))
    optimizer.param_groups[0]["params"][1] = replaced
    random_gradients(params_of(optimizer), seed=4)
    pair = Pair(algorithm, optimizer)
    pair.step(1.0)
    pair.check_step()


@EVERY
def test_step_under_inference_and_no_grad(algorithm: Algorithm, backend: str) -> None:
    inside, outside = fresh(algorithm, backend), fresh(algorithm, backend)
    with torch.no_grad():
        inside.step(loss=1.0)
    outside.step(loss=1.0)
    assert_same(inside, outside)


def test_repr_names_the_algorithm(backend: str) -> None:
    text = repr(fresh(NGNMDv1, backend))
    assert "NGNMDv1" in text and "lr" in text

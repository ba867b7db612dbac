"""The optimizer contract: groups, hooks, telemetry, and updates in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from algorithms import (
    ALGORITHMS,
    COORDINATE,
    EVERY,
    NGN,
    NGNM,
    SCALAR,
    Algorithm,
    Hyper,
    NGNMDv1,
    NGNMDv2,
)
from helpers import SHAPES, after_step, fresh, params_of, random_columns, random_gradients, snapshot
from pair import Pair
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ngn_kernels import SkippedStepWarning


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
        pair.checked_step(0.7)
    if algorithm.rms:
        assert [int(pair.optimizer.state[p]["step"]) for p in (first[0], second[0])] == [3, 2]


def test_add_param_group_takes_the_defaults(backend: str) -> None:
    optimizer = NGNMDv1.simple([Parameter(torch.ones(2))], lr=0.5, backend=backend)
    optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
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
        pair.checked_step(0.5)
        keys = {key for p in params_of(pair.optimizer) for key in pair.optimizer.state[p]}
        assert ("momentum_buffer" in keys) == (k >= 2)


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
    assert calls == ["global before", "before", "after", "global after"]
    plain = fresh(NGNMDv1, backend)
    plain.step(loss=2.0)
    assert snapshot(optimizer) == snapshot(plain)


def test_step_hooks_of_a_subclass(backend: str) -> None:
    """Once per step also where a subclass has a step() of its own, which torch wraps."""

    class Counting(NGNMDv1.cls):  # type: ignore[misc]
        def step(self, closure: Any = None, *, loss: Any = None) -> Any:
            return super().step(closure, loss=loss)

    params = random_columns([[(3,)]])[0]
    optimizer = Counting(params, backend=backend)
    random_gradients(params, seed=0)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step(loss=1.0)
    assert calls == ["after"]


@pytest.mark.parametrize("way", ["plain", "hook", "scheduler"])
def test_warnings_point_at_the_callers_line(way: str, backend: str) -> None:
    optimizer = fresh(NGNMDv1, backend)
    if way == "hook":
        optimizer.register_step_post_hook(lambda *_: None)
    if way == "scheduler":
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.warns(SkippedStepWarning) as record:
        optimizer.step(loss=float("nan"))
    assert [Path(warning.filename).name for warning in record] == [Path(__file__).name]


def test_profilers_see_the_step(backend: str) -> None:
    optimizer = fresh(NGNMDv1, backend)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step(loss=1.0)
    assert "Optimizer.step#NGNMDv1.step" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_leaves_grad_mode_as_it_was(enabled: bool, backend: str) -> None:
    optimizer = fresh(NGNMDv1, backend)
    with torch.set_grad_enabled(enabled):
        optimizer.step(loss=1.0)
        assert torch.is_grad_enabled() == enabled
        with pytest.raises(RuntimeError):
            optimizer.step()
        assert torch.is_grad_enabled() == enabled


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
    shrink: Any = optimizer.shrink
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
    p = Parameter(torch.ones(3))
    optimizer = NGN.simple([p], backend=backend)
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    optimizer.step(loss=loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@EVERY
def test_step_under_no_grad(algorithm: Algorithm, backend: str) -> None:
    inside = fresh(algorithm, backend)
    with torch.no_grad():
        inside.step(loss=1.0)
    assert snapshot(inside) == after_step(algorithm, backend, 1.0)


def test_repr_names_the_algorithm(backend: str) -> None:
    text = repr(fresh(NGNMDv1, backend))
    assert "NGNMDv1" in text and "lr" in text

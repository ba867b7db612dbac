"""A target for the loss, a cap for the step, and the gradients' norm: every algorithm on every engine."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from algorithms import EVERY, SCALAR, TWO_GROUPS, Algorithm, NGNMDv1, NGNMDv1W, NGNMDv2
from helpers import SHAPES, params_of, random_columns, random_gradients, snapshot
from pair import Pair
from torch.nn import Parameter
from torch.optim.lr_scheduler import LinearLR

from ngn_kernels import NGNM, SkippedStepWarning

TARGETS = (0.0, 0.8, 0.99)


@EVERY
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("caps", [(None, None), (3.0, None), (0.5, 40.0)], ids=str)
@pytest.mark.parametrize("clipping", [None, 0.7], ids=["", "clipping"])
def test_steps_under_a_schedule(
    algorithm: Algorithm,
    target: float,
    caps: tuple[float | None, float | None],
    clipping: float | None,
    backend: str,
) -> None:
    """Both options change between steps, and the lr with a schedule."""
    optimizer = algorithm.build(
        random_columns(SHAPES),
        backend=backend,
        loss_target=target,
        max_grad_norm=clipping,
        loss_floor=-0.5,
    )
    for group, cap in zip(optimizer.param_groups, caps, strict=True):
        group["step_cap"] = cap
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=3)
    for k in range(4):
        if k == 2:
            optimizer.loss_target = target = 0.5
            optimizer.param_groups[0]["step_cap"] = 7.0
        random_gradients(params_of(optimizer), seed=k)
        options = {"loss_target": target, "max_grad_norm": clipping, "loss_floor": -0.5}
        pair = Pair(algorithm, optimizer, **options)
        pair.step(0.7)
        pair.check_step()
        schedule.step()


@pytest.mark.parametrize("algorithm", SCALAR, ids=str)
def test_telemetry_is_that_of_the_oracle(algorithm: Algorithm, backend: str) -> None:
    columns = random_columns(SHAPES)
    optimizer = algorithm.build(columns, backend=backend, loss_target=0.9, max_grad_norm=0.7)
    optimizer.param_groups[0]["step_cap"] = 5.0
    for k in range(2):
        random_gradients(params_of(optimizer), seed=k)
        pair = Pair(algorithm, optimizer, loss_target=0.9, max_grad_norm=0.7)
        pair.step(1.0)
        assert list(map(float, optimizer.step_sizes())) == pytest.approx(
            pair.oracle.step_sizes, rel=1e-5
        )
        grads = [p.grad.flatten() for p in params_of(optimizer)]
        assert float(optimizer.grad_norm) == pytest.approx(float(torch.cat(grads).norm()), rel=1e-5)


@EVERY
def test_without_them_nothing_changes(algorithm: Algorithm, backend: str) -> None:
    """A cap at the lr is the paper, bit for bit, and so is no target."""
    optimizers = [algorithm.build(random_columns(SHAPES), backend=backend) for _ in range(2)]
    for group in optimizers[1].param_groups:
        group["step_cap"] = group["lr"]
    for k in range(3):
        for optimizer in optimizers:
            random_gradients(params_of(optimizer), seed=k)
            optimizer.step(loss=1.0 / (k + 1))
    plain, capped = (snapshot(optimizer) for optimizer in optimizers)
    assert plain == capped


def test_a_schedule_scales_the_whole_step(backend: str) -> None:
    """rho does not depend on the scheduled lr, and at lr 0 parameters decay no more."""
    p = Parameter(torch.tensor([1.0, -2.0]))
    optimizer = NGNMDv1W.simple([p], lr=0.5, step_cap=50.0, weight_decay=0.1, backend=backend)
    told = []
    for lr in (50.0, 5.0, 0.5, 0.0):
        p.data = torch.tensor([1.0, -2.0])
        optimizer.state.clear()
        optimizer.param_groups[0]["lr"] = lr
        p.grad = torch.tensor([0.3, 0.4])
        optimizer.step(loss=2.0)
        told.append((float(optimizer.shrink), (torch.tensor([1.0, -2.0]) - p.detach())[0].item()))
    assert len({shrink for shrink, _ in told}) == 1
    moved = [move for _, move in told]
    assert moved == pytest.approx([moved[0], moved[0] / 10, moved[0] / 100, 0.0], abs=1e-7)


@EVERY
def test_options_that_are_set_later_are_used(algorithm: Algorithm, backend: str) -> None:
    """Each alone changes, and nothing else does."""
    optimizer = algorithm.build(random_columns(SHAPES), backend=backend)
    settings: list[tuple[float, float | None]] = [(0.0, None), (0.0, 2.0), (0.9, 2.0), (0.9, None)]
    random_gradients(params_of(optimizer), seed=0)
    for target, cap in settings:
        optimizer.loss_target, optimizer.param_groups[1]["step_cap"] = target, cap
        Pair(algorithm, optimizer, loss_target=target).checked_step(0.4)


@EVERY
def test_the_norm_is_known_where_a_pass_computes_it(algorithm: Algorithm, backend: str) -> None:
    optimizer = algorithm.build(random_columns(SHAPES), TWO_GROUPS, backend=backend)
    assert optimizer.grad_norm is None
    known = not (algorithm.coordinate or algorithm.rms)
    for k, clipping in enumerate((None, 0.5, None)):
        optimizer.max_grad_norm = clipping
        random_gradients(params_of(optimizer), seed=k)
        optimizer.step(loss=1.0)
        norm = torch.cat([p.grad.flatten() for p in params_of(optimizer)]).norm()
        if known or clipping:
            assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-5)
        else:
            assert optimizer.grad_norm is None


def test_a_skipped_step_keeps_the_norm_of_the_last_one(backend: str) -> None:
    p = Parameter(torch.ones(4))
    optimizer = NGNM([p], backend=backend)
    p.grad = torch.full((4,), 2.0)
    optimizer.step(loss=1.0)
    p.grad = torch.full((4,), float("inf"))
    with pytest.warns(SkippedStepWarning):
        optimizer.step(loss=1.0)
    assert float(optimizer.grad_norm) == 4.0


@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies(way: Any) -> None:
    optimizer = NGNMDv1.simple([Parameter(torch.ones(3))], step_cap=4.0, loss_target=0.25)
    copied = way(optimizer)
    assert copied.loss_target == 0.25 and copied.param_groups[0]["step_cap"] == 4.0


@pytest.mark.parametrize("algorithm", [NGNMDv1, NGNMDv2], ids=str)
def test_a_norm_is_of_the_last_applied_step(algorithm: Algorithm, backend: str) -> None:
    """Clipping begins and ends with a step that is skipped."""
    optimizer = algorithm.simple([Parameter(torch.ones(4))], backend=backend)
    (p,) = params_of(optimizer)
    known = []
    for clipping, gradient, loss in (
        (None, 2.0, 1.0),
        (1.0, float("inf"), 1.0),
        (1.0, 2.0, 1.0),
        (None, 5.0, float("nan")),
        (None, 1.0, 1.0),
        (1.0, 3.0, 1.0),
    ):
        optimizer.max_grad_norm = clipping
        p.grad = torch.full((4,), gradient)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SkippedStepWarning)
            optimizer.step(loss=loss)
        norm = optimizer.grad_norm
        known.append(None if norm is None else float(norm))
    assert known == [None, None, 4.0, 4.0, None, 6.0]


@pytest.mark.parametrize("value", [1, 1.0, -0.1, float("nan"), float("inf"), "0.5", None, True])
def test_bad_targets_are_refused(value: Any) -> None:
    p = Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"loss_target=.*must be in \[0, 1\)"):
        NGNMDv1.simple([p], loss_target=value)
    optimizer = NGNMDv1.simple([p], loss_target=0.5)
    with pytest.raises(ValueError, match="loss_target="):
        optimizer.loss_target = value
    assert optimizer.loss_target == 0.5


@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), float("inf"), "1", True])
def test_bad_caps_are_refused(value: Any) -> None:
    p = Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"step_cap=.*must be None or in \(0, inf\)"):
        NGNMDv1.simple([p], step_cap=value)
    optimizer = NGNMDv1.simple([p])
    optimizer.param_groups[0]["step_cap"] = value
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="step_cap="):
        optimizer.step(loss=1.0)


def test_a_target_belongs_to_the_optimizer() -> None:
    with pytest.raises(ValueError, match="loss_target is an option of the whole optimizer"):
        NGNMDv1.simple([{"params": [Parameter(torch.ones(3))], "loss_target": 0.5}])


def test_checkpoints(backend: str) -> None:
    """A cap is saved with its group; a target is the loading optimizer's own, and a difference is said."""

    def made(**options: Any) -> Any:
        optimizer = NGNMDv1.simple([Parameter(torch.ones(3))], backend=backend, **options)
        params_of(optimizer)[0].grad = torch.ones(3)
        optimizer.step(loss=1.0)
        return optimizer

    saved = made(step_cap=4.0, loss_target=0.25).state_dict()
    loaded = made(loss_target=0.5)
    with pytest.warns(UserWarning, match="loss_target=0.25.*goes on with loss_target=0.5"):
        loaded.load_state_dict(saved)
    assert loaded.param_groups[0]["step_cap"] == 4.0 and loaded.loss_target == 0.5
    for group in saved["param_groups"]:  # of a version without them
        del group["step_cap"], group["ngn"]["loss_target"]
    for cap in (None, 2.0):
        loaded.param_groups[0]["step_cap"] = cap
        loaded.load_state_dict(saved)
        assert loaded.param_groups[0]["step_cap"] == cap

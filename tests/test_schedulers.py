"""Every scheduler of torch, moving lr (float or tensor) and momentum under the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from algorithms import EVERY, NGN, NGND, NGNM, Algorithm, NGNMDv1, NGNMDv1W, NGNMDv2
from helpers import params_of, random_columns, random_gradients
from pair import Pair
from steps import train
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: lrs.LambdaLR(opt, lambda k: 0.8**k),
    "MultiplicativeLR": lambda opt: lrs.MultiplicativeLR(opt, lambda k: 0.8),
    "StepLR": lambda opt: lrs.StepLR(opt, step_size=2, gamma=0.5),
    "MultiStepLR": lambda opt: lrs.MultiStepLR(opt, milestones=[1, 3], gamma=0.5),
    "ConstantLR": lambda opt: lrs.ConstantLR(opt, factor=0.5, total_iters=2),
    "LinearLR": lambda opt: lrs.LinearLR(opt, start_factor=0.2, total_iters=3),
    "ExponentialLR": lambda opt: lrs.ExponentialLR(opt, gamma=0.7),
    "PolynomialLR": lambda opt: lrs.PolynomialLR(opt, total_iters=4),
    "CosineAnnealingLR": lambda opt: lrs.CosineAnnealingLR(opt, T_max=4),
    "CosineAnnealingWarmRestarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, T_0=2),
    "SequentialLR": lambda opt: lrs.SequentialLR(
        opt, [lrs.LinearLR(opt, 0.5, total_iters=2), lrs.ExponentialLR(opt, 0.5)], milestones=[2]
    ),
    "ChainedScheduler": lambda opt: lrs.ChainedScheduler(
        [lrs.ConstantLR(opt, 0.5, total_iters=2), lrs.ExponentialLR(opt, 0.9)]
    ),
    "ReduceLROnPlateau": lambda opt: lrs.ReduceLROnPlateau(opt, patience=0, factor=0.5),
    "CyclicLR": lambda opt: lrs.CyclicLR(
        opt, base_lr=0.01, max_lr=0.3, step_size_up=2, cycle_momentum=has_momentum(opt)
    ),
    "OneCycleLR": lambda opt: lrs.OneCycleLR(
        opt, max_lr=0.3, total_steps=8, cycle_momentum=has_momentum(opt)
    ),
    "SWALR": lambda opt: SWALR(opt, swa_lr=0.02, anneal_epochs=3),
}
CYCLES_MOMENTUM = ("CyclicLR", "OneCycleLR")
ONE_PER_SHAPE_OF_GROUP = (NGN, NGNM, NGND, NGNMDv1, NGNMDv2, NGNMDv1W)


def has_momentum(optimizer: Any) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


def advance(scheduler: Any, loss: float) -> None:
    if isinstance(scheduler, lrs.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def test_the_list_is_complete() -> None:
    base = (lrs.LRScheduler, getattr(lrs, "_LRScheduler", lrs.LRScheduler))
    known = {
        name
        for name, cls in vars(lrs).items()
        if isinstance(cls, type) and issubclass(cls, lrs.LRScheduler) and cls not in base
    }
    assert known <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("algorithm", ONE_PER_SHAPE_OF_GROUP, ids=str)
def test_scheduler(algorithm: Algorithm, backend: str, name: str) -> None:
    pair = Pair(algorithm, algorithm.build(random_columns([[(9,)], [(4, 4)]]), backend=backend))
    run_under(pair, name)


@pytest.mark.parametrize("name", [n for n in SCHEDULERS if n not in ("SWALR",)])
@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1, NGNMDv2], ids=str)
def test_scheduler_with_tensor_lr(algorithm: Algorithm, backend: str, name: str) -> None:
    pair = Pair(algorithm, algorithm.build(random_columns([[(9,)], [(4, 4)]]), backend=backend))
    for group in pair.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    run_under(pair, name)


def run_under(pair: Pair, name: str) -> None:
    """Six steps; the oracle reads lr and momentum where the scheduler leaves them."""
    scheduler = SCHEDULERS[name](pair.optimizer)
    seen = []
    for k in range(6):
        random_gradients(params_of(pair.optimizer), seed=k)
        pair.checked_step(1.0)
        seen.append([float(group["lr"]) for group in pair.optimizer.param_groups])
        advance(scheduler, 1.0)
    assert len({tuple(rates) for rates in seen}) > 1, "the scheduler must have moved lr"


@pytest.mark.parametrize("name", CYCLES_MOMENTUM)
@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1], ids=str)
def test_momentum_is_cycled(algorithm: Algorithm, backend: str, name: str) -> None:
    pair = Pair(algorithm, algorithm.build(random_columns([[(9,)], [(4, 4)]]), backend=backend))
    scheduler = SCHEDULERS[name](pair.optimizer)
    seen = set()
    for k in range(4):
        random_gradients(params_of(pair.optimizer), seed=k)
        pair.checked_step(1.0)
        seen.add(pair.oracle.groups[0].beta1)
        scheduler.step()
    assert len(seen) > 1


@pytest.mark.essential
@EVERY
@pytest.mark.parametrize(
    "lr", [torch.tensor(0.2), torch.tensor([0.2], dtype=torch.float64)], ids=str
)
def test_tensor_lr(algorithm: Algorithm, backend: str, lr: torch.Tensor) -> None:
    """A tensor lr is read at every step, so filling it in place is enough."""
    lr = lr.clone()
    params = random_columns([[(9,), (4, 4)]])[0]
    pair = Pair(algorithm, algorithm.simple(params, lr=lr, backend=backend))
    for k, value in enumerate((0.2, 0.1, 0.0, 0.4)):
        lr.fill_(value)
        random_gradients(params, seed=k)
        pair.checked_step(1.0)
    assert pair.optimizer.param_groups[0]["lr"] is lr


@pytest.mark.essential
@pytest.mark.parametrize("kind", [None, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [4, 5, 7])
def test_a_schedule_that_was_rounded_to_below_zero(
    steps: int, kind: torch.dtype | None, backend: str
) -> None:
    """torch's LinearLR ends at -5.6e-19 for a third of its settings; what the groups show is kept."""
    params = random_columns([[(9,)], [(4, 4)]])
    pair = Pair(NGNMDv1W, NGNMDv1W.build(params, backend=backend))
    groups = pair.optimizer.param_groups
    for group in groups:
        if kind is not None:
            group["lr"] = torch.tensor(group["lr"], dtype=kind)
    scheduler = lrs.LinearLR(pair.optimizer, 0.1, 0.0, total_iters=steps)
    shown = []
    for k in range(steps + 3):
        random_gradients(params_of(pair.optimizer), seed=k)
        pair.sync()
        rates = [float(group["lr"]) for group in groups]
        pair.step(1.0)
        pair.check_step()
        assert [float(group["lr"]) for group in groups] == rates
        assert all(float(size) >= 0 for size in pair.optimizer.step_sizes())
        shown.append(min(rates))
        scheduler.step()
    assert min(shown) < 0
    other = NGNMDv1W.build(random_columns([[(9,)], [(4, 4)]]), backend=backend)
    other.load_state_dict(pair.optimizer.state_dict())
    assert [float(group["lr"]) for group in other.param_groups] == rates
    other.step(loss=1.0)


@pytest.mark.parametrize("kind", [None, torch.float32], ids=str)
@pytest.mark.parametrize("below", [1e-3, 1.1e-6])
def test_an_lr_below_zero_that_is_a_mistake(
    below: float, kind: torch.dtype | None, backend: str
) -> None:
    """Such as a schedule that goes one step too far; relative to the lr that it began with."""
    (params,) = random_columns([[(9,), (4, 4)]])
    optimizer = NGNMDv1.simple(params, lr=100.0, backend=backend)
    (group,) = optimizer.param_groups
    for start, first in (({}, 100.0), ({"initial_lr": 0.5}, 0.5)):
        group.update(start)
        for lr, fine in ((-0.9e-6 * first, True), (-below * first, False)):
            group["lr"] = lr if kind is None else torch.tensor(lr, dtype=kind)
            random_gradients(params, seed=1)
            if fine:
                optimizer.step(loss=1.0)
            else:
                with pytest.raises(ValueError, match=r"^lr=-.*: must be in \[0, inf\)"):
                    optimizer.step(loss=1.0)


def test_scheduler_state_resumes(backend: str) -> None:
    """Scheduler and optimizer saved and loaded together go on as before."""

    def start() -> tuple[Any, Any]:
        optimizer = NGNMDv1.build(random_columns([[(9,)], [(4, 4)]]), backend=backend)
        return optimizer, SCHEDULERS["OneCycleLR"](optimizer)

    def go(optimizer: Any, scheduler: Any, seed: int) -> None:
        train(optimizer, seed)
        scheduler.step()

    optimizer, scheduler = start()
    go(optimizer, scheduler, 0)
    other, other_scheduler = start()
    other_scheduler.load_state_dict(scheduler.state_dict())
    other.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(params_of(other), params_of(optimizer), strict=True):
            p.copy_(q)
    for k in range(1, 4):
        go(optimizer, scheduler, k)
        go(other, other_scheduler, k)
        for p, q in zip(params_of(other), params_of(optimizer), strict=True):
            assert torch.equal(p, q)

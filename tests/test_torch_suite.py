"""What fits of torch's own optimizer conformance helpers, with the loss passed by closure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from algorithms import ALGORITHMS, Algorithm
from helpers import params_of
from torch.nn import Parameter
from torch.testing._internal import common_utils
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    TensorTracker,
    get_error_inputs_for_all_optims,
)

# torch expects a warning here; this package refuses, since overlapping parameters always raise.
STRICTER = "a param group cannot have duplicate parameters"


def inputs(algorithm: Algorithm) -> list[OptimizerInput]:
    no_params: Any = None
    cases: list[dict[str, Any]] = [
        {},
        {"lr": 0.1},
        {"lr": torch.tensor(0.1)},
        {"weight_decay": 0.1},
        {"max_grad_norm": 0.5},
        {"loss_floor": -1.0},
    ]
    if algorithm.momentum == "momentum":
        cases.append({"momentum": 0.5})
    if algorithm.momentum == "betas":
        cases.append({"betas": (0.5, 0.9), "eps": 1e-6})
    return [
        OptimizerInput(params=no_params, kwargs={**algorithm.options, **kwargs}, desc=str(kwargs))
        for kwargs in cases
    ]


def info(algorithm: Algorithm) -> Any:
    cls: Any = algorithm.cls
    return OptimizerInfo(
        cls,
        optim_inputs_func=lambda device: inputs(algorithm),
        optim_error_inputs_func=get_error_inputs_for_all_optims,
        supported_impls=(),
        step_requires_closure=True,
    )


INFOS = [info(algorithm) for algorithm in ALGORITHMS]
EVERY = pytest.mark.parametrize("optim_info", INFOS, ids=map(str, ALGORITHMS))


def closure_of(optimizer: Any) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p.abs() ** 2).sum() for p in params_of(optimizer))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    return closure


def built(optim_info: Any, case: OptimizerInput, params: Any, backend: str) -> Any:
    return optim_info.optim_cls(params, **case.kwargs, backend=backend)


@EVERY
@pytest.mark.filterwarnings("error")
def test_errors(optim_info: Any) -> None:
    """torch's table of bad constructor arguments that every optimizer must refuse."""
    for bad in optim_info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        assert isinstance(bad, ErrorOptimizerInput)
        assert bad.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        case = bad.optimizer_error_input
        params = [Parameter(torch.randn(1, 1))] if case.params is None else case.params
        if case.desc == STRICTER:
            kinds: Any = (UserWarning, ValueError)
            pattern = "duplicate|twice|overlap|more than once"
        elif "lr" in case.kwargs:
            kinds, pattern = ValueError, "lr"
        else:
            kinds, pattern = bad.error_type, bad.error_regex
        with pytest.raises(kinds, match=pattern):
            optim_info.optim_cls(params, **case.kwargs)


@EVERY
def test_goes_in_the_right_direction(optim_info: Any, backend: str) -> None:
    """Every input, contiguous and not, complex too: the loss falls."""
    for case in optim_info.optim_inputs_func(device="cpu"):
        weight = Parameter(torch.randn(10, 5, generator=torch.Generator().manual_seed(0)))
        slanted = Parameter(torch.randn(10, 5, generator=torch.Generator().manual_seed(1)).t())
        spin = Parameter(torch.tensor([1 + 2j, -0.5j]))
        optimizer = built(optim_info, case, [weight, slanted, spin], backend)
        closure = closure_of(optimizer)
        first = float(closure())
        for _ in range(10):
            optimizer.step(closure)
        assert float(closure()) < first, case.desc


@EVERY
def test_step_without_gradients_is_a_noop(optim_info: Any, backend: str) -> None:
    for case in optim_info.optim_inputs_func(device="cpu"):
        params = [Parameter(torch.randn(2, 3)) for _ in range(2)]
        before = [p.detach().clone() for p in params]
        built(optim_info, case, params, backend).step(lambda: torch.tensor(1.0))
        assert all(torch.equal(p, x) for p, x in zip(params, before, strict=True))


@EVERY
def test_step_with_zero_gradients_is_a_noop_without_decay(optim_info: Any, backend: str) -> None:
    for case in optim_info.optim_inputs_func(device="cpu"):
        params = [Parameter(torch.randn(2, 3)) for _ in range(2)]
        before = [p.detach().clone() for p in params]
        kwargs = {**case.kwargs, "weight_decay": 0.0}
        optimizer = optim_info.optim_cls(params, **kwargs, backend=backend)
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step(lambda: torch.tensor(1.0))
        assert all(torch.equal(p, x) for p, x in zip(params, before, strict=True))


@EVERY
def test_complex_matches_two_reals(optim_info: Any, backend: str) -> None:
    """torch's comparison of a complex parameter with its real view, by its TensorTracker."""
    for case in optim_info.optim_inputs_func(device="cpu"):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(3, 2, generator=generator, dtype=torch.complex64)
        spin = Parameter(values.clone())
        pair = Parameter(torch.view_as_real(values).clone())
        left = built(optim_info, case, [spin], backend)
        right = built(optim_info, case, [pair], backend)
        tracker = TensorTracker(assert_eq_kwargs={"rtol": 1e-6, "atol": 1e-7})
        for _ in range(4):
            left.step(closure_of(left))
            tracker.add(torch.view_as_real(spin))
            right.step(closure_of(right))
            tracker.pop_check_set(pair, common_utils.TestCase())
        assert tracker.all_popped()


@EVERY
def test_state_dict_with_and_without_steps(optim_info: Any, backend: str) -> None:
    """Save and load before the first step and after, and after a deepcopy of the whole."""
    for case in optim_info.optim_inputs_func(device="cpu"):
        weight = Parameter(torch.randn(2, 3, generator=torch.Generator().manual_seed(0)))
        optimizer = built(optim_info, case, [weight], backend)
        optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(3):
            optimizer.step(closure_of(optimizer))
        other_weight = Parameter(weight.detach().clone())
        other = built(optim_info, case, [other_weight], backend)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(3):
            optimizer.step(closure_of(optimizer))
            other.step(closure_of(other))
            assert torch.equal(weight, other_weight)


@EVERY
def test_schedulers_of_the_helper(optim_info: Any, backend: str) -> None:
    for makers in optim_info.scheduler_inputs:
        weight = Parameter(torch.randn(10, 5, generator=torch.Generator().manual_seed(0)))
        optimizer = optim_info.optim_cls([weight], lr=0.1, backend=backend)
        schedulers = [make(optimizer) for make in makers]
        closure = closure_of(optimizer)
        first = float(closure())
        for _ in range(20):
            loss = optimizer.step(closure)
            for scheduler in schedulers:
                if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(loss)
                else:
                    scheduler.step()
        assert float(closure()) < first


@EVERY
def test_can_load_older_state_dict(optim_info: Any, backend: str) -> None:
    """A group without options that came later is filled from the defaults on load."""
    weight = Parameter(torch.ones(2, 2))
    optimizer = optim_info.optim_cls([weight], backend=backend)
    optimizer.step(closure_of(optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["weight_decay"]
    optimizer.load_state_dict(saved)
    optimizer.step(closure_of(optimizer))
    assert "weight_decay" in optimizer.param_groups[0]

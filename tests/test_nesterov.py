"""Nesterov's momentum: every rule with momentum on every engine, and what it means."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from algorithms import ALGORITHMS, TWO_GROUPS, Algorithm, NGNMuon
from helpers import SHAPES, bits, params_of, random_columns, random_gradients
from pair import Pair
from torch.nn import Parameter

import ngn_kernels

ADAMW: dict[str, Any] = {"decay_form": "adamw"}
WITH_MOMENTUM = pytest.mark.parametrize(
    "algorithm", [a for a in ALGORITHMS if a.momentum and a.name != "NGNMDv1W"], ids=str
)


def built(algorithm: Algorithm, columns: Any, **options: Any) -> Any:
    optimizer = algorithm.build(columns, **{**ADAMW, **options})
    optimizer.nesterov = True
    return optimizer


@WITH_MOMENTUM
@pytest.mark.parametrize("clipping", [None, 0.7], ids=["", "clipping"])
def test_steps(algorithm: Algorithm, clipping: float | None, backend: str) -> None:
    """The form of the momentum, its size and the lr change between steps."""
    options = {"max_grad_norm": clipping, "loss_target": 0.5}
    hypers = [TWO_GROUPS[0]._replace(step_cap=3.0), TWO_GROUPS[1]]
    optimizer = built(algorithm, random_columns(SHAPES), hypers=hypers, backend=backend, **options)
    for k, nesterov in enumerate((True, True, False, True)):
        optimizer.nesterov = nesterov
        changed = TWO_GROUPS[1]._replace(lr=0.1 * k, beta1=0.2 * k)
        optimizer.param_groups[1].update(algorithm.values(changed))
        random_gradients(params_of(optimizer), seed=k)
        Pair(algorithm, optimizer, nesterov=nesterov, **ADAMW, **options).checked_step(0.8)


@WITH_MOMENTUM
@pytest.mark.parametrize("state", ["bfloat16", "8bit"])
def test_narrow_state(algorithm: Algorithm, state: str, backend: str) -> None:
    columns = random_columns(([(70, 65)], [(3, 7)]))
    optimizer = built(algorithm, columns, backend=backend, state=state)
    pair = Pair(algorithm, optimizer, nesterov=True, **ADAMW)
    for k in range(3):
        random_gradients(params_of(optimizer), seed=k)
        pair.checked_step(0.8)


def test_a_skipped_step_moves_nothing(backend: str) -> None:
    optimizer = built(NGNMuon, random_columns(SHAPES), backend=backend)
    random_gradients(params_of(optimizer), seed=0)
    optimizer.step(loss=1.0)
    params_of(optimizer)[0].grad[0] = torch.nan
    before = [bits(p) for p in params_of(optimizer)]
    with pytest.warns(ngn_kernels.SkippedStepWarning):
        optimizer.step(loss=1.0)
    assert before == [bits(p) for p in params_of(optimizer)]


def test_without_momentum_nothing_moves_ahead(backend: str) -> None:
    runs = []
    for nesterov in (True, False):
        p = Parameter(torch.linspace(1, 2, 12).view(3, 4))
        optimizer = ngn_kernels.NGNMuon(
            [p], betas=(0.0, 0.9), backend=backend, nesterov=nesterov, **ADAMW
        )
        for k in range(3):
            random_gradients([p], seed=k)
            optimizer.step(loss=1.0)
        runs.append(bits(p))
    assert runs[0] == runs[1]


def test_copies_and_checkpoints() -> None:
    p = Parameter(torch.ones(2, 3))
    optimizer = ngn_kernels.NGNMuon([p], nesterov=True, **ADAMW)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.nesterov and other.rule.nesterov
    plain = ngn_kernels.NGNMuon([p], **ADAMW)
    with pytest.warns(UserWarning, match=r"nesterov=True, .*goes on with nesterov=False"):
        plain.load_state_dict(optimizer.state_dict())
    saved = plain.state_dict()
    for group in saved["param_groups"]:
        del group["ngn"]["nesterov"]  # as earlier versions saved it
    plain.load_state_dict(saved)


def test_what_is_refused() -> None:
    p = Parameter(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r'nesterov=True is for decay_form="adamw"'):
        ngn_kernels.NGNMuon([p], nesterov=True)
    optimizer = ngn_kernels.NGNMuon([p], nesterov=True, **ADAMW)
    with pytest.raises(ValueError, match=r'nesterov=True is for decay_form="adamw"'):
        optimizer.decay_form = "paper"
    assert (optimizer.decay_form, optimizer.nesterov) == ("adamw", True)
    with pytest.raises(TypeError, match="nesterov=1: must be True or False"):
        optimizer.nesterov = 1  # type: ignore[assignment]
    with pytest.raises(ValueError, match="nesterov is an option of the whole optimizer"):
        ngn_kernels.NGNMuon([{"params": [p], "nesterov": True}])


@pytest.mark.parametrize("saved", [False, True])
def test_advice_after_loading_can_be_followed(saved: bool) -> None:
    """Nesterov's momentum goes with one form of decay alone, so the order matters."""
    both = {"decay_form": "adamw", "nesterov": True}
    p = Parameter(torch.ones(2, 3))
    source = ngn_kernels.NGNMuon([p], **(both if saved else {}))
    target = ngn_kernels.NGNMuon([p], **({} if saved else both))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        target.load_state_dict(source.state_dict())
    for one in said:
        ((name, value),) = re.findall(r"write optimizer\.(\w+) = (\S+) to keep", str(one.message))
        setattr(target, name, ast.literal_eval(value))
    assert (target.decay_form, target.nesterov) == (source.decay_form, source.nesterov)


def test_groups_may_repeat_it() -> None:
    """As those of ZeroRedundancyOptimizer do."""
    group = {"params": [Parameter(torch.ones(2, 3))], "nesterov": True, "decay_form": "adamw"}
    optimizer = ngn_kernels.NGNMuon([group], decay_form="adamw", nesterov=True)
    assert optimizer.nesterov and "nesterov" not in optimizer.param_groups[0]

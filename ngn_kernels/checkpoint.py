"""Saving and loading: what a checkpoint holds, and which ones an optimizer takes."""

from __future__ import annotations

import math
from collections import defaultdict
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .adamw import is_adamw_state
from .distributed.dtensors import is_sharded, local
from .formats import REMAINDER, Format, Storage, rounding_of, scale_key
from .options import check_group
from .planning.state import (
    STATE_KEYS,
    check_state,
    check_storage,
    copied_like,
    plain,
    put,
    step_count,
    storage_of,
    wanted_format,
)
from .rules import RULES, Rule
from .spectral import Spectral, check_matrix

SAVED = "ngn"  # in a saved group: what belongs to the whole optimizer


class LoadedInto(NamedTuple):
    """A parameter of the optimizer, in the order in which state_dict counts them."""

    param: Tensor
    label: str
    parameter_index: int


class Loaded(NamedTuple):
    """A checkpoint that fits, copied to the parameters' devices."""

    state: defaultdict[Tensor, Any]
    groups: list[dict[str, Any]]
    options: dict[str, Any]  # of the whole optimizer


def load(
    state_dict: dict[str, Any],
    current: list[dict[str, Any]],
    defaults: dict[str, Any],
    params: list[LoadedInto],
    storage: Storage,
) -> Loaded:
    """What an optimizer with these groups and parameters takes over; raises if it does not fit."""
    if is_adamw_state(state_dict):
        algorithm = defaults["algorithm"]
        raise ValueError(
            "the loaded state is AdamW's: "
            + (
                "write optimizer.load_adamw_state_dict(state_dict), which takes its second moments, "
                "its momentum and its step counts over"
                if RULES[algorithm].rms and RULES[algorithm].momentum and "spectral" not in defaults
                else f"{algorithm} keeps another state, so begin it without this one"
            )
        )
    groups = deepcopy(list(state_dict["param_groups"]))
    check_loadable(groups, current, defaults)
    saved_names = [saved for group in groups for saved in group["params"]]
    owners = dict(zip(saved_names, params, strict=True))
    for theirs, ours in zip(groups, current, strict=True):
        for name, value in defaults.items():  # a value that an older file lacks
            theirs.setdefault(name, ours.get(name, value))
    rules: dict[Any, Rule] = {}
    for group in groups:
        rule, spectral = RULES[group["algorithm"]], Spectral.of(group)
        rule = rule if spectral is None else rule.with_directions()
        for saved in group["params"]:
            rules[saved] = rule
            if spectral is not None:
                check_matrix(owners[saved].param, spectral, owners[saved].label)
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for saved, values in state_dict["state"].items():
        if saved not in owners:
            raise ValueError(f"the loaded state has parameter {saved!r}, which is in no group")
        state[owners[saved].param] = load_state(
            values, owners[saved], rules[saved], defaults["algorithm"], storage
        )
    options = saved_options(groups)
    for theirs, ours in zip(groups, current, strict=True):
        theirs["params"] = ours["params"]
        if "param_names" in ours:
            theirs.setdefault("param_names", ours["param_names"])
        theirs[SAVED] = None
    return Loaded(state, groups, options)


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state in numbers that any `state=` loads."""
    scales = {scale_key(key) for key in STATE_KEYS}
    numbers = {
        key: plain(state, key) if key in STATE_KEYS else value
        for key, value in state.items()
        if key not in scales
    }
    if is_sharded(numbers.get(REMAINDER)):
        numbers[REMAINDER] = numbers[REMAINDER].int()  # process groups send no int16
    return numbers


def saved_options(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What belongs to the whole optimizer; every group has it, and files of other ways have none."""
    found = [group[SAVED] for group in groups if isinstance(group.get(SAVED), dict)]
    options = dict(found[0]) if found else {}
    count = options.get("skipped_steps", 0)
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"the loaded skipped_steps is {count!r}: it must be a count of steps")
    return options


def check_loadable(
    loaded: list[dict[str, Any]], current: list[dict[str, Any]], defaults: dict[str, Any]
) -> None:
    """Raise unless the loaded groups fit the optimizer's."""
    algorithm = defaults["algorithm"]
    if len(loaded) != len(current):
        raise ValueError(
            f"the loaded state has {len(loaded)} parameter groups and the optimizer has "
            f"{len(current)}: build the optimizer with the same groups first"
        )
    for i, (theirs, ours) in enumerate(zip(loaded, current, strict=True)):
        source = theirs.get("algorithm")
        if source is None:
            raise ValueError(
                f"the loaded state is from no optimizer of ngn_kernels, whose groups have an algorithm, "
                f"and {algorithm} keeps another state: begin it without this one"
            )
        foreign = "spectral" in theirs and "spectral" not in defaults
        if RULES.get(source) != RULES[algorithm] or foreign:
            raise ValueError(
                f"the loaded state is from {source} and this is {algorithm}, which keeps another "
                f"state: go on with {source}, or begin {algorithm} without this state"
            )
        theirs["algorithm"] = algorithm
        if len(theirs["params"]) != len(ours["params"]):
            raise ValueError(
                f"group {i} of the loaded state has {len(theirs['params'])} parameters and the "
                f"optimizer's {len(ours['params'])}: build the optimizer with the same groups first"
            )
        check_group({**defaults, **theirs}, defaults)


def load_state(
    values: dict[str, Any], into: LoadedInto, rule: Rule, algorithm: str, storage: Storage
) -> dict[str, Any]:
    """One parameter's loaded state, copied to its device and memory order.

    It is recast only to and from the narrow formats of `state=`. Keys that are not the optimizer's
    are the user's own: they are copied as they are.
    """
    param, label, parameter_index = into
    # torch's loader of flattened state gives {} for tensors that were not saved.
    optional = {REMAINDER, *map(scale_key, STATE_KEYS)}
    reserved = {"step", *STATE_KEYS, *optional}
    own = {k: copied(v) for k, v in values.items() if k not in reserved}
    values = {
        k: v
        for k, v in values.items()
        if k in reserved and not (k in optional and isinstance(v, dict) and not v)
    }
    required = {"step"} | ({"exp_avg_sq"} if rule.rms else set())
    known = required | ({"momentum_buffer"} if rule.momentum else set())
    exact = rounding_of(param.dtype, storage.rounding) == "exact"
    if values and not required <= set(values) <= known | {REMAINDER}:
        raise ValueError(
            f"the loaded state of {label} has {sorted(values)} where {algorithm} keeps "
            f"{sorted(known)}: it is from another optimizer"
        )
    if values and exact and REMAINDER not in values:
        raise ValueError(
            f'the loaded state of {label} has no remainder, which rounding="exact" needs: load it '
            'with the rounding that it was saved with, or add "remainder": '
            "torch.zeros_like(param, dtype=torch.int16) to go on from the rounded parameter"
        )
    owner, fix = f"{label}, as loaded,", "load it into the model that it was saved with"
    check_state(values, param, rule, owner, fix)
    _check_numbers(values, owner)
    check_storage(param, storage_of(rule, storage), label)
    state: dict[str, Any] = {}
    if "step" in values:
        state["step"] = step_count(values["step"], param.device).clone()
    for key in STATE_KEYS:
        if key in values:
            form = wanted_format(param, key, storage)
            if form is not None:
                _check_storable(values[key], key, form, label)
            put(state, key, values[key], param, form, parameter_index)
    if exact and values:
        state[REMAINDER] = copied_like(param, values[REMAINDER], torch.int16)
    return state | own


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def _check_numbers(values: dict[str, Any], owner: str) -> None:
    """Raise unless a run can have left these numbers behind: finite ones, and v not negative."""
    fix = (
        "no step stores that, so the file is damaged: load an earlier one, or leave this state out"
    )
    if "step" in values:
        count = float(values["step"])
        if not (math.isfinite(count) and count >= 0 and count.is_integer()):
            raise ValueError(f"the step of {owner} is {count}, not a count of steps: {fix}")
    for key in set(STATE_KEYS) & set(values):
        numbers = local(values[key])
        if numbers.is_complex():
            numbers = torch.view_as_real(numbers.resolve_conj())
        if not numbers.isfinite().all():
            raise ValueError(f"the {key} of {owner} has numbers that are not finite: {fix}")
        if key == "exp_avg_sq" and (numbers < 0).any():
            raise ValueError(f"the {key} of {owner} has negative numbers: {fix}")


def _check_storable(values: Tensor, key: str, form: Format, label: str) -> None:
    """In a narrow format one number that is too large would spoil its neighbours."""
    if not (local(values).abs() <= form.limit).all():
        raise ValueError(
            f"the {key} of {label}, as loaded, has numbers that are too large for a narrow state: "
            'load it with state="float32"'
        )

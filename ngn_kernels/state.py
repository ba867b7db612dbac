"""A parameter's state: which tensors, in which format and memory order, and how they are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .checks import check_group, has_memory, is_dense
from .formats import (
    FLOAT32,
    FORMATS,
    QUANT_BLOCK,
    REMAINDER,
    SMALL,
    Format,
    Storage,
    decoded,
    encoded,
    narrow_format,
    noise,
    noise_key,
    rounding_of,
    scale_key,
)
from .rules import RULES, Rule
from .shards import (
    first_element,
    is_sharded,
    like,
    local,
    placed_like,
    same_mesh,
    same_placement,
)

STATE_KEYS = ("momentum_buffer", "exp_avg_sq")
SAVED = "ngn"  # in a saved group: what belongs to the whole optimizer


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What state is kept in unless `state=` says otherwise: never less than float32."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def same_order(tensor: Tensor, other: Tensor) -> bool:
    """Whether element i of both lies at the same place; dimensions of size 1 have no say."""
    dims = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return tensor.numel() == 0 or all(size == 1 or a == b for size, a, b in dims)


def buffer_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros in the memory order of a dense parameter, contiguous for any other; sharded as it is."""
    part = local(param)
    layout = torch.preserve_format if is_dense(part) else torch.contiguous_format
    zeros = torch.zeros_like(part, dtype=dtype, memory_format=layout, requires_grad=False)
    return like(param, zeros)


def columns_of(rule: Rule) -> tuple[str, ...]:
    """The keys of the state that a rule keeps for each element."""
    return tuple(
        key for key, kept in zip(STATE_KEYS, (rule.momentum, rule.rms), strict=True) if kept
    )


def keys_of(rule: Rule, state: dict[str, Any]) -> Iterator[str]:
    """The keys of all tensors that a kernel is shown for each element, scales among them."""
    for key in columns_of(rule):
        yield key
        if scale_key(key) in state:
            yield scale_key(key)
    if REMAINDER in state:
        yield REMAINDER


def is_wide(dtype: torch.dtype) -> bool:
    real = dtype.to_real() if dtype.is_complex else dtype
    return real in (torch.float32, torch.float64)


def wanted_format(param: Tensor, key: str, storage: Storage) -> Format | None:
    """The narrow format of a parameter's column; None if it is no narrower than float32."""
    if param.is_complex() or param.numel() < SMALL:
        return None
    form = FORMATS[key][getattr(storage, key)]
    return None if form is FLOAT32 else form


def stored_dtype(param: Tensor, key: str, state: dict[str, Any], storage: Storage) -> torch.dtype:
    """The element type of a column after `init_state`."""
    form = wanted_format(param, key, storage)
    if form is not None:
        return form.storage
    held: torch.dtype = state[key].dtype if key in state else state_dtype(param.dtype)
    return held if is_wide(held) else state_dtype(param.dtype)


def storage_of(rule: Rule, storage: Storage) -> Storage:
    """What was asked for, of the columns that a rule has."""
    kept = {key: getattr(storage, key) for key in columns_of(rule)}
    return Storage(**kept, rounding=storage.rounding)


def check_storage(param: Tensor, storage: Storage, owner: str) -> None:
    if storage.narrow and param.dtype == torch.float64:
        raise TypeError(
            f"{owner} is float64, whose state is float64: leave state= out, or make it float32"
        )
    if storage.rounding == "exact" and param.dtype == torch.float16:
        raise TypeError(
            f"{owner} is float16, which does not have the range for its float32 number to be kept "
            'beside it: use bfloat16, or rounding="stochastic"'
        )


def check_rounding(dtypes: set[torch.dtype], rounding: str) -> None:
    """Of all parameters together: beside bfloat16 ones there may be some that are exact already."""
    if rounding == "exact" and dtypes and torch.bfloat16 not in dtypes:
        raise TypeError(
            'rounding="exact" keeps what bfloat16 parameters lack, and none is bfloat16: '
            "float32 parameters are exact without it, leave it out"
        )


MEND_STATE = "put back what was there, or start it anew with optimizer.state.pop(param)"


def check_state(
    state: dict[str, Any], param: Tensor, rule: Rule, owner: str, mend: str = MEND_STATE
) -> None:
    """Raise unless what lies in a parameter's state can be used, after a move or a new layout."""
    step = state.get("step", 0.0)
    is_tensor = isinstance(step, Tensor)
    if not (step.numel() == 1 and not step.is_complex() if is_tensor else isinstance(step, Real)):
        raise ValueError(f"the step of {owner} is not one number: {mend}")
    for key in columns_of(rule):
        if key not in state:
            continue
        tensor = state[key]
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"the {key} of {owner} is not a dense tensor: {mend}")
        if tensor.shape != param.shape:
            raise ValueError(f"the {key} of {owner} has shape {tuple(tensor.shape)}: {mend}")
        form = None if param.is_complex() else narrow_format(key, tensor.dtype)
        wide = is_wide(tensor.dtype) and tensor.is_complex() == param.is_complex()
        if form is None and not wide:
            raise ValueError(
                f"the {key} of {owner} is {tensor.dtype}; state is float32 or float64, "
                f"complex for complex parameters, or as state= says: {mend}"
            )
        _check_mesh(tensor, param, key, owner)
        if not has_memory(local(tensor)):
            raise TypeError(f"the {key} of {owner} has no memory: {mend}")
        if form is not None and form.scale is not None:
            _check_scale(
                state.get(scale_key(key)), local(tensor), form, f"the {key} of {owner}", mend
            )
    _check_remainder(state.get(REMAINDER), param, owner, mend)


def _check_mesh(tensor: Tensor, param: Tensor, key: str, owner: str) -> None:
    advice = (
        "load sharded state with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
    )
    if is_sharded(tensor) != is_sharded(param):
        raise ValueError(
            f"one of {owner} and its {key} is a DTensor and the other is not: {advice}"
        )
    if not same_mesh(tensor, param):
        raise ValueError(f"{owner} and its {key} lie on different meshes: {advice}")


def _check_remainder(remainder: Any, param: Tensor, owner: str, mend: str) -> None:
    if remainder is None:
        return
    fits = isinstance(remainder, Tensor) and (
        remainder.dtype in (torch.int16, torch.int32)
        and remainder.layout == torch.strided
        and remainder.shape == param.shape
        and has_memory(local(remainder))
    )
    if not fits:
        raise ValueError(f"the remainder of {owner} is no int16 tensor of its shape: {mend}")
    _check_mesh(remainder, param, REMAINDER, owner)


def scale_count(part: Tensor) -> int:
    """One for each quantisation block, counted from the first element that lies here."""
    return -(-part.numel() // QUANT_BLOCK)


def _check_scale(scale: Any, code: Tensor, form: Format, owner: str, mend: str) -> None:
    count = scale_count(code)
    fits = (
        isinstance(scale, Tensor)
        and scale.dtype == form.scale
        and scale.shape == (count,)
        and scale.is_contiguous()
        and scale.device == code.device
        and has_memory(scale)
    )
    if not fits:
        raise ValueError(
            f"{owner} has no {count} scales beside it, one {form.scale} for each {QUANT_BLOCK} of its "
            f"elements: {mend}"
        )
    if not is_dense(code):
        raise ValueError(f"{owner} has gaps in memory, so that its scales fit no longer: {mend}")


def step_count(count: float | Tensor, device: torch.device) -> Tensor:
    """As a float32 number on the device; itself if it is one."""
    if isinstance(count, Tensor):
        count = count.to(device, torch.float32)
        return count.reshape(()) if count.dim() else count
    return torch.full((), count, dtype=torch.float32, device=device)


def init_state(
    state: dict[str, Any],
    param: Tensor,
    rule: Rule,
    storage: Storage = Storage(),  # noqa: B008
    number: int = 0,
) -> None:
    """Create what is missing, and bring what a move, a cast or a new layout left behind along.

    Args:
        number: the parameter's own in the optimizer, which rounding depends on.
    """
    state["step"] = step_count(state.get("step", 0.0), param.device)
    for key in columns_of(rule):
        form = wanted_format(param, key, storage)
        if key not in state:
            state[key] = buffer_like(param, form.storage if form else state_dtype(param.dtype))
            if form is not None and form.scale is not None:
                count, device = scale_count(local(param)), param.device
                state[scale_key(key)] = torch.zeros(count, dtype=form.scale, device=device)
        elif not is_in_place(state[key], param) or narrow_format(key, state[key].dtype) != form:
            put(state, key, plain(state, key), param, form, number)
    if rounding_of(param.dtype, storage.rounding) == "exact":
        remainder = state.get(REMAINDER)
        if remainder is None:
            state[REMAINDER] = buffer_like(param, torch.int16)
        elif not is_in_place(remainder, param) or remainder.dtype != torch.int16:
            state[REMAINDER] = copied_like(param, remainder, torch.int16)


def is_in_place(tensor: Tensor, param: Tensor) -> bool:
    """Whether its elements lie where a kernel looks for those that belong to the parameter's."""
    if not same_placement(tensor, param):
        return False
    part, here = local(tensor), local(param)
    in_order = same_order(part, here) if is_dense(here) else part.is_contiguous()
    return part.device == here.device and in_order and not part.is_conj() and not part.is_neg()


def copied_like(param: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """In the parameter's memory order, and spread over ranks as it is."""
    placed = values if same_placement(values, param) else placed_like(values, param)
    copy = buffer_like(param, dtype)
    local(copy).copy_(local(placed))
    return copy


def plain(state: dict[str, Any], key: str) -> Tensor:
    """A column of the state as numbers."""
    form = narrow_format(key, state[key].dtype)
    if form is None or form.scale is None:
        column: Tensor = state[key]
        return column
    return like(state[key], decoded(local(state[key]), state[scale_key(key)], form))


def put(
    state: dict[str, Any], key: str, values: Tensor, param: Tensor, form: Format | None, number: int
) -> None:
    """Numbers as a column of the state, in the parameter's memory order and the given format.

    What a format can hold stays as it is, so that storing what was stored changes nothing.
    """
    state.pop(scale_key(key), None)
    if form is None:
        dtype = values.dtype if is_wide(values.dtype) else torch.float32
        state[key] = copied_like(param, values, dtype)
        return
    part = local(copied_like(param, values, torch.float32)).add_(0.0)  # which makes 0 of -0
    random = noise(noise_key(number), state["step"], part.numel(), first_element(param))
    code, scale = encoded(part, random, form)
    state[key] = like(param, code)
    if scale is not None:
        state[scale_key(key)] = scale


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
        if theirs.get("algorithm") != algorithm:
            source = theirs.get("algorithm", "another optimizer")
            raise ValueError(
                f"the loaded state is from {source} and this is {algorithm}: "
                "load it into the algorithm it came from"
            )
        if len(theirs["params"]) != len(ours["params"]):
            raise ValueError(
                f"group {i} of the loaded state has {len(theirs['params'])} parameters and the "
                f"optimizer's {len(ours['params'])}: build the optimizer with the same groups first"
            )
        check_group({**defaults, **theirs}, defaults)


def load_state(
    param: Tensor,
    values: dict[str, Any],
    algorithm: str,
    label: str,
    storage: Storage = Storage(),  # noqa: B008
    number: int = 0,
) -> dict[str, Any]:
    """One parameter's loaded state, copied to its device and memory order.

    It is recast only to and from the narrow formats of `state=`. Keys that are not the optimizer's
    are the user's own: they are copied as they are.
    """
    rule = RULES[algorithm]
    # torch's loader of flattened state gives {} for what lies beside the numbers and was not saved.
    beside = {REMAINDER, *map(scale_key, STATE_KEYS)}
    reserved = {"step", *STATE_KEYS, *beside}
    own = {k: copied(v) for k, v in values.items() if k not in reserved}
    values = {
        k: v
        for k, v in values.items()
        if k in reserved and not (k in beside and isinstance(v, dict) and not v)
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
    owner, mend = f"{label}, as loaded,", "load it into the model that it was saved with"
    check_state(values, param, rule, owner, mend)
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
            put(state, key, values[key], param, form, number)
    if exact and values:
        state[REMAINDER] = copied_like(param, values[REMAINDER], torch.int16)
    return state | own


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def _check_numbers(values: dict[str, Any], owner: str) -> None:
    """Raise unless a run can have left these numbers behind: finite ones, and v not negative."""
    mend = (
        "no step stores that, so the file is damaged: load an earlier one, or leave this state out"
    )
    if "step" in values:
        count = float(values["step"])
        if not (math.isfinite(count) and count >= 0 and count.is_integer()):
            raise ValueError(f"the step of {owner} is {count}, not a count of steps: {mend}")
    for key in set(STATE_KEYS) & set(values):
        numbers = local(values[key])
        if numbers.is_complex():
            numbers = torch.view_as_real(numbers.resolve_conj())
        if not numbers.isfinite().all():
            raise ValueError(f"the {key} of {owner} has numbers that are not finite: {mend}")
        if key == "exp_avg_sq" and (numbers < 0).any():
            raise ValueError(f"the {key} of {owner} has negative numbers: {mend}")


def _check_storable(values: Tensor, key: str, form: Format, label: str) -> None:
    """In a narrow format one number that is too large would spoil its neighbours."""
    if not (local(values).abs() <= form.limit).all():
        raise ValueError(
            f"the {key} of {label}, as loaded, has numbers that are too large for a narrow state: "
            'load it with state="float32"'
        )

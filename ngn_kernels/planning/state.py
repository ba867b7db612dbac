"""A parameter's state: which tensors, in which format and memory order."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..distributed.dtensors import (
    first_element,
    is_sharded,
    like,
    local,
    placed_like,
    same_mesh,
    same_placement,
)
from ..formats import (
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
from ..rules import Rule
from .checks import has_memory, is_dense

STATE_KEYS = ("momentum_buffer", "exp_avg_sq")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What state is kept in unless `state=` says otherwise: never less than float32."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def same_order(tensor: Tensor, other: Tensor) -> bool:
    """Whether element i of both is at the same offset; dimensions of size 1 do not matter."""
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
    dtype: torch.dtype = state[key].dtype if key in state else state_dtype(param.dtype)
    return dtype if is_wide(dtype) else state_dtype(param.dtype)


def storage_of(rule: Rule, storage: Storage) -> Storage:
    """The storage options of the columns that a rule has."""
    kept = {key: getattr(storage, key) for key in columns_of(rule)}
    return Storage(**kept, rounding=storage.rounding)


def check_storage(param: Tensor, storage: Storage, owner: str) -> None:
    if storage.narrow and param.dtype == torch.float64:
        raise TypeError(
            f"{owner} is float64, whose state is float64: leave state= out, or make it float32"
        )
    if storage.rounding == "exact" and param.dtype == torch.float16:
        raise TypeError(
            f'{owner} is float16, whose range is too small for rounding="exact": '
            'use bfloat16, or rounding="stochastic"'
        )


def check_rounding(dtypes: set[torch.dtype], rounding: str) -> None:
    """Raise unless a parameter is bfloat16, if any is there; others are exact already."""
    if rounding == "exact" and dtypes and torch.bfloat16 not in dtypes:
        raise TypeError(
            'rounding="exact" keeps what bfloat16 parameters lack, and none is bfloat16: '
            "float32 parameters are exact without it, leave it out"
        )


CHANGED_FORM = "set the group's spectral back, or reset the state with optimizer.state.pop(param)"
RESTORE = "restore the original tensor, or reset the state with optimizer.state.pop(param)"


def check_state(
    state: dict[str, Any], param: Tensor, rule: Rule, owner: str, fix: str = RESTORE
) -> None:
    """Raise unless a parameter's state can be used, perhaps after a move or a new layout."""
    step = state.get("step", 0.0)
    is_tensor = isinstance(step, Tensor)
    if not (step.numel() == 1 and not step.is_complex() if is_tensor else isinstance(step, Real)):
        raise ValueError(f"the step of {owner} is not one number: {fix}")
    if rule.directed and "exp_avg_sq" in state:
        raise ValueError(
            f"the group of {owner} is spectral now, and its state is of a group that was not: "
            f"{CHANGED_FORM}"
        )
    if rule.rms and "exp_avg_sq" not in state and float(step) > 0:
        raise ValueError(
            f"the state of {owner} has no exp_avg_sq: {fix}; if its group was spectral, {CHANGED_FORM}"
        )
    for key in columns_of(rule):
        if key not in state:
            continue
        tensor = state[key]
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"the {key} of {owner} is not a dense tensor: {fix}")
        if tensor.shape != param.shape:
            raise ValueError(f"the {key} of {owner} has shape {tuple(tensor.shape)}: {fix}")
        form = None if param.is_complex() else narrow_format(key, tensor.dtype)
        wide = is_wide(tensor.dtype) and tensor.is_complex() == param.is_complex()
        if form is None and not wide:
            raise ValueError(
                f"the {key} of {owner} is {tensor.dtype}; state is float32 or float64, "
                f"complex for complex parameters, or as state= says: {fix}"
            )
        _check_mesh(tensor, param, key, owner)
        if not has_memory(local(tensor)):
            raise TypeError(f"the {key} of {owner} has no memory: {fix}")
        if form is not None and form.scale is not None:
            _check_scale(
                state.get(scale_key(key)), local(tensor), form, f"the {key} of {owner}", fix
            )
    _check_remainder(state.get(REMAINDER), param, owner, fix)


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


def _check_remainder(remainder: Any, param: Tensor, owner: str, fix: str) -> None:
    if remainder is None:
        return
    fits = isinstance(remainder, Tensor) and (
        remainder.dtype in (torch.int16, torch.int32)
        and remainder.layout == torch.strided
        and remainder.shape == param.shape
        and has_memory(local(remainder))
    )
    if not fits:
        raise ValueError(
            f"the remainder of {owner} must be an int16 tensor of the parameter's shape: {fix}"
        )
    _check_mesh(remainder, param, REMAINDER, owner)


def scale_count(part: Tensor) -> int:
    """One for each quantisation block, counted from the first element that lies here."""
    return -(-part.numel() // QUANT_BLOCK)


def _check_scale(scale: Any, code: Tensor, form: Format, owner: str, fix: str) -> None:
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
            f"{owner} needs a scale tensor of shape ({count},) and type {form.scale}, one scale for "
            f"each {QUANT_BLOCK} elements: {fix}"
        )
    if not is_dense(code):
        raise ValueError(
            f"{owner} has gaps in memory, so its scales no longer belong to its elements: {fix}"
        )


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
    """Create missing state, and convert existing state to the parameter's device, type and layout.

    Args:
        number: the parameter's index in the optimizer, which stochastic rounding depends on.
    """
    state["step"] = step_count(state.get("step", 0.0), param.device)
    for key in columns_of(rule):
        form = wanted_format(param, key, storage)
        if key not in state:
            if (
                form is not None and form.scale is not None
            ):  # first: without a column it does no harm
                count, device = scale_count(local(param)), param.device
                state[scale_key(key)] = torch.zeros(count, dtype=form.scale, device=device)
            state[key] = buffer_like(param, form.storage if form else state_dtype(param.dtype))
        elif not is_in_place(state[key], param) or narrow_format(key, state[key].dtype) != form:
            put(state, key, plain(state, key), param, form, number)
    if rounding_of(param.dtype, storage.rounding) == "exact":
        remainder = state.get(REMAINDER)
        if remainder is None:
            state[REMAINDER] = buffer_like(param, torch.int16)
        elif not is_in_place(remainder, param) or remainder.dtype != torch.int16:
            state[REMAINDER] = copied_like(param, remainder, torch.int16)


def is_in_place(tensor: Tensor, param: Tensor) -> bool:
    """Whether its elements have the device, placement and memory order of the parameter's."""
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
    """Store numbers in the state, in the parameter's memory order and the given format.

    Numbers that a format can represent stay the same, so storing twice changes nothing.
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

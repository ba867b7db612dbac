"""A parameter's state: which tensors, in which type and memory order, and how they are loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_group, is_dense
from .rules import RULES, Rule

STATE_KEYS = ("momentum_buffer", "exp_avg_sq")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """State is never narrower than float32, whatever the parameter is."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def same_order(tensor: Tensor, other: Tensor) -> bool:
    """Whether element i of both lies at the same place; dimensions of size 1 have no say."""
    dims = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return tensor.numel() == 0 or all(size == 1 or a == b for size, a, b in dims)


def buffer_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros in the memory order of a dense parameter, contiguous for any other."""
    layout = torch.preserve_format if is_dense(param) else torch.contiguous_format
    return torch.zeros_like(param, dtype=dtype, memory_format=layout, requires_grad=False)


def init_state(state: dict[str, Any], param: Tensor, rule: Rule) -> None:
    """Create what is missing, and bring what a move or a new layout left behind along."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    elif state["step"].device != param.device:
        state["step"] = state["step"].to(param.device)
    for key, wanted in zip(STATE_KEYS, (rule.momentum, rule.rms), strict=True):
        if not wanted:
            continue
        if key not in state:
            state[key] = buffer_like(param, state_dtype(param.dtype))
            continue
        old = state[key]
        in_order = same_order(old, param) if is_dense(param) else old.is_contiguous()
        if old.device != param.device or not in_order:
            state[key] = buffer_like(param, old.dtype).copy_(old)


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
        check_group({**defaults, **theirs}, algorithm)


def load_state(param: Tensor, values: dict[str, Any], algorithm: str, label: str) -> dict[str, Any]:
    """One parameter's loaded state, copied to its device and memory order, never recast."""
    rule = RULES[algorithm]
    required = {"step"} | ({"exp_avg_sq"} if rule.rms else set())
    known = required | ({"momentum_buffer"} if rule.momentum else set())
    if values and not required <= set(values) <= known:
        raise ValueError(
            f"the loaded state of {label} has {sorted(values)} where {algorithm} keeps "
            f"{sorted(known)}: it is from another optimizer"
        )
    state: dict[str, Any] = {}
    for key, value in values.items():
        if key == "step":
            count = torch.as_tensor(value, dtype=torch.float32).reshape(())
            state[key] = count.to(param.device, copy=True)
            continue
        if value.shape != param.shape:
            raise ValueError(
                f"the loaded {key} of {label} has shape {tuple(value.shape)}: "
                "load it into the model that it was saved with"
            )
        if value.dtype.to_real() not in (torch.float32, torch.float64) or (
            value.is_complex() != param.is_complex()
        ):
            raise ValueError(
                f"the loaded {key} of {label} is {value.dtype}; state is float32 or float64"
            )
        state[key] = buffer_like(param, value.dtype).copy_(value)
    if len({state[key].dtype for key in STATE_KEYS if key in state}) > 1:
        raise ValueError(f"the loaded state of {label} mixes float32 and float64")
    return state

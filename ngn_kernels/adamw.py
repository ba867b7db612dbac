"""To and from torch.optim.AdamW in the middle of a run.

Both keep the same second moment v and step count t. AdamW keeps an average of gradients, and the
optimizers here the displacement that momentum goes on with. Where rho is 1 the one follows from the
other: with D = eps + sqrt(v / (1 - beta2^t)), m = lr * exp_avg / D, and exp_avg = m D / gamma.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

VALUES = ("lr", "betas", "eps", "weight_decay")
STATE = {"step", "exp_avg", "exp_avg_sq"}
# What torch's AdamW expects in each group besides.
OWN_OPTIONS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def is_adamw_state(state_dict: Mapping[str, Any]) -> bool:
    """Whether this looks like what Adam or AdamW saves."""
    states = state_dict["state"].values()
    return any("exp_avg" in values for values in states) or any(
        "amsgrad" in group for group in state_dict["param_groups"]
    )


def groups_from_adamw(adamw: Optimizer) -> list[dict[str, Any]]:
    """Its groups as an optimizer here takes them: parameters, values, and the user's own keys."""
    if not isinstance(adamw, (Adam, AdamW)):
        raise TypeError(f"from_adamw takes a torch.optim.AdamW or Adam, not {type(adamw).__name__}")
    groups = []
    for group in adamw.param_groups:
        _check_group(group)
        params = group["params"]
        names = group.get("param_names")
        kept = {
            k: v
            for k, v in group.items()
            if k not in OWN_OPTIONS and k not in ("params", "param_names")
        }
        named = params if names is None else list(zip(names, params, strict=True))
        groups.append({**kept, "params": named})
    return groups


def state_from_adamw(
    state_dict: Mapping[str, Any], current: list[dict[str, Any]], algorithm: str
) -> dict[str, Any]:
    """What AdamW saved as a checkpoint of this algorithm, for an optimizer with these groups."""
    if not is_adamw_state(state_dict):
        raise ValueError("this is no state_dict of an AdamW: it has neither exp_avg nor amsgrad")
    if len(state_dict["param_groups"]) != len(current):
        raise ValueError(
            f"AdamW's state has {len(state_dict['param_groups'])} parameter groups and the optimizer "
            f"has {len(current)}: build the optimizer with the same groups first"
        )
    groups, state = [], {}
    for saved, ours in zip(state_dict["param_groups"], current, strict=True):
        _check_group(saved)
        kept = {k: v for k, v in saved.items() if k not in OWN_OPTIONS}
        groups.append({**kept, "algorithm": algorithm, "step_cap": ours["step_cap"]})
        for index in saved["params"]:
            if state_dict["state"].get(index):
                state[index] = _converted(state_dict["state"][index], saved)
    return {"state": state, "param_groups": groups}


def state_for_adamw(saved: Mapping[str, Any], step_sizes: list[float]) -> dict[str, Any]:
    """A checkpoint of an optimizer here as AdamW loads it; `step_sizes` are gamma of each group."""
    groups, state = [], {}
    for group, gamma in zip(saved["param_groups"], step_sizes, strict=True):
        kept = {k: v for k, v in group.items() if k not in ("algorithm", "step_cap", "ngn")}
        groups.append({**kept, **OWN_OPTIONS})
        for index in group["params"]:
            values = saved["state"].get(index)
            if values:
                v, m = values["exp_avg_sq"], values.get("momentum_buffer")
                d = preconditioner(v, values["step"], group)
                average = torch.zeros_like(v)
                if m is not None and gamma > 0:
                    average = _scaled(m, d / gamma)
                state[index] = {
                    "step": values["step"].clone(),
                    "exp_avg": average,
                    "exp_avg_sq": v.clone(),
                }
    return {"state": state, "param_groups": groups}


def preconditioner(v: Tensor, step: Any, group: Mapping[str, Any]) -> Tensor:
    """D, in the real form of v."""
    bias = 1 - float(group["betas"][1]) ** float(step)
    return group["eps"] + (_real(v) / bias).sqrt()


def _converted(values: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    if not set(values) >= STATE:
        raise ValueError(f"AdamW's state has {sorted(values)} where it keeps {sorted(STATE)}")
    v, average = (_wide(values[key]) for key in ("exp_avg_sq", "exp_avg"))
    step = torch.as_tensor(values["step"], dtype=torch.float32).clone()
    d = preconditioner(v, step, group)
    return {
        "step": step,
        "exp_avg_sq": v.clone(),
        "momentum_buffer": _scaled(average, float(group["lr"]) / d),
    }


def _check_group(group: Mapping[str, Any]) -> None:
    if group.get("maximize"):
        raise ValueError("maximize=True: minimise the negative loss instead")
    if group.get("amsgrad"):
        raise ValueError(
            "amsgrad=True keeps the largest second moment, which no optimizer here has: begin "
            "without its state"
        )
    if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
        raise ValueError(
            "Adam's weight_decay is a part of the gradient, which no optimizer here has: use AdamW, "
            "or weight_decay=0"
        )


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    scaled = _real(tensor) * factor
    return torch.view_as_complex(scaled) if tensor.is_complex() else scaled


def _wide(tensor: Tensor) -> Tensor:
    """In the type that state has here: float32 for 16-bit parameters."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

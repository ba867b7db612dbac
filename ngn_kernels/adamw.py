"""To and from torch.optim.AdamW in the middle of a run.

Both keep the same second moment v and step count t. AdamW keeps an average of gradients, and the
optimizers here the displacement that momentum goes on with. With D = eps + sqrt(v / (1 - beta2^t)) and
AdamW's lr the one is taken for the other so that a run goes on in its direction and at its speed:
m = lr exp_avg / D, and exp_avg = m D / lr.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from .formats import REMAINDER

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
    """Whether this looks like what Adam or AdamW saves, of which alone groups have amsgrad."""
    groups = state_dict.get("param_groups") or ()
    return any("amsgrad" in group and "algorithm" not in group for group in groups)


def groups_from_adamw(adamw: Optimizer, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its groups as an optimizer here takes them: parameters, values, and the user's own keys.

    Args:
        values: in the place of those of all groups, such as lr.
    """
    if not isinstance(adamw, (Adam, AdamW)):
        inner = "; pass the optimizer inside, its .optimizer" if hasattr(adamw, "optimizer") else ""
        raise TypeError(
            f"from_adamw takes a torch.optim.AdamW or Adam, not {type(adamw).__name__}{inner}"
        )
    groups = []
    for group in adamw.param_groups:
        _check_group(group, isinstance(adamw, AdamW))
        params = group["params"]
        names = group.get("param_names")
        kept = {
            k: v
            for k, v in group.items()
            if k not in OWN_OPTIONS and k not in ("params", "param_names")
        }
        named = params if names is None else list(zip(names, params, strict=True))
        if "lr" in values and "initial_lr" in kept:  # from which a new scheduler would begin
            kept["initial_lr"] = values["lr"]
        groups.append({**kept, **values, "params": named})
    return groups


def state_from_adamw(
    state_dict: Mapping[str, Any], current: list[dict[str, Any]], exact: bool
) -> dict[str, Any]:
    """What AdamW saved as a checkpoint of an optimizer with these groups, which keep their values.

    Args:
        exact: whether bfloat16 parameters keep their remainders, which AdamW has not.
    """
    if not is_adamw_state(state_dict):
        raise ValueError("this is no state_dict of an AdamW: its groups have no amsgrad")
    if len(state_dict["param_groups"]) != len(current):
        raise ValueError(
            f"AdamW's state has {len(state_dict['param_groups'])} parameter groups and the optimizer "
            f"has {len(current)}: build the optimizer with the same groups first"
        )
    groups, state = [], {}
    for saved, ours in zip(state_dict["param_groups"], current, strict=True):
        _check_group(saved, True)
        kept = {k: v for k, v in ours.items() if k != "param_names"}
        groups.append({**kept, "params": saved["params"]})
        for index in saved["params"]:
            values = state_dict["state"].get(index)
            if values and float(values["step"]) > 0:
                state[index] = _converted(values, saved, exact)
    return {"state": state, "param_groups": groups}


def state_for_adamw(
    saved: Mapping[str, Any], lrs: list[float], switches: Mapping[str, Any]
) -> dict[str, Any]:
    """A checkpoint of an optimizer here as an AdamW with these lrs and switches loads it."""
    groups, state = [], {}
    for group, lr in zip(saved["param_groups"], lrs, strict=True):
        kept = {k: v for k, v in group.items() if k not in ("algorithm", "step_cap", "ngn")}
        if "initial_lr" in kept and lr != group["lr"]:
            kept["initial_lr"] = lr
        groups.append({**kept, "lr": lr, **OWN_OPTIONS, **switches})
        for index in group["params"]:
            values = saved["state"].get(index)
            if not values or float(values["step"]) == 0:
                continue
            v, m = values["exp_avg_sq"], values.get("momentum_buffer")
            average = torch.zeros_like(v)
            if m is not None and lr > 0:
                average = _scaled(m, preconditioner(v, values["step"], group) / lr)
            # Its step lies on the host; loading moves it where a switch says so.
            state[index] = {
                "step": torch.tensor(float(values["step"])),
                "exp_avg": average,
                "exp_avg_sq": v.clone(),
            }
    return {"state": state, "param_groups": groups}


def preconditioner(v: Tensor, step: Any, group: Mapping[str, Any]) -> Tensor:
    """D, in the real form of v."""
    bias = 1 - float(group["betas"][1]) ** float(step)
    return group["eps"] + (_real(v) / bias).sqrt()


def _converted(values: Mapping[str, Any], group: Mapping[str, Any], exact: bool) -> dict[str, Any]:
    if set(values) != STATE:
        raise ValueError(f"AdamW's state has {sorted(values)} where it keeps {sorted(STATE)}")
    v, average = (_wide(values[key]) for key in ("exp_avg_sq", "exp_avg"))
    step = torch.as_tensor(values["step"], dtype=torch.float32).clone()
    d = preconditioner(v, step, group)
    state = {
        "step": step,
        "exp_avg_sq": v.clone(),
        "momentum_buffer": _scaled(average, float(group["lr"]) / d),
    }
    if exact and values["exp_avg"].dtype == torch.bfloat16:
        state[REMAINDER] = torch.zeros_like(values["exp_avg"], dtype=torch.int16)
    return state


def _check_group(group: Mapping[str, Any], decoupled: bool) -> None:
    """`decoupled` is of the weight decay, where torch is too old (2.6) for groups that say it."""
    if group.get("maximize"):
        raise ValueError("maximize=True: minimise the negative loss instead")
    if group.get("amsgrad"):
        raise ValueError(
            "amsgrad=True keeps the largest second moment, which no optimizer here has: begin "
            "without its state"
        )
    if group["weight_decay"] and not group.get("decoupled_weight_decay", decoupled):
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

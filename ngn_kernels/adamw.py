"""To and from torch.optim.AdamW in the middle of a run.

Both keep the same second moment v and step count t. AdamW keeps an average of gradients, and the
optimizers here the last displacement, with which momentum goes on. With D = eps + sqrt(v / (1 - beta2^t))
and AdamW's lr the one is taken for the other so that a run goes on in its direction and at its speed:
m = lr exp_avg / ((1 - beta1^t) D), and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from .formats import REMAINDER

VALUES = ("lr", "betas", "eps", "weight_decay")
# The lr, and what schedulers keep beside it in a group.
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr")
STATE = {"step", "exp_avg", "exp_avg_sq"}
# Parts of parameters' names that DDP and torch.compile add.
WRAPPERS = {"module", "_orig_mod"}
# What else torch's AdamW expects in each group.
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
    """Whether Adam or AdamW saved this: no other optimizer's groups have amsgrad."""
    groups = state_dict.get("param_groups") or ()
    return any("amsgrad" in group and "algorithm" not in group for group in groups)


def groups_from_adamw(adamw: Optimizer, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its groups as an optimizer here takes them: parameters, values, and the user's own keys.

    Args:
        given: values that replace AdamW's. An lr is that of the group with the largest one, and the
            others keep their ratios to it; a group without weight decay stays without, if any has some.
    """
    if not isinstance(adamw, (Adam, AdamW)):
        inner = [f"; pass its .{name}" for name in ("optimizer", "optim") if hasattr(adamw, name)]
        raise TypeError(
            "from_adamw takes a torch.optim.AdamW or Adam, not "
            f"{type(adamw).__name__}{''.join(inner[:1])}"
        )
    for group in adamw.param_groups:
        _check_group(group, isinstance(adamw, AdamW))
    groups = [group_from_adamw(group) for group in adamw.param_groups]
    lrs = scheduled_lrs(groups, given["lr"]) if "lr" in given else [{} for _ in groups]
    decays = any(group["weight_decay"] for group in groups)
    for group, own_lrs in zip(groups, lrs, strict=True):
        own_decay = {"weight_decay": 0.0} if decays and not group["weight_decay"] else {}
        group |= {**given, **own_lrs, **own_decay}
    return groups


def group_from_adamw(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group, or AdamW's defaults. An lr that is a tensor is copied, and betas become numbers."""
    kept = {k: v for k, v in group.items() if k not in OWN_OPTIONS and k != "param_names"}
    kept |= {k: kept[k].clone() for k in SCHEDULED if isinstance(kept.get(k), Tensor)}
    kept["betas"] = tuple(float(beta) for beta in kept["betas"])
    if "param_names" in group:
        kept["params"] = list(zip(group["param_names"], group["params"], strict=True))
    return kept


def scheduled_lrs(groups: list[dict[str, Any]], lr: float | Tensor) -> list[dict[str, Any]]:
    """The lr of each group, and what schedulers keep beside it, where `lr` is the largest base lr.

    The ratios of all of these stay, as many schedulers derive the next lr from the one before. At the
    end of a schedule, at 0, nothing goes on, and a group begins with its base lr.
    """
    bases = [float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups]
    largest = max(bases)
    found = []
    for group, base in zip(groups, bases, strict=True):
        now = float(group["lr"])
        ratio = (now if now > 0 else base) / largest if largest > 0 else 1.0
        lrs = {"lr": lr if ratio == 1.0 else lr * ratio}
        for name in SCHEDULED[1:]:
            if name in group:
                lrs[name] = float(lr) * (float(group[name]) / largest if largest > 0 else 1.0)
        found.append(lrs)
    return found


def state_from_adamw(
    state_dict: Mapping[str, Any], current: list[dict[str, Any]], exact: bool
) -> dict[str, Any]:
    """What AdamW saved as a checkpoint of an optimizer with these groups.

    Args:
        exact: whether bfloat16 parameters keep their remainders, which AdamW has not.
    """
    _check_state_dict(state_dict)
    if len(state_dict["param_groups"]) != len(current):
        raise ValueError(
            f"AdamW's state has {len(state_dict['param_groups'])} parameter groups and the optimizer "
            f"has {len(current)}: build the optimizer with the same groups first"
        )
    groups, state = [], {}
    for saved, ours in zip(state_dict["param_groups"], current, strict=True):
        _check_group(saved, True)
        names, own_names = saved.get("param_names"), ours.get("param_names")
        if names and own_names and list(map(_bare, names)) != list(map(_bare, own_names)):
            raise ValueError(
                f"AdamW's group has the parameters {names} and the optimizer's {own_names}: build the "
                "optimizer with the same parameters in the same order"
            )
        values_of_ours = {name: ours[name] for name in (*VALUES, "algorithm")}
        groups.append({**values_of_ours, "params": saved["params"]})
        # Groups of another number of parameters are refused where they are loaded.
        for index, param in zip(saved["params"], ours["params"], strict=False):
            values = state_dict["state"].get(index)
            if values and float(values["step"]) > 0:
                state[index] = _converted(index, values, saved, ours)
                if exact and param.dtype == torch.bfloat16:
                    state[index][REMAINDER] = torch.zeros_like(values["exp_avg"], dtype=torch.int16)
    return {"state": state, "param_groups": groups}


def state_for_adamw(
    saved: Mapping[str, Any], lr: float | Tensor | None, switches: Mapping[str, Any]
) -> dict[str, Any]:
    """A checkpoint of an optimizer here as an AdamW with this largest base lr and switches loads it."""
    groups, state = [], {}
    lrs = (
        [{"lr": float(group["lr"])} for group in saved["param_groups"]]
        if lr is None
        else scheduled_lrs(saved["param_groups"], lr)
    )
    for group, own_lrs in zip(saved["param_groups"], lrs, strict=True):
        kept = {k: v for k, v in group.items() if k not in ("algorithm", "step_cap", "ngn")}
        groups.append({**kept, **own_lrs, **OWN_OPTIONS, **switches})
        for index in group["params"]:
            values = saved["state"].get(index)
            if values and float(values["step"]) > 0:
                state[index] = _for_adamw(values, group, float(own_lrs["lr"]))
    return {"state": state, "param_groups": groups}


def preconditioner(v: Tensor, step: float, group: Mapping[str, Any]) -> Tensor:
    """D, in the real form of v."""
    return group["eps"] + (_real(v) / _bias(group, 1, step)).sqrt()


def _bias(group: Mapping[str, Any], moment: int, step: float) -> float:
    """1 - beta^t, of the first (0) or the second (1) moment."""
    return 1 - float(group["betas"][moment]) ** step


def _converted(
    index: int, values: Mapping[str, Any], group: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, Any]:
    """AdamW's state of a parameter as that of an optimizer here, whose betas may be others."""
    if set(values) != STATE:
        raise ValueError(
            f"AdamW's state of parameter {index} has {sorted(values)} where AdamW keeps "
            f"{sorted(STATE)}: delete from state_dict['state'][{index}] what is too much, or all of "
            "it to begin this parameter anew"
        )
    v, average = (_wide(values[key]) for key in ("exp_avg_sq", "exp_avg"))
    step = float(values["step"])
    d = preconditioner(v, step, group)
    # With eps=0 D is 0 where every gradient was 0, and AdamW's next step 0/0.
    per_d = torch.where(d > 0, float(group["lr"]) / _bias(group, 0, step) / d, 0.0)
    return {
        "step": torch.as_tensor(values["step"], dtype=torch.float32).clone(),
        "exp_avg_sq": v * (_bias(ours, 1, step) / _bias(group, 1, step)),
        "momentum_buffer": _scaled(average, per_d),
    }


def _for_adamw(values: Mapping[str, Any], group: Mapping[str, Any], lr: float) -> dict[str, Any]:
    """A parameter's state as that of an AdamW with this lr."""
    v, m, step = _wide(values["exp_avg_sq"]), values.get("momentum_buffer"), float(values["step"])
    m = None if m is None else _wide(m)
    average = torch.zeros_like(v)
    if m is not None and lr > 0:
        average = _scaled(m, preconditioner(v, step, group) * (_bias(group, 0, step) / lr))
    elif m is not None and m.any():
        raise ValueError(
            "a group has lr 0, from which AdamW's average of gradients does not follow: pass "
            "adamw_state_dict(lr=...), the base lr of AdamW"
        )
    # Its step lies on the host; loading moves it where a switch says so.
    count = torch.tensor(step, dtype=torch.float32, device="cpu")
    return {"step": count, "exp_avg": average, "exp_avg_sq": v.clone()}


def _bare(name: str) -> str:
    """A parameter's name without what DDP and torch.compile add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _check_state_dict(state_dict: Any) -> None:
    """Raise unless this looks like what AdamW saves."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "load_adamw_state_dict takes what adamw.state_dict() returned, not "
            f"{type(state_dict).__name__}: an AdamW itself is for NGNMDv1.from_adamw(adamw)"
        )
    if is_adamw_state(state_dict):
        return
    inside = [k for k, v in state_dict.items() if isinstance(v, Mapping) and is_adamw_state(v)]
    if inside:
        fix = f"pass state_dict[{inside[0]!r}], which is AdamW's"
    elif "param_groups" in state_dict:
        fix = "it is from another optimizer, so begin without it"
    else:
        fix = "load a flattened one into an AdamW, for NGNMDv1.from_adamw"
    raise ValueError(f"this is no state_dict of an AdamW: {fix}")


def _check_group(group: Mapping[str, Any], decoupled: bool) -> None:
    """`decoupled` is of the weight decay, where torch is too old (2.6) for groups that say it."""
    if group.get("maximize"):
        raise ValueError("maximize=True: minimise the negative loss instead")
    if group.get("amsgrad"):
        raise ValueError(
            "amsgrad=True keeps the largest second moment, which no optimizer here has: begin without "
            "its state, as in NGNMDv1(adamw.param_groups[0]['params'], lr=...)"
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

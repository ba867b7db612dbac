"""The options of an optimizer and the values of its groups, and the checks of both."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from functools import cache
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from .messages import FOREIGN_OPTIONS

# Types of options with few values, so that type checkers find misspelt ones.
DecayForm = Literal["paper", "adamw"]
OnSkip = Literal["warn", "raise", "ignore"]
StateFormat = Literal["float32", "bfloat16", "8bit"]
RoundingName = Literal["nearest", "stochastic", "exact"]
LossReduction = Literal["mean", "sum"]

PER_OPTIMIZER = (
    *(
        "loss_floor",
        "loss_target",
        "max_grad_norm",
        "decay_form",
        "nesterov",
        "on_skip",
        "max_skipped_steps",
        "backend",
        "preconditioner",
        "state",
        "rounding",
    ),
    *("reduce_group", "replicas", "loss_reduction"),
)


# Saved with a run; one that loads it keeps its own and warns of others.
SAVED_OPTIONS = ("loss_floor", "loss_target", "max_grad_norm", "decay_form", "nesterov")


# Values of groups that say whether and how gradients become directions in the spectral norm.
SPECTRAL_VALUES = ("spectral", "adjust_lr_fn", "ns_steps", "ns_coefficients", "ns_dtype")
SPECTRAL_FORMS = (False, True, "flat", "stack")
SCALES = ("original", "match_rms_adamw")
POLAR_EXPRESS = "polar_express"
NS_DTYPES = ("auto", "float32", "bfloat16")

# Values that some algorithms have in each group, with a word on who has them.
OPTIONAL_VALUES = {
    "momentum": "NGNM has it; the MD family has betas",
    "betas": "the MD family has them",
    "beta2": 'NGND has it with preconditioner="rms"',
    "eps": "algorithms with an RMS preconditioner have it",
    **dict.fromkeys(SPECTRAL_VALUES, "NGNMuon has it"),
}


@cache
def torch_keywords() -> frozenset[str]:
    """What the constructors of torch's own optimizers take."""
    classes = [v for v in vars(torch.optim).values() if isinstance(v, type)]
    keywords = [inspect.signature(c).parameters for c in classes if issubclass(c, Optimizer)]
    return frozenset(name for parameters in keywords for name in parameters)


def check_group_names(names: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Raise for a name that was meant for an optimizer, and that this one would never read.

    Any other name is the user's own: schedulers, trainers and layer-wise rates keep theirs in groups.
    """
    known = list(known)
    for name in names:
        if name in known or name in OPTIONAL_VALUES:
            continue
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.85)
        advice = FOREIGN_OPTIONS.get(name)
        if advice is None and name in torch_keywords() - {"params", "defaults"}:
            advice = "leave it out: it is an option of another optimizer"
        if advice is None and near and not name.endswith(near[0]):  # such as max_momentum
            advice = f"did you mean {near[0]}?"
        if advice is not None:
            raise TypeError(f"{owner} has no option {name}, which a group has: {advice}")


# Of the lr that a schedule began with: what its products may be rounded by. A schedule that goes one
# step too far is further below 0 than this, unless it has a million steps.
LR_ROUNDING = 1e-6


def usable_lr(lr: float, group: dict[str, Any], defaults: dict[str, Any]) -> float:
    """The lr of a step: 0 where a schedule that ends at 0 was rounded to a number below it."""
    if lr >= 0:
        return lr
    start = group.get("initial_lr", defaults["lr"])
    if isinstance(start, Tensor):
        start = start.item() if start.device.type == "cpu" else 0.0
    return 0.0 if lr >= -LR_ROUNDING * start else lr


def check_group(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise unless a group has the values of its algorithm, and every one is in its range."""
    algorithm = defaults["algorithm"]
    for name, owner in OPTIONAL_VALUES.items():
        if name in group and name not in defaults:
            raise ValueError(f"{algorithm} has no {name} ({owner}): take it out of the group")
    if group["algorithm"] != algorithm:
        raise ValueError(
            f"a group says algorithm={group['algorithm']!r}: this optimizer is {algorithm}"
        )
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.is_floating_point():
            raise ValueError(f"lr={lr}: a tensor lr must be one floating-point number")
        lr = lr.item() if lr.device.type == "cpu" else 0.0
    require("lr", lr, "in [0, inf)", lambda v: 0 <= usable_lr(v, group, defaults) < math.inf)
    unit = "in [0, 1)"
    if "momentum" in group:
        require("momentum", group["momentum"], unit, lambda v: 0 <= v < 1)
    if "beta2" in group:
        require("beta2", group["beta2"], unit, lambda v: 0 <= v < 1)
    if "betas" in group:
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas={betas!r}: must be a pair of numbers, each {unit}")
        for i, beta in enumerate(betas):
            require(f"betas[{i}]", beta, unit, lambda v: 0 <= v < 1)
    if "eps" in group:
        require("eps", group["eps"], "in (0, inf)", lambda v: 0 < v < math.inf)
    require("weight_decay", group["weight_decay"], "in [0, inf)", lambda v: 0 <= v < math.inf)
    if group.get("step_cap") is not None:
        require("step_cap", group["step_cap"], "None or in (0, inf)", lambda v: 0 < v < math.inf)
    if "spectral" in group:
        check_spectral(*(group[name] for name in SPECTRAL_VALUES))


def check_spectral(form: Any, adjust: Any, steps: Any, coefficients: Any, dtype: Any) -> None:
    if type(form) not in (bool, str) or form not in SPECTRAL_FORMS:
        listed = ", ".join(map(repr, SPECTRAL_FORMS))
        raise ValueError(f"spectral={form!r}: must be one of {listed}")
    if adjust not in SCALES:
        raise ValueError(f"adjust_lr_fn={adjust!r}: must be one of {', '.join(map(repr, SCALES))}")
    if type(steps) is not int or not 1 <= steps < 100:
        raise ValueError(f"ns_steps={steps!r}: must be an integer from 1 to 99")
    if dtype not in NS_DTYPES:
        raise ValueError(f"ns_dtype={dtype!r}: must be one of {', '.join(map(repr, NS_DTYPES))}")
    if isinstance(coefficients, str) and coefficients == POLAR_EXPRESS:
        return
    numbers = coefficients if isinstance(coefficients, (tuple, list)) else ()
    if len(numbers) != 3 or not all(
        isinstance(n, Real) and not isinstance(n, bool) and math.isfinite(n) for n in numbers
    ):
        raise ValueError(
            f"ns_coefficients={coefficients!r}: must be three numbers, or {POLAR_EXPRESS!r}"
        )
    a, b, c = numbers
    if not (a > 0 and b * b < 4 * a * c):
        raise ValueError(
            f"ns_coefficients={coefficients!r}: a > 0 and b^2 < 4 a c must hold, so that "
            "a s + b s^3 + c s^5 has the sign of s, and no direction points uphill"
        )
    if not stays_bounded(a, b, c, steps):
        raise ValueError(
            f"ns_coefficients={coefficients!r}: in {steps} steps of Newton-Schulz some singular value "
            "from 0 to 1 grows beyond 2 instead of coming near 1: Muon's are (3.4445, -4.775, 2.0315)"
        )


@cache
def stays_bounded(a: float, b: float, c: float, steps: int) -> bool:
    """Whether no number from 0 to 1, or a rounding above, is taken beyond 2."""
    numbers = np.linspace(0.0, 1.01, 2000)
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(steps):
            numbers = numbers * (a + numbers**2 * (b + numbers**2 * c))
    return bool((numbers <= 2).all())


def require(name: str, value: Any, wanted: str, holds: Callable[[Any], bool]) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not holds(value):
        raise ValueError(f"{name}={value!r}: must be {wanted}")

"""What users may pass: each check raises an error that says what to do, and changes nothing."""

from __future__ import annotations

import difflib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from .shards import is_sharded, local


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of dimensions."""
    if tensor.numel() == 0:
        return True
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dim for dim in dims if dim[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def read_loss(loss: Any) -> float | Tensor:
    """A number if the loss is on the host; a 0-d tensor, never read, if it is on a device.

    A DTensor of which ranks have parts stays one, for `whole_loss`.
    """
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}: reduce it to one number first, "
                "such as loss.mean()"
            )
        if loss.is_complex() or loss.dtype == torch.bool:
            raise TypeError(f"the loss is a {loss.dtype} tensor: it must be a real number")
        if is_sharded(loss):
            spec: Any = loss
            if not all(placement.is_replicate() for placement in spec.placements):
                return loss.detach()
            loss = local(loss)
        return float(loss.item()) if loss.is_cpu else loss.detach().reshape(())
    if isinstance(loss, Real) and not isinstance(loss, bool):
        return float(loss)
    raise TypeError(
        f"the loss is a {type(loss).__name__}: pass a number or a tensor with one element"
    )


def whole_loss(loss: float | Tensor) -> float | Tensor:
    """The sum of the ranks' parts of a loss; a collective of those ranks if it is a DTensor."""
    return read_loss(loss.full_tensor()) if is_sharded(loss) else loss  # type: ignore[union-attr]


def read_weight(weight: Any) -> float:
    """A number, or a tensor on the host with one element."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"weight has shape {tuple(weight.shape)}: it must be one number")
        if not weight.is_cpu or is_sharded(weight):
            raise TypeError(
                f"weight is a tensor on {weight.device}: pass a number, which the host knows without "
                "waiting for a device, such as the number of samples"
            )
        weight = weight.item()
    require("weight", weight, "in (0, inf)", lambda v: 0 < v < math.inf)
    return float(weight)


def as_double(value: float | Tensor) -> float | Tensor:
    """On any device that has them."""
    if not isinstance(value, Tensor):
        return value
    return value.float() if value.device.type == "mps" else value.double()


# Values that some algorithms have in each group, with a word on who has them.
OPTIONAL_VALUES = {
    "momentum": "NGNM has it; the MD family has betas",
    "betas": "the MD family has them",
    "beta2": 'NGND has it with preconditioner="rms"',
    "eps": "algorithms with an RMS preconditioner have it",
}


# Keywords of other optimizers, and what to write here instead.
FOREIGN_OPTIONS = {
    "fused": "leave it out: every step is fused, and backend= chooses the kernels",
    "foreach": "leave it out: every step is fused, and backend= chooses the kernels",
    "capturable": "leave it out: every step on a GPU can be captured",
    "differentiable": "leave it out: no step can be differentiated",
    "maximize": "minimise the negative loss instead, with a loss_floor below it",
    "amsgrad": "leave it out: there is no such variant",
    "nesterov": "leave it out: there is no such variant",
    "dampening": "leave it out: the gradient's share is 1 - momentum",
    "alpha": "it is beta2, or betas[1], here",
    "learning_rate": "it is lr here",
    "epsilon": "it is eps here",
    "beta1": "it is betas[0], or momentum, here",
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
        if advice is None and near and near[0] not in name:  # such as max_momentum
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


def require(name: str, value: Any, wanted: str, holds: Callable[[Any], bool]) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not holds(value):
        raise ValueError(f"{name}={value!r}: must be {wanted}")


INSIDE = ("ngn_kernels", "torch")


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the first line outside this package and torch: the caller's own."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


# Attributes that others leave on parameters which they have flattened.
FLATTENED = {
    ("_fsdp_flattened", "_is_flat_param"): "FSDP1",
    ("ds_id", "ds_status", "_hp_mapping"): "DeepSpeed ZeRO",
}


def check_param(param: Tensor, label: str) -> None:
    if not (param.is_floating_point() or param.is_complex()):
        raise TypeError(f"{label} is {param.dtype}: NGN optimizers take floating-point parameters")
    for marks, owner in FLATTENED.items():
        if any(hasattr(param, mark) for mark in marks):
            raise TypeError(
                f"{label} is a part of what {owner} flattened and sharded behind the optimizer's "
                "back, so that no rank knows the whole model's step size: use "
                "torch.distributed.fsdp.fully_shard (FSDP2), DistributedDataParallel, or "
                "ZeroRedundancyOptimizer with replicas=1"
            )
    if param.layout != torch.strided:
        raise TypeError(f"{label} has layout {param.layout}: NGN optimizers take dense parameters")
    if not has_memory(local(param)):
        raise TypeError(
            f"{label} has no memory (a meta tensor, a wrapper class, or freed storage): "
            "give it its values before the step"
        )
    check_gradient(param, label)


def check_gradient(param: Tensor, label: str) -> None:
    grad = param.grad
    if grad is None:
        return
    if grad.device != param.device:
        raise RuntimeError(
            f"{label} is on {param.device}, its gradient on {grad.device}: move both, as "
            "module.to(device) does, or call zero_grad() before moving the parameter"
        )
    if grad.layout != torch.strided:
        raise TypeError(
            f"{label} has a gradient of layout {grad.layout}; NGN optimizers take dense gradients: "
            "use sparse=False in the layer, or param.grad = param.grad.to_dense()"
        )
    if grad.is_complex() != param.is_complex():
        wanted = "param.grad.to(param.dtype)" if param.is_complex() else "param.grad.real"
        raise TypeError(
            f"{label} is {param.dtype} and its gradient {grad.dtype}, where both must be real or both "
            f"complex: write param.grad = {wanted} before the step"
        )
    if grad.shape != param.shape:
        raise RuntimeError(
            f"{label} has a gradient of shape {tuple(grad.shape)}: call zero_grad() before "
            "changing the parameter's shape"
        )
    if is_sharded(param) != is_sharded(grad):
        raise TypeError(
            f"one of {label} and its gradient is a DTensor and the other is not: "
            "make both DTensors or both plain tensors"
        )
    grad = local(grad)
    arriving = hasattr(grad, "trigger_wait")  # a collective's result, which a copy waits for
    if not arriving and not has_memory(grad) and not grad._is_zerotensor():
        raise TypeError(
            f"{label} has a gradient without memory (a wrapper class, or freed storage): "
            "make it an ordinary tensor before the step"
        )


def has_memory(tensor: Tensor) -> bool:
    """Unlike a meta tensor, a wrapper, or one whose storage was freed."""
    return tensor.numel() == 0 or tensor.data_ptr() != 0


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Where the memory of its elements begins and ends; it has at least one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def check_overlap(tensors: list[tuple[Tensor, str]]) -> None:
    """Raise if a tensor that a step writes shares memory with itself or with another one."""
    spans = []
    for tensor, label in tensors:
        if tensor.numel() == 0:
            continue
        if not is_dense(tensor) and _overlaps_itself(tensor):
            raise ValueError(
                f"{label} overlaps itself in memory (strides {tensor.stride()}); "
                "give the optimizer a tensor that owns its elements, such as its clone()"
            )
        spans.append((str(tensor.device), *span_of(tensor), tensor, label))
    spans.sort(key=lambda span: span[:3])
    reaching: list[tuple[str, int, int, Tensor, str]] = []
    for span in spans:
        device, start, _, tensor, label = span
        reaching = [other for other in reaching if other[0] == device and other[2] > start]
        for *_, other_tensor, other_label in reaching:
            if _share_memory(_addresses(tensor), _addresses(other_tensor)):
                raise ValueError(
                    f"{other_label} and {label} overlap in memory; "
                    "pass tied weights once, as the same Parameter object"
                )
        reaching.append(span)


class _Addresses:
    """A tensor's elements as numpy sees them; numpy never reads the memory itself."""

    def __init__(self, address: int, shape: list[int], strides: list[int], itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": tuple(shape),
            "strides": tuple(stride * itemsize for stride in strides),
            "typestr": f"|V{itemsize}",
        }


def _addresses(tensor: Tensor) -> np.ndarray:
    place = tensor.data_ptr(), list(tensor.shape), list(tensor.stride()), tensor.element_size()
    return np.asarray(_Addresses(*place))


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements that differ first in some dimension share an address.

    Only their distance matters, so that the one may have index 0 there, and both in those before.
    """
    shape, strides, itemsize = list(tensor.shape), list(tensor.stride()), tensor.element_size()
    for d in range(len(shape)):
        rest = [shape[d] - 1, *shape[d + 1 :]], strides[d:]
        start = tensor.data_ptr()
        first = np.asarray(_Addresses(start, shape[d + 1 :], strides[d + 1 :], itemsize))
        others = np.asarray(_Addresses(start + strides[d] * itemsize, *rest, itemsize))
        if shape[d] > 1 and _share_memory(first, others):
            return True
    return False


def _share_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """Exactly, but for layouts so intricate that it would take for ever: these count as shared."""
    try:
        return np.shares_memory(a, b, max_work=1_000_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True

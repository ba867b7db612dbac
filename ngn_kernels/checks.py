"""What users may pass: each check raises an error that says what to do, and changes nothing."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
    """A number if the loss is on the host; a 0-d tensor, never read, if it is on a device."""
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}: reduce it to one number first, "
                "such as loss.mean()"
            )
        if loss.is_complex() or loss.dtype == torch.bool:
            raise TypeError(f"the loss is a {loss.dtype} tensor: it must be a real number")
        return float(loss.item()) if loss.is_cpu else loss.detach().reshape(())
    if isinstance(loss, Real) and not isinstance(loss, bool):
        return float(loss)
    raise TypeError(
        f"the loss is a {type(loss).__name__}: pass a number or a tensor with one element"
    )


def wide(value: float | Tensor) -> float | Tensor:
    """As a double, on any device that has them."""
    if not isinstance(value, Tensor):
        return value
    return value.float() if value.device.type == "mps" else value.double()


def check_group(group: dict[str, Any], algorithm: str) -> None:
    """Raise unless every value of a group is in its range."""
    if group["algorithm"] != algorithm:
        raise ValueError(
            f"a group says algorithm={group['algorithm']!r}: this optimizer is {algorithm}"
        )
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.is_floating_point():
            raise ValueError(f"lr={lr}: a tensor lr must be one floating-point number")
        lr = lr.item() if lr.device.type == "cpu" else 0.0
    require("lr", lr, "in [0, inf)", lambda v: 0 <= v < math.inf)
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


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the first line outside this package and torch: the caller's own."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in ("ngn_kernels", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def check_param(param: Tensor, label: str) -> None:
    if not (param.is_floating_point() or param.is_complex()):
        raise TypeError(f"{label} is {param.dtype}: NGN optimizers take floating-point parameters")
    if hasattr(param, "device_mesh"):
        raise TypeError(f"{label} is a DTensor: sharded parameters are not supported yet")
    if param.layout != torch.strided:
        raise TypeError(f"{label} has layout {param.layout}: NGN optimizers take dense parameters")
    if _lacks_memory(param):
        raise TypeError(
            f"{label} has no memory (a meta tensor, a wrapper class, or freed storage): "
            "give it its values before the step"
        )
    if param.grad is not None:
        check_gradient(param.grad, param.device, label)


def check_gradient(grad: Tensor, device: torch.device, label: str) -> None:
    if grad.device != device:
        raise RuntimeError(
            f"{label} is on {device}, its gradient on {grad.device}: move both, as "
            "module.to(device) does, or call zero_grad() before moving the parameter"
        )
    if grad.layout != torch.strided:
        raise TypeError(
            f"{label} has a gradient of layout {grad.layout}; NGN optimizers take dense gradients: "
            "use sparse=False in the layer, or param.grad = param.grad.to_dense()"
        )
    if _lacks_memory(grad) and not grad._is_zerotensor():
        raise TypeError(
            f"{label} has a gradient without memory (a wrapper class, or freed storage): "
            "make it an ordinary tensor before the step"
        )


def _lacks_memory(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.data_ptr() == 0


def check_overlap(params: list[tuple[Tensor, str]]) -> None:
    """Raise if a parameter shares memory with itself or with another one."""
    spans = []
    for param, label in params:
        if param.numel() == 0:
            continue
        last = sum(
            (size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)
        )
        start = param.data_ptr()
        spans.append(
            (str(param.device), start, start + (last + 1) * param.element_size(), param, label)
        )
        if not is_dense(param) and len(_addresses(param)) < param.numel():
            raise ValueError(
                f"{label} overlaps itself in memory (strides {param.stride()}); "
                "give the optimizer a parameter that owns its elements, such as param.clone()"
            )
    spans.sort(key=lambda span: span[:3])
    reaching: list[tuple[str, int, int, Tensor, str]] = []
    for span in spans:
        device, start, _, param, label = span
        reaching = [other for other in reaching if other[0] == device and other[2] > start]
        for *_, other_param, other_label in reaching:
            if _share_memory(param, other_param):
                raise ValueError(
                    f"{other_label} and {label} overlap in memory; "
                    "pass tied weights once, as the same Parameter object"
                )
        reaching.append(span)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Of two tensors whose spans meet."""
    if is_dense(a) and is_dense(b):
        return True
    return np.intersect1d(_addresses(a), _addresses(b)).size > 0


def _addresses(tensor: Tensor) -> np.ndarray:
    """The distinct addresses of a tensor's elements."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size) * stride).ravel()
    return np.unique(offsets) * tensor.element_size() + tensor.data_ptr()

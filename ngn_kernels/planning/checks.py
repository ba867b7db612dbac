"""Checks of parameters and gradients: each raises an error that says what to do."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..distributed.dtensors import flattened_by, is_sharded, local


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


def check_param(param: Tensor, label: str) -> None:
    if not (param.is_floating_point() or param.is_complex()):
        raise TypeError(f"{label} is {param.dtype}: NGN optimizers take floating-point parameters")
    owner = flattened_by(param)
    if owner is not None:
        raise TypeError(
            f"{label} is a part of what {owner} flattened and sharded without telling the optimizer, so "
            "that no rank knows the whole model's step size: use torch.distributed.fsdp.fully_shard "
            "(FSDP2), DistributedDataParallel, or ZeroRedundancyOptimizer with replicas=1"
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
            if _share_memory(tensor, other_tensor):
                raise ValueError(
                    f"{other_label} and {label} overlap in memory; "
                    "pass tied weights once, as the same Parameter object"
                )
        reaching.append(span)


class _Addresses:
    """A tensor's elements as numpy sees them; numpy never reads the memory itself."""

    def __init__(self, tensor: Tensor) -> None:
        itemsize = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * itemsize for stride in tensor.stride()),
            "typestr": f"|V{itemsize}",
        }


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether a dimension's stride is too small to step over the dimensions with smaller ones."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Exact, except for layouts so intricate that it would take too long: these count as shared."""
    try:
        arrays = np.asarray(_Addresses(a)), np.asarray(_Addresses(b))
        return np.shares_memory(*arrays, max_work=1_000_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True

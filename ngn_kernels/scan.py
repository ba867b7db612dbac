"""Where a bucket's tensors lie, asked at every step: in C++ where possible, or else in Python."""

from __future__ import annotations

from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .state import same_order

try:
    from ._cpu import Scan as NativeScan
    from ._cpu import same_items, same_values
except ImportError:
    NativeScan = None  # type: ignore[assignment, misc]

    def same_items(items: list[Any], others: list[Any], /) -> bool:
        """Whether these are the same objects in the same order."""
        return len(items) == len(others) and all(map(is_, items, others))

    def same_values(mapping: dict[Any, Any], others: list[Any], /) -> bool:
        return same_items(list(mapping.values()), others)


EMPTY = 1  # stands for the address of a gradient without elements, which torch gives as 0

# What a look at all tensors tells; csrc/scan.h has the same numbers.
SAME = 0  # all is where it was
MOVED = 1  # gradients came, went, or lie elsewhere
ODD = (
    2  # a gradient needs a closer look: another element type, device or memory order, sparse, lazy
)
STALE = 3  # a parameter or state tensor was replaced, or lies elsewhere than at first


class Scan(Protocol):
    def refresh(self, pointers: np.ndarray) -> int:
        """Look at all tensors, and write the gradients' addresses, 0 for none."""


def make_scan(
    params: list[Tensor],
    dense: list[Tensor],
    states: list[dict[str, Any]],
    keys: tuple[str, ...],
    grad_dtype: torch.dtype,
) -> Scan:
    """A scan of these tensors; `dense` gives the memory order that gradients must have."""
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    plain = all(type(p) in (Tensor, torch.nn.Parameter) for p in params)
    if NativeScan is not None and api is not None and plain:
        sample = torch.empty(0, dtype=grad_dtype)
        return NativeScan(
            params=params, dense=dense, states=states, keys=keys, api=api, sample=sample
        )
    return PythonScan(params, dense, states, keys, grad_dtype)


class PythonScan:
    def __init__(
        self,
        params: list[Tensor],
        dense: list[Tensor],
        states: list[dict[str, Any]],
        keys: tuple[str, ...],
        grad_dtype: torch.dtype,
    ) -> None:
        self._params = params
        self._dense = dense
        self._states = states
        self._keys = keys
        self._grad_dtype = grad_dtype
        self._places = self._look()

    def _look(self) -> list[Any]:
        places: list[Any] = [(p.data_ptr(), p.stride(), p.dtype) for p in self._params]
        for key in self._keys:
            places += [state[key].data_ptr() for state in self._states]
        return places

    def _is_stale(self) -> bool:
        try:
            return self._look() != self._places
        except KeyError:
            return True

    def refresh(self, pointers: np.ndarray) -> int:
        if self._is_stale():
            return STALE
        found = []
        for param, dense in zip(self._params, self._dense, strict=True):
            grad = param.grad
            if grad is None:
                found.append(0)
            elif (
                grad.dtype == self._grad_dtype
                and grad.device == param.device
                and grad.layout == torch.strided
                and not grad.is_neg()
                and same_order(grad, dense)
                and (grad.data_ptr() or not grad.numel())
            ):
                found.append(grad.data_ptr() or EMPTY)
            else:
                return ODD
        if found == pointers.tolist():
            return SAME
        pointers[:] = found
        return MOVED

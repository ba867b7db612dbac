"""Detects when a cached plan must be rebuilt.

In C++ (csrc/cpu/signature.h) where torch offers DLPack's exchange API, and here for every other torch.
"""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..distributed.dtensors import local, same_placement
from ..extension import why_missing
from ..layout import EMPTY_ADDRESS, UNUSUAL_ADDRESS, Guard
from .state import same_order

if why_missing() is None:
    from .._cpu import Signature as NativeSignature
else:
    NativeSignature = None  # type: ignore[assignment, misc]

SAME, MOVED, UNUSUAL, STALE, GROWN = Guard


class SignatureRow(NamedTuple):
    """One parameter that takes part."""

    param: Tensor
    dense: Tensor  # what lies here, or a dense copy: the memory order of state and gradient
    state: dict[str, Any]
    keys: tuple[str, ...]  # of the state that kernels are shown
    sample: Tensor  # has the gradient's element type


class Signature(Protocol):
    def check(self, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> int:
        """Compare all with what was there at the start.

        Unless STALE, the gradients' addresses are in the columns: 0 for none, UNUSUAL_ADDRESS
        where a closer look is needed. References to them are kept until `release`.
        """

    def extend(
        self,
        state: dict[Tensor, Any],
        rows: list[SignatureRow],
        columns: list[np.ndarray],
        places: np.ndarray,
    ) -> None:
        """Add rows after GROWN; `places` are those of all rows in the new columns, old ones first."""

    def gradients(self) -> list[Tensor | None]:
        """The gradients that `check` has found, in the order of the rows."""

    def release(self) -> None:
        """Drop the references to the gradients."""


def make_signature(
    groups: list[dict[str, Any]],
    state: dict[Tensor, Any],
    rows: list[SignatureRow],
    columns: list[np.ndarray],
) -> Signature:
    """Of the parameters of `groups` and the optimizer's state.

    The gradients' addresses go into `columns`, in the order of the rows.
    """
    params = [list(group["params"]) for group in groups]
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    plain = all(type(local(p)) in (Tensor, torch.nn.Parameter) for group in params for p in group)
    if NativeSignature is not None and plain and api and NativeSignature.understands(api):
        return NativeSignature(groups=params, state=state, rows=rows, columns=columns, api=api)
    return PythonSignature(params, state, rows, columns)


class PythonSignature:
    def __init__(
        self,
        groups: list[list[Tensor]],
        state: dict[Tensor, Any],
        rows: list[SignatureRow],
        columns: list[np.ndarray],
    ) -> None:
        self._groups = groups
        self._states = list(state.items())
        self._rows = rows
        self._columns = columns
        taken = {id(row.param) for row in rows}
        self._idle = [p for group in groups for p in group if id(p) not in taken]
        self._places = [self._place(row) for row in rows]
        self._gradients: list[Tensor | None] = []

    @staticmethod
    def _place(row: SignatureRow) -> list[Any]:
        """Which the tensors of a row are, and where they lie; state that is gone is None."""
        tensors = [row.param, *(row.state.get(key) for key in row.keys)]
        places: list[Any] = []
        for t in tensors:
            places.append(id(t))
            if isinstance(t, Tensor) and t.layout == torch.strided:
                part = local(t)
                places.append((part.data_ptr(), part.dtype, part.device, part.shape, part.stride()))
        return places

    def _is_stale(self, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> bool:
        params = [group["params"] for group in groups]
        return not (
            list(map(len, params)) == list(map(len, self._groups))
            and all(
                all(map(is_, ours, theirs))
                for ours, theirs in zip(self._groups, params, strict=True)
            )
            and len(state) == len(self._states)
            and all(
                key is known and value is kept
                for (key, value), (known, kept) in zip(state.items(), self._states, strict=True)
            )
            and all(param.grad is None for param in self._idle)
            and [self._place(row) for row in self._rows] == self._places
        )

    def check(self, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> int:
        if self._is_stale(groups, state):
            return STALE
        self._gradients = [row.param.grad for row in self._rows]
        found = [
            _gradient_address(row, grad)
            for row, grad in zip(self._rows, self._gradients, strict=True)
        ]
        moved = found != [address for column in self._columns for address in column.tolist()]
        first = 0
        for column in self._columns:
            column[:] = found[first : first + len(column)]
            first += len(column)
        return UNUSUAL if UNUSUAL_ADDRESS in found else MOVED if moved else SAME

    def extend(
        self,
        state: dict[Tensor, Any],
        rows: list[SignatureRow],
        columns: list[np.ndarray],
        places: np.ndarray,
    ) -> None:
        raise NotImplementedError("it never says GROWN")

    def gradients(self) -> list[Tensor | None]:
        return self._gradients

    def release(self) -> None:
        self._gradients = []


def _gradient_address(row: SignatureRow, grad: Tensor | None) -> int:
    if grad is None:
        return 0
    if not same_placement(grad, row.param):
        return UNUSUAL_ADDRESS
    grad = local(grad)
    plain = (
        grad.dtype == row.sample.dtype
        and grad.device == row.dense.device
        and grad.layout == torch.strided
        and not grad.is_neg()
        and not grad.is_conj()
        and grad.shape == row.dense.shape
        and same_order(grad, row.dense)
        and (grad.data_ptr() != 0 or grad.numel() == 0)
    )
    return (grad.data_ptr() or EMPTY_ADDRESS) if plain else UNUSUAL_ADDRESS

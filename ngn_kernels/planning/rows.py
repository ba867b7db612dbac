"""Parameters as rows, and rows that share element types as buckets with a table of addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..distributed.dtensors import first_element, local, placed_like, same_placement
from ..formats import (
    QUANT_BLOCK,
    REMAINDER,
    Storage,
    narrow_format,
    noise_key,
    rounding_of,
    scale_key,
)
from ..layout import Column, DType, Rounding
from ..rules import Rule
from ..spectral import Spectral
from .checks import check_gradient, has_memory, is_dense
from .signature import EMPTY_ADDRESS, UNUSUAL_ADDRESS, SignatureRow
from .state import STATE_KEYS, keys_of, same_order, stored_dtype


def real_view(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Participant(NamedTuple):
    """A parameter that has a gradient, or has had one and keeps its row, so that plans stay."""

    param: Tensor
    group: int
    label: str
    replicas: int  # how many ranks hold the same elements
    rule: Rule
    parameter_index: int = 0  # among all parameters of the optimizer
    spectral: Spectral | None = None  # how its directions are made, where the rule has given ones


class BucketKey(NamedTuple):
    """What the rows of a bucket share: a device, and the element type of each column.

    The type of m and v names their format, too.
    """

    device: torch.device
    param: torch.dtype
    grad: torch.dtype
    m: torch.dtype
    v: torch.dtype
    rounding: str = "nearest"  # of the parameters
    directed: bool = False  # whether their rule has given directions

    @property
    def compute_dtype(self) -> torch.dtype:
        wide = torch.float64 in (self.param, self.grad, self.m, self.v) and not self.narrow
        return torch.float64 if wide else torch.float32

    @property
    def narrow(self) -> bool:
        """Whether storing takes more than a cast to nearest; all is then computed in float32."""
        columns = zip(STATE_KEYS, (self.m, self.v), strict=True)
        quantised = any(narrow_format(key, dtype) is not None for key, dtype in columns)
        return quantised or self.rounding != "nearest"

    def codes(self) -> dict[str, int]:
        """Its types and rounding by their numbers, for C++ and CUDA."""
        types = zip("xgmv", (self.param, self.grad, self.m, self.v), strict=True)
        codes = {f"{c}_type": DType[str(t).removeprefix("torch.").upper()] for c, t in types}
        return {**codes, "rounding": Rounding[self.rounding.upper()]}

    @classmethod
    def of(
        cls,
        param: Tensor,
        state: dict[str, Any],
        storage: Storage = Storage(),  # noqa: B008
        directed: bool = False,
    ) -> BucketKey:
        """Of a parameter whose gradient and state may not be there yet."""
        grad = param.dtype if param.grad is None else param.grad.dtype
        m, v = (stored_dtype(param, key, state, storage) for key in STATE_KEYS)
        x, g, m, v = (t.to_real() if t.is_complex else t for t in (param.dtype, grad, m, v))
        return cls(param.device, x, g, m, v, rounding_of(param.dtype, storage.rounding), directed)


class Row:
    """One parameter that takes part: its state, and the memory that a kernel may touch for it."""

    def __init__(self, of: Participant, state: dict[str, Any], key: BucketKey) -> None:
        self.param, self.group, self.label, self.replicas, self.rule, *_ = of
        self.parameter_index, self.spectral = of.parameter_index, of.spectral
        self.noise_key = noise_key(self.parameter_index)
        self.offset = first_element(self.param)
        self.state = state
        self.local = local(self.param)
        # A parameter with gaps in memory is worked on in a dense copy and written back.
        self.copy = (
            None
            if is_dense(self.local)
            else torch.empty_like(
                self.local, memory_format=torch.contiguous_format, requires_grad=False
            )
        )
        rule = self.rule
        self.m = real_view(local(state["momentum_buffer"])) if rule.momentum else None
        self.v = real_view(local(state["exp_avg_sq"])) if rule.rms else None
        # Written anew in each step.
        self.direction = (
            torch.zeros_like(self.x, dtype=key.compute_dtype) if rule.directed else None
        )
        self.m_scale, self.v_scale = (state.get(scale_key(key)) for key in STATE_KEYS)
        self.remainder = local(state[REMAINDER]) if REMAINDER in state else None
        self.step: Tensor = state["step"]
        # A copy of a gradient whose memory order is another one.
        self.relaid: Tensor | None = None

    @property
    def dense(self) -> Tensor:
        return self.local if self.copy is None else self.copy

    @property
    def x(self) -> Tensor:
        """A new view each time: one that is kept would keep memory that the parameter has left."""
        return real_view(self.dense.detach())

    def gradient(self, grad: Tensor | None) -> Tensor | None:
        """This step's gradient as reals, in the memory order of `x`."""
        if grad is not None:
            grad = local(grad) if self._is_plain(grad) else self.relaid
        return None if grad is None else real_view(grad)

    def lay_out_gradient(self) -> int:
        """Where this step's gradient lies, after copying it if its memory order is another one."""
        grad = self.param.grad
        if grad is None:
            return 0
        if self._is_plain(grad):
            return local(grad).data_ptr() or EMPTY_ADDRESS
        if not same_placement(grad, self.param):
            grad = placed_like(grad, self.param)
        grad = local(grad)
        if self.relaid is None or self.relaid.dtype != grad.dtype:
            with torch.inference_mode(False):  # steps outside of it write here, too
                self.relaid = torch.empty_like(self.dense, dtype=grad.dtype, requires_grad=False)
        self.relaid.copy_(grad)
        return self.relaid.data_ptr() or EMPTY_ADDRESS

    def _is_plain(self, grad: Tensor) -> bool:
        """Whether the gradient's values lie in its memory, in the order of the parameter's."""
        if not same_placement(grad, self.param):
            return False
        grad = local(grad)
        lazy = grad.is_conj() or grad.is_neg() or grad._is_zerotensor()
        return same_order(grad, self.dense) and not lazy and has_memory(grad)


class Bucket:
    """Rows on one device with one set of element types: one launch of each kind serves them all."""

    def __init__(
        self, key: BucketKey, rows: list[Row], backend: Any, table: np.ndarray | None = None
    ) -> None:
        self.key = key
        self.rows = rows
        self.backend = backend
        self.rule = rows[0].rule  # of all of them
        self.table = _table_of(rows) if table is None else table

    def with_rows(self, rows: list[Row]) -> Bucket:
        """A bucket with more rows, all in the order of their parameters; gradients are unknown."""
        every = self.rows + rows
        order = np.argsort([row.parameter_index for row in every])
        table = np.ascontiguousarray(np.hstack([self.table, _table_of(rows)])[:, order])
        table[Column.G] = 0
        return Bucket(self.key, [every[i] for i in order], self.backend, table)

    def spans(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where the memory that a step writes begins and ends, in each column of each row."""
        numel, blocks = self.table[Column.NUMEL], -(-self.table[Column.NUMEL] // QUANT_BLOCK)
        sizes = {
            Column.X: numel * self.key.param.itemsize,
            Column.M: numel * self.key.m.itemsize,
            Column.V: numel * self.key.v.itemsize,
            Column.M_SCALE: blocks * 4,
            Column.V_SCALE: blocks * 4,
            Column.REMAINDER: numel * 2,
        }
        return [(self.table[column], self.table[column] + size) for column, size in sizes.items()]

    def signature_rows(self, rows: list[Row]) -> list[SignatureRow]:
        kinds = {
            is_complex: self.key.grad.to_complex() if is_complex else self.key.grad
            for is_complex in {row.param.is_complex() for row in rows}
        }
        samples = {kind: torch.empty(0, dtype=dtype, device="cpu") for kind, dtype in kinds.items()}
        return [
            SignatureRow(
                r.param,
                r.dense,
                r.state,
                ("step", *keys_of(r.rule, r.state)),
                samples[r.param.is_complex()],
            )
            for r in rows
        ]

    def unusual(self) -> list[int]:
        """The rows whose gradients need a closer look."""
        found: list[int] = (self.table[Column.G] == UNUSUAL_ADDRESS).nonzero()[0].tolist()
        return found

    def takes_gradients(self) -> bool:
        """Whether unusual gradients are of this bucket's type; raises if one cannot be used."""
        for i in self.unusual():
            row = self.rows[i]
            check_gradient(row.param, row.label)
            assert row.param.grad is not None
            if local(row.param.grad).dtype.to_real() != self.key.grad:
                return False
        return True

    def lay_out_gradients(self) -> None:
        """Bring unusual gradients into shape; other ranks take part where they are placed otherwise."""
        for i in self.unusual():
            self.table[Column.G, i] = self.rows[i].lay_out_gradient()

    def active_params(self) -> list[Tensor]:
        """The parameters that have a gradient in this step."""
        return [self.rows[i].param for i in self.table[Column.G].nonzero()[0]]

    def chunks(self, size: int) -> np.ndarray:
        """Rows cut into chunks of `size` elements: (row, first element), in row order."""
        counts = -(-self.table[Column.NUMEL] // size)
        rows = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        return np.stack([rows, (np.arange(len(rows)) - first) * size], axis=1)


def _table_of(rows: list[Row]) -> np.ndarray:
    """Addresses and sizes, but for the gradients."""
    table = np.zeros((len(Column), len(rows)), dtype=np.int64)
    for column, values in {
        Column.X: [row.x.data_ptr() for row in rows],
        Column.M: [_address(row.m) for row in rows],
        Column.V: [_address(row.v) for row in rows],
        Column.M_SCALE: [_address(row.m_scale) for row in rows],
        Column.V_SCALE: [_address(row.v_scale) for row in rows],
        Column.REMAINDER: [_address(row.remainder) for row in rows],
        Column.NOISE_KEY: [row.noise_key for row in rows],
        Column.OFFSET: [row.offset for row in rows],
        Column.D: [_address(row.direction) for row in rows],
        Column.STEP: [row.step.data_ptr() for row in rows],
        Column.NUMEL: [row.x.numel() for row in rows],
        Column.GROUP: [row.group for row in rows],
        Column.REPLICAS: [row.replicas for row in rows],
    }.items():
        table[column] = values
    return table


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

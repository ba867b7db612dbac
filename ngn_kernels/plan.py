"""Tensors to tables: which rows share a bucket, where their memory lies, what moves between steps.

A plan is built once and kept while nothing but gradients moves. It knows no math.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .checks import check_gradient, is_dense
from .rules import Reason, Rule
from .state import STATE_KEYS, same_order

# Columns of a bucket's table, the order of TensorRow in csrc/tables.h.
X, G, M, V, STEP, NUMEL, GROUP = range(7)
# Entries of Board.scalars and Board.report: StepScalars and Report in csrc/tables.h.
HEIGHT, GRAD_SCALE, FOUND_INF, MAX_GRAD_NORM, SHRINK = range(5)
REASON, SKIPPED, LAST_REASON = range(3)


class Hyper(NamedTuple):
    """One group's values, in the order of Group in csrc/tables.h; lr may be a tensor on a GPU."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def real_view(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Board:
    """The numbers of a step that all buckets of one device read, and what the step reports back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Metal has no float64.
        self.wide = torch.float32 if device.type == "mps" else torch.float64
        self.scalars = torch.zeros(5, dtype=self.wide, device=device)
        self.report = torch.zeros(3, dtype=torch.int64, device=device)
        self.groups = torch.zeros(0, 5, dtype=self.wide, device=device)
        self.on_host = device.type == "cpu"
        self._host_scalars = self.scalars.numpy() if self.on_host else None
        self._known: dict[int, float] = {}
        self._hypers: list[Hyper] | None = None
        self._seen = 0
        self._in_flight: tuple[Tensor, torch.cuda.Event] | None = None

    def set(self, index: int, value: float | Tensor) -> None:
        """Write one scalar without waiting for the device."""
        if isinstance(value, Tensor):
            if not self.on_host:
                self._known.pop(index, None)
                self.scalars[index].copy_(value, non_blocking=True)
                return
            value = float(value)
        if self._host_scalars is not None:
            self._host_scalars[index] = value
        elif self._known.get(index) != value:
            self.scalars[index] = value
            self._known[index] = value

    def set_groups(self, hypers: list[Hyper]) -> None:
        """Write the groups' values; an lr that lives on the device is copied there, never read."""
        device_lrs = [(i, h.lr) for i, h in enumerate(hypers) if isinstance(h.lr, Tensor)]
        known = [h._replace(lr=0.0) if isinstance(h.lr, Tensor) else h for h in hypers]
        if known != self._hypers:
            table = torch.tensor(known, dtype=self.wide)
            if len(hypers) != len(self.groups):
                self.groups = torch.zeros(len(hypers), 5, dtype=self.wide, device=self.device)
            self.groups.copy_(table, non_blocking=True)
            self._hypers = known
        for i, lr in device_lrs:
            self.groups[i, 0].copy_(lr.detach().reshape(()), non_blocking=True)

    def news(self) -> Reason:
        """The reason of a skipped step not yet told; from a GPU it arrives some steps late."""
        if self.on_host:
            return self._read(self.report)
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return Reason.NONE
        if self._in_flight is not None and not self._in_flight[1].query():
            return Reason.NONE
        reason = Reason.NONE if self._in_flight is None else self._read(self._in_flight[0])
        host = torch.empty(3, dtype=torch.int64, pin_memory=True)
        host.copy_(self.report, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._in_flight = (host, event)
        return reason

    def _read(self, report: Tensor) -> Reason:
        _, skipped, last_reason = report.tolist()
        if skipped == self._seen:
            return Reason.NONE
        self._seen = skipped
        return Reason(last_reason)


class Row:
    """One parameter that takes part: its state, and the memory that a kernel may touch for it."""

    def __init__(
        self, param: Tensor, group: int, label: str, state: dict[str, Any], rule: Rule
    ) -> None:
        self.param = param
        self.group = group
        self.label = label
        self.state = state
        # A parameter with gaps in memory is worked on in a dense copy and written back.
        self.copy = (
            None
            if is_dense(param)
            else torch.empty_like(param, memory_format=torch.contiguous_format, requires_grad=False)
        )
        self.x = real_view(param.detach() if self.copy is None else self.copy)
        self.m = real_view(state["momentum_buffer"]) if rule.momentum else None
        self.v = real_view(state["exp_avg_sq"]) if rule.rms else None
        self.step: Tensor = state["step"]
        # A gradient whose memory order is another one is copied here.
        self.relaid: Tensor | None = None
        self.relaid_in_use = False

    @property
    def dense(self) -> Tensor:
        return self.param if self.copy is None else self.copy

    def gradient(self) -> Tensor | None:
        """This step's gradient as reals, in the memory order of `x`."""
        grad = self.param.grad
        if grad is None:
            return None
        return (
            real_view(self.relaid)
            if self.relaid_in_use and self.relaid is not None
            else real_view(grad)
        )

    def grad_pointer(self) -> int:
        """Where this step's gradient lies, after copying it if its memory order is another one."""
        grad = self.param.grad
        self.relaid_in_use = False
        if grad is None:
            return 0
        check_gradient(grad, self.label)
        if same_order(grad, self.dense) and not grad.is_conj() and not grad.is_neg():
            return grad.data_ptr()
        if self.relaid is None or self.relaid.dtype != grad.dtype:
            self.relaid = torch.empty_like(self.dense, dtype=grad.dtype, requires_grad=False)
        self.relaid.copy_(grad)
        self.relaid_in_use = True
        return self.relaid.data_ptr()


class BucketKey(NamedTuple):
    device: torch.device
    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype


class Bucket:
    """Rows on one device with one set of element types: one launch of each kind serves them all."""

    def __init__(self, key: BucketKey, rows: list[Row], backend: Any) -> None:
        self.key = key
        self.rows = rows
        self.backend = backend
        self.index = 0
        self.board: Board
        self.sums: Tensor  # of all buckets, on this bucket's device
        self.prepared: Any = None
        self.moved = True  # whether gradients have moved since the last step
        self.table = np.zeros((7, len(rows)), dtype=np.int64)
        self.table[X] = [row.x.data_ptr() for row in rows]
        self.table[M] = [0 if row.m is None else row.m.data_ptr() for row in rows]
        self.table[V] = [0 if row.v is None else row.v.data_ptr() for row in rows]
        self.table[STEP] = [row.step.data_ptr() for row in rows]
        self.table[NUMEL] = [row.x.numel() for row in rows]
        self.table[GROUP] = [row.group for row in rows]
        self._params = [row.param for row in rows]
        self._states = [row.state for row in rows]
        # One flat list of all that is looked at each step: a comparison of lists costs little.
        self._expected = self._look()
        self._grad_strides: list[tuple[int, ...] | None] = [None] * len(rows)
        self._grad_dtypes = [_kinds(key.grad, row.param) for row in rows]
        self._pointers: list[int] = []

    def _look(self) -> list[Any]:
        params, states = self._params, self._states
        seen: list[Any] = [p.data_ptr() for p in params]
        seen += [p.stride() for p in params]
        seen += [p.dtype for p in params]
        seen += [s["step"].data_ptr() for s in states]
        for key, column in zip(STATE_KEYS, (M, V), strict=True):
            if self.table[column, 0]:
                seen += [s[key].data_ptr() for s in states]
        return seen

    def is_current(self, state: dict[Tensor, Any]) -> bool:
        """Whether parameters and state still lie where the table says."""
        try:
            same = all(state[p] is s for p, s in zip(self._params, self._states, strict=True))
            return same and self._look() == self._expected
        except KeyError:
            return False

    def refresh(self) -> bool:
        """Point the table at this step's gradients; False if one has changed its element type."""
        try:
            grads: list[Any] = [p.grad for p in self._params]
            strides = [g.stride() for g in grads]
            dtypes = [g.dtype for g in grads]
            pointers = [g.data_ptr() for g in grads]
        except (AttributeError, RuntimeError):  # None, sparse, or no data pointer: look one by one
            strides = []
        if strides != self._grad_strides or dtypes != self._grad_dtypes:
            if not self._refresh_slowly():
                return False
            pointers = [row.grad_pointer() for row in self.rows]
        self.moved = pointers != self._pointers
        if self.moved:
            self.table[G] = pointers
            self._pointers = pointers
        return True

    def _refresh_slowly(self) -> bool:
        for i, row in enumerate(self.rows):
            grad = row.param.grad
            if grad is None:
                continue
            check_gradient(grad, row.label)
            if grad.dtype != self._grad_dtypes[i]:
                return False
            # Once seen to be in the parameter's order, these strides are expected from now on.
            plain = same_order(grad, row.dense) and not grad.is_conj() and not grad.is_neg()
            self._grad_strides[i] = grad.stride() if plain else None
        return True

    def chunks(self, size: int) -> np.ndarray:
        """Rows cut into chunks of `size` elements: (row, first element), in row order."""
        counts = -(-self.table[NUMEL] // size)
        rows = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        return np.stack([rows, (np.arange(len(rows)) - first) * size], axis=1)


def _kinds(grad: torch.dtype, param: Tensor) -> torch.dtype:
    return grad.to_complex() if param.is_complex() else grad


class Plan:
    """All buckets of a step, in the order of their first parameter."""

    def __init__(
        self, buckets: Sequence[Bucket], boards: dict[torch.device, Board], rule: Rule
    ) -> None:
        self.buckets = list(buckets)
        self.rule = rule
        self.boards = [boards[d] for d in dict.fromkeys(b.key.device for b in self.buckets)]
        sums = {
            board.device: torch.zeros(len(self.buckets), 3, dtype=board.wide, device=board.device)
            for board in self.boards
        }
        self.sums = list(sums.values())
        self._copies = [row for b in self.buckets for row in b.rows if row.copy is not None]
        for index, bucket in enumerate(self.buckets):
            bucket.index = index
            bucket.board = boards[bucket.key.device]
            bucket.sums = sums[bucket.key.device]

    @property
    def home(self) -> Board:
        """The board that telemetry is read from, and the last to be applied."""
        return self.boards[0]

    def is_current(self, state: dict[Tensor, Any]) -> bool:
        return all(bucket.is_current(state) for bucket in self.buckets)

    def refresh(self) -> bool:
        if not all(bucket.refresh() for bucket in self.buckets):
            return False
        for row in self._copies:
            assert row.copy is not None
            row.copy.copy_(row.param)
        return True

    def write_back(self) -> None:
        for row in self._copies:
            assert row.copy is not None
            row.param.copy_(row.copy)

    def share_sums(self) -> None:
        """Bring every bucket's sums to every device, asynchronously."""
        for target in self.sums:
            for bucket in self.buckets:
                if bucket.sums is not target:
                    target[bucket.index].copy_(bucket.sums[bucket.index], non_blocking=True)

    def share_reason(self) -> None:
        """Bring the other devices' reports home, where the step is counted once."""
        home = self.home.report[REASON]
        for board in self.boards[1:]:
            torch.maximum(home, board.report[REASON].to(home.device, non_blocking=True), out=home)
            board.report[REASON].zero_()

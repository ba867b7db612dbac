"""Tensors to tables: which rows share a bucket, where their memory lies, what moves between steps.

A plan is built once and kept while nothing but gradients moves. It knows no math.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .checks import check_gradient, is_dense
from .rules import Reason, Rule
from .scan import EMPTY, ODD, SAME, STALE, Scan, make_scan, same_items, same_values
from .state import STATE_KEYS, same_order
from .transfer import Numbers, is_capturing, numbers_of

# Columns of a bucket's table, the order of TensorRow in csrc/tables.h.
X, G, M, V, STEP, NUMEL, GROUP = range(7)
# Entries of Board.scalars and Board.report: StepScalars and Report in csrc/tables.h.
HEIGHT, GRAD_SCALE, FOUND_INF, MAX_GRAD_NORM, SHRINK = range(5)
REASON, SKIPPED, LAST_REASON = range(3)


class Hyper(NamedTuple):
    """One group's values, in the order of Group in csrc/tables.h."""

    lr: float
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
        self._scalars = numbers_of(self.scalars.narrow(0, 0, SHRINK))
        self._scalar_slots = self.scalars.unbind()
        self._host_report = self.report.numpy().data if device.type == "cpu" else None
        # Numbers of other tensors on a device, which are never read.
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._seen = 0
        self._in_flight: tuple[Tensor, torch.cuda.Event] | None = None
        self._lay_out(0)

    def _lay_out(self, groups: int) -> None:
        self.groups = torch.zeros(groups, 5, dtype=self.wide, device=self.device)
        self._groups = numbers_of(self.groups)
        self._lr_slots = self.groups.select(1, 0).unbind()
        self._hypers: list[Hyper] | None = None

    def make_room(self, groups: int) -> None:
        if len(self.groups) != groups:
            self._lay_out(groups)

    def set(self, index: int, value: float | Tensor) -> None:
        """Write one scalar; the device has it after `send`."""
        if isinstance(value, Tensor):
            value = self._number(value, self._scalar_slots[index])
        self._scalars.values[index] = value

    def set_groups(self, hypers: list[Hyper], device_lrs: dict[int, Tensor]) -> None:
        """Write the groups' values; an lr that lives on a device is copied, never read."""
        if hypers != self._hypers:
            self._groups.values[:] = hypers
            for index, lr in device_lrs.items():
                self._groups.values[index, 0] = self._number(lr, self._lr_slots[index])
            self._hypers = None if device_lrs else hypers

    def _number(self, value: Tensor, slot: Tensor) -> float:
        """A tensor's number if it is on the host, or else NaN until `send` copies it over."""
        if self._host_report is not None or value.device.type == "cpu":
            return float(value)
        self._copies.append((slot, value.detach().reshape(())))
        return math.nan

    def send(self) -> None:
        """Bring what was written to the device, without waiting for it."""
        self._scalars.send()
        self._groups.send()
        if self._copies:
            slots, values = zip(*self._copies, strict=True)
            torch._foreach_copy_(slots, values, non_blocking=True)
            self._copies.clear()

    def news(self) -> Reason:
        """The reason of a skipped step not yet told; from a GPU it arrives some steps late."""
        if self._host_report is not None:
            return self._read(self._host_report)
        if self.device.type != "cuda" or is_capturing(self.device):
            return Reason.NONE
        if self._in_flight is None:
            host = torch.zeros(3, dtype=torch.int64, pin_memory=True)
            self._in_flight = (host, torch.cuda.Event())
        host, event = self._in_flight
        if not event.query():
            return Reason.NONE
        reason = self._read(host.tolist())
        host.copy_(self.report, non_blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return reason

    def _read(self, report: memoryview | list[int]) -> Reason:
        if report[SKIPPED] == self._seen:
            return Reason.NONE
        self._seen = report[SKIPPED]
        return Reason(report[LAST_REASON])


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

    @property
    def dense(self) -> Tensor:
        return self.param if self.copy is None else self.copy

    def gradient(self) -> Tensor | None:
        """This step's gradient as reals, in the memory order of `x`."""
        grad = self.param.grad
        if grad is None:
            return None
        if not self._is_plain(grad) and self.relaid is not None:
            grad = self.relaid
        return real_view(grad)

    def grad_pointer(self) -> int:
        """Where this step's gradient lies, after copying it if its memory order is another one."""
        grad = self.param.grad
        if grad is None:
            return 0
        check_gradient(grad, self.param.device, self.label)
        if self._is_plain(grad):
            return grad.data_ptr() or EMPTY
        if self.relaid is None or self.relaid.dtype != grad.dtype:
            self.relaid = torch.empty_like(self.dense, dtype=grad.dtype, requires_grad=False)
        self.relaid.copy_(grad)
        return self.relaid.data_ptr() or EMPTY

    def _is_plain(self, grad: Tensor) -> bool:
        """Whether the gradient's values lie in its memory, in the order of the parameter's."""
        lazy = grad.is_conj() or grad.is_neg() or grad._is_zerotensor()
        return same_order(grad, self.dense) and not lazy


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
        self._params = [row.param for row in rows]
        self.active: list[Tensor] = []  # the parameters that have a gradient in this step
        self.table = np.zeros((7, len(rows)), dtype=np.int64)
        self.gradients: Numbers | None = None  # column G of a backend's copy of the table
        self.table[X] = [row.x.data_ptr() for row in rows]
        self.table[M] = [0 if row.m is None else row.m.data_ptr() for row in rows]
        self.table[V] = [0 if row.v is None else row.v.data_ptr() for row in rows]
        self.table[STEP] = [row.step.data_ptr() for row in rows]
        self.table[NUMEL] = [row.x.numel() for row in rows]
        self.table[GROUP] = [row.group for row in rows]
        self._grad_pointers = self.table[G]
        self._scan: Scan | None = None

    @property
    def scan(self) -> Scan:
        if self._scan is None:
            first = self.rows[0]
            keys = [k for k, t in zip(STATE_KEYS, (first.m, first.v), strict=True) if t is not None]
            self._scan = make_scan(
                self._params,
                [row.dense for row in self.rows],
                [row.state for row in self.rows],
                ("step", *keys),
                self.key.grad,
            )
        return self._scan

    def refresh(self) -> bool:
        """Point the table at this step's gradients; False if a new plan is needed."""
        seen = self.scan.refresh(self._grad_pointers)
        if seen == STALE:
            return False
        if seen == ODD:
            for row in self.rows:
                grad = row.param.grad
                if grad is not None and grad.dtype.to_real() != self.key.grad:
                    return False
            self._grad_pointers[:] = [row.grad_pointer() for row in self.rows]
        if seen != SAME:
            active = self._grad_pointers.nonzero()[0]
            everyone = len(active) == len(self._params)
            self.active = self._params if everyone else [self._params[i] for i in active]
        if self.gradients is not None:
            self.gradients.send()
        return True

    def chunks(self, size: int) -> np.ndarray:
        """Rows cut into chunks of `size` elements: (row, first element), in row order."""
        counts = -(-self.table[NUMEL] // size)
        rows = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        return np.stack([rows, (np.arange(len(rows)) - first) * size], axis=1)


class Plan:
    """All buckets of a step, in the order of their first parameter."""

    def __init__(
        self,
        buckets: list[Bucket],
        boards: dict[torch.device, Board],
        rule: Rule,
        reductions: tuple[Rule, ...],
        params: list[Tensor],
        states: list[dict[str, Any]],
    ) -> None:
        self.buckets = buckets
        self.rule = rule
        self.reductions = reductions
        self._params = params
        self._states = states
        rows = {id(row.param) for bucket in buckets for row in bucket.rows}
        self._idle = [param for param in params if id(param) not in rows]
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

    def is_of(
        self,
        rule: Rule,
        reductions: tuple[Rule, ...],
        params: list[Tensor],
        state: dict[Tensor, Any],
    ) -> bool:
        """Whether this is still a plan of these parameters and this state."""
        return (
            rule is self.rule
            and reductions is self.reductions
            and same_items(params, self._params)
            and same_values(state, self._states)
            and all(param.grad is None for param in self._idle)
        )

    def refresh(self) -> bool:
        for bucket in self.buckets:
            if not bucket.refresh():
                return False
        for row in self._copies:
            assert row.copy is not None
            row.copy.copy_(row.param)
        return True

    def finish(self) -> None:
        """Tell autograd of what a kernel wrote behind its back, and write copies back."""
        for bucket in self.buckets:
            if bucket.backend.name != "reference":
                increment_version(bucket.active)
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

"""The tables of a step: its inputs and its report, on each device. layout.py has their columns."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import Count, GroupColumn, Input, Reason, Size
from .transfer import is_capturing, numbers_of


class GroupValues(NamedTuple):
    """One row of the table of groups, in the order of GroupColumn."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step_cap: float = 0.0  # 0: none


def float_type(device: torch.device) -> torch.dtype:
    """What sums and step sizes are kept in: Metal has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def array_of(tensor: Tensor) -> Any:
    """A tensor for arithmetic on a few numbers: on the host numpy takes a fraction of the time."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


class StepOptions(NamedTuple):
    """The options of an optimizer that every step reads."""

    loss_floor: float
    loss_target: float
    max_grad_norm: float | None


NO_AMP = (None, None)


class Inputs:
    """What a step reads, on one device: a few scalars, and each group's values."""

    def __init__(self, device: torch.device, groups: int, alone: bool) -> None:
        dtype = float_type(device)
        # This rank's, and those of all ranks, which kernels read.
        self.own = torch.zeros(len(Input), dtype=dtype, device=device)
        self.scalars = self.own if alone else torch.zeros_like(self.own)
        self.groups = torch.zeros(groups, len(GroupColumn), dtype=dtype, device=device)
        self.own_array, self.array = array_of(self.own), array_of(self.scalars)
        self._scalars = numbers_of(self.own)
        self._groups = numbers_of(self.groups)
        self._scalar_slots = self.own.unbind()
        self._lr_slots = self.groups.select(1, GroupColumn.LR).unbind()
        self._on_host = device.type == "cpu"
        self._values: list[GroupValues] | None = None
        self._options: StepOptions | None = None  # that were written without AMP
        # Numbers of tensors on a device, which are never read.
        self._copies: list[tuple[Tensor, Tensor]] = []

    def set(
        self,
        loss: float | Tensor,
        options: StepOptions,
        amp: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Write this rank's scalars; the device has them after `send`.

        Args:
            loss: the loss of the step.
            options: the optimizer's.
            amp: grad_scale and found_inf, as a GradScaler leaves them with the optimizer.
        """
        values = self._scalars.values
        if options != self._options or amp != NO_AMP:
            grad_scale, found_inf = amp
            norm = options.max_grad_norm
            values[Input.LOSS_FLOOR] = options.loss_floor
            values[Input.AIM] = 1.0 - options.loss_target
            values[Input.MAX_GRAD_NORM] = math.inf if norm is None else norm
            values[Input.GRAD_SCALE] = self._number(
                1.0 if grad_scale is None else grad_scale, Input.GRAD_SCALE
            )
            values[Input.FOUND_INF] = self._number(
                0.0 if found_inf is None else found_inf, Input.FOUND_INF
            )
            self._options = options if amp == NO_AMP else None
        values[Input.LOSS] = self._number(loss, Input.LOSS)

    def set_groups(self, values: list[GroupValues], device_lrs: dict[int, Tensor]) -> None:
        """Write the groups' values; an lr that lives on a device is copied, never read."""
        if device_lrs or values != self._values:
            self._groups.values[:] = values
            for index, lr in device_lrs.items():
                self._groups.values[index, GroupColumn.LR] = self._copied(lr, self._lr_slots[index])
            self._values = None if device_lrs else values

    def _number(self, value: float | Tensor, field: Input) -> float:
        return (
            self._copied(value, self._scalar_slots[field]) if isinstance(value, Tensor) else value
        )

    def _copied(self, value: Tensor, slot: Tensor) -> float:
        """A tensor's number if it is on the host, or else NaN until `send` copies it over."""
        if self._on_host or value.device.type == "cpu":
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
        if self.scalars is not self.own:
            self.scalars.copy_(self.own)


class Skips(NamedTuple):
    """Skipped steps that the host has just learned of."""

    reason: Reason  # of the last one
    in_a_row: int


class Report:
    """What a step reports, on one device: counts, rho, and gamma of each group."""

    def __init__(self, device: torch.device, groups: int) -> None:
        self.device = device
        self.counts = torch.zeros(len(Count), dtype=torch.int64, device=device)
        self.sizes = self._no_sizes(groups)
        self._host_counts = self.counts.numpy().data if device.type == "cpu" else None
        self._seen = 0  # skipped steps
        self._in_a_row = 0
        self._steps = self._steps_arriving = 0  # since the counts were sent, and before that
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None

    def _no_sizes(self, groups: int) -> Tensor:
        """NaN, until a step is applied."""
        dtype = float_type(self.device)
        return torch.full((Size.STEP_SIZES + groups,), math.nan, dtype=dtype, device=self.device)

    def resize(self, groups: int) -> None:
        """Give every group a step size, and keep those of the groups that stay."""
        known, self.sizes = self.sizes, self._no_sizes(groups)
        shared = min(len(known), len(self.sizes))
        self.sizes.narrow(0, 0, shared).copy_(known.narrow(0, 0, shared))

    def poll_skips(self) -> Skips | None:
        """After each step: what is new, if anything; from a GPU it comes some steps late."""
        if self._host_counts is not None:
            return self._read_counts(self._host_counts, 1)
        if self.device.type != "cuda":
            return self._read_counts(self.counts.tolist(), 1)
        if is_capturing(self.device):
            return None
        self._steps += 1
        if self._arriving is None:
            host = torch.zeros(len(Count), dtype=torch.int64, device="cpu", pin_memory=True)
            self._arriving = (host, torch.cuda.Event())
        host, event = self._arriving
        if not event.query():
            return None
        skips = self._read_counts(host.tolist(), self._steps_arriving)
        host.copy_(self.counts, non_blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        self._steps_arriving, self._steps = self._steps, 0
        return skips

    def end_row_of_skips(self) -> None:
        """Count skipped steps in a row from 0, as after another run was loaded."""
        self._in_a_row = 0

    def _read_counts(self, counts: memoryview | list[int], steps: int) -> Skips | None:
        """The skipped steps among the last `steps`, from the counts after them."""
        skipped = counts[Count.SKIPPED] - self._seen
        if skipped < steps:  # some step was applied, perhaps the last
            self._in_a_row = 0
        if not skipped:
            return None
        self._seen += skipped
        # More where a captured step was replayed, and nobody knows their order.
        if skipped == steps:
            self._in_a_row += steps
        return Skips(Reason(counts[Count.LAST_REASON]), self._in_a_row)


class DeviceTables:
    """A step's inputs and its report, on one device."""

    def __init__(self, device: torch.device, groups: int, alone: bool) -> None:
        self.device = device
        self.alone = alone  # whether a step is of this process only
        self.inputs = Inputs(device, groups, alone)
        self.report = Report(device, groups)

    def fit(self, groups: int, alone: bool) -> None:
        if (len(self.inputs.groups), self.alone) != (groups, alone):
            self.alone = alone
            self.inputs = Inputs(self.device, groups, alone)
            self.report.resize(groups)

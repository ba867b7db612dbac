"""Plans: the buckets of a step and all that is kept between steps. They know no math.

A plan is built once and kept while nothing but gradients moves; its signature decides that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..distributed.dtensors import is_sharded, local, same_placement
from ..distributed.owners import has_split_matrices
from ..formats import REMAINDER, Storage
from ..layout import Column, Count, Sum
from ..rules import Rule
from ..spectral import check_matrix
from ..step_size import report_step
from .checks import check_overlap, check_param, is_dense, span_of
from .directions import Directions
from .rows import Bucket, BucketKey, Participant, Row
from .signature import GROWN, MOVED, SAME, STALE, UNUSUAL, Signature, make_signature
from .state import (
    STATE_KEYS,
    check_rounding,
    check_state,
    check_storage,
    init_state,
    keys_of,
    storage_of,
)
from .tables import DeviceTables, Inputs, Report, array_of, float_type


class Memory(NamedTuple):
    """What the passes over a bucket read and write besides its rows."""

    inputs: Inputs
    report: Report
    sums: Tensor  # of this process: reduce writes the row of the bucket
    totals: Tensor  # of all ranks, which add up to a step's; of a process alone the same memory
    bucket_index: int
    gradients: Callable[[], list[Tensor | None]]  # this step's, as reals in the memory order of x


class PreparedBucket(Protocol):
    """The passes of a step over one bucket. None returns anything to Python or waits for the device."""

    def load_gradients(self) -> None:
        """The bucket's table has the addresses of this step's gradients."""

    def reduce(self, index: int) -> None:
        """Write the bucket's row of the sums for one of the plan's rounds, and nothing else."""

    def compute(self) -> None:
        """Do what may run out of memory, before any bucket is applied."""

    def apply(self, last: bool) -> None:
        """From the totals of all buckets, update parameters, state and report in place.

        The last bucket's apply counts the step if any bucket had a reason to skip.
        """

    def finish(self, params: list[Tensor]) -> None:
        """Tell autograd that these parameters were written, unless it knows."""


class Backend(Protocol):
    """An engine."""

    name: str

    def unfit(self, key: BucketKey) -> str | None:
        """Why this backend does not take such types of tensors and devices, or None."""

    def refusal(self, device: torch.device) -> str | None:
        """Why this device, of a type that the backend takes, cannot run it now, or None."""

    def prepare(
        self, bucket: Bucket, memory: Memory, rule: Rule, rounds: tuple[Rule | None, ...]
    ) -> PreparedBucket:
        """Build what stays the same while the plan does: tables, launches."""


class Plan:
    """All buckets of a step; those of one device are neighbours, the home device's come first."""

    rows: list[Row]  # in the order of the signature's

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, Any],
        rule: Rule,
        clipping: bool,
        buckets: list[Bucket],
        devices: list[DeviceTables],
        process_group: Any,
        known: Plan | None = None,
    ) -> None:
        """`known` is a plan that has grown, which has all rows but the new ones."""
        self.rule, self.clipping = rule, clipping
        self.computes_norm = clipping or not (rule.coordinate or rule.rms)
        # What is summed before each exchange of the ranks; None: they exchange their losses alone.
        self.rounds: tuple[Rule | None, ...] = rule.reductions(clipping)
        if not self.rounds and process_group is not None:
            self.rounds = (None,)
        self.buckets = buckets
        self.devices = devices
        # A group that was destroyed is not kept.
        self._process_group = None if process_group is None else weakref.ref(process_group)
        # Rows with gaps in memory, and where their gradients' addresses are.
        self._gapped = [
            (row, bucket.table[Column.G, i : i + 1])
            for bucket in buckets
            for i, row in enumerate(bucket.rows)
            if row.copy is not None
        ]
        self.has_grown = False
        self._seen: int = STALE
        self._active = [bucket.active_params() for bucket in buckets]
        self.sums = [
            torch.zeros(max(1, len(buckets)), len(Sum), dtype=float_type(d.device), device=d.device)
            for d in devices
        ]
        alone = process_group is None
        self.totals = self.sums if alone else [torch.zeros_like(s) for s in self.sums]
        self.home_sums, self.home_totals = array_of(self.sums[0]), array_of(self.totals[0])

        known_rows: list[Row] = [] if known is None else known.rows
        old = set(map(id, known_rows))
        new = [(bucket, [r for r in bucket.rows if id(r) not in old]) for bucket in buckets]
        self.rows = known_rows + [row for _, rows in new for row in rows]
        self._sharded = any(is_sharded(row.param) for row in self.rows)
        self.has_split_matrices = any(
            has_split_matrices(row.param, row.spectral) for row in self.rows
        )
        added = [row for bucket, rows in new for row in bucket.signature_rows(rows)]
        columns = [bucket.table[Column.G] for bucket in buckets]
        if known is None:
            self.signature = make_signature(groups, state, added, columns)
        else:
            self.signature = known.signature
            in_buckets = _places([row for bucket in buckets for row in bucket.rows])
            places = np.array([in_buckets[id(row)] for row in self.rows], dtype=np.int64)
            self.signature.extend(state, added, columns, places)

        in_signature = _places(self.rows)
        device_index = {d.device: i for i, d in enumerate(devices)}
        self._prepared: list[PreparedBucket] = []
        self._at_home: list[PreparedBucket] = []  # on the home device
        self._elsewhere: list[PreparedBucket] = []
        self._directions: list[Directions] = []
        for index, bucket in enumerate(buckets):
            i = device_index[bucket.key.device]
            indices = [in_signature[id(row)] for row in bucket.rows]
            # Not a method of the plan: it would keep itself, and its tensors, until a collection.
            gradients = partial(_gradients, self.signature, bucket.rows, indices)
            inputs, report = devices[i].inputs, devices[i].report
            memory = Memory(inputs, report, self.sums[i], self.totals[i], index, gradients)
            if bucket.rule.directed:
                self._directions.append(Directions(bucket, gradients, process_group))
            rounds = bucket.rule.reductions(clipping) or self.rounds
            prepared = bucket.backend.prepare(bucket, memory, bucket.rule, rounds)
            self._prepared.append(prepared)
            (self._at_home if i == 0 else self._elsewhere).append(prepared)

    @property
    def params(self) -> set[int]:
        """The ids of those that have a row."""
        return {id(row.param) for row in self.rows}

    @property
    def home(self) -> DeviceTables:
        """The device that telemetry is read from, and the last to be applied."""
        return self.devices[0]

    def is_of(self, process_group: Any) -> bool:
        """Whether the plan was made for the steps of this process group, or of this process alone."""
        if self._process_group is None or process_group is None:
            return self._process_group is process_group
        return self._process_group() is process_group

    # The passes of a step, in their order

    def check(self, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> bool:
        """Find this step's gradients; False if a new plan is needed. No rank waits for another."""
        if self._sharded:
            # Otherwise torch looks for an override of each gradient's attribute.
            with torch._C.DisableTorchFunctionSubclass():
                self._seen = seen = self.signature.check(groups, state)
        else:
            self._seen = seen = self.signature.check(groups, state)
        if seen == STALE:
            return False
        # Also the old rows of a plan that grows: their gradients are checked before state is created.
        fits = seen in (SAME, MOVED) or all([b.takes_gradients() for b in self.buckets])
        self.has_grown = fits and seen == GROWN
        return fits and seen != GROWN

    @property
    def misplaced(self) -> bool:
        """Whether a gradient is spread over ranks otherwise than its parameter."""
        if self._seen not in (UNUSUAL, GROWN) or not self._sharded:
            return False
        rows = [bucket.rows[i] for bucket in self.buckets for i in bucket.unusual()]
        return any(not same_placement(row.param.grad, row.param) for row in rows)

    def load_gradients(self) -> None:
        """Point the tables at the gradients that `check` has found."""
        if self._seen == UNUSUAL:
            for bucket in self.buckets:
                bucket.lay_out_gradients()
        if self._seen != SAME:
            self._active = [bucket.active_params() for bucket in self.buckets]
        for prepared in self._prepared:
            prepared.load_gradients()
        for row, address in self._gapped:
            if address[0] != 0:
                row.dense.copy_(row.local)

    def find_directions(self) -> None:
        """Write the directions of the rows whose rule has given ones."""
        for directions in self._directions:
            directions.write()

    def reduce(self, index: int) -> None:
        """Sum over the rows of every bucket, and bring the sums to where they are read."""
        if self.rounds[index] is None:
            return
        for prepared in self._prepared:
            prepared.reduce(index)
        if len(self.devices) > 1:
            self._share_sums()

    def _share_sums(self) -> None:
        """Of a process alone every device reads them, of several ranks only the home device."""
        by_device = {d.device: sums for d, sums in zip(self.devices, self.sums, strict=True)}
        for target in self.sums if self._process_group is None else self.sums[:1]:
            for index, bucket in enumerate(self.buckets):
                source = by_device[bucket.key.device]
                if source is not target:
                    copy_to(target[index], source[index])

    def apply(self) -> None:
        """Update the rows of every bucket, and count the step on the home device."""
        for prepared in self._prepared:
            prepared.compute()
        for prepared in reversed(self._elsewhere):
            prepared.apply(last=False)
        if self._elsewhere:
            self._share_reasons()
        for prepared in reversed(self._at_home):
            prepared.apply(last=prepared is self._at_home[0])
        if not self._at_home:
            report_step(self.rule, self.totals[0], self.home.inputs, self.home.report)

    def _share_reasons(self) -> None:
        """Copy the other devices' reasons to skip to the home device."""
        home = self.home.report.counts[Count.REASON]
        for other in self.devices[1:]:
            reason = other.report.counts[Count.REASON]
            torch.maximum(home, copy_to(torch.empty_like(home), reason), out=home)
            reason.zero_()

    def finish(self) -> None:
        """Record what was written, write copies back, and drop the references to gradients."""
        for prepared, params in zip(self._prepared, self._active, strict=True):
            prepared.finish(params)
        for row, address in self._gapped:
            if address[0] != 0:  # one without a gradient is left alone
                row.local.copy_(row.dense)
        self.signature.release()


def home_device(groups: list[dict[str, Any]]) -> torch.device:
    """Where a step is counted and ranks exchange their numbers, whatever has a gradient in it."""
    params = [param for group in groups for param in group["params"][:1]]
    if params and not params[0].requires_grad:
        params = [p for group in groups for p in group["params"] if p.requires_grad] or params
    return params[0].device if params else torch.device("cpu")


def _places(rows: list[Row]) -> dict[int, int]:
    return {id(row): i for i, row in enumerate(rows)}


def _gradients(signature: Signature, rows: list[Row], indices: list[int]) -> list[Tensor | None]:
    """This step's gradients of these rows, of which the signature keeps references."""
    kept = signature.gradients()
    return [row.gradient(kept[i]) for row, i in zip(rows, indices, strict=True)]


def copy_to(target: Tensor, source: Tensor) -> Tensor:
    """Without waiting, but for the host, which reads what has arrived."""
    return target.copy_(source, non_blocking=target.device.type != "cpu")


class Draft(NamedTuple):
    """What a plan will be made of. Everything is checked, nothing has changed yet."""

    participants: list[Participant]  # all of them, or those that join a known plan
    keys: list[BucketKey]  # one for each participant
    backends: dict[BucketKey, Backend]
    storage: Storage
    misplaced: bool  # whether tensors will move between ranks: matrices, or those spread as no parameter is
    known: Plan | None = None  # a plan that has grown, whose rows stay


def draft_plan(
    state: dict[Tensor, Any],
    participants: list[Participant],
    select_backend: Callable[[BucketKey], Backend],
    storage: Storage,
    known: Plan | None = None,
) -> Draft | None:
    """Check everything that a step will touch. No rank waits for another.

    None where memory is so nested that participants of a known plan must be checked with the others.
    """
    written = []
    misplaced = False
    for participant in participants:
        param, rule, label = participant.param, participant.rule, participant.label
        check_param(param, label)
        if participant.spectral is not None:
            check_matrix(param, participant.spectral, label)
            misplaced |= has_split_matrices(param, participant.spectral)
        check_storage(param, storage_of(rule, storage), label)
        values = state.get(param, {})
        check_state(values, param, rule, label)
        written.append((local(param), label))
        written += [
            (local(values[key]), f"the {key} of {label}")
            for key in keys_of(rule, values)
            if key in values and is_dense(local(values[key]))
        ]
        if is_sharded(param):
            spread = (param.grad, *(values.get(key) for key in (*STATE_KEYS, REMAINDER)))
            misplaced |= any(t is not None and not same_placement(t, param) for t in spread)
    check_overlap(written)
    if known is not None and not apart(known.buckets, written):
        return None
    if known is None:
        check_rounding({p.param.dtype for p in participants}, storage.rounding)
    keys = [
        BucketKey.of(p.param, state.get(p.param, {}), storage_of(p.rule, storage), p.rule.directed)
        for p in participants
    ]
    backends = {key: select_backend(key) for key in keys}
    return Draft(participants, keys, backends, storage, misplaced, known)


def apart(buckets: list[Bucket], written: list[tuple[Tensor, str]]) -> bool:
    """Whether no two spans of memory overlap, of all rows and of the tensors to be written."""
    gapped = [row.local for bucket in buckets for row in bucket.rows if row.copy is not None]
    tensors = [t for t in (*(tensor for tensor, _ in written), *gapped) if t.numel()]
    for device in {bucket.key.device for bucket in buckets} | {t.device for t in tensors}:
        spans = [pair for b in buckets if b.key.device == device for pair in b.spans()]
        more = np.array([span_of(t) for t in tensors if t.device == device], dtype=np.int64)
        begin = np.concatenate([*(begin for begin, _ in spans), *more.reshape(-1, 2).T[:1]])
        end = np.concatenate([*(end for _, end in spans), *more.reshape(-1, 2).T[1:]])
        order = np.argsort(begin[begin != 0], kind="stable")
        begin, end = begin[begin != 0][order], end[begin != 0][order]
        if (begin[1:] < np.maximum.accumulate(end)[:-1]).any():
            return False
    return True


def misplaced(plan: Plan | None, draft: Draft | None) -> bool:
    """Whether the step will move tensors between ranks."""
    plans = (plan, None if draft is None else draft.known)
    return any(p.misplaced or p.has_split_matrices for p in plans if p is not None) or (
        draft is not None and draft.misplaced
    )


def create_state(draft: Draft, state: dict[Tensor, Any]) -> None:
    """Create the state that is missing."""
    with torch.inference_mode(False):
        for participant in draft.participants:
            param, rule = participant.param, participant.rule
            storage = storage_of(rule, draft.storage)
            init_state(state[param], param, rule, storage, participant.parameter_index)


def make_plan(
    draft: Draft,
    groups: list[dict[str, Any]],
    state: dict[Tensor, Any],
    rule: Rule,
    clipping: bool,
    tables_of: Callable[[torch.device], DeviceTables],
    process_group: Any,
) -> Plan:
    """Create the state that is missing, and lay out the tables.

    Buckets are in the order of their first parameters, those of one device together.
    """
    rows: dict[BucketKey, list[Row]] = {}
    create_state(draft, state)
    with torch.inference_mode(False):
        for key, participant in zip(draft.keys, draft.participants, strict=True):
            rows.setdefault(key, []).append(Row(participant, state[participant.param], key))
        buckets = {key: Bucket(key, rows[key], draft.backends[key]) for key in rows}
        for bucket in draft.known.buckets if draft.known else ():
            buckets[bucket.key] = bucket.with_rows(rows.get(bucket.key, []))
        in_order = sorted(buckets.values(), key=lambda bucket: bucket.rows[0].parameter_index)
        devices = list(dict.fromkeys([home_device(groups), *(b.key.device for b in in_order)]))
        in_order.sort(key=lambda bucket: devices.index(bucket.key.device))
        tables = [tables_of(device) for device in devices]
        return Plan(groups, state, rule, clipping, in_order, tables, process_group, draft.known)

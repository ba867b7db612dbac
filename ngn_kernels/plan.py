"""Tensors to tables: which rows share a bucket, and where their memory lies. It knows no math.

A plan is built once and kept while nothing but gradients moves; its signature decides that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .checks import (
    check_gradient,
    check_overlap,
    check_param,
    has_memory,
    is_dense,
    span_of,
)
from .distributed.dtensors import first_element, is_sharded, local, placed_like, same_placement
from .formats import (
    QUANT_BLOCK,
    REMAINDER,
    Storage,
    narrow_format,
    noise_key,
    rounding_of,
    scale_key,
)
from .layout import Column, Count, Sum
from .rules import Rule
from .signature import (
    EMPTY_ADDRESS,
    GROWN,
    SAME,
    STALE,
    UNUSUAL,
    UNUSUAL_ADDRESS,
    SignatureRow,
    make_signature,
)
from .state import (
    STATE_KEYS,
    check_rounding,
    check_state,
    check_storage,
    init_state,
    keys_of,
    same_order,
    storage_of,
    stored_dtype,
)
from .step_size import report_step
from .tables import DeviceTables, array_of, float_type
from .transfer import Numbers


def real_view(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Participant(NamedTuple):
    """A parameter that has a gradient, or has had one and keeps its row, so that plans stay."""

    param: Tensor
    group: int
    label: str
    copies: int  # on how many ranks the same elements lie
    number: int = 0  # among all parameters of the optimizer


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

    @property
    def narrow(self) -> bool:
        """Whether storing takes more than a cast to nearest; all is then computed in float32."""
        columns = zip(STATE_KEYS, (self.m, self.v), strict=True)
        coded = any(narrow_format(key, dtype) is not None for key, dtype in columns)
        return coded or self.rounding != "nearest"

    @classmethod
    def of(
        cls,
        param: Tensor,
        state: dict[str, Any],
        storage: Storage = Storage(),  # noqa: B008
    ) -> BucketKey:
        """Of a parameter whose gradient and state may not be there yet."""
        grad = param.dtype if param.grad is None else param.grad.dtype
        m, v = (stored_dtype(param, key, state, storage) for key in STATE_KEYS)
        x, g, m, v = (t.to_real() if t.is_complex else t for t in (param.dtype, grad, m, v))
        return cls(param.device, x, g, m, v, rounding_of(param.dtype, storage.rounding))


class Row:
    """One parameter that takes part: its state, and the memory that a kernel may touch for it."""

    def __init__(self, of: Participant, state: dict[str, Any], rule: Rule) -> None:
        self.param, self.group, self.label, self.copies, self.number = of
        self.noise_key = noise_key(self.number)
        self.first = first_element(self.param)
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
        self.m = real_view(local(state["momentum_buffer"])) if rule.momentum else None
        self.v = real_view(local(state["exp_avg_sq"])) if rule.rms else None
        self.m_scale, self.v_scale = (state.get(scale_key(key)) for key in STATE_KEYS)
        self.remainder = local(state[REMAINDER]) if REMAINDER in state else None
        self.step: Tensor = state["step"]
        # A gradient whose memory order is another one is copied here.
        self.relaid: Tensor | None = None
        self.held: Tensor | None = None  # this step's gradient, for a backend that asks for tensors

    @property
    def dense(self) -> Tensor:
        return self.local if self.copy is None else self.copy

    @property
    def x(self) -> Tensor:
        """Made anew: a view that is kept would keep memory that the parameter has left."""
        return real_view(self.dense.detach())

    def hold_gradient(self) -> None:
        """This step's gradient as reals, in the memory order of `x`, whoever drops it meanwhile."""
        grad = self.param.grad
        if grad is not None:
            grad = local(grad) if self._is_plain(grad) else self.relaid
        self.held = None if grad is None else real_view(grad)

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

    def __init__(self, key: BucketKey, rows: list[Row], backend: Any) -> None:
        self.key = key
        self.rows = rows
        self.backend = backend
        self.index = 0
        self.tables: DeviceTables
        self.sums: Tensor  # of this process, by bucket, on this bucket's device
        self.totals: Tensor  # of all ranks; in a process alone the same memory
        self.prepared: Any = None
        self.drafted: Any = None  # what a backend that drafts will write
        self._params = [row.param for row in rows]
        self.active: list[Tensor] = []  # the parameters that have a gradient in this step
        self.table = np.zeros((len(Column), len(rows)), dtype=np.int64)
        self.gradients: Numbers | None = None  # column G of a backend's copy of the table
        for column, values in {
            Column.X: [row.x.data_ptr() for row in rows],
            Column.M: [_address(row.m) for row in rows],
            Column.V: [_address(row.v) for row in rows],
            Column.M_SCALE: [_address(row.m_scale) for row in rows],
            Column.V_SCALE: [_address(row.v_scale) for row in rows],
            Column.REMAINDER: [_address(row.remainder) for row in rows],
            Column.NOISE_KEY: [row.noise_key for row in rows],
            Column.OFFSET: [row.first for row in rows],
            Column.STEP: [row.step.data_ptr() for row in rows],
            Column.NUMEL: [row.x.numel() for row in rows],
            Column.GROUP: [row.group for row in rows],
            Column.REPLICAS: [row.copies for row in rows],
        }.items():
            self.table[column] = values

    def with_rows(self, rows: list[Row]) -> Bucket:
        """With more rows, all of them in the order of their parameters; gradients are to be looked for."""
        more = Bucket(self.key, rows, self.backend)
        every = self.rows + rows
        order = np.argsort([row.number for row in every])
        more.rows = [every[i] for i in order]
        more._params = [row.param for row in more.rows]
        more.table = np.ascontiguousarray(np.hstack([self.table, more.table])[:, order])
        more.table[Column.G] = 0
        return more

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

    def signature_rows(self, rule: Rule, rows: list[Row]) -> list[SignatureRow]:
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
                ("step", *keys_of(rule, r.state)),
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

    def note_active(self) -> None:
        addresses = self.table[Column.G]
        everyone = np.count_nonzero(addresses) == len(self._params)
        self.active = (
            self._params if everyone else [self._params[i] for i in addresses.nonzero()[0]]
        )

    def chunks(self, size: int) -> np.ndarray:
        """Rows cut into chunks of `size` elements: (row, first element), in row order."""
        counts = -(-self.table[Column.NUMEL] // size)
        rows = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        return np.stack([rows, (np.arange(len(rows)) - first) * size], axis=1)


class Plan:
    """All buckets of a step; those of one device lie together, the home device's first."""

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
        """`known` said GROWN, and has all rows but the new ones."""
        self.rule, self.clipping = rule, clipping
        reductions = rule.reductions(clipping)
        # What is summed before each exchange of the ranks; None: they exchange their losses alone.
        self.rounds = reductions or (() if process_group is None else (None,))
        self.buckets = buckets
        self._drafting = [bucket for bucket in buckets if bucket.backend.takes_tensors]
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
        self._signed: list[Row] = []  # in the order of the signature's rows
        self.sums = [
            torch.zeros(max(1, len(buckets)), len(Sum), dtype=float_type(d.device), device=d.device)
            for d in devices
        ]
        alone = process_group is None
        self.totals = self.sums if alone else [torch.zeros_like(s) for s in self.sums]
        self.home_sums, self.home_totals = array_of(self.sums[0]), array_of(self.totals[0])
        by_device = {
            d.device: (d, s, t) for d, s, t in zip(devices, self.sums, self.totals, strict=True)
        }
        for index, bucket in enumerate(buckets):
            bucket.index = index
            bucket.tables, bucket.sums, bucket.totals = by_device[bucket.key.device]
            bucket.backend.prepare(bucket)
        self._sign(groups, state, known)
        self._at_home = [bucket for bucket in buckets if bucket.tables is self.home]
        self._elsewhere = [bucket for bucket in buckets if bucket.tables is not self.home]

    def _sign(
        self, groups: list[dict[str, Any]], state: dict[Tensor, Any], known: Plan | None
    ) -> None:
        columns = [bucket.table[Column.G] for bucket in self.buckets]
        every = [row for bucket in self.buckets for row in bucket.rows]
        seen = set() if known is None else set(map(id, known._signed))
        new = [(bucket, [r for r in bucket.rows if id(r) not in seen]) for bucket in self.buckets]
        added = [row for bucket, rows in new for row in bucket.signature_rows(self.rule, rows)]
        fresh = [row for _, rows in new for row in rows]
        self._sharded = any(is_sharded(row.param) for row in fresh)
        if known is None:
            self._signed = every
            self.signature = make_signature(groups, state, added, columns)
            return
        self._sharded = self._sharded or known._sharded
        self._signed = known._signed + fresh
        place = {id(row): i for i, row in enumerate(every)}
        places = np.array([place[id(row)] for row in self._signed], dtype=np.int64)
        self.signature = known.signature
        self.signature.extend(state, added, columns, places)

    @property
    def params(self) -> set[int]:
        """The ids of those that have a row."""
        return {id(row.param) for row in self._signed}

    @property
    def home(self) -> DeviceTables:
        """The device that telemetry is read from, and the last to be applied."""
        return self.devices[0]

    def is_of(self, process_group: Any) -> bool:
        """Whether the plan was made for the steps of this process group, or of this process alone."""
        if self._process_group is None or process_group is None:
            return self._process_group is process_group
        return self._process_group() is process_group

    def look(self, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> bool:
        """Find this step's gradients; False if a new plan is needed. No rank waits for another."""
        if self._sharded:
            # Otherwise torch looks for an override of each gradient's attribute.
            with torch._C.DisableTorchFunctionSubclass():
                seen = self.signature.check(groups, state)
        else:
            seen = self.signature.check(groups, state)
        self._seen = seen
        if seen >= STALE:
            self.has_grown = seen == GROWN
            return False
        if seen == UNUSUAL:
            return all([bucket.takes_gradients() for bucket in self.buckets])
        return True

    @property
    def misplaced(self) -> bool:
        """Whether a gradient is spread over ranks otherwise than its parameter."""
        if self._seen != UNUSUAL or not self._sharded:
            return False
        rows = [bucket.rows[i] for bucket in self.buckets for i in bucket.unusual()]
        return any(not same_placement(row.param.grad, row.param) for row in rows)

    def load_gradients(self) -> None:
        """Point the tables at the gradients that `look` has found."""
        for bucket in self.buckets:
            if self._seen == UNUSUAL:
                bucket.lay_out_gradients()
            if self._seen != SAME:
                bucket.note_active()
            if bucket.gradients is not None:
                bucket.gradients.send()
            if bucket.backend.takes_tensors:
                for row in bucket.rows:
                    row.hold_gradient()
        for row, address in self._gapped:
            if address[0] != 0:
                row.dense.copy_(row.local)

    def finish(self) -> None:
        """Tell autograd of what a kernel wrote behind its back, and write copies back."""
        for bucket in self.buckets:
            if bucket.backend.takes_tensors:
                for row in bucket.rows:
                    row.held = None
            else:
                increment_version(bucket.active)
        for row, address in self._gapped:
            if address[0] != 0:  # one without a gradient is left alone
                row.local.copy_(row.dense)
        self.signature.release()

    def reduce(self, index: int) -> None:
        """Sum over the rows of every bucket, and bring the sums to where they are read."""
        rule = self.rounds[index]
        if rule is None:
            return
        for bucket in self.buckets:
            bucket.backend.reduce(bucket, rule)
        # Of a process alone every device reads them, of several ranks only the home device.
        alone = self._process_group is None
        for target in self.sums if alone else self.sums[:1]:
            for bucket in self.buckets:
                if bucket.sums is not target:
                    copy_to(target[bucket.index], bucket.sums[bucket.index])

    def apply(self) -> None:
        """Update the rows of every bucket, and count the step at home."""
        for bucket in self._drafting:
            bucket.backend.draft(bucket, self.rule)
        for bucket in reversed(self._elsewhere):
            bucket.backend.apply(bucket, self.rule, last=False)
        if self._elsewhere:
            self._share_reasons()
        for bucket in reversed(self._at_home):
            bucket.backend.apply(bucket, self.rule, last=bucket is self._at_home[0])
        if not self._at_home:
            report_step(self.rule, self.totals[0], self.home.inputs, self.home.report)

    def _share_reasons(self) -> None:
        """Bring the other devices' reasons home."""
        home = self.home.report.counts[Count.REASON]
        for other in self.devices[1:]:
            reason = other.report.counts[Count.REASON]
            torch.maximum(home, copy_to(torch.empty_like(home), reason), out=home)
            reason.zero_()


def home_device(groups: list[dict[str, Any]]) -> torch.device:
    """Where a step is counted and ranks exchange their numbers, whatever has a gradient in it."""
    params = [param for group in groups for param in group["params"][:1]]
    if params and not params[0].requires_grad:
        params = [p for group in groups for p in group["params"] if p.requires_grad] or params
    return params[0].device if params else torch.device("cpu")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def copy_to(target: Tensor, source: Tensor) -> Tensor:
    """Without waiting, but for the host, which reads what has arrived."""
    return target.copy_(source, non_blocking=target.device.type != "cpu")


class Draft(NamedTuple):
    """What a plan will be made of. Everything is checked, nothing has changed yet."""

    participants: list[Participant]  # all of them, or those that join a known plan
    keys: list[BucketKey]  # one for each participant
    backends: dict[BucketKey, Any]
    storage: Storage
    misplaced: bool  # whether a gradient or state is spread over ranks otherwise than its parameter
    known: Plan | None = None  # a plan that said GROWN, whose rows stay


def draft_plan(
    state: dict[Tensor, Any],
    rule: Rule,
    participants: list[Participant],
    select_backend: Callable[[BucketKey], Any],
    storage: Storage,
    known: Plan | None = None,
) -> Draft | None:
    """Check everything that a step will touch. No rank waits for another.

    None where memory is so nested that participants of a known plan must be checked with the others.
    """
    storage = storage_of(rule, storage)
    written = []
    misplaced = False
    for param, _, label, *_ in participants:
        check_param(param, label)
        check_storage(param, storage, label)
        held = state.get(param, {})
        check_state(held, param, rule, label)
        written.append((local(param), label))
        written += [
            (local(held[key]), f"the {key} of {label}")
            for key in keys_of(rule, held)
            if key in held and is_dense(local(held[key]))
        ]
        if is_sharded(param):
            spread = (param.grad, *(held.get(key) for key in (*STATE_KEYS, REMAINDER)))
            misplaced |= any(t is not None and not same_placement(t, param) for t in spread)
    check_overlap(written)
    if known is not None and not apart(known.buckets, written):
        return None
    if known is None:
        check_rounding({p.param.dtype for p in participants}, storage.rounding)
    keys = [BucketKey.of(p.param, state.get(p.param, {}), storage) for p in participants]
    backends = {key: select_backend(key) for key in keys}
    return Draft(participants, keys, backends, storage, misplaced, known)


def apart(buckets: list[Bucket], written: list[tuple[Tensor, str]]) -> bool:
    """Whether the spans of memory of all rows, and of more tensors, are one beside the other."""
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
    return (plan is not None and plan.misplaced) or (draft is not None and draft.misplaced)


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
    with torch.inference_mode(False):
        for key, participant in zip(draft.keys, draft.participants, strict=True):
            held = state[participant.param]
            init_state(held, participant.param, rule, draft.storage, participant.number)
            rows.setdefault(key, []).append(Row(participant, held, rule))
        buckets = {key: Bucket(key, rows[key], draft.backends[key]) for key in rows}
        for bucket in draft.known.buckets if draft.known else ():
            buckets[bucket.key] = bucket.with_rows(rows.get(bucket.key, []))
        in_order = sorted(buckets.values(), key=lambda bucket: bucket.rows[0].number)
        devices = list(dict.fromkeys([home_device(groups), *(b.key.device for b in in_order)]))
        in_order.sort(key=lambda bucket: devices.index(bucket.key.device))
        tables = [tables_of(device) for device in devices]
        return Plan(groups, state, rule, clipping, in_order, tables, process_group, draft.known)

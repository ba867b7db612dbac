"""Tensors to tables: which rows share a bucket, and where their memory lies. It knows no math.

A plan is built once and kept while nothing but gradients moves; its signature decides that.
"""

from __future__ import annotations

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
from .formats import QUANTUM, REMAINDER, Storage, narrow_format, noise_key, rounding_of, scale_key
from .rules import Rule
from .shards import first_element, is_sharded, local, placed_like, same_placement
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
from .tables import Column, Count, DeviceTables, Sum, array_of, float_type
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
        self.sums: Tensor  # of all buckets, on this bucket's device
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
            Column.FIRST: [row.first for row in rows],
            Column.STEP: [row.step.data_ptr() for row in rows],
            Column.NUMEL: [row.x.numel() for row in rows],
            Column.GROUP: [row.group for row in rows],
            Column.COPIES: [row.copies for row in rows],
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
        numel, blocks = self.table[Column.NUMEL], -(-self.table[Column.NUMEL] // QUANTUM)
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

    def lay_out_gradients(self) -> bool:
        """Bring unusual gradients into shape; False if one has another element type."""
        addresses = self.table[Column.G]
        for i in (addresses == UNUSUAL_ADDRESS).nonzero()[0]:
            row = self.rows[i]
            check_gradient(row.param, row.label)
            assert row.param.grad is not None
            if local(row.param.grad).dtype.to_real() != self.key.grad:
                return False
            addresses[i] = row.lay_out_gradient()
        return True

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
        reductions: tuple[Rule, ...],
        buckets: list[Bucket],
        devices: list[DeviceTables],
        known: Plan | None = None,
    ) -> None:
        """`known` said GROWN, and has all rows but the new ones."""
        self.rule = rule
        self.reductions = reductions
        self.buckets = buckets
        self._drafting = [bucket for bucket in buckets if bucket.backend.takes_tensors]
        self.devices = devices
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
        self.home_sums = array_of(self.sums[0])
        by_device = {d.device: (d, s) for d, s in zip(devices, self.sums, strict=True)}
        for index, bucket in enumerate(buckets):
            bucket.index = index
            bucket.tables, bucket.sums = by_device[bucket.key.device]
            bucket.backend.prepare(bucket)
        self._sign(groups, state, known)

        # The first bucket of the home device to be applied, where other devices came before it.
        at_home = [bucket for bucket in buckets if bucket.tables is self.home]
        self.last_at_home = at_home[-1] if len(devices) > 1 else None
        self.agreed: Any = None  # what ranks agreed on, kept by ranks.py's caller while it holds

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

    def refresh(self, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> bool:
        """Point the tables at this step's gradients; False if a new plan is needed."""
        if self._sharded:
            # Otherwise torch looks for an override of each gradient's attribute.
            with torch._C.DisableTorchFunctionSubclass():
                seen = self.signature.look(groups, state)
        else:
            seen = self.signature.look(groups, state)
        if seen >= STALE:
            self.has_grown = seen == GROWN
            return False
        if seen == UNUSUAL and not all([bucket.lay_out_gradients() for bucket in self.buckets]):
            return False
        for bucket in self.buckets:
            if seen != SAME:
                bucket.note_active()
            if bucket.gradients is not None:
                bucket.gradients.send()
            if bucket.backend.takes_tensors:
                for row in bucket.rows:
                    row.hold_gradient()
        for row, address in self._gapped:
            if address[0] != 0:
                row.dense.copy_(row.local)
        return True

    def draft(self) -> None:
        """Let backends that allocate memory in a step do so, before any of them writes anything."""
        for bucket in self._drafting:
            bucket.backend.draft(bucket, self.rule)

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

    def share_sums(self) -> None:
        """Bring every bucket's sums to every device."""
        for target in self.sums:
            for bucket in self.buckets:
                if bucket.sums is not target:
                    copy_to(target[bucket.index], bucket.sums[bucket.index])

    def share_reasons(self) -> None:
        """Bring the other devices' reasons home, where the step is counted once."""
        home = self.home.report.counts[Count.REASON]
        for other in self.devices[1:]:
            reason = other.report.counts[Count.REASON]
            torch.maximum(home, copy_to(torch.empty_like(home), reason), out=home)
            reason.zero_()


def any_device(groups: list[dict[str, Any]]) -> torch.device:
    first = next((param for group in groups for param in group["params"]), None)
    return torch.device("cpu") if first is None else first.device


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def copy_to(target: Tensor, source: Tensor) -> Tensor:
    """Without waiting, but for the host, which reads what has arrived."""
    return target.copy_(source, non_blocking=target.device.type != "cpu")


def build_plan(
    groups: list[dict[str, Any]],
    state: dict[Tensor, Any],
    rule: Rule,
    reductions: tuple[Rule, ...],
    participants: list[Participant],
    select_backend: Callable[[BucketKey], Any],
    tables_of: Callable[[torch.device], DeviceTables],
    storage: Storage,
) -> Plan:
    """Check everything, create the state that is missing, and lay out the tables."""
    storage = storage_of(rule, storage)
    check_overlap(checked(state, rule, participants, storage))
    check_rounding({p.param.dtype for p in participants}, storage.rounding)
    buckets = make_buckets(state, rule, participants, select_backend, storage)
    return lay_out(groups, state, rule, reductions, buckets, tables_of)


def grow_plan(
    known: Plan,
    groups: list[dict[str, Any]],
    state: dict[Tensor, Any],
    participants: list[Participant],
    select_backend: Callable[[BucketKey], Any],
    tables_of: Callable[[torch.device], DeviceTables],
    storage: Storage,
) -> Plan | None:
    """A plan that said GROWN with rows for more parameters, in the order of a plan that is built anew.

    None where memory is nested so that only that can tell whether anything overlaps.
    """
    storage = storage_of(known.rule, storage)
    written = checked(state, known.rule, participants, storage)
    check_overlap(written)
    if not apart(known.buckets, written):
        return None
    buckets = make_buckets(state, known.rule, participants, select_backend, storage)
    for bucket in known.buckets:
        more = buckets.get(bucket.key)
        buckets[bucket.key] = bucket.with_rows(more.rows if more is not None else [])
    return lay_out(groups, state, known.rule, known.reductions, buckets, tables_of, known)


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


def checked(
    state: dict[Tensor, Any], rule: Rule, participants: list[Participant], storage: Storage
) -> list[tuple[Tensor, str]]:
    """Raise unless all of them can take part; the tensors that a step writes, and their names."""
    written = []
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
    return written


def make_buckets(
    state: dict[Tensor, Any],
    rule: Rule,
    participants: list[Participant],
    select_backend: Callable[[BucketKey], Any],
    storage: Storage,
) -> dict[BucketKey, Bucket]:
    """Their rows, with the state that is missing created."""
    keys = [BucketKey.of(p.param, state.get(p.param, {}), storage) for p in participants]
    backends = {key: select_backend(key) for key in keys}
    # Nothing can be refused from here on: state may be created.
    rows: dict[BucketKey, list[Row]] = {}
    with torch.inference_mode(False):
        for key, participant in zip(keys, participants, strict=True):
            held = state[participant.param]
            init_state(held, participant.param, rule, storage, participant.number)
            rows.setdefault(key, []).append(Row(participant, held, rule))
        return {key: Bucket(key, rows[key], backends[key]) for key in rows}


def lay_out(
    groups: list[dict[str, Any]],
    state: dict[Tensor, Any],
    rule: Rule,
    reductions: tuple[Rule, ...],
    buckets: dict[BucketKey, Bucket],
    tables_of: Callable[[torch.device], DeviceTables],
    known: Plan | None = None,
) -> Plan:
    """Buckets in the order of their first parameters, those of one device together."""
    in_order = sorted(buckets.values(), key=lambda bucket: bucket.rows[0].number)
    devices = list(dict.fromkeys(b.key.device for b in in_order)) or [any_device(groups)]
    in_order.sort(key=lambda bucket: devices.index(bucket.key.device))
    with torch.inference_mode(False):
        tables = [tables_of(device) for device in devices]
        return Plan(groups, state, rule, reductions, in_order, tables, known)

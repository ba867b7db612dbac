"""Plain torch operations on any device: the readable form of the math, in rule.h's order and names.

Nothing here waits for the device: a skipped step is a `where`, not an `if`. All that a step writes is
computed before its first write, so that one that runs out of memory has changed nothing. Until then it
takes as much memory again as the parameters and state that it changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import (
    decoded,
    encoded,
    in_memory_order,
    join_bfloat16,
    narrow_format,
    noise,
    other_noise,
    split_bfloat16,
    stochastic_bfloat16,
    stochastic_float16,
)
from ..layout import GroupColumn, Input, Reason, Sum
from ..planning.plan import Memory
from ..planning.rows import Bucket, BucketKey, Row
from ..planning.tables import Inputs
from ..rules import Rule
from ..step_size import (
    Telemetry,
    aimed_loss,
    clip_factor,
    group_steps,
    shrink,
    telemetry,
    write_telemetry,
)
from . import unfit_types


class Coefficients(NamedTuple):
    """What every element of a row shares; 0-d tensors."""

    gradient_scale: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    bias: Tensor  # 1 - beta2^t
    step: Tensor  # (1 - beta1) gamma lr / c; of coordinate rules (1 - beta1) min(c, 2h) lr / c
    flatness: Tensor  # 2h / max(c, 2h), coordinate rules
    curvature: Tensor  # c / max(c, 2h), coordinate rules
    decay: Tensor  # lambda a lr / c; of AdamW's form lambda gamma lr / c


def coefficients(rule: Rule, inputs: Inputs, row: Row, clip: Tensor, rho: Tensor) -> Coefficients:
    _, beta1, beta2, eps, weight_decay, _ = inputs.groups[row.group].unbind()
    c, schedule, a = group_steps(rule, inputs.groups[row.group])
    # Divided by the larger of the two, neither overflows; 0 where both are.
    two_h = 2 * aimed_loss(inputs)
    larger = torch.maximum(c, two_h)
    flatness, curvature = ((part / larger).masked_fill(larger == 0, 0.0) for part in (two_h, c))
    gamma = torch.minimum(c, two_h) if rule.coordinate else a * rho
    follows_gamma = rule.adamw_decay and not rule.coordinate
    return Coefficients(
        gradient_scale=clip / inputs.scalars[Input.GRAD_SCALE],
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        bias=1 - beta2 ** (row.step.to(beta2.dtype) + 1),
        step=(1 - beta1) * (schedule * gamma),
        flatness=flatness,
        curvature=curvature,
        decay=weight_decay * (schedule * (gamma if follows_gamma else a)),
    )


def second_moment(v: Tensor, g: Tensor, k: Coefficients) -> Tensor:
    """v <- beta2 v + (1 - beta2) g^2"""
    return k.beta2 * v + (1 - k.beta2) * (g * g)


def preconditioner(v: Tensor, k: Coefficients) -> Tensor:
    """D = eps + sqrt(v / (1 - beta2^t))"""
    return k.eps + (v / k.bias).sqrt()


def contribute(
    rule: Rule, x: Tensor, v: Tensor | None, g: Tensor, d: Tensor | None, k: Coefficients
) -> tuple[Tensor, Tensor | None]:
    """The elements' parts of the sums, nothing is written."""
    g = k.gradient_scale * g
    weighted = g * (g if d is None else d)
    if v is not None:
        weighted = weighted / preconditioner(second_moment(v, g, k), k)
    return weighted, g * x if rule.regularised else None


def update(
    rule: Rule,
    x: Tensor,
    m: Tensor | None,
    v: Tensor | None,
    g: Tensor,
    d: Tensor | None,
    k: Coefficients,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The elements' new x, m and v."""
    g = k.gradient_scale * g if d is None else d
    v_new, divisor = None, torch.ones_like(g)
    if v is not None:
        v_new = second_moment(v, g, k)
        divisor = preconditioner(v_new, k)
    if rule.coordinate:
        divisor = k.flatness * divisor + k.curvature * (g * g)
        m_new = (k.step * g / divisor).masked_fill(divisor == 0, 0.0)
    else:
        m_new = k.step * g / divisor
    decayed = k.decay * x
    if not rule.adamw_decay:
        m_new = m_new + decayed
    if m is not None:
        m_new = m_new + k.beta1 * m
    displacement = m_new + decayed if rule.adamw_decay else m_new
    if rule.nesterov and m is not None:
        displacement = displacement + k.beta1 * (m_new - m)
    return x - displacement, m_new, v_new


class Write(NamedTuple):
    """What a step leaves behind in a tensor, of the same type."""

    target: Tensor
    value: Tensor


class StateColumn:
    """One column of a row: loaded as numbers, and stored in its format."""

    def __init__(
        self, key: str, data: Tensor, scale: Tensor | None, row: Row, dtype: torch.dtype
    ) -> None:
        self.data = data
        self.scale = scale
        self.row = row
        self.form = narrow_format(key, data.dtype)
        self.old = (data if self.form is None else decoded(data, scale, self.form)).to(dtype)

    def fits(self, new: Tensor) -> Tensor:
        """Where a number is finite in its storage."""
        if self.form is None:
            return new.to(self.data.dtype).isfinite()
        return new.abs() <= self.form.limit

    def stored(self, new: Tensor, fits: Tensor, go: Tensor) -> Iterator[Write]:
        """Elements that do not fit keep their numbers; without `go` nothing changes."""
        if self.form is None:
            new = new.to(self.data.dtype)
            yield Write(self.data, torch.where(go & fits, new, self.data))
            return
        values = torch.empty_like(self.data, dtype=torch.float32)
        values.copy_(torch.where(fits, new, self.old))
        random = noise(self.row.noise_key, self.row.step, values.numel(), self.row.offset)
        code, scale = encoded(values, random, self.form)
        yield Write(self.data, torch.where(go, code, self.data))
        if self.scale is not None and scale is not None:
            yield Write(self.scale, torch.where(go, scale, self.scale))


class ParameterColumn:
    """The same of a parameter, which is stored as its `rounding` says."""

    def __init__(self, row: Row, rounding: str, dtype: torch.dtype) -> None:
        self.row = row
        self.rounding = rounding
        x, remainder = row.x, row.remainder
        exact = rounding == "exact" and remainder is not None
        self.old = join_bfloat16(x, remainder) if exact else x.to(dtype)  # type: ignore[arg-type]

    def fits(self, new: Tensor) -> Tensor:
        dtype = self.row.x.dtype
        if self.rounding == "stochastic":
            return new.abs() <= torch.finfo(dtype).max
        return new.to(dtype).isfinite()

    def stored(self, new: Tensor, fits: Tensor, go: Tensor) -> Iterator[Write]:
        x, remainder = self.row.x, self.row.remainder
        keep = torch.where(go & fits, new, self.old)
        if self.rounding == "stochastic":
            values = torch.empty_like(x, dtype=torch.float32).copy_(keep)
            random = other_noise(
                noise(self.row.noise_key, self.row.step, x.numel(), self.row.offset)
            )
            to_half = stochastic_bfloat16 if x.dtype == torch.bfloat16 else stochastic_float16
            yield Write(in_memory_order(x), to_half(in_memory_order(values), random))
        elif self.rounding == "exact":
            assert remainder is not None
            near, low = split_bfloat16(keep.to(torch.float32))
            yield Write(x, near)
            yield Write(remainder, low)
        else:
            yield Write(x, torch.where(go & fits, new.to(x.dtype), x))


def columns(
    rule: Rule, row: Row, key: BucketKey
) -> tuple[ParameterColumn, StateColumn | None, StateColumn | None]:
    """x, m and v of a row, as far as the rule has them."""
    dtype = key.compute_dtype
    m = row.m if rule.momentum else None
    v = row.v if rule.rms else None
    return (
        ParameterColumn(row, key.rounding, dtype),
        None if m is None else StateColumn("momentum_buffer", m, row.m_scale, row, dtype),
        None if v is None else StateColumn("exp_avg_sq", v, row.v_scale, row, dtype),
    )


def old(column: StateColumn | None) -> Tensor | None:
    return None if column is None else column.old


class ReferenceBackend:
    name = "reference"

    def unfit(self, key: BucketKey) -> str | None:
        return unfit_types(key)

    def refusal(self, device: torch.device) -> str | None:
        return None

    def prepare(
        self, bucket: Bucket, memory: Memory, rule: Rule, rounds: tuple[Rule | None, ...]
    ) -> ReferenceBucket:
        return ReferenceBucket(bucket, memory, rule, rounds)


class ReferenceBucket:
    """One bucket, a row at a time."""

    def __init__(
        self, bucket: Bucket, memory: Memory, rule: Rule, rounds: tuple[Rule | None, ...]
    ) -> None:
        self.key, self.rows = bucket.key, bucket.rows
        self.memory, self.rule, self.rounds = memory, rule, rounds
        self.dtype = bucket.key.compute_dtype
        self._writes: list[Write] = []
        self._telemetry: Telemetry | None = None

    def load_gradients(self) -> None:
        pass

    def _rows_with_gradients(self) -> list[tuple[Row, Tensor]]:
        gradients = zip(self.rows, self.memory.gradients(), strict=True)
        return [(row, g.to(self.dtype)) for row, g in gradients if g is not None]

    def reduce(self, index: int) -> None:
        rule, inputs, sums = self.rounds[index], self.memory.inputs, self.memory.sums
        assert rule is not None
        one = torch.ones((), dtype=sums.dtype, device=sums.device)
        max_grad_norm = inputs.scalars[Input.MAX_GRAD_NORM]
        norm = self.memory.totals.sum(0)[Sum.NORM]
        clip = clip_factor(norm, max_grad_norm) if rule.sums_clipped else one
        total = torch.zeros(len(Sum), dtype=sums.dtype, device=sums.device)
        for row, g in self._rows_with_gradients():
            k = coefficients(rule, inputs, row, clip, one)
            x, _, v = columns(rule, row, self.key)
            d = row.direction if rule.directed else None
            weighted, alignment = contribute(rule, x.old, old(v), g, d, k)
            steps = group_steps(rule, inputs.groups[row.group])
            weighted_sum = weighted.sum(dtype=sums.dtype) / row.replicas
            total[Sum.WEIGHTED].add_(steps.effective * weighted_sum)
            if alignment is not None:
                weight_decay = inputs.groups[row.group, GroupColumn.WEIGHT_DECAY]
                total[Sum.ALIGNMENT].add_(
                    steps.largest * weight_decay * alignment.sum(dtype=sums.dtype) / row.replicas
                )
            if not rule.sums_clipped:
                total[Sum.NORM].add_(weighted_sum)
        written = Sum.NORM if rule.sums_clipped else len(Sum)
        sums[self.memory.bucket_index].narrow(0, 0, written).copy_(total.narrow(0, 0, written))

    def compute(self) -> None:
        rule, inputs = self.rule, self.memory.inputs
        step = shrink(rule, self.memory.totals.sum(0), inputs)
        reason = step.reason
        go = reason == 0
        self._writes = []
        for row, g in self._rows_with_gradients():
            k = coefficients(rule, inputs, row, step.clip, step.rho)
            x, m, v = loaded = columns(rule, row, self.key)
            new = update(rule, x.old, old(m), old(v), g, row.direction, k)
            stored = [(c, n) for c, n in zip(loaded, new, strict=True) if c and n is not None]
            fits = torch.stack([column.fits(value) for column, value in stored]).all(0)
            for column, value in stored:
                self._writes += column.stored(value, fits, go)
            self._writes.append(Write(row.step, row.step + go))
            kept = go & ~fits.all()
            reason = reason.masked_fill(kept, int(Reason.ELEMENTS_KEPT))
        self._telemetry = telemetry(rule, inputs, step, go, reason, self.memory.report)

    def apply(self, last: bool) -> None:
        assert self._telemetry is not None
        while self._writes:  # each value is freed once it is written
            target, value = self._writes.pop()
            target.copy_(value)
        write_telemetry(self._telemetry, self.memory.report, last)

    def finish(self, params: list[Tensor]) -> None:
        pass


def load() -> ReferenceBackend:
    return ReferenceBackend()

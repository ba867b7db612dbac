"""Plain torch operations on any device: the readable form of the math, in rule.h's order and names.

Nothing here waits for the device: a skipped step is a `where`, not an `if`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..plan import (
    FOUND_INF,
    GRAD_SCALE,
    HEIGHT,
    LAST_REASON,
    MAX_GRAD_NORM,
    REASON,
    SHRINK,
    SKIPPED,
    Board,
    Bucket,
    BucketKey,
    Row,
)
from ..rules import Reason, Rule
from . import is_real_float


class Coefficients(NamedTuple):
    """What every element of a row shares; 0-d tensors."""

    gradient_scale: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    bias: Tensor  # 1 - beta2^t
    step: Tensor  # (1 - beta1) gamma, scalar rules
    lr: Tensor
    two_h: Tensor
    decay: Tensor  # lambda c, or lambda a


class Shrink(NamedTuple):
    rho: Tensor
    clip: Tensor
    reason: Tensor


def clip_factor(norm_squared: Tensor, max_grad_norm: Tensor) -> Tensor:
    """s = min(1, max_grad_norm / (norm + 1e-6))"""
    factor = torch.clamp(max_grad_norm / (norm_squared.sqrt() + 1e-6), max=1.0)
    return factor.masked_fill(~max_grad_norm.isfinite(), 1.0)


def shrink(rule: Rule, sums: Tensor, board: Board) -> Shrink:
    """rho = max(0, 2h - W) / (2h + Q), 1 where 0/0"""
    weighted, alignment, norm = sums.unbind()
    h = board.scalars[HEIGHT]
    max_grad_norm = board.scalars[MAX_GRAD_NORM]
    clip = clip_factor(norm, max_grad_norm)
    # Without RMS the sum was taken over unclipped gradients.
    q = weighted if rule.rms else clip * clip * weighted
    denominator = 2 * h + q
    rho = torch.clamp(2 * h - alignment, min=0.0) / denominator
    rho = rho.masked_fill(denominator == 0, 1.0)

    norm = norm.masked_fill(~max_grad_norm.isfinite(), 0.0)
    reason = torch.zeros_like(board.report[REASON])
    for condition, code in (  # the first that holds is written last
        (~(weighted + alignment + norm).isfinite(), Reason.GRADIENT_NOT_FINITE),
        (h < 0, Reason.LOSS_BELOW_FLOOR),
        (~h.isfinite(), Reason.LOSS_NOT_FINITE),
        (board.scalars[FOUND_INF] != 0, Reason.AMP_OVERFLOW),
    ):
        reason = reason.masked_fill(condition, int(code))
    return Shrink(rho, clip, reason)


def effective_lr(rule: Rule, lr: Tensor, weight_decay: Tensor) -> Tensor:
    """a_j: the lr, or the lr that regularised decay leaves of it"""
    return lr / (1 + weight_decay * lr) if rule.regularised else lr


def coefficients(rule: Rule, board: Board, row: Row, clip: Tensor, rho: Tensor) -> Coefficients:
    lr, beta1, beta2, eps, weight_decay = board.groups[row.group].unbind()
    a = effective_lr(rule, lr, weight_decay)
    return Coefficients(
        gradient_scale=clip / board.scalars[GRAD_SCALE],
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        bias=1 - beta2 ** (row.step.to(board.wide) + 1),
        step=(1 - beta1) * a * rho,
        lr=lr,
        two_h=2 * board.scalars[HEIGHT],
        decay=weight_decay * a,
    )


def second_moment(v: Tensor, g: Tensor, k: Coefficients) -> Tensor:
    """v <- beta2 v + (1 - beta2) g^2"""
    return k.beta2 * v + (1 - k.beta2) * (g * g)


def preconditioner(v: Tensor, k: Coefficients) -> Tensor:
    """D = eps + sqrt(v / (1 - beta2^t))"""
    return k.eps + (v / k.bias).sqrt()


def contribute(
    rule: Rule, x: Tensor, v: Tensor | None, g: Tensor, k: Coefficients
) -> tuple[Tensor, Tensor | None]:
    """The elements' parts of the sums, nothing is written."""
    g = k.gradient_scale * g
    weighted = g * g
    if v is not None:
        weighted = weighted / preconditioner(second_moment(v, g, k), k)
    return weighted, g * x if rule.regularised else None


def update(
    rule: Rule, x: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, k: Coefficients
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The elements' new x, m and v."""
    g = k.gradient_scale * g
    v_new, d = None, torch.ones_like(g)
    if v is not None:
        v_new = second_moment(v, g, k)
        d = preconditioner(v_new, k)
    if rule.coordinate:
        denominator = k.two_h * d + k.lr * (g * g)
        numerator = (1 - k.beta1) * k.two_h * k.lr
        m_new = (numerator * g / denominator).masked_fill(denominator == 0, 0.0)
    else:
        m_new = k.step * g / d
    m_new = m_new + k.decay * x
    if m is not None:
        m_new = m_new + k.beta1 * m
    return x - m_new, m_new, v_new


def compute_dtype(key: BucketKey) -> torch.dtype:
    wide = torch.float64 in (key.param, key.grad, key.state)
    return torch.float64 if wide else torch.float32


class ReferenceBackend:
    name = "reference"

    def unfit(self, key: BucketKey) -> str | None:
        for what, dtype in (("parameters", key.param), ("gradients", key.grad)):
            if not is_real_float(dtype):
                return f"{what} of {dtype}; float64, float32, bfloat16 and float16 are supported"
        return None

    def prepare(self, bucket: Bucket) -> None:
        pass

    def reduce(self, bucket: Bucket, rule: Rule) -> None:
        board, dtype = bucket.board, compute_dtype(bucket.key)
        one = torch.ones((), dtype=board.wide, device=board.device)
        clip = clip_factor(bucket.sums.sum(0)[2], board.scalars[MAX_GRAD_NORM]) if rule.rms else one
        total = torch.zeros(3, dtype=board.wide, device=board.device)
        for row in bucket.rows:
            g = row.gradient()
            if g is None:
                continue
            k = coefficients(rule, board, row, clip, one)
            v = None if row.v is None or not rule.rms else row.v.to(dtype)
            weighted, alignment = contribute(rule, row.x.to(dtype), v, g.to(dtype), k)
            weight_decay = board.groups[row.group, 4]
            weighted_sum = weighted.sum(dtype=board.wide)
            total[0].add_(effective_lr(rule, k.lr, weight_decay) * weighted_sum)
            if alignment is not None:
                total[1].add_(k.lr * weight_decay * alignment.sum(dtype=board.wide))
            if not rule.rms:
                total[2].add_(weighted_sum)
        written = 2 if rule.rms else 3
        bucket.sums[bucket.index].narrow(0, 0, written).copy_(total.narrow(0, 0, written))

    def apply(self, bucket: Bucket, rule: Rule, last: bool) -> None:
        board, dtype = bucket.board, compute_dtype(bucket.key)
        rho, clip, reason = shrink(rule, bucket.sums.sum(0), board)
        go = reason == 0
        for row in bucket.rows:
            g = row.gradient()
            if g is None:
                continue
            k = coefficients(rule, board, row, clip, rho)
            old = [
                (row.x, row.x.to(dtype)),
                (row.m if rule.momentum else None, None if row.m is None else row.m.to(dtype)),
                (row.v if rule.rms else None, None if row.v is None else row.v.to(dtype)),
            ]
            x, m, v = (values if target is not None else None for target, values in old)
            assert x is not None
            new = update(rule, x, m, v, g.to(dtype), k)
            stored = [
                (target, value.to(target.dtype))
                for (target, _), value in zip(old, new, strict=True)
                if target is not None and value is not None
            ]
            finite = torch.stack([value.isfinite() for _, value in stored]).all(0)
            for target, value in stored:
                target.copy_(torch.where(go & finite, value, target))
            row.step += go
            kept = go & ~finite.all()
            reason = reason.masked_fill(kept, int(Reason.ELEMENTS_KEPT))
        board.scalars[SHRINK].copy_(torch.where(go, rho, board.scalars[SHRINK]))
        report = board.report
        torch.maximum(report[REASON], reason, out=report[REASON])
        if last:
            skipped = report[REASON] != 0
            report[SKIPPED].add_(skipped)
            report[LAST_REASON].copy_(torch.where(skipped, report[REASON], report[LAST_REASON]))
            report[REASON].zero_()


def load() -> ReferenceBackend:
    return ReferenceBackend()

"""The step size of a step from its sums, and its telemetry, in plain torch.

The reference engine uses it, and any device on which no parameter lies. Nothing here waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Count, GroupColumn, Input, Reason
from .planning.tables import Inputs, Report
from .rules import Rule


class Shrink(NamedTuple):
    rho: Tensor
    clip: Tensor
    reason: Tensor


def clip_factor(norm_squared: Tensor, max_grad_norm: Tensor) -> Tensor:
    """s = min(1, max_grad_norm / (norm + 1e-6))"""
    factor = torch.clamp(max_grad_norm / (norm_squared.sqrt() + 1e-6), max=1.0)
    return factor.masked_fill(~max_grad_norm.isfinite(), 1.0)


def loss_above_floor(inputs: Inputs) -> Tensor:
    """h: how far the loss is above its floor"""
    return inputs.scalars[Input.LOSS] - inputs.scalars[Input.LOSS_FLOOR]


def shrink(rule: Rule, sums: Tensor, inputs: Inputs) -> Shrink:
    """rho = max(0, 2h - W) / (2h + Q), 1 where 0/0"""
    weighted, alignment, norm = sums.unbind()
    h = loss_above_floor(inputs)
    max_grad_norm = inputs.scalars[Input.MAX_GRAD_NORM]
    clip = clip_factor(norm, max_grad_norm)
    # Without RMS the sum was taken over unclipped gradients.
    q = weighted if rule.rms else clip * clip * weighted
    denominator = 2 * h + q
    rho = torch.clamp(2 * h - alignment, min=0.0) / denominator
    rho = rho.masked_fill(denominator == 0, 1.0)

    norm = norm.masked_fill(~max_grad_norm.isfinite(), 0.0)
    reason = torch.zeros((), dtype=torch.int64, device=sums.device)
    for condition, code in (  # the first that holds is written last
        (~(weighted + alignment + norm).isfinite(), Reason.GRADIENT_NOT_FINITE),
        (h < 0, Reason.LOSS_BELOW_FLOOR),
        (~h.isfinite(), Reason.LOSS_NOT_FINITE),
        (inputs.scalars[Input.FOUND_INF] != 0, Reason.AMP_OVERFLOW),
    ):
        reason = reason.masked_fill(condition, int(code))
    return Shrink(rho, clip, reason)


def effective_lr(rule: Rule, lr: Tensor, weight_decay: Tensor) -> Tensor:
    """a_j: the lr, or the lr that regularised decay leaves of it"""
    return lr / (1 + weight_decay * lr) if rule.regularised else lr


class Telemetry(NamedTuple):
    """What a bucket reports of a step."""

    sizes: Tensor
    reason: Tensor
    skipped: Tensor  # room for a number


def telemetry(
    rule: Rule, inputs: Inputs, rho: Tensor, go: Tensor, reason: Tensor, report: Report
) -> Telemetry:
    """The step sizes of a step that was applied, or the reason why it was not."""
    lr, weight_decay = (
        inputs.groups.select(1, column) for column in (GroupColumn.LR, GroupColumn.WEIGHT_DECAY)
    )
    sizes = torch.cat([rho.reshape(1), effective_lr(rule, lr, weight_decay) * rho])
    return Telemetry(torch.where(go, sizes, report.sizes), reason, torch.empty_like(reason))


def write_telemetry(new: Telemetry, report: Report, last: bool) -> None:
    """Write it, in place; the last bucket counts a step that was skipped."""
    report.sizes.copy_(new.sizes)
    reason, skipped, last_reason = (report.counts[i] for i in Count)
    torch.maximum(reason, new.reason, out=reason)
    if last:
        skipped.add_(torch.sign(reason, out=new.skipped))
        last_reason.mul_(new.skipped.sub_(1).neg_()).add_(reason)
        reason.zero_()


def report_step(rule: Rule, totals: Tensor, inputs: Inputs, report: Report) -> None:
    """Report a step on a device that has no bucket, whose parameters lie on others or other ranks."""
    rho, _, reason = shrink(rule, totals.sum(0), inputs)
    write_telemetry(telemetry(rule, inputs, rho, reason == 0, reason, report), report, last=True)

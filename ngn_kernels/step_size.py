"""The step size of a step from its sums, and its telemetry, in plain torch.

The reference engine uses it, and any device on which no parameter lies. Nothing here waits for a device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Count, GroupColumn, Input, Reason
from .planning.tables import Inputs, Report
from .rules import Rule


class Shrink(NamedTuple):
    rho: Tensor
    clip: Tensor
    squared_norm: Tensor  # of the gradients before clipping; NaN where no pass computes it
    reason: Tensor


def clip_factor(norm_squared: Tensor, max_grad_norm: Tensor) -> Tensor:
    """s = min(1, max_grad_norm / (norm + 1e-6))"""
    factor = torch.clamp(max_grad_norm / (norm_squared.sqrt() + 1e-6), max=1.0)
    return factor.masked_fill(~max_grad_norm.isfinite(), 1.0)


def aimed_loss(inputs: Inputs) -> Tensor:
    """h = (1 - loss_target) (f - loss_floor): what a step aims to remove of the loss"""
    above = inputs.scalars[Input.LOSS] - inputs.scalars[Input.LOSS_FLOOR]
    return inputs.scalars[Input.AIM] * above


def shrink(rule: Rule, sums: Tensor, inputs: Inputs) -> Shrink:
    """rho = max(0, 2h - W) / (2h + Q), 1 where 0/0"""
    weighted, alignment, squared_norm = sums.unbind()
    h = aimed_loss(inputs)
    max_grad_norm = inputs.scalars[Input.MAX_GRAD_NORM]
    clip = clip_factor(squared_norm, max_grad_norm)
    q = weighted if rule.sums_clipped else clip * clip * weighted
    denominator = 2 * h + q
    rho = torch.clamp(2 * h - alignment, min=0.0) / denominator
    rho = rho.masked_fill(denominator == 0, 1.0)

    norm = squared_norm.masked_fill(~max_grad_norm.isfinite(), 0.0)
    reason = torch.zeros((), dtype=torch.int64, device=sums.device)
    for condition, code in (  # the first that holds is written last
        (~(weighted + alignment + norm).isfinite(), Reason.GRADIENT_NOT_FINITE),
        (h < 0, Reason.LOSS_BELOW_FLOOR),
        (~h.isfinite(), Reason.LOSS_NOT_FINITE),
        (inputs.scalars[Input.FOUND_INF] != 0, Reason.AMP_OVERFLOW),
    ):
        reason = reason.masked_fill(condition, int(code))
    if rule.coordinate or rule.sums_clipped:
        squared_norm = squared_norm.masked_fill(~max_grad_norm.isfinite(), math.nan)
    return Shrink(rho, clip, squared_norm, reason)


class GroupSteps(NamedTuple):
    """What the step size of a group is made of; with a leading dimension for several groups."""

    largest: Tensor  # c: the step size that rho is computed at
    schedule: Tensor  # lr / c: what a schedule leaves of the whole step
    effective: Tensor  # a: c; with regularised decay c / (1 + lambda c)


def group_steps(rule: Rule, groups: Tensor) -> GroupSteps:
    """Of rows of the table of groups."""
    lr, step_cap, weight_decay = (
        groups.select(-1, column)
        for column in (GroupColumn.LR, GroupColumn.STEP_CAP, GroupColumn.WEIGHT_DECAY)
    )
    capped = step_cap > 0
    largest = torch.where(capped, step_cap, lr)
    schedule = torch.where(capped, lr / step_cap, 1.0)
    effective = largest / (1 + weight_decay * largest) if rule.regularised else largest
    return GroupSteps(largest, schedule, effective)


class Telemetry(NamedTuple):
    """What a bucket reports of a step."""

    sizes: Tensor
    reason: Tensor
    skipped: Tensor  # of one element


def telemetry(
    rule: Rule, inputs: Inputs, step: Shrink, go: Tensor, reason: Tensor, report: Report
) -> Telemetry:
    """The step sizes of a step that was applied, or the reason why it was not."""
    steps = group_steps(rule, inputs.groups)
    gammas = steps.schedule * steps.effective * step.rho
    sizes = torch.cat([torch.stack([step.rho, step.squared_norm]), gammas])
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
    step = shrink(rule, totals.sum(0), inputs)
    new = telemetry(rule, inputs, step, step.reason == 0, step.reason, report)
    write_telemetry(new, report, last=True)

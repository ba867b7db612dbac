"""Warnings, who calls, and what errors say of other packages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection
from types import FrameType

INSIDE = ("ngn_kernels", "torch")


class SkippedStepWarning(RuntimeWarning):
    """A step, or some of its elements, left everything as it was."""


class SkippedStepError(RuntimeError):
    """The same, where ``on_skip`` or ``max_skipped_steps`` says that it is an error."""


def is_called_by(functions: Collection[str]) -> bool:
    """Whether a function of one of these qualified names is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}" in functions:
            return True
        frame = frame.f_back
    return False


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the first line outside this package and torch: the caller's own."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


# Keywords of other optimizers, and what to write here instead.
FOREIGN_OPTIONS = {
    "fused": "leave it out: every step is fused, and backend= chooses the kernels",
    "foreach": "leave it out: every step is fused, and backend= chooses the kernels",
    "capturable": "leave it out: every step on a GPU can be captured",
    "differentiable": "leave it out: no step can be differentiated",
    "maximize": "minimise the negative loss instead, with a loss_floor below it",
    "amsgrad": "leave it out: there is no such variant",
    "nesterov": "leave it out: of these optimizers NGNMuon alone has it",
    "dampening": "leave it out: the gradient's share is 1 - momentum",
    "alpha": "it is beta2, or betas[1], here",
    "learning_rate": "it is lr here",
    "epsilon": "it is eps here",
    "beta1": "it is betas[0], or momentum, here",
}

IN_LIGHTNING = "Trainer(callbacks=[ngn_kernels.trainers.FeedLoss()])"
BEFORE_A_CLOSURE = (
    f"In Lightning write {IN_LIGHTNING}, else call optimizer.add_loss(share) with what each backward() is "
    "called on, or clear the gradients in the closure"
)
HOW_TO_PASS_THE_LOSS = (
    "write optimizer.step(loss=loss), or optimizer.step(closure), or optimizer.add_loss(share) "
    "with what each backward() was called on, and then optimizer.step(); in a "
    "transformers.Trainer or with an accelerate.Accelerator: "
    "ngn_kernels.trainers.feed_loss(trainer); in Lightning: "
    f"{IN_LIGHTNING}"
)

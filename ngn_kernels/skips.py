"""Skipped steps: what is said of them, and when they raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn, get_args

import torch
from torch import Tensor

from .distributed.dtensors import local
from .layout import Reason
from .messages import SkippedStepError, SkippedStepWarning, warn
from .options import OnSkip
from .planning.tables import Skips

WARNINGS = {
    Reason.AMP_OVERFLOW: "the gradient scaler found an overflow; the step was skipped",
    Reason.LOSS_NOT_FINITE: "the loss is not finite; the step was skipped",
    Reason.LOSS_BELOW_FLOOR: "the loss is below loss_floor; the step was skipped: "
    "pass a loss_floor that the loss never falls below",
    Reason.GRADIENT_NOT_FINITE: "a gradient, or the sum of squared gradients, is not finite; "
    "the step was skipped",
    Reason.ELEMENTS_KEPT: "some elements would have become non-finite and kept their old values: "
    "they, their state or their gradient is not finite, or they overflow their type",
}

OR_A_RANK = "(or, on GPUs, a rank raised an error or the ranks disagree on what they do)"

NamedParams = Callable[[], Iterable[tuple[Tensor, str]]]


class SkipPolicy:
    """What a skipped step does: it warns, raises, or nothing happens."""

    def __init__(self, on_skip: OnSkip, limit: int | None) -> None:
        """`limit` is the number of skipped steps in a row that raises in any case."""
        if on_skip not in get_args(OnSkip):
            raise ValueError(f'on_skip={on_skip!r}: must be "warn", "raise" or "ignore"')
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"max_skipped_steps={limit!r}: must be None or a positive integer")
        self.on_skip = on_skip
        self.limit = limit
        self._error: SkippedStepError | None = None  # of the last step, raised in the next one

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_error": None}

    def check(self, home: torch.device) -> None:
        """Raise if ranks on such devices cannot follow it together.

        Hosts of several GPUs learn of a skipped step at different times.
        """
        raises = self.on_skip == "raise" or self.limit is not None
        if raises and home.type != "cpu":
            raise ValueError(
                'on_skip="raise" and max_skipped_steps are not for several ranks on GPUs, which would '
                "raise at different steps and wait for each other: read optimizer.skipped_steps "
                "every few hundred steps, on all ranks alike"
            )

    def report(self, name: str, skips: Skips, alone: bool, params: NamedParams) -> None:
        """Warn or raise; with other ranks all raise together, by `raise_error` in the next step."""
        too_many = self.limit is not None and skips.in_a_row >= self.limit
        raises = too_many or (
            # An overflow under AMP is how a GradScaler finds its scale.
            self.on_skip == "raise" and skips.reason is not Reason.AMP_OVERFLOW
        )
        if self.on_skip == "ignore" and not raises:
            return
        message = f"{name}: {_described(skips.reason, alone, params)}"
        if too_many:
            message += f" ({skips.in_a_row} steps in a row; max_skipped_steps={self.limit})"
        if not raises:
            warn(message, SkippedStepWarning)
            return
        error = SkippedStepError(message)
        if alone:
            raise error
        self._error = error

    @property
    def has_error(self) -> bool:
        """Whether the next step is to raise."""
        return self._error is not None

    def raise_error(self) -> NoReturn:
        error, self._error = self._error, None
        assert error is not None
        raise error

    def drop_error(self) -> None:
        """Of steps before another run was loaded."""
        self._error = None


def _described(reason: Reason, alone: bool, params: NamedParams) -> str:
    """What happened, with the parameter where the host can see it."""
    message = WARNINGS[reason]
    if reason is Reason.LOSS_NOT_FINITE and not alone:
        message += f" {OR_A_RANK}"
    if reason in (Reason.GRADIENT_NOT_FINITE, Reason.ELEMENTS_KEPT):
        named = list(params())
        grads = [(p.grad, f"the gradient of {name}") for p, name in named if p.grad is not None]
        for tensor, name in (*named, *grads):
            own = local(tensor)
            if own.is_cpu and not own.isfinite().all():
                return f"{message} ({name} is not finite)"
    return message

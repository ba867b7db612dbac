"""Where the loss of a step comes from: from step() itself, or from what was given before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .checks import as_double, read_loss, whole_loss

Groups = list[dict[str, Any]]

HOW_TO_PASS_THE_LOSS = (
    "write optimizer.step(loss=loss), or optimizer.step(closure), or optimizer.add_loss(share) "
    "with what each backward() was called on, and then optimizer.step(); in a "
    "transformers.Trainer or with an accelerate.Accelerator: "
    "ngn_kernels.trainers.feed_loss(trainer); in Lightning: "
    "Trainer(callbacks=[ngn_kernels.trainers.FeedLoss()])"
)


def has_gradients(groups: Groups) -> bool:
    return any(param.grad is not None for group in groups for param in group["params"])


class Gradient(NamedTuple):
    """A gradient as it was at some time; no reference keeps it alive."""

    param: Tensor
    grad: TensorWeakRef
    version: int

    @classmethod
    def first_of(cls, groups: Groups) -> Gradient | None:
        for group in groups:
            for param in group["params"]:
                if param.grad is not None:
                    return cls(param, TensorWeakRef(param.grad), param.grad._version)
        return None

    def stands(self) -> bool:
        grad = self.param.grad
        return grad is not None and grad is self.grad() and grad._version == self.version


class PendingLoss:
    """What add_loss or set_loss gave for the next step, which takes it.

    It belongs to the gradients, so zero_grad() drops it together with gradients that no step has
    used. It outlives a zero_grad() only if no such gradient was there when it was given nor since:
    then its backward() is still to come.
    """

    def __init__(self) -> None:
        self._used: Gradient | None = None  # nobody waits for this one any more
        self.clear()

    def __bool__(self) -> bool:
        return self._total is not None

    def clear(self) -> None:
        self._total: float | Tensor | None = None
        self._weight = 0.0
        self._by = ""
        self._has_gradients = False
        self._dropped = False

    def add(self, share: Any, groups: Groups) -> None:
        self._give("add_loss", as_double(whole_loss(read_loss(share))), 1.0, groups)
        self._weight = 1.0

    def set(self, loss: Any, weight: float, groups: Groups) -> None:
        self._give(
            "set_loss", as_double(whole_loss(read_loss(loss))) * weight, float(weight), groups
        )

    def _give(self, by: str, value: float | Tensor, weight: float, groups: Groups) -> None:
        if self._by not in ("", by):
            raise RuntimeError(
                "add_loss() and set_loss() were both called before one step: use one of them, "
                "add_loss(share) for a sum or set_loss(loss, weight) for a weighted mean"
            )
        self._by = by
        self._total = value if self._total is None else self._total + value
        self._weight += weight
        self._has_gradients = self._has_gradients or self._unused(groups)
        self._dropped = False

    def take(self, groups: Groups) -> float | Tensor | None:
        """The pending loss, which is then no longer pending; None if there is none."""
        if self._total is None:
            return None
        value = self._total / self._weight
        self.clear()
        self._used = Gradient.first_of(groups)
        return value

    def before_zero_grad(self, groups: Groups) -> None:
        if self and (self._has_gradients or self._unused(groups)):
            self.clear()
            self._dropped = True

    def after_zero_grad(self, groups: Groups) -> None:
        self._used = Gradient.first_of(groups)  # one that was zeroed in place

    def _unused(self, groups: Groups) -> bool:
        """Whether there is a gradient that was not there at the last step or zero_grad()."""
        if self._used is not None and self._used.stands():
            return False
        return has_gradients(groups)

    def of_step(
        self, closure: Callable[[], Any] | None, loss: Any, groups: Groups
    ) -> tuple[Any, float | Tensor | None]:
        """The loss as step() returns it, and as a number; None where nobody gave one."""
        if closure is not None and not callable(closure):
            raise TypeError(
                f"step() takes a closure, not {type(closure).__name__}: {HOW_TO_PASS_THE_LOSS}"
            )
        if loss is not None and (closure is not None or self):
            self.clear()
            raise RuntimeError(f"the loss came from two sources at once: {HOW_TO_PASS_THE_LOSS}")
        if closure is not None:
            try:
                with torch.enable_grad():
                    loss = closure()
            except BaseException:
                self.clear()
                raise
        value = self.take(groups)
        if value is None and loss is not None:
            value = read_loss(loss)
        return loss, value

    def missing(self, name: str, closure: bool) -> str:
        """What to say where a step has gradients and no loss."""
        if self._dropped:
            return (
                f"{name} needs the loss of this step: the one that was given belonged to gradients "
                "that zero_grad() has cleared; give it after zero_grad()"
            )
        if closure:
            return f"the closure returned None: return the loss from it, or {HOW_TO_PASS_THE_LOSS}"
        return f"{name} needs the loss of this step: {HOW_TO_PASS_THE_LOSS}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_used": None}

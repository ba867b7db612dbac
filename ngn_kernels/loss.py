"""Where the loss of a step comes from: from step() itself, or from what was given before it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .backwards import BackwardCounter, Groups, has_gradients, params_of, version
from .distributed.dtensors import is_sharded, local
from .messages import BEFORE_A_CLOSURE, HOW_TO_PASS_THE_LOSS, warn
from .options import require


def read_loss(loss: Any) -> float | Tensor:
    """A number if the loss is on the host; a 0-d tensor, never read, if it is on a device.

    A DTensor of which ranks have parts stays one, for `whole_loss`.
    """
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}: reduce it to one number first, "
                "such as loss.mean()"
            )
        if loss.is_complex() or loss.dtype == torch.bool:
            raise TypeError(f"the loss is a {loss.dtype} tensor: it must be a real number")
        if is_sharded(loss):
            spec: Any = loss
            if not all(placement.is_replicate() for placement in spec.placements):
                return loss.detach()
            loss = local(loss)
        return float(loss.item()) if loss.is_cpu else loss.detach().reshape(())
    if isinstance(loss, Real) and not isinstance(loss, bool):
        return float(loss)
    raise TypeError(
        f"the loss is a {type(loss).__name__}: pass a number or a tensor with one element"
    )


def whole_loss(loss: float | Tensor) -> float | Tensor:
    """The sum of the ranks' parts of a loss; a collective of those ranks if it is a DTensor."""
    return read_loss(loss.full_tensor()) if is_sharded(loss) else loss  # type: ignore[union-attr]


def read_weight(weight: Any) -> float:
    """A number, or a tensor on the host with one element."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"weight has shape {tuple(weight.shape)}: it must be one number")
        if not weight.is_cpu or is_sharded(weight):
            raise TypeError(
                f"weight is a tensor on {weight.device}: pass a number, which the host knows without "
                "waiting for a device, such as the number of samples"
            )
        weight = weight.item()
    require("weight", weight, "in (0, inf)", lambda v: 0 < v < math.inf)
    return float(weight)


def as_double(value: float | Tensor) -> float | Tensor:
    """On any device that has them."""
    if not isinstance(value, Tensor):
        return value
    return value.float() if value.device.type == "mps" else value.double()


SAMPLE = 16  # gradients that are marked when a loss is given; to mark 1,000 takes 0.2 ms


class GradientMarks:
    """Gradients as they were at some time, by identity and version; no reference keeps one alive."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        grads = (param.grad for param in params)
        self._marks = {
            id(grad): (weakref.ref(grad), version(grad)) for grad in grads if grad is not None
        }

    def has(self, grad: Tensor) -> bool:
        """Whether it is one of them, whatever was added to it since."""
        mark = self._marks.get(id(grad))
        return mark is not None and mark[0] is weakref.ref(grad)

    def has_unchanged(self, grad: Tensor) -> bool:
        return self.has(grad) and self._marks[id(grad)][1] == version(grad)


class PendingLoss:
    """Loss queued by add_loss or set_loss for the next step, which consumes it.

    It belongs to its gradients: where these are thrown away before a step has used them, by
    zero_grad() of the optimizer or of a module, it is dropped with them. It outlives a clearing only
    if no such gradient was there when it was given nor since: then its backward() is still to come.
    """

    def __init__(self) -> None:
        self.backwards = BackwardCounter()
        self._used: GradientMarks | None = None  # what a step has used or zero_grad() has zeroed
        self._used_by_step = False  # the same, where the witness stands for all gradients
        self._warned = False
        self.clear()

    def __bool__(self) -> bool:
        return self._total is not None

    def clear(self) -> None:
        self._total: float | Tensor | None = None
        self._weight = 0.0
        self._by = ""
        self._has_gradients = False
        self._sample: GradientMarks | None = None  # of the gradients that it was given for
        self._discards = 0
        self._dropped = False

    def add(self, share: Any, groups: Groups) -> None:
        self._give("add_loss", as_double(whole_loss(read_loss(share))), 1.0, groups)
        self._weight = 1.0

    def set(self, loss: Any, weight: float, groups: Groups) -> None:
        self._give(
            "set_loss", as_double(whole_loss(read_loss(loss))) * weight, float(weight), groups
        )

    def _give(self, by: str, value: float | Tensor, weight: float, groups: Groups) -> None:
        self.drop_stale(groups)
        if self._by not in ("", by):
            raise RuntimeError(
                "add_loss() and set_loss() were both called before one step: use one of them, "
                "add_loss(share) for a sum or set_loss(loss, weight) for a weighted mean"
            )
        self._by = by
        self._total = value if self._total is None else self._total + value
        self._weight += weight
        if self._unused(groups):
            self.backwards.join(groups, self._is_unused)
            if not self._has_gradients:
                params = list(params_of(groups))
                self._sample = GradientMarks(params[:: max(1, len(params) // SAMPLE)])
            self._has_gradients = True
        self._discards = self.backwards.discards
        self._dropped = False

    def drop_stale(self, groups: Groups, in_place: bool = True) -> None:
        """Drop a loss whose gradients were thrown away since it was given."""
        self.backwards.check(groups, in_place)
        if self and (
            self._discards != self.backwards.discards
            or (self._has_gradients and not self._has_gradients_left(groups))
        ):
            self.clear()
            self._dropped = True

    def _has_gradients_left(self, groups: Groups) -> bool:
        """Some loops drop the gradients of single layers; the others still belong to the loss."""
        witness = self.backwards.witness(groups)
        if self._sample is None or not self.backwards.present or witness is None:
            return has_gradients(groups)
        grads = (param.grad for param in params_of(groups))
        return witness.grad is not None or any(g is not None and self._sample.has(g) for g in grads)

    def take(self, groups: Groups) -> float | Tensor | None:
        """The pending loss, which is then no longer pending; None if there is none."""
        if self._total is None:
            return None
        self.drop_stale(groups, in_place=False)
        if self._total is None:
            return None
        value = self._total / self._weight
        self.clear()
        witness = self.backwards.witness(groups) if self.backwards.count else None
        self._used_by_step = witness is not None
        self._used = GradientMarks(params_of(groups) if witness is None else [witness])
        return value

    def before_zero_grad(self, groups: Groups) -> None:
        if self and (self._has_gradients or self._unused(groups)):
            self.clear()
            self._dropped = True

    def after_zero_grad(self, groups: Groups, set_to_none: bool) -> None:
        self.backwards.restart()
        self._used_by_step = False
        self._used = None if set_to_none else GradientMarks(params_of(groups))

    def _unused(self, groups: Groups) -> bool:
        """Whether there is a gradient that was not there at the last step or zero_grad()."""
        if self.backwards.present:
            return True
        if self._used_by_step:
            witness = self.backwards.witness(groups)
            if witness is not None and witness.grad is not None and not self._is_unused(witness):
                return False
        return any(map(self._is_unused, params_of(groups)))

    def _is_unused(self, param: Tensor) -> bool:
        grad = param.grad
        return grad is not None and (self._used is None or not self._used.has_unchanged(grad))

    def of_step(
        self, closure: Callable[[], Any] | None, loss: Any, groups: Groups
    ) -> tuple[Any, float | Tensor | None]:
        """The loss as step() returns it, and as a number; None where nobody gave one."""
        if closure is not None and not callable(closure):
            raise TypeError(
                f"step() takes a closure, not {type(closure).__name__}: {HOW_TO_PASS_THE_LOSS}"
            )
        returned = None
        if closure is not None:
            self.backwards.earlier = self.backwards.count
            try:
                with torch.enable_grad():
                    returned = closure()
            except BaseException:
                self.clear()
                raise
        if loss is not None:
            if self._total is not None:
                self.drop_stale(groups, in_place=False)
            if returned is not None or self._total is not None:
                self.clear()
                raise RuntimeError(
                    f"the loss came from two sources at once: {HOW_TO_PASS_THE_LOSS}"
                )
        given = loss if returned is None else returned
        value = self.take(groups)
        if value is None and given is not None:
            self._check_count(given, by_closure=returned is not None)
            value = read_loss(given)
            self._dropped = False
        self.backwards.after_step(groups)
        return given, value

    def _check_count(self, loss: Any, by_closure: bool) -> None:
        """A loss that step() got belongs to one pass, or else it is a number: then it is the sum."""
        count, earlier = self.backwards.count, self.backwards.earlier
        if count < 2:
            return
        if by_closure and 0 < earlier < count:
            raise RuntimeError(
                f"{earlier} backward() calls came before the closure, and nobody has cleared their "
                f"gradients: what the closure returned is not the loss of all of them. {BEFORE_A_CLOSURE}"
            )
        if isinstance(loss, Tensor) and loss.requires_grad and not self._warned:
            self._warned = True
            warn(
                f"{count} backward() calls made the gradients of this step, and its loss is a "
                "tensor that still requires grad, as the loss of one of them does: write "
                "optimizer.add_loss(loss / n) after each (loss / n).backward(), and then "
                "optimizer.step(). If it is the sum of all of them, pass loss.detach()",
                UserWarning,
            )

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
        return {
            **self.__dict__,
            "_used": None,
            "_used_by_step": False,
            "_sample": None,
            "_discards": 0,
        }

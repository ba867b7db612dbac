"""What the trainers share: whose gradients a backward() made, and what there is to log."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..optimizer import NGNOptimizer

SHARDS_FLAT = (
    "flattens and shards parameters without telling the optimizer, so that a step sees neither all "
    "gradients nor its own loss: train with DDP or FSDP2, or with another optimizer"
)


def unwrapped(optimizers: Iterable[Any]) -> list[NGNOptimizer]:
    """The NGN optimizers among these, out of what trainers wrap them in."""
    found = []
    for optimizer in optimizers:
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if isinstance(optimizer, NGNOptimizer):
            found.append(optimizer)
    return found


def require_version(package: str, minimum: tuple[int, int]) -> None:
    version = importlib.import_module(package).__version__
    if tuple(int(part) for part in version.split(".")[:2]) < minimum:
        wanted = ".".join(map(str, minimum))
        raise RuntimeError(
            f"{package} {version} is too old to feed the loss: install {package}>={wanted}"
        )


class Feed:
    """Gives what a backward() was called on to the optimizers whose gradients it changed."""

    def __init__(self) -> None:
        self._backwards = 0
        self._before: list[list[Any]] = []
        self._pending: dict[NGNOptimizer, set[int]] = {}
        self._stepped: set[int] = set()

    def before_backward(self, optimizers: list[NGNOptimizer]) -> None:
        """Forget the losses whose gradients were thrown away: until this backward() that is plain."""
        for optimizer in optimizers:
            if not optimizer.loss_is_pending():
                self._pending.pop(optimizer, None)
        if len(optimizers) > 1:
            self._before = [_gradients(optimizer) for optimizer in optimizers]

    def after_backward(self, optimizers: list[NGNOptimizer], share: Tensor) -> None:
        self._backwards += 1
        fed = optimizers
        if len(optimizers) > 1:
            now = [_gradients(optimizer) for optimizer in optimizers]
            changed = zip(optimizers, self._before, now, strict=True)
            fed = [optimizer for optimizer, before, after in changed if before != after]
        for optimizer in fed:
            self._pending.setdefault(optimizer, set()).add(self._backwards)
            optimizer.add_loss(share)

    def before_step(self, optimizer: NGNOptimizer) -> None:
        """Raise if another optimizer has stepped on the same loss."""
        backwards = self._pending.pop(optimizer, set()) if optimizer.loss_is_pending() else set()
        if backwards & self._stepped:
            optimizer.drop_loss()
            raise RuntimeError(
                "one backward() made the gradients of two NGN optimizers, and both step on it: "
                "each would count the whole loss as its own. Make one optimizer with two "
                "parameter groups, or call backward() on a loss of its own for each"
            )
        waiting = set().union(*self._pending.values())
        self._stepped = (self._stepped | backwards) & waiting


def _gradients(optimizer: NGNOptimizer) -> list[Any]:
    """A mark of each gradient, which changes as soon as a backward() adds to it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(hasattr(param, "device_mesh") for param in params):
        raise RuntimeError(
            "several NGN optimizers with sharded parameters: nobody can see whose gradients a "
            "backward() will make. Call optimizer.add_loss(loss) for the one that it belongs to"
        )
    grads = [param.grad for param in params]
    return [None if grad is None else (id(grad), grad._version) for grad in grads]


def telemetry(optimizers: list[NGNOptimizer]) -> dict[str, Tensor]:
    """What the optimizers did in their last step, on their devices, by the names of the logs."""
    logs: dict[str, Tensor] = {}
    for i, optimizer in enumerate(optimizers):
        logs |= optimizer.metrics(prefix="ngn" if len(optimizers) == 1 else f"ngn/{i}")
    return logs

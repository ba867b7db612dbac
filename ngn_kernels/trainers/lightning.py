"""FeedLoss: a callback for Lightning, by either of its names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import Any

from torch import Tensor

from .feed import SHARDS_FLAT, Feed, require_version, telemetry, unwrapped

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
MINIMUM = (2, 1)


def FeedLoss() -> Any:
    """A callback that lets what ``backward()`` is called on reach the NGN optimizers.

    Write ``Trainer(callbacks=[FeedLoss()])``. It serves automatic and manual optimization
    (``self.manual_backward(loss)``) and logs ``ngn/shrink``, ``ngn/step_size``,
    ``ngn/grad_norm`` and ``ngn/skipped_steps``.
    """
    names = [name for name in PACKAGES if name in sys.modules]
    if not names:
        names = [name for name in PACKAGES if importlib.util.find_spec(name.split(".")[0])][:1]
    if not names:
        raise ImportError("FeedLoss() is for Lightning: pip install lightning")
    return _callback_class(tuple(names))()


@cache
def _callback_class(names: tuple[str, ...]) -> type:
    for name in names:
        require_version(name, MINIMUM)
    bases = tuple(importlib.import_module(name).Callback for name in names)
    return type("FeedLoss", (Hooks, *bases), {})


class Hooks:
    """What the callback does; Lightning's Callback is its other base."""

    def __init__(self) -> None:
        self._feed = Feed()
        self._share: Tensor | None = None
        self._unscaled: list[Any] = []

    def __reduce__(self) -> Any:
        return FeedLoss, ()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if sum(isinstance(callback, Hooks) for callback in trainer.callbacks) > 1:
            raise RuntimeError("the Trainer has more than one FeedLoss(): one is enough")
        names = {cls.__name__ for cls in type(trainer.strategy).__mro__}
        for name in names & {"DeepSpeedStrategy", "FSDPStrategy"}:
            raise RuntimeError(f"NGN optimizers do not work with {name}: it {SHARDS_FLAT}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers = unwrapped(trainer.optimizers)
        if not optimizers:
            raise RuntimeError(
                "FeedLoss() found no NGN optimizer: return one from configure_optimizers(), or "
                "leave the callback out"
            )
        # Lightning does not clip gradients that the step unscales; without a scaler no step does.
        if _scaler(trainer) is None or trainer.gradient_clip_val or _clips_by_itself(pl_module):
            wrappers = pl_module.optimizers()  # manual optimization clips by these
            wrappers = wrappers if isinstance(wrappers, (list, tuple)) else [wrappers]
            self._unscaled = [*optimizers, *(w for w in wrappers if unwrapped([w]))]
            for optimizer in self._unscaled:
                optimizer._step_supports_amp_scaling = False

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for optimizer in self._unscaled:
            vars(optimizer).pop("_step_supports_amp_scaling", None)
        self._unscaled = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Drop the loss of a step that a scaler left out, however the module clears gradients."""
        for ngn in unwrapped([optimizer]):
            ngn.drop_loss()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._share = loss.detach()
        scaler = _scaler(trainer)
        if scaler is not None and scaler.is_enabled():
            self._share = self._share / scaler._get_scale_async()  # get_scale() would sync
        self._feed.before_backward(unwrapped(trainer.optimizers))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._share is not None:
            self._feed.after_backward(unwrapped(trainer.optimizers), self._share)
        self._share = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for ngn in unwrapped([optimizer]):
            self._feed.before_step(ngn)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        logs = telemetry(unwrapped(trainer.optimizers))
        pl_module.log_dict({name: value.float() for name, value in logs.items()})


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _clips_by_itself(pl_module: Any) -> bool:
    return any(
        "configure_gradient_clipping" in vars(cls)
        and cls.__module__.split(".")[0] not in ("lightning", "pytorch_lightning")
        for cls in type(pl_module).__mro__
    )

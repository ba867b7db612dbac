"""feed_loss: for accelerate.Accelerator and transformers.Trainer, and so for TRL's trainers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from ..optimizer import NGNOptimizer
from .feed import SHARDS_FLAT, Feed, require_version, telemetry, unwrapped

Owner = TypeVar("Owner")

MINIMUM = {"accelerate": (1, 0), "transformers": (4, 57)}
POLICY_GRADIENTS = {"GRPOTrainer", "RLOOTrainer", "PPOTrainer", "A2POTrainer", "AsyncGRPOTrainer"}


def feed_loss(owner: Owner) -> Owner:
    """Let what ``accelerator.backward()`` is called on reach the NGN optimizers.

    Args:
        owner: an ``accelerate.Accelerator`` or a ``transformers.Trainer`` (TRL's are such),
            before or after its optimizer was made. A trainer's logs also get ``ngn/shrink``,
            ``ngn/step_size``, ``ngn/grad_norm`` and ``ngn/skipped_steps``.

    Returns:
        The owner.
    """
    kind: Any = owner
    if _is_a(owner, "transformers", "Trainer"):
        require_version("transformers", MINIMUM["transformers"])
        _refuse_policy_gradients(kind, unwrapped([kind.optimizer]))
        _feed_accelerator(kind.accelerator, kind)
        _feed_later_accelerators(kind)
        _add_to_logs(kind)
    elif _is_a(owner, "accelerate", "Accelerator"):
        _feed_accelerator(kind, None)
    else:
        raise TypeError(
            f"feed_loss() takes an accelerate.Accelerator or a transformers.Trainer, not "
            f"{type(owner).__name__}; in Lightning write Trainer(callbacks=[FeedLoss()]), in a "
            "loop of your own optimizer.step(loss=loss)"
        )
    return owner


def _is_a(owner: Any, package: str, name: str) -> bool:
    """Like isinstance, without an import."""
    return any(
        cls.__name__ == name and cls.__module__.split(".")[0] == package
        for cls in type(owner).__mro__
    )


def _feed_accelerator(accelerator: Any, trainer: Any) -> None:
    require_version("accelerate", MINIMUM["accelerate"])
    _refuse_shards(accelerator)
    if "backward" in vars(accelerator):
        raise RuntimeError("feed_loss() was called twice for the same accelerator: once is enough")
    backward, feed = accelerator.backward, Feed()
    hooked: set[NGNOptimizer] = set()

    def backward_and_feed(loss: Any, **kwargs: Any) -> None:
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"accelerator.backward() got {type(loss).__name__}, not a loss: a model returns "
                "one only if it is given labels; else compute it from the model's output"
            )
        optimizers = unwrapped(accelerator._optimizers)
        if not optimizers:
            raise RuntimeError(
                "feed_loss() found no NGN optimizer: give it to accelerator.prepare(), or write "
                "Trainer(..., optimizer_cls_and_kwargs=(NGNMDv1, {...}))"
            )
        if trainer is not None:
            _refuse_policy_gradients(trainer, optimizers)
        if len(optimizers) > 1:
            for optimizer in set(optimizers) - hooked:
                optimizer.register_step_pre_hook(lambda stepped, *_: feed.before_step(stepped))
                hooked.add(optimizer)
        feed.before_backward(optimizers)
        backward(loss, **kwargs)
        feed.after_backward(optimizers, loss.detach() / accelerator.gradient_accumulation_steps)

    accelerator.backward = backward_and_feed


def _feed_later_accelerators(trainer: Any) -> None:
    """A hyper-parameter search makes an accelerator for each trial."""
    create = trainer.create_accelerator_and_postprocess

    def create_and_feed() -> None:
        create()
        _feed_accelerator(trainer.accelerator, trainer)

    trainer.create_accelerator_and_postprocess = create_and_feed


def _add_to_logs(trainer: Any) -> None:
    log = trainer.log

    def log_with_telemetry(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # where the trainer itself has just waited for the device
            extra = telemetry(unwrapped(trainer.accelerator._optimizers))
            home = next(iter(extra.values())).device
            values = torch.stack([value.to(home, torch.float32) for value in extra.values()])
            logs.update(zip(extra, values.tolist(), strict=True))
        log(logs, *args, **kwargs)

    trainer.log = log_with_telemetry


def _refuse_shards(accelerator: Any) -> None:
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind == "FSDP" and getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) == 2:
        return
    if kind in ("DEEPSPEED", "MEGATRON_LM", "FSDP"):
        name = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "FSDP": "FSDP 1"}[kind]
        raise RuntimeError(f"NGN optimizers do not work with {name}: it {SHARDS_FLAT}")


def _refuse_policy_gradients(trainer: Any, optimizers: list[NGNOptimizer]) -> None:
    names = POLICY_GRADIENTS & {cls.__name__ for cls in type(trainer).__mro__}
    if names and any(optimizer.loss_floor == 0 for optimizer in optimizers):
        raise RuntimeError(
            f"the loss of {names.pop()} takes both signs: it is a surrogate whose gradient counts, "
            "not its value, while NGN step sizes need to know how far the loss is above its "
            "lowest value. Use AdamW there. If you know a lower bound of your loss, pass it to the "
            "optimizer as loss_floor=; a bound far below the loss makes the step size constant"
        )

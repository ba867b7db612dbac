"""The model, the data and the hand-written loop that every trainer is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ngn_kernels import NGNMDv1

VOCABULARY, LENGTH, SAMPLES, BATCH, EPOCHS = 32, 8, 20, 2, 2
LR = 0.05
# Windows over both epochs: 10 micro-batches each, so that a window of 4 ends with one of 2.
MAX_STEPS = SAMPLES // BATCH * EPOCHS


@dataclass(frozen=True)
class Case:
    """What is asked of a trainer."""

    accumulate: int = 1
    clip: float = 0.0
    bf16: bool = False
    overflow: int = 0  # the backward() in which a scaled gradient overflows; 0: no scaler
    schedule: bool = False
    smoothing: float = 0.0
    items: bool = False  # the loss is divided by the number of tokens in the window


class Model(nn.Module):
    """Tokens to tokens; the loss is the mean over the labels that are not -100."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def logits(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(input_ids))))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": loss_of(logits, labels)} | {"logits": logits}
        )


class CountingModel(Model):
    """As transformers' own models, it divides by the number of tokens that it is told."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        assert labels is not None
        return {"loss": loss_of(logits, labels, kwargs.get("num_items_in_batch")), "logits": logits}


def loss_of(logits: Tensor, labels: Tensor, items: Any = None, smoothing: float = 0.0) -> Tensor:
    total = cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", label_smoothing=smoothing
    )
    return total / (labels.ne(-100).sum() if items is None else items)


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for k in range(SAMPLES):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.roll(-1)
        labels[: k % LENGTH] = -100  # samples of different weight
        found.append({"input_ids": tokens, "labels": labels})
    return found


def batches(data: list[dict[str, Tensor]] | None = None) -> list[dict[str, Tensor]]:
    """The micro-batches of an epoch."""
    data = samples() if data is None else data
    return [
        {name: torch.stack([row[name] for row in data[k : k + BATCH]]) for name in data[0]}
        for k in range(0, len(data), BATCH)
    ]


def windows(accumulate: int) -> list[list[dict[str, Tensor]]]:
    """The micro-batches of each step, with a short last window in every epoch."""
    epoch = batches()
    return [epoch[k : k + accumulate] for k in range(0, len(epoch), accumulate)] * EPOCHS


def unbroken_windows(accumulate: int) -> list[list[dict[str, Tensor]]]:
    """The same for trainers that count on across epochs."""
    every = batches() * EPOCHS
    return [every[k : k + accumulate] for k in range(0, len(every), accumulate)]


def optimizer_of(model: nn.Module, **options: Any) -> Any:
    return NGNMDv1(model.parameters(), lr=LR, **options)


def schedule_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 - k / (2 * MAX_STEPS))


def scaler_of() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)


def let_overflow(model: nn.Module, backward: int) -> None:
    """The gradient of one parameter becomes infinite in the given backward()."""
    calls = []

    def hook(grad: Tensor) -> Tensor:
        calls.append(1)
        return torch.full_like(grad, float("inf")) if len(calls) == backward else grad

    if backward:
        next(model.parameters()).register_hook(hook)


Divide = Callable[[list[dict[str, Tensor]], Case], float]
DIVIDE_BY_SETTING: Divide = lambda window, case: case.accumulate  # noqa: E731
DIVIDE_BY_LENGTH: Divide = lambda window, case: len(window)  # noqa: E731


def by_hand(
    case: Case,
    divide: Divide,
    windows_of: Callable[[int], list[list[dict[str, Tensor]]]] = windows,
    factor: float = 1.0,
) -> nn.Module:
    """Train as one would without a trainer; a factor other than 1 makes the loss a wrong one."""
    model = Model()
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer) if case.schedule else None
    scaler = scaler_of() if case.overflow else None
    let_overflow(model, case.overflow)
    for window in windows_of(case.accumulate):
        optimizer.zero_grad()
        whole = 0.0
        items = sum(int(batch["labels"].ne(-100).sum()) for batch in window)
        for batch in window:
            amp = torch.autocast("cpu", torch.bfloat16) if case.bf16 else contextlib.nullcontext()
            with amp:
                logits = model.logits(batch["input_ids"])
                loss = loss_of(
                    logits, batch["labels"], items if case.items else None, case.smoothing
                )
            loss = loss if case.items else loss / divide(window, case)
            (loss if scaler is None else scaler.scale(loss)).backward()
            whole += float(loss.detach())
        if case.clip:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        if scaler is None:
            optimizer.step(loss=whole * factor)
        else:
            scaler.step(optimizer, loss=whole * factor)
            scaler.update()
        if schedule is not None:
            schedule.step()
    return model


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)

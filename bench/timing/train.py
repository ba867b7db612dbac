"""`ngn-bench train`: what an optimizer costs inside a real training loop."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import models
from ..contenders.check import Verdict, checked
from ..contenders.registry import BASELINE, CONTENDERS, Contender, is_ngn, select
from ..environment import first_line, memory_free
from ..errors import BenchError, unknown_name
from ..report import (
    INTERRUPTED_NOTE,
    Progress,
    Table,
    columns,
    duration,
    part_of,
    rows_of,
    spread_text,
    workload_names,
)
from .measure import Clock, Lane, Summary, make_clock, measure, paired_ratio, summarise
from .workloads import count

BATCHES = 64
BYTE_VOCABULARY = 256

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TrainSettings:
    """Where `batch` or `context` is None, it is chosen so that an iteration takes about a second."""

    device: torch.device
    seconds: float
    batch: int | None = None
    context: int | None = None
    clip: float | None = None
    autocast: bool = False
    text: Path | None = None


@dataclass(frozen=True)
class Plan:
    """What will be trained: a model with its sizes, and batches of inputs of one shape."""

    name: str
    model: str
    sizes: dict[str, int]
    batch: int
    input_shape: tuple[int, ...]

    @property
    def context(self) -> int | None:
        """Tokens in a sequence; None for images."""
        return self.sizes.get("context")

    def build(self) -> nn.Module:
        return models.build(self.model, **self.sizes)


@dataclass(frozen=True)
class Task:
    """A model with its batches, ready to train."""

    name: str
    model: nn.Module
    batches: list[Batch]
    description: str


IMAGES = {"mlp": (1, 28, 28), "resnet20": (3, 32, 32), "vit-cifar": (3, 32, 32)}
SMALL_TRANSFORMER = {"layers": 4, "heads": 4, "dim": 128, "vocab": BYTE_VOCABULARY}
TASKS = (
    *IMAGES,
    "small-transformer",
    "gpt2",
    *(f"transformer++-{size}" for size in models.TRANSFORMER_PLUS_SIZES),
)


def plan_task(name: str, contenders: Sequence[Contender], settings: TrainSettings) -> Plan:
    """Choose the sizes that are not given; raise before anything is allocated if it cannot be trained."""
    if name not in TASKS:
        raise unknown_name("training task", name, TASKS)
    if name in IMAGES:
        if settings.text is not None or settings.context is not None:
            raise BenchError(f"{name} trains on images: --text and --context do not apply to it")
        plan = Plan(name, name, {}, settings.batch or 128, IMAGES[name])
    elif name == "small-transformer":
        context = settings.context or 64
        sizes = {**SMALL_TRANSFORMER, "context": context}
        plan = Plan(name, "char-transformer", sizes, settings.batch or 16, (context,))
    else:
        batch, context = _fit_machine(name, settings)
        plan = Plan(name, name, {"context": context}, batch, (context,))
    plan = _fit_memory(plan, contenders, settings)
    if settings.text is not None and plan.context is not None:
        _read_text(settings.text, plan.batch, plan.context)
    return plan


def make_task(plan: Plan, settings: TrainSettings) -> Task:
    """Build the model and a few batches of images, text or random tokens for it."""
    torch.manual_seed(0)
    model = plan.build().to(settings.device)
    if plan.context is None:
        batches = _image_batches(plan, settings.device)
        return Task(plan.name, model, batches, f"batches of {plan.batch} images")
    if settings.text is None:
        vocabulary = model.get_parameter("embed.weight").shape[0]
        tokens = torch.randint(vocabulary, (BATCHES, plan.batch, plan.context + 1))
        source = "random"
    else:
        tokens, source = _read_text(settings.text, plan.batch, plan.context), "bytes of text"
    batches = [
        (chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous())
        for chunk in tokens.to(settings.device)
    ]
    return Task(plan.name, model, batches, f"{plan.batch} × {plan.context} tokens, {source}")


def _image_batches(plan: Plan, device: torch.device) -> list[Batch]:
    shape = (plan.batch, *plan.input_shape)
    images = [torch.randn(shape, device=device) for _ in range(BATCHES)]
    labels = [torch.randint(10, (plan.batch,), device=device) for _ in range(BATCHES - 1)]
    # Lists of different lengths pair each image with changing labels: nothing can be memorised,
    # and gradients do not vanish into slow denormal numbers.
    rounds = range(BATCHES * (BATCHES - 1))
    return [(images[i % BATCHES], labels[i % (BATCHES - 1)]) for i in rounds]


def _read_text(path: Path, batch: int, context: int) -> Tensor:
    """Bytes of a file as tokens: as many batches as it holds, up to `BATCHES`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(f"cannot read the text {path}: {error.strerror}") from None
    shape = (min(BATCHES, len(data) // (batch * (context + 1))), batch, context + 1)
    if shape[0] == 0:
        raise BenchError(
            f"{path} has {len(data):,} bytes, and a batch of {batch} × {context} tokens needs "
            f"{batch * (context + 1):,}: take a longer text, or a smaller --batch or --context"
        )
    used = bytearray(data[: math.prod(shape)])
    return torch.frombuffer(used, dtype=torch.uint8).long().view(shape)


def _fit_machine(name: str, settings: TrainSettings) -> tuple[int, int]:
    """Batch and context that make an iteration last about a second on this machine."""
    shapes = models.parameter_shapes(name)
    multiplied = sum(math.prod(shape) for key, shape in shapes.items() if "embed" not in key)
    tokens = max(32, int(_matmul_speed(settings) / (6 * multiplied)))
    context = settings.context or min(2048, 2 ** int(math.log2(tokens)))
    return settings.batch or max(1, min(256, tokens // context)), context


def _matmul_speed(settings: TrainSettings) -> float:
    """Floating-point operations per second of a matrix product."""
    n = 4096 if settings.device.type == "cuda" else 1024
    dtype = torch.bfloat16 if settings.autocast else torch.float32
    a, b = (torch.randn(n, n, device=settings.device).to(dtype) for _ in range(2))
    lane = Lane("matmul", lambda: a @ b)
    measure([lane], make_clock(settings.device), 0.2)
    summary = summarise(lane)
    if summary is None:
        raise BenchError(f"this machine cannot multiply matrices in {dtype}: {lane.failure}")
    return 2 * n**3 / summary.busy


def _fit_memory(plan: Plan, contenders: Sequence[Contender], settings: TrainSettings) -> Plan:
    """The plan with a batch that fits the memory; an error if it was given, or if none does."""
    free = memory_free(settings.device)
    fixed, per_sample = _memory_needed(plan, contenders)
    needed = fixed + plan.batch * per_sample
    if free is None or needed <= free:
        return plan
    fitting = (free - fixed) // per_sample
    if settings.batch is None and fitting >= 1:
        return dataclasses.replace(plan, batch=fitting)
    smaller = "a smaller model" if plan.context is None else "a smaller model or --context"
    raise BenchError(
        f"training {plan.name} in batches of {plan.batch:,} with {len(contenders)} optimizers needs "
        f"about {needed / 2**30:,.1f} GiB, and {free / 2**30:.1f} GiB are free on "
        f"{settings.device}: take a smaller --batch, {smaller}, or fewer --optimizers"
    )


def _memory_needed(plan: Plan, contenders: Sequence[Contender]) -> tuple[int, int]:
    """Bytes for the models and their optimizers, and for each sample in a batch.

    What a forward pass keeps for the backward pass is counted on the meta device.
    """
    is_text = plan.context is not None
    with torch.device("meta"):
        model = plan.build()
        shape = (1, *plan.input_shape)
        inputs = torch.zeros(shape, dtype=torch.long) if is_text else torch.zeros(shape)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(inputs)
        logits.float().log_softmax(-1)
    saved = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in kept}
    for p in model.parameters():
        saved.pop(p.untyped_storage()._cdata, None)
    # The gradient of the logits comes in two steps.
    activations = sum(saved.values()) + 2 * logits.nbytes
    batches = BATCHES * inputs.nbytes * (2 if is_text else 1)
    parameters = sum(p.numel() for p in model.parameters())
    per_parameter = 4 + sum(
        8 + contender.passes.state_bytes(torch.float32) for contender in contenders
    )
    if any(contender.unfused for contender in contenders):
        per_parameter += 12
    return int(parameters * per_parameter), activations + batches


@dataclass
class TrainRow:
    """One optimizer in one training loop. Updates are the optimizer's part of an iteration."""

    workload: str
    contender: str
    label: str
    parameters: int
    description: str
    dtype: str
    device: str
    verdict: Verdict
    time: Summary | None = None
    ratio: float | None = None
    update: float | None = None
    update_ratio: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    note: str = ""


@dataclass
class Loop:
    """A training loop of one optimizer; each call of `iterate` is one iteration."""

    model: nn.Module
    batches: Iterator[Batch]
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor], object]
    clip: float | None
    clock: Clock
    autocast: bool
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def iterate(self) -> None:
        inputs, targets = next(self.batches)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(inputs)
            loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
        loss.backward()
        start = self.clock.mark()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.step(loss)
        self.marks.append((start, self.clock.mark()))
        self.losses.append(loss.detach())

    def update_seconds(self) -> float:
        return statistics.median(self.clock.elapsed(start, end) for start, end in self.marks)


def _make_loop(contender: Contender, task: Task, settings: TrainSettings, clock: Clock) -> Loop:
    model = copy.deepcopy(task.model)
    fused_clip = settings.clip is not None and is_ngn(contender.name)
    options = {"max_grad_norm": settings.clip} if fused_clip else {}
    optimizer = contender.build(list(model.parameters()), **options)
    return Loop(
        model,
        itertools.cycle(task.batches),
        optimizer,
        contender.step_function(optimizer),
        None if fused_clip else settings.clip,
        clock,
        settings.autocast,
    )


def run_train(
    names: Sequence[str],
    contenders: Sequence[Contender],
    settings: TrainSettings,
    progress: Progress = lambda fraction, text: None,
) -> tuple[list[TrainRow], bool]:
    """Train each task with each contender in turns. Returns rows, and False if interrupted."""
    plans = [plan_task(name, contenders, settings) for name in names]
    verdicts = {c.name: checked(c, torch.float32, settings.device) for c in contenders}
    rows: list[TrainRow] = []
    for index, (name, plan) in enumerate(zip(names, plans, strict=True)):
        show = part_of(progress, index, len(names), name)
        show(0.0, "building")
        try:
            task = make_task(plan, settings)
            seconds = settings.seconds / len(plans)
            found, completed = _run_task(task, contenders, verdicts, settings, seconds, show)
        except KeyboardInterrupt:
            return rows, False
        rows += found
        if not completed:
            return rows, False
    return rows, True


def _run_task(
    task: Task,
    contenders: Sequence[Contender],
    verdicts: dict[str, Verdict | str],
    settings: TrainSettings,
    seconds: float,
    progress: Progress,
) -> tuple[list[TrainRow], bool]:
    clock = make_clock(settings.device)
    rows: dict[str, TrainRow] = {}
    loops: dict[str, Loop] = {}
    lanes: list[Lane] = []
    if any(contender.compiled for contender in contenders):
        torch.compiler.reset()
    for contender in contenders:
        verdict = verdicts[contender.name]
        row = TrainRow(
            task.name,
            contender.name,
            contender.label,
            sum(p.numel() for p in task.model.parameters()),
            task.description,
            "bfloat16 autocast" if settings.autocast else "float32",
            str(settings.device),
            Verdict(None, verdict) if isinstance(verdict, str) else verdict,
        )
        rows[contender.name] = row
        if isinstance(verdict, str):
            row.note = f"cannot run: {verdict}"
            continue
        if verdict.ok is False:
            row.note = f"not timed: {verdict.text}"
            continue
        try:
            loops[contender.name] = loop = _make_loop(contender, task, settings, clock)
        except Exception as error:  # shown with the contender
            row.note = f"cannot run: {first_line(error)}"
            continue
        lanes.append(Lane(contender.name, loop.iterate))
    completed = measure(lanes, clock, seconds, progress)
    for lane in lanes:
        row, loop = rows[lane.name], loops[lane.name]
        summary = summarise(lane)
        if lane.failure:
            row.note = f"failed: {lane.failure}"
        elif summary is None:
            row.note = INTERRUPTED_NOTE
        else:
            row.time, row.update = summary, loop.update_seconds()
            row.first_loss, row.last_loss = loop.losses[0].item(), loop.losses[-1].item()
    baseline = rows.get(BASELINE)
    for row in rows.values():
        if baseline and baseline.time and row.time and row.update and baseline.update:
            row.ratio = paired_ratio(row.time, baseline.time)
            row.update_ratio = row.update / baseline.update
    return list(rows.values()), completed


COLUMNS = columns(
    "optimizer",
    "time/iteration",
    "±",
    "vs AdamW",
    "time/update",
    "vs AdamW",
    "update's share",
    "loss, first → last",
    "checked",
    text=(0, -1),
)


def train_tables(record: dict[str, Any]) -> list[Table]:
    """One table per task, from the JSON record."""
    tables = []
    for workload in workload_names(record):
        rows = rows_of(record, workload)
        first = rows[0]
        title = (
            f"{workload}: {count(first['parameters'])} parameters, {first['description']}, "
            f"{first['dtype']} on {first['device']}"
        )
        bold = next((i for i, row in enumerate(rows) if row["contender"] == BASELINE), None)
        tables.append(Table(title, COLUMNS, [_cells(row) for row in rows], bold=bold))
    if tables:
        tables[-1].caption = (
            "Medians. vs AdamW: ratio to torch's fused AdamW; for iterations the median ratio of "
            "rounds in which both ran in turns."
        )
    return tables


def _cells(row: dict[str, Any]) -> list[str]:
    time = row["time"]
    if time is None:
        return [row["label"], *["–"] * (len(COLUMNS) - 2), row["note"]]
    return [
        row["label"],
        duration(time["median"]),
        spread_text(time),
        "–" if row["ratio"] is None else f"{row['ratio']:.3f}×",
        duration(row["update"]),
        "–" if row["update_ratio"] is None else f"{row['update_ratio']:.2f}×",
        f"{row['update'] / time['median']:.1%}",
        f"{row['first_loss']:.3f} → {row['last_loss']:.3f}",
        row["note"] or row["verdict"]["text"],
    ]


def select_optimizers(names: Sequence[str], backend: str) -> list[Contender]:
    """Contenders of a training loop: the baseline first."""
    chosen = select(names, backend)
    for contender in chosen:
        if contender.dtype is not None:
            raise BenchError(f"{contender.name}: all train the same float32 model; leave out the @")
    return [CONTENDERS[BASELINE], *(c for c in chosen if c.name != BASELINE)]

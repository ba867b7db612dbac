"""`ngn-bench train`: what an optimizer costs inside a real training loop."""

from __future__ import annotations

import copy
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

from . import models
from .contenders import BASELINE, CONTENDERS, Contender, select
from .environment import first_line, memory_free
from .errors import BenchError, unknown_name
from .measure import Clock, Lane, Summary, make_clock, measure, paired_ratio, summarise
from .report import Column, Table, duration, rows_of, spread, workload_names
from .workloads import count

BATCHES = 64
BYTE_VOCABULARY = 256

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TrainSettings:
    """`batch` and `context` of None are sized so that an iteration takes about a second."""

    device: torch.device
    seconds: float
    batch: int | None = None
    context: int | None = None
    clip: float | None = None
    autocast: bool = False
    text: Path | None = None


@dataclass(frozen=True)
class Task:
    """A model with its batches, ready to train."""

    name: str
    model: nn.Module
    batches: list[Batch]
    description: str


TASKS = (
    "mlp",
    "small-transformer",
    "resnet20",
    "vit-cifar",
    "gpt2",
    *(f"transformer++-{size}" for size in models.TRANSFORMER_PLUS_SIZES),
)


def make_task(name: str, settings: TrainSettings) -> Task:
    """Build the model and a few batches of images, text or random tokens for it."""
    if name not in TASKS:
        raise unknown_name("training task", name, TASKS)
    torch.manual_seed(0)
    if name in ("mlp", "resnet20", "vit-cifar"):
        return _image_task(name, settings)
    return _language_task(name, settings)


def _image_task(name: str, settings: TrainSettings) -> Task:
    if settings.text is not None or settings.context is not None:
        raise BenchError(f"{name} trains on images: --text and --context do not apply to it")
    shape = (1, 28, 28) if name == "mlp" else (3, 32, 32)
    batch = settings.batch or 128
    device = settings.device
    images = [torch.randn(batch, *shape, device=device) for _ in range(BATCHES)]
    labels = [torch.randint(10, (batch,), device=device) for _ in range(BATCHES - 1)]
    # The two lists run past each other: what has no pattern cannot be learnt by heart, and
    # gradients do not vanish into slow denormal numbers.
    rounds = range(BATCHES * (BATCHES - 1))
    batches = [(images[i % BATCHES], labels[i % (BATCHES - 1)]) for i in rounds]
    return Task(name, models.build(name).to(device), batches, f"batches of {batch} images")


def _language_task(name: str, settings: TrainSettings) -> Task:
    if name == "small-transformer":
        name_of_model, sizes = "char-transformer", {"layers": 4, "heads": 4, "dim": 128}
        sizes["vocab"] = BYTE_VOCABULARY
        batch, context = settings.batch or 16, settings.context or 64
    else:
        name_of_model, sizes = name, {}
        batch, context = _fit_machine(name, settings)
    _require_memory(name_of_model, sizes, batch, context, settings)
    model = models.build(name_of_model, context=context, **sizes).to(settings.device)
    vocabulary = model.get_parameter("embed.weight").shape[0]
    if settings.text is None:
        tokens, source = torch.randint(vocabulary, (BATCHES, batch, context + 1)), "random"
    else:
        tokens, source = _read_text(settings.text, batch, context), "bytes of text"
    batches = [
        (chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous())
        for chunk in tokens.to(settings.device)
    ]
    return Task(name, model, batches, f"{batch} × {context} tokens, {source}")


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


def _require_memory(
    name: str, sizes: dict[str, int], batch: int, context: int, settings: TrainSettings
) -> None:
    free = memory_free(settings.device)
    if free is None:
        return
    shapes = models.parameter_shapes(name, context=context, **sizes)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    width = shapes["embed.weight"][1]
    # Parameters, gradients and two states for each of two optimizers; then logits with their
    # gradient, and some twenty activations of the model's width per block.
    layers = sum(1 for key in shapes if key.endswith("attn.qkv.weight"))
    vocabulary = shapes["embed.weight"][0]
    activations = batch * context * 4 * (3 * vocabulary + 20 * layers * width)
    needed = 2 * 16 * parameters + activations
    if needed > free:
        raise BenchError(
            f"training {name} on {batch} × {context} tokens needs about {needed / 2**30:.1f} GiB, "
            f"and {free / 2**30:.1f} GiB are free on {settings.device}: take a smaller model, "
            "--batch or --context"
        )


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
    uses_loss: bool
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
        step: Callable[..., Any] = self.optimizer.step
        if self.uses_loss:
            step(loss=loss)
        else:
            step()
        self.marks.append((start, self.clock.mark()))
        self.losses.append(loss.detach())

    def update_seconds(self) -> float:
        return statistics.median(self.clock.elapsed(start, end) for start, end in self.marks)


def _make_loop(contender: Contender, task: Task, settings: TrainSettings, clock: Clock) -> Loop:
    model = copy.deepcopy(task.model)
    fused_clip = (
        settings.clip is not None
        and contender.truth == "reference"
        and (contender.name != "ngnmdv1:plain")
    )
    options = {"max_grad_norm": settings.clip} if fused_clip else {}
    return Loop(
        model,
        itertools.cycle(task.batches),
        contender.build(list(model.parameters()), **options),
        contender.uses_loss,
        None if fused_clip else settings.clip,
        clock,
        settings.autocast,
    )


def run_train(
    names: Sequence[str],
    contenders: Sequence[Contender],
    settings: TrainSettings,
    progress: Callable[[float, str], object] = lambda fraction, text: None,
) -> tuple[list[TrainRow], bool]:
    """Train each task with each contender in turns. Returns rows, and False if interrupted."""
    rows: list[TrainRow] = []
    for index, name in enumerate(names):

        def show(fraction: float, text: str, index: int = index, name: str = name) -> None:
            progress((index + fraction) / len(names), f"{name}: {text}" if text else name)

        show(0.0, "building")
        try:
            task = make_task(name, settings)
            found, completed = _run_task(
                task, contenders, settings, settings.seconds / len(names), show
            )
        except KeyboardInterrupt:
            return rows, False
        rows += found
        if not completed:
            return rows, False
    return rows, True


def _run_task(
    task: Task,
    contenders: Sequence[Contender],
    settings: TrainSettings,
    seconds: float,
    progress: Callable[[float, str], object],
) -> tuple[list[TrainRow], bool]:
    clock = make_clock(settings.device)
    rows: dict[str, TrainRow] = {}
    loops: dict[str, Loop] = {}
    lanes: list[Lane] = []
    for contender in contenders:
        row = TrainRow(
            task.name,
            contender.name,
            contender.label,
            sum(p.numel() for p in task.model.parameters()),
            task.description,
            "bfloat16 autocast" if settings.autocast else "float32",
            str(settings.device),
        )
        rows[contender.name] = row
        try:
            loops[contender.name] = loop = _make_loop(contender, task, settings, clock)
        except Exception as error:  # reported beside the contender
            row.note = f"cannot run: {first_line(error)}"
            continue
        lanes.append(Lane(contender.name, loop.iterate))
    completed = measure(lanes, clock, seconds, progress)
    for lane in lanes:
        row, loop = rows[lane.name], loops[lane.name]
        row.time = summarise(lane)
        if lane.failure:
            row.note = f"failed: {lane.failure}"
        if row.time is not None:
            row.update = loop.update_seconds()
            row.first_loss, row.last_loss = loop.losses[0].item(), loop.losses[-1].item()
    baseline = rows.get(BASELINE)
    for row in rows.values():
        if baseline and baseline.time and row.time and row.update and baseline.update:
            row.ratio = paired_ratio(row.time, baseline.time)
            row.update_ratio = row.update / baseline.update
    return list(rows.values()), completed


COLUMNS = (
    Column("optimizer", right=False),
    Column("time/iteration"),
    Column("±"),
    Column("vs AdamW"),
    Column("time/update"),
    Column("vs AdamW"),
    Column("update's share"),
    Column("loss, first → last"),
    Column("", right=False),
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
        f"{spread(time):.1%}",
        "–" if row["ratio"] is None else f"{row['ratio']:.3f}×",
        duration(row["update"]),
        "–" if row["update_ratio"] is None else f"{row['update_ratio']:.2f}×",
        f"{row['update'] / time['median']:.1%}",
        f"{row['first_loss']:.3f} → {row['last_loss']:.3f}",
        row["note"],
    ]


def select_optimizers(names: Sequence[str], backend: str) -> list[Contender]:
    """Contenders of a training loop: the baseline first."""
    chosen = select(names, backend)
    return [CONTENDERS[BASELINE], *(c for c in chosen if c.name != BASELINE)]

"""`ngn-bench step`: the cost of one optimizer step, contenders side by side."""

from __future__ import annotations

import dataclasses
import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import roofline
from .check import Verdict, checked, try_once
from .contenders import BASELINE, Contender
from .environment import cache_bytes, first_line, memory_free
from .errors import BenchError
from .measure import Lane, Summary, make_clock, measure, peak_extra_bytes, summarise
from .report import INTERRUPTED_NOTE
from .traffic import count_bytes
from .workloads import Shape, Workload

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LOSS = 2.5
# So small that parameters stay in range however many steps are timed.
LEARNING_RATE = 1e-4
COUNTED_ELEMENTS = 2**16
SLOW_REFERENCE_PARAMETERS = 16_000_000
LARGE_PARAMETERS = 4_000_000


@dataclass(frozen=True)
class Settings:
    device: torch.device
    dtype: torch.dtype
    seconds: float
    cold: bool = False


@dataclass
class Row:
    """One contender on one workload. `time` is None where it was not timed; `note` says why."""

    workload: str
    contender: str
    label: str
    parameters: int
    tensors: int
    dtype: str
    device: str
    verdict: Verdict
    bytes_code: float
    bytes_floor: float
    state_bytes: int = 0
    extra_bytes: int | None = None
    time: Summary | None = None
    ratio: float | None = None
    note: str = ""

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, counting only what the rule has to move."""
        if self.time is None:
            return None
        return self.bytes_floor * self.parameters / self.time.busy

    def as_json(self, memory_speed: float | None) -> dict[str, Any]:
        share = self.bandwidth / memory_speed if self.bandwidth and memory_speed else None
        return {**dataclasses.asdict(self), "bandwidth": self.bandwidth, "share": share}


@dataclass
class StepResult:
    """Rows in the order of the table; the memory's copy and update speed, the best of the run."""

    rows: list[Row] = field(default_factory=list)
    memory_bandwidth: dict[str, float] = field(default_factory=dict)
    not_run: dict[str, dict[str, str]] = field(default_factory=dict)
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        speed = roofline.memory_speed(self.memory_bandwidth)
        return {
            "rows": [row.as_json(speed) for row in self.rows],
            "memory_bandwidth": self.memory_bandwidth,
            "not_run": self.not_run,
            "interrupted": self.interrupted,
        }


def require_memory(workload: Workload, contenders: Sequence[Contender], settings: Settings) -> None:
    """Raise before anything is allocated if the run would not fit."""
    free = memory_free(settings.device)
    if free is None:
        return
    size = workload.parameters * settings.dtype.itemsize
    states = workload.parameters * sum(
        contender.passes.state_bytes(settings.dtype) for contender in contenders
    )
    temporaries = 3 * size if any(contender.unfused for contender in contenders) else 0
    bandwidth = 2 * 4 * roofline.large_elements(settings.device)
    needed = 2 * size + states + temporaries + bandwidth
    if needed > free:
        gib = 2**30
        raise BenchError(
            f"{workload.name} with {len(contenders)} contender(s) needs about "
            f"{needed / gib:.1f} GiB (parameters and gradients {2 * size / gib:.1f}, optimizer "
            f"states {states / gib:.1f}, temporaries {temporaries / gib:.1f}), and "
            f"{free / gib:.1f} GiB are free on {settings.device}. Take a smaller workload, or "
            "fewer contenders: --contenders ngnmdv1 compares one rule with fused AdamW."
        )


def run_step(
    workloads: Sequence[tuple[Workload, Sequence[Contender]]],
    settings: Settings,
    progress: Callable[[float, str], object] = lambda fraction, text: None,
    finished: Callable[[StepResult], object] = lambda result: None,
) -> StepResult:
    """Measure every workload's contenders; `finished` is called after each workload.

    What was measured is returned also when the user interrupts.
    """
    for workload, contenders in workloads:
        require_memory(workload, contenders, settings)
    result = StepResult()
    verdicts: dict[str, Verdict | str] = {}
    share = settings.seconds / max(1, len(workloads))
    for index, (workload, contenders) in enumerate(workloads):

        def show(fraction: float, text: str, index: int = index, name: str = workload.name) -> None:
            progress((index + fraction) / len(workloads), f"{name}: {text}" if text else name)

        try:
            _run_workload(workload, contenders, settings, share, verdicts, result, show)
        except KeyboardInterrupt:
            result.interrupted = True
        finished(result)
        if result.interrupted:
            break
        if workload.parameters >= LARGE_PARAMETERS:
            # Optimizers may sit in reference cycles, and the next workload needs the memory.
            gc.collect()
    return result


def _run_workload(
    workload: Workload,
    contenders: Sequence[Contender],
    settings: Settings,
    seconds: float,
    verdicts: dict[str, Verdict | str],
    result: StepResult,
    progress: Callable[[float, str], object],
) -> None:
    rows: list[Row] = []
    lanes: list[Lane] = []
    refused = result.not_run.setdefault(workload.name, {})
    params, gradients = _allocate(workload, settings)
    _fill(params, gradients)
    turn = _next_of_same_shape(workload.shapes)
    loss = torch.full((), LOSS, device=settings.device)
    clock = make_clock(settings.device, _flush_bytes() if settings.cold else 0)
    optimizers: dict[str, Optimizer] = {}
    if any(contender.compiled for contender in contenders):
        torch.compiler.reset()

    def prepare() -> None:
        """New gradient tensors for every step, as `zero_grad()` leaves a training loop; where
        several parameters have one shape, also in other memory than before."""
        nonlocal gradients
        gradients = [gradients[index] for index in turn]
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient.detach()
        if settings.cold:
            clock.flush()

    for contender in contenders:
        progress(0.0, f"checking {contender.label}")
        if contender.name not in verdicts:
            verdicts[contender.name] = checked(contender, settings.dtype, settings.device)
        verdict = verdicts[contender.name]
        if isinstance(verdict, str):
            refused[contender.label] = verdict
            continue
        row = Row(
            workload.name,
            contender.name,
            contender.label,
            workload.parameters,
            workload.tensors,
            str(settings.dtype).removeprefix("torch."),
            str(settings.device),
            verdict,
            _bytes_moved(contender, settings),
            contender.passes.floor_bytes(settings.dtype),
        )
        rows.append(row)
        if verdict.ok is False:
            row.note = f"not timed: {verdict.text}"
            continue
        try:
            optimizer = contender.build(list(params), lr=LEARNING_RATE)
            lane = _lane(contender, optimizer, loss, prepare, row, settings)
            if not _all_finite(params):
                raise ArithmeticError(f"its step leaves non-finite parameters in {row.dtype}")
        except Exception as error:  # reported beside the contender
            row.note = f"failed: {first_line(error)}"
            _fill(params, gradients)
            continue
        lanes.append(lane)
        optimizers[lane.name] = optimizer

    memory, moved = roofline.bandwidth_lanes(
        roofline.large_elements(settings.device), settings.device, roofline.MEMORY_KERNELS
    )
    completed = measure([*lanes, *memory], clock, seconds, progress)
    result.interrupted = not completed
    for name, speed in roofline.speeds(memory, moved).items():
        result.memory_bandwidth[name] = max(speed, result.memory_bandwidth.get(name, 0.0))
    _fill_in(rows, lanes, _unfit_times(optimizers, params))
    result.rows += rows


def _allocate(workload: Workload, settings: Settings) -> tuple[list[Tensor], list[Tensor]]:
    options: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device}
    params = [torch.empty(shape, **options, requires_grad=True) for shape in workload.shapes]
    return params, [torch.empty(shape, **options) for shape in workload.shapes]


@torch.no_grad()
def _fill(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Random values; gradients away from zero, so that their squares do not underflow in half
    precision."""
    generator = torch.Generator(params[0].device).manual_seed(0)
    for p, gradient in zip(params, gradients, strict=True):
        p.normal_(generator=generator)
        gradient.uniform_(0.25, 1.25, generator=generator)


def _next_of_same_shape(shapes: Sequence[Shape]) -> list[int]:
    """For each tensor the index of the next one of its shape, in a circle."""
    alike: dict[Shape, list[int]] = {}
    for index, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(index)
    turn: dict[int, int] = {}
    for indices in alike.values():
        turn.update(zip(indices, [*indices[1:], indices[0]], strict=True))
    return [turn[index] for index in range(len(shapes))]


def _all_finite(params: Iterable[Tensor]) -> bool:
    """Whether no parameter is NaN or infinite; found without temporaries of their size."""
    extremes = [end for p in params if p.numel() for end in torch.aminmax(p.detach())]
    return bool(torch.isfinite(torch.stack(extremes)).all())


def _unfit_times(optimizers: dict[str, Optimizer], params: Sequence[Tensor]) -> dict[str, str]:
    """Reasons not to show the time of some optimizers: they did not do the work."""
    if not _all_finite(params):
        return dict.fromkeys(optimizers, "parameters became non-finite while steps were timed")
    skipped = {
        name: int(optimizer.skipped_steps)
        for name, optimizer in optimizers.items()
        if hasattr(optimizer, "skipped_steps")
    }
    return {
        name: f"{number} of its steps were skipped" for name, number in skipped.items() if number
    }


def _flush_bytes() -> int:
    return max(cache_bytes().values(), default=32 * 2**20)


def _bytes_moved(contender: Contender, settings: Settings) -> float:
    """Bytes per parameter that the contender's code moves."""
    if not contender.unfused:
        return contender.passes.floor_bytes(settings.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = try_once(contender, settings.dtype, settings.device, COUNTED_ELEMENTS)
        return round(count_bytes(step) / COUNTED_ELEMENTS, 1)


def _lane(
    contender: Contender,
    optimizer: Optimizer,
    loss: Tensor,
    prepare: Callable[[], None],
    row: Row,
    settings: Settings,
) -> Lane:
    step = functools.partial(contender.step_function(optimizer), loss)
    prepare()
    step()
    row.state_bytes = _state_bytes(optimizer)
    prepare()
    row.extra_bytes = peak_extra_bytes(step, settings.device)
    return Lane(contender.label, step, prepare)


def _state_bytes(optimizer: Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _fill_in(
    rows: Iterable[Row],
    lanes: Sequence[Lane],
    unfit: dict[str, str],
) -> None:
    """Times that may be shown, and their ratios to the baseline."""
    summaries = {lane.name: summarise(lane) for lane in lanes}
    failures = {lane.name: lane.failure for lane in lanes if lane.failure}
    by_name = {row.contender: row for row in rows}
    for row in by_name.values():
        if row.label in failures:
            row.note = f"failed: {failures[row.label]}"
        elif row.label in unfit:
            row.note = f"not shown: {unfit[row.label]}"
        elif not row.note:
            row.time = summaries[row.label]
            row.note = "" if row.time else INTERRUPTED_NOTE
    baseline = by_name.get(BASELINE)
    if baseline is not None and baseline.time is not None:
        for row in by_name.values():
            row.ratio = row.time.median / baseline.time.median if row.time else None

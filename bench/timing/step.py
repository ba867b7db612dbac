"""`ngn-bench step`: the cost of one optimizer step, contenders side by side."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..contenders.check import Verdict, checked, try_once
from ..contenders.registry import BASELINE, Contender
from ..contenders.traffic import count_bytes
from ..environment import cache_bytes, first_line, memory_free
from ..errors import BenchError
from ..report import INTERRUPTED_NOTE, Progress, part_of
from . import roofline
from .measure import Clock, Lane, Summary, make_clock, measure, peak_extra_bytes, summarise
from .workloads import Shape, Workload

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
    bytes_code: float | None
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
    dtypes = [contender.dtype_in(settings.dtype) for contender in contenders]
    size = workload.parameters * sum(dtype.itemsize for dtype in {*dtypes, settings.dtype})
    states = workload.parameters * sum(
        contender.passes.state_bytes(dtype)
        for contender, dtype in zip(contenders, dtypes, strict=True)
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
    progress: Progress = lambda fraction, text: None,
    finished: Callable[[StepResult], object] = lambda result: None,
) -> StepResult:
    """Measure every workload's contenders; `finished` is called after each workload.

    What was measured is returned also when the user interrupts.
    """
    for workload, contenders in workloads:
        require_memory(workload, contenders, settings)
    result = StepResult()
    verdicts: dict[str, Verdict | str] = {}
    shares = _shares(workloads)
    for index, (workload, contenders) in enumerate(workloads):
        show = part_of(progress, index, len(workloads), workload.name)
        try:
            seconds = settings.seconds * shares[index]
            _run_workload(workload, contenders, settings, seconds, verdicts, result, show)
        except KeyboardInterrupt:
            result.interrupted = True
        finished(result)
        if result.interrupted:
            break
        if workload.parameters >= LARGE_PARAMETERS:
            # Optimizers may sit in reference cycles, and the next workload needs the memory.
            gc.collect()
    return result


def _shares(workloads: Sequence[tuple[Workload, Sequence[Contender]]]) -> list[float]:
    """Of the measuring time: each contender alike, and twice as much where steps take long."""
    weights = [
        len(contenders) * (2 if workload.parameters > LARGE_PARAMETERS else 1)
        for workload, contenders in workloads
    ]
    return [weight / sum(weights) for weight in weights]


def _run_workload(
    workload: Workload,
    contenders: Sequence[Contender],
    settings: Settings,
    seconds: float,
    verdicts: dict[str, Verdict | str],
    result: StepResult,
    progress: Progress,
) -> None:
    rows: list[Row] = []
    lanes: list[Lane] = []
    refused = result.not_run.setdefault(workload.name, {})
    models: dict[torch.dtype, Model] = {}
    loss = torch.full((), LOSS, device=settings.device)
    clock = make_clock(settings.device, _flush_bytes() if settings.cold else 0)
    optimizers: dict[str, tuple[Optimizer, Model]] = {}
    if any(contender.compiled for contender in contenders):
        torch.compiler.reset()

    for contender in contenders:
        progress(0.0, f"checking {contender.label}")
        dtype = contender.dtype_in(settings.dtype)
        if contender.name not in verdicts:
            verdicts[contender.name] = checked(contender, dtype, settings.device)
        verdict = verdicts[contender.name]
        if isinstance(verdict, str):
            refused[contender.label] = verdict
            continue
        floor = contender.passes.mean_floor_bytes(dtype, map(math.prod, workload.shapes))
        row = Row(
            workload.name,
            contender.name,
            contender.label,
            workload.parameters,
            workload.tensors,
            str(dtype).removeprefix("torch."),
            str(settings.device),
            verdict,
            _bytes_moved(contender, dtype, settings.device, floor),
            floor,
        )
        rows.append(row)
        if verdict.ok is False:
            row.note = f"not timed: {verdict.text}"
            continue
        if dtype not in models:
            models[dtype] = Model(workload.shapes, dtype, settings.device)
        model = models[dtype]
        try:
            optimizer = contender.build(list(model.params), lr=LEARNING_RATE)
            prepare = _preparation(model, clock, settings)
            lane = _lane(contender, optimizer, loss, prepare, row, settings)
            if not model.finite():
                raise ArithmeticError(f"its step leaves non-finite parameters in {row.dtype}")
        except Exception as error:  # shown with the contender
            row.note = f"failed: {first_line(error)}"
            model.fill()
            continue
        lanes.append(lane)
        optimizers[lane.name] = optimizer, model

    memory, moved = roofline.bandwidth_lanes(
        roofline.large_elements(settings.device), settings.device, roofline.MEMORY_KERNELS
    )
    completed = measure([*lanes, *memory], clock, seconds, progress)
    result.interrupted = not completed
    for name, speed in roofline.speeds(memory, moved).items():
        result.memory_bandwidth[name] = max(speed, result.memory_bandwidth.get(name, 0.0))
    _fill_in(rows, lanes, _invalid_times(optimizers))
    result.rows += rows


class Model:
    """Parameters of one dtype and their gradients, shared by the contenders that update them."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> None:
        self.params, self._gradients = _allocate(shapes, dtype, device)
        self._turn = _next_of_same_shape(shapes)
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Random values; gradients away from zero, so that their squares do not underflow in half
        precision."""
        generator = torch.Generator(self.params[0].device).manual_seed(0)
        for p, gradient in zip(self.params, self._gradients, strict=True):
            p.normal_(generator=generator)
            gradient.uniform_(0.25, 1.25, generator=generator)

    def renew_gradients(self) -> None:
        """New gradient tensors for every step, as `zero_grad()` leaves a training loop; where
        several parameters have one shape, also in other memory than before."""
        self._gradients = [self._gradients[index] for index in self._turn]
        for p, gradient in zip(self.params, self._gradients, strict=True):
            p.grad = gradient.detach()

    def finite(self) -> bool:
        """Whether no parameter is NaN or infinite; found without temporaries of their size."""
        extremes = [end for p in self.params if p.numel() for end in torch.aminmax(p.detach())]
        return bool(torch.isfinite(torch.stack(extremes)).all())


def _allocate(
    shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    params = [torch.empty(shape, **options, requires_grad=True) for shape in shapes]
    return params, [torch.empty(shape, **options) for shape in shapes]


def _preparation(model: Model, clock: Clock, settings: Settings) -> Callable[[], None]:
    def prepare() -> None:
        model.renew_gradients()
        if settings.cold:
            clock.flush()

    return prepare


def _next_of_same_shape(shapes: Sequence[Shape]) -> list[int]:
    """For each tensor the index of the next one of its shape, in a circle."""
    alike: dict[Shape, list[int]] = {}
    for index, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(index)
    turn: dict[int, int] = {}
    for indices in alike.values():
        turn.update(zip(indices, [*indices[1:], indices[0]], strict=True))
    return [turn[index] for index in range(len(shapes))]


def _invalid_times(optimizers: dict[str, tuple[Optimizer, Model]]) -> dict[str, str]:
    """Why the times of some optimizers are not shown: they did not do the work."""
    invalid = {}
    non_finite = {id(model) for _, model in optimizers.values() if not model.finite()}
    for name, (optimizer, model) in optimizers.items():
        skipped = int(getattr(optimizer, "skipped_steps", 0))
        if id(model) in non_finite:
            invalid[name] = "parameters became non-finite while steps were timed"
        elif skipped:
            invalid[name] = f"{skipped} of its steps were skipped"
    return invalid


def _flush_bytes() -> int:
    return max(cache_bytes().values(), default=32 * 2**20)


def _bytes_moved(
    contender: Contender, dtype: torch.dtype, device: torch.device, floor: float
) -> float | None:
    """Bytes per parameter that the contender's code moves; None if that is not known."""
    if not contender.unfused:
        return None if contender.opaque else floor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = try_once(contender, dtype, device, COUNTED_ELEMENTS)
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
        _tensor_bytes(value)
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _tensor_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor; of a wrapper subclass, those of its inner tensors."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_tensor_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def _fill_in(rows: Iterable[Row], lanes: Sequence[Lane], invalid: dict[str, str]) -> None:
    """Times that may be shown, and their ratios to the baseline."""
    summaries = {lane.name: summarise(lane) for lane in lanes}
    failures = {lane.name: lane.failure for lane in lanes if lane.failure}
    by_name = {row.contender: row for row in rows}
    for row in by_name.values():
        if row.label in failures:
            row.note = f"failed: {failures[row.label]}"
        elif row.label in invalid:
            row.note = f"not shown: {invalid[row.label]}"
        elif not row.note:
            row.time = summaries[row.label]
            row.note = "" if row.time else INTERRUPTED_NOTE
    baseline = by_name.get(BASELINE)
    if baseline is not None and baseline.time is not None:
        for row in by_name.values():
            row.ratio = row.time.median / baseline.time.median if row.time else None

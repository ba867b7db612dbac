"""`ngn-bench step`: the cost of one optimizer step, contenders side by side."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import roofline
from .check import Verdict, check
from .contenders import BASELINE, Contender
from .environment import cache_bytes, first_line, memory_free
from .errors import BenchError
from .measure import Lane, Summary, make_clock, measure, peak_extra_bytes, summarise
from .traffic import PASSES, count_bytes
from .workloads import Workload

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LOSS = 2.5
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
    share: float | None = None
    note: str = ""

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, counting only what the rule has to move."""
        if self.time is None:
            return None
        return self.bytes_floor * self.parameters / self.time.busy

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "bandwidth": self.bandwidth}


@dataclass
class StepResult:
    """Rows in the order of the table, with the memory bandwidth measured among them."""

    rows: list[Row] = field(default_factory=list)
    memory_bandwidth: dict[str, float] = field(default_factory=dict)
    not_run: dict[str, dict[str, str]] = field(default_factory=dict)
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": [row.as_json() for row in self.rows],
            "memory_bandwidth": self.memory_bandwidth,
            "not_run": self.not_run,
            "interrupted": self.interrupted,
        }


def state_bytes_estimate(contender: Contender, parameters: int, dtype: torch.dtype) -> int:
    """Memory of the optimizer's state, from the streams that its rule keeps."""
    kept = {stream for stream in PASSES[contender.rule].writes if stream in "mv"}
    in_dtype = contender.uses_loss is False or contender.name.startswith("momo")
    size = dtype.itemsize if in_dtype else max(4, dtype.itemsize)
    return parameters * size * len(kept)


def require_memory(workload: Workload, contenders: Sequence[Contender], settings: Settings) -> None:
    """Raise before anything is allocated if the run would not fit."""
    free = memory_free(settings.device)
    if free is None:
        return
    size = workload.parameters * settings.dtype.itemsize
    states = sum(
        state_bytes_estimate(contender, workload.parameters, settings.dtype)
        for contender in contenders
    )
    temporaries = 3 * size if any(contender.unfused for contender in contenders) else 0
    bandwidth = 4 * roofline.large_elements(settings.device)
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
    loss = torch.full((), LOSS, device=settings.device)
    clock = make_clock(settings.device, _flush_bytes() if settings.cold else 0)

    def prepare() -> None:
        """New gradient tensors for every step, as `zero_grad()` leaves a training loop."""
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient.detach()
        if settings.cold:
            clock.flush()

    for contender in contenders:
        progress(0.0, f"checking {contender.label}")
        verdict = _checked(contender, settings, verdicts)
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
            PASSES[contender.rule].floor_bytes(settings.dtype),
        )
        rows.append(row)
        if verdict.ok is False:
            row.note = f"not timed: {verdict.text}"
            continue
        try:
            lane = _lane(contender, params, loss, prepare, row, settings)
        except Exception as error:  # reported beside the contender
            row.note = f"failed: {first_line(error)}"
            continue
        lanes.append(lane)

    updates, moved = roofline.bandwidth_lanes(
        roofline.large_elements(settings.device), settings.device, ["update"]
    )
    completed = measure([*lanes, *updates], clock, seconds, progress)
    result.interrupted = not completed
    _fill_in(rows, lanes, updates[0], moved["update"], workload, result)
    result.rows += rows


def _allocate(workload: Workload, settings: Settings) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator(settings.device).manual_seed(0)
    params: list[Tensor] = []
    gradients: list[Tensor] = []
    for shape in workload.shapes:
        for tensors, scale in ((params, 1.0), (gradients, 1e-3)):
            tensor = torch.empty(shape, dtype=settings.dtype, device=settings.device)
            tensors.append(tensor.normal_(0.0, scale, generator=generator))
        params[-1].requires_grad_()
    return params, gradients


def _flush_bytes() -> int:
    return max(cache_bytes().values(), default=32 * 2**20)


def _checked(
    contender: Contender, settings: Settings, verdicts: dict[str, Verdict | str]
) -> Verdict | str:
    """The contender's verdict, or the reason why it cannot run at all."""
    if contender.name not in verdicts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if contender.build_truth is None:
                    _try_once(contender, settings)
                verdicts[contender.name] = check(contender, settings.dtype, settings.device)
        except Exception as error:  # reported beside the contender
            verdicts[contender.name] = first_line(error)
    return verdicts[contender.name]


def _try_once(contender: Contender, settings: Settings, elements: int = 8) -> tuple[Any, ...]:
    """Build the contender on one tensor and take a step, so that its state exists."""
    param = torch.ones(elements, dtype=settings.dtype, device=settings.device, requires_grad=True)
    param.grad = torch.ones_like(param)
    step = contender.step_function(
        contender.build([param]), torch.full((), LOSS, device=settings.device)
    )
    step()
    return param, step


def _bytes_moved(contender: Contender, settings: Settings) -> float:
    """Bytes per parameter that the contender's code moves."""
    if not contender.unfused:
        return PASSES[contender.rule].floor_bytes(settings.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, step = _try_once(contender, settings, COUNTED_ELEMENTS)
        return round(count_bytes(step) / COUNTED_ELEMENTS, 1)


def _lane(
    contender: Contender,
    params: Sequence[Tensor],
    loss: Tensor,
    prepare: Callable[[], None],
    row: Row,
    settings: Settings,
) -> Lane:
    optimizer = contender.build(list(params))
    step = contender.step_function(optimizer, loss)
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
    update: Lane,
    update_bytes: int,
    workload: Workload,
    result: StepResult,
) -> None:
    """Times, and ratios to the baseline and to the memory bandwidth of the same run."""
    summaries = {lane.name: summarise(lane) for lane in lanes}
    failures = {lane.name: lane.failure for lane in lanes if lane.failure}
    updated = summarise(update)
    speed = update_bytes / updated.busy if updated else None
    if speed is not None:
        result.memory_bandwidth[workload.name] = speed
    by_name = {row.contender: row for row in rows}
    for row in by_name.values():
        row.time = summaries.get(row.label)
        if row.label in failures:
            row.note = f"failed: {failures[row.label]}"
        elif row.time is None and not row.note:
            row.note = "not measured: interrupted"
    baseline = by_name.get(BASELINE)
    for row in by_name.values():
        if row.time is None:
            continue
        if baseline is not None and baseline.time is not None:
            row.ratio = row.time.median / baseline.time.median
        if speed is not None and row.bandwidth is not None:
            row.share = row.bandwidth / speed

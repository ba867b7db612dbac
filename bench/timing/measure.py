"""The measuring core: contenders take turns, every step is timed, medians are reported."""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

MIN_ROUNDS = 3
MAX_ROUNDS = 200
MIN_BLOCK_SECONDS = 0.02
SHORT_SECONDS = 0.2
SLOW = 4  # times the median lane
SLOW_VISITS = 2


@dataclass(frozen=True)
class Timing:
    """Seconds from call to finished work, and on a GPU the time its queue took for it."""

    wall: float
    device: float | None = None


class Clock(Protocol):
    """Times runs. `mark` and `elapsed` time a part of a run without disturbing the whole."""

    def time(self, run: Callable[[], object]) -> Timing: ...

    def flush(self) -> None:
        """Push everything out of the caches."""

    def mark(self) -> Any: ...

    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two marks; called when the work between them is finished."""


class CpuClock:
    def __init__(self, cache_bytes: int = 0) -> None:
        self._buffer = torch.zeros(2 * cache_bytes // 4)

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed(self, start: float, end: float) -> float:
        return end - start

    def time(self, run: Callable[[], object]) -> Timing:
        start = time.perf_counter()
        run()
        return Timing(time.perf_counter() - start)

    def flush(self) -> None:
        self._buffer.add_(1.0)


class CudaClock:
    """Device time between two events, and wall time up to the end of the device's work."""

    def __init__(self, device: torch.device, cache_bytes: int = 256 * 2**20) -> None:
        self._device = device
        self._buffer = torch.empty(cache_bytes, dtype=torch.int8, device=device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def time(self, run: Callable[[], object]) -> Timing:
        torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        start = self.mark()
        run()
        end = self.mark()
        torch.cuda.synchronize(self._device)
        return Timing(time.perf_counter() - begin, self.elapsed(start, end))

    def flush(self) -> None:
        self._buffer.zero_()


def make_clock(device: torch.device, cache_bytes: int = 0) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock(cache_bytes)


@dataclass
class Lane:
    """One contender in a measurement: `prepare` is called before each `run` and is not timed."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    timings: list[Timing] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    failure: str = ""

    def step(self, clock: Clock) -> Timing:
        self.prepare()
        return clock.time(self.run)


@dataclass(frozen=True)
class Summary:
    """Seconds per run. `low` and `high` are the quartiles; `rounds` the median of each round;
    `busy_low` the first quartile of the time that the hardware worked."""

    median: float
    low: float
    high: float
    fastest: float
    samples: int
    rounds: tuple[float, ...]
    device_median: float | None
    busy_low: float

    @property
    def busy(self) -> float:
        """Seconds that the hardware worked: device time where there is one."""
        return self.median if self.device_median is None else self.device_median

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        return (self.high - self.low) / 2 / self.median


def summarise(lane: Lane) -> Summary | None:
    """Statistics of what a lane has measured so far; None if that is nothing."""
    if not lane.timings:
        return None
    walls = [timing.wall for timing in lane.timings]
    devices = [timing.device for timing in lane.timings if timing.device is not None]
    low, median, high = _quartiles(walls)
    device_low, device_median, _ = _quartiles(devices) if devices else (low, None, high)
    return Summary(
        median, low, high, min(walls), len(walls), tuple(lane.rounds), device_median, device_low
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Never beyond the values themselves, however few there are."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def paired_ratio(summary: Summary, baseline: Summary) -> float | None:
    """Median over rounds of the ratio in that round: slow changes of the machine cancel.

    None if no round was finished by both.
    """
    ratios = [mine / other for mine, other in zip(summary.rounds, baseline.rounds, strict=False)]
    return statistics.median(ratios) if ratios else None


def measure(
    lanes: Sequence[Lane],
    clock: Clock,
    seconds: float,
    progress: Callable[[float, str], object] = lambda fraction, text: None,
) -> bool:
    """Time all lanes in turns for about `seconds`. Returns False if the user interrupted.

    Each round visits every lane once, forwards and backwards in alternation, so that slow changes
    of the machine affect all lanes alike. A visit is a block of several runs; where runs are short,
    the first is not timed, because the caches still contain the previous lane's data. A lane that is
    much slower than the others is visited only twice, so that they get their rounds. A lane that
    raises is marked with its failure and left out from then on.
    """
    gc.disable()
    try:
        start = time.perf_counter()
        lengths = _calibrate(lanes, clock)
        slow = _slow_lanes(lengths, seconds)
        seconds_left = seconds - SLOW_VISITS * sum(lengths[name] for name in slow)
        fast = [length for name, length in lengths.items() if name not in slow]
        rounds, block = _schedule(fast, seconds_left)
        for index in range(rounds):
            if index >= MIN_ROUNDS and time.perf_counter() - start > seconds:
                break
            order = list(lanes) if index % 2 == 0 else list(reversed(lanes))
            for position, lane in enumerate(order):
                if not lane.failure and (index < SLOW_VISITS or lane.name not in slow):
                    progress((index + position / len(lanes)) / rounds, lane.name)
                    _visit(lane, clock, lengths[lane.name], block)
        progress(1.0, "")
    except KeyboardInterrupt:
        return False
    finally:
        gc.enable()
    return True


def _calibrate(lanes: Sequence[Lane], clock: Clock) -> dict[str, float]:
    """Warm up, and return about how long a run of each lane takes."""
    lengths = {}
    for lane in lanes:
        try:
            lane.step(clock)
            length = lane.step(clock).wall
            if length < SHORT_SECONDS:
                length = min(length, *(lane.step(clock).wall for _ in range(2)))
            lengths[lane.name] = length
        except Exception as error:  # a contender may fail in any way; the others continue
            lane.failure = f"{type(error).__name__}: {error}"
    return lengths


def _slow_lanes(lengths: dict[str, float], seconds: float) -> set[str]:
    """Lanes that would take more than their share of the time for the least number of rounds."""
    if not lengths:
        return set()
    share = seconds / len(lengths)
    median = statistics.median(lengths.values())
    return {
        name
        for name, length in lengths.items()
        if MIN_ROUNDS * length > share and length > SLOW * median
    }


def _schedule(lengths: Sequence[float], seconds: float) -> tuple[int, float]:
    """Number of rounds, and the length of a block of fast runs, that fill `seconds`."""
    round_seconds = sum(max(length, MIN_BLOCK_SECONDS) for length in lengths)
    if not round_seconds:
        return 0, 0.0
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / round_seconds)))
    spare = seconds / rounds - round_seconds
    block = MIN_BLOCK_SECONDS
    fast = [length for length in lengths if length < seconds / rounds / len(lengths)]
    if spare > 0 and fast:
        block = max(block, spare / len(fast))
    return rounds, block


def _visit(lane: Lane, clock: Clock, length: float, block: float) -> None:
    runs = max(1, round(block / max(length, 1e-7)))
    first = len(lane.timings)
    deadline = time.perf_counter() + 3 * block
    try:
        if length < MIN_BLOCK_SECONDS:
            lane.step(clock)
        for _ in range(runs):
            lane.timings.append(lane.step(clock))
            if time.perf_counter() > deadline:
                break
    except Exception as error:  # as in _calibrate
        lane.failure = f"{type(error).__name__}: {error}"
        return
    lane.rounds.append(statistics.median(timing.wall for timing in lane.timings[first:]))


def peak_extra_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The peak of torch's memory during `run`, above what was allocated before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler's library writes a line to stderr by default.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    used = peak = 0
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0:
            used += event["args"]["Bytes"]
            peak = max(peak, used)
    return peak

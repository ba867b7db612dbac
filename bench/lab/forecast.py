"""How long a sweep will take: a few steps are measured before it starts, finished runs correct it."""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..environment import available_cores
from . import optimizers, train
from .tasks import Scale
from .train import Machine, Run, RunSpec

ENOUGH_SECONDS = 0.5
"""Measuring stops after the batch that passes this, and after ten in any case."""
LONG_SECONDS = 600.0
"""Above this, the estimate suggests a shorter sweep."""


class Measured(NamedTuple):
    """The seconds of a whole run by optimizer, and the identity of their problem."""

    seconds: dict[str, float]
    identity: dict[str, Any]


def measure(specs: Sequence[RunSpec], machine: Machine) -> Measured:
    """Time a few batches of the first spec's problem, and a step of each optimizer."""
    seconds: dict[str, float] = {}
    with train.threads(machine.threads):
        problem = train.build(specs[0], machine)
        identity = train.identity(problem)
        batches = problem.batches(torch.Generator().manual_seed(specs[0].seed))
        problem.model.train()
        batch = 0.0
        for name, spec in {spec.optimizer: spec for spec in specs}.items():
            optimizer = train.make_optimizer(dataclasses.replace(spec, lr=1e-12), problem)
            training = train.Training(problem, optimizer, spec, machine.micro_batch)
            batch = batch or _shortest(lambda t: t.backward(next(batches)), training)
            loss = training.backward(next(batches))
            step = _shortest(optimizers.step, name, optimizer, loss)
            scoring = problem.evaluations * problem.held_out_batches() * batch / 3
            seconds[name] = problem.steps * (batch + step) + scoring
    return Measured(seconds, identity)


def _shortest(action: Callable[..., object], *arguments: Any) -> float:
    """Seconds of the fastest of a few calls; the first one also prepares things."""
    times: list[float] = []
    while len(times) < 10 and (len(times) < 2 or sum(times) < ENOUGH_SECONDS):
        start = time.perf_counter()
        action(*arguments)
        times.append(time.perf_counter() - start)
        if times[0] > 4 * ENOUGH_SECONDS:
            break
    return min(times)


class Forecast:
    """What is left of a sweep, from the runs that are finished, under way and waiting.

    A waiting run is expected to take what its optimizer was measured to take, times what finished
    runs took beyond that. Where the optimizer diverged at this step size or a smaller one, it is
    expected to end as early as that.
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        seconds: Mapping[str, float],
        processes: int,
        clock: Callable[[], float] = time.monotonic,
        crowding: float = 1.0,
    ) -> None:
        self.crowding = crowding  # runs at once take so many times what one alone was measured to
        self.seconds = seconds
        self.clock = clock
        self.waiting = deque(specs)
        self.processes = max(1, processes)
        self.running: dict[RunSpec, float] = {}
        self.finished: dict[RunSpec, Run] = {}
        self._start_next()

    def _start_next(self) -> None:
        while self.waiting and len(self.running) < self.processes:
            self.running[self.waiting.popleft()] = self.clock()

    def finish(self, spec: RunSpec, run: Run | None) -> None:
        """Note that a run is finished, or failed."""
        if self.running.pop(spec, None) is None:
            self.waiting.remove(spec)
        if run is not None:
            self.finished[spec] = run
        self._start_next()

    @property
    def pace(self) -> float:
        """By how much finished runs took longer than measured."""
        whole = [(s, r) for s, r in self.finished.items() if r["status"] == "finished"]
        measured = sum(self.seconds[spec.optimizer] for spec, _ in whole)
        return sum(run["seconds"] for _, run in whole) / measured if measured else self.crowding

    def expected(self, spec: RunSpec) -> float:
        """Seconds that a run will probably take."""

        def same_but_smaller(other: RunSpec) -> bool:
            return other.lr <= spec.lr and other == dataclasses.replace(
                spec, lr=other.lr, seed=other.seed
            )

        ended = {
            other.lr: float(run["seconds"])
            for other, run in self.finished.items()
            if run["status"] == "diverged" and same_but_smaller(other)
        }
        return ended[max(ended)] if ended else self.seconds[spec.optimizer] * self.pace

    def left(self) -> float:
        """Seconds until the last run ends."""
        now = self.clock()
        free = [max(0.0, self.expected(s) - (now - start)) for s, start in self.running.items()]
        heapq.heapify(free)
        for spec in self.waiting:
            heapq.heapreplace(free, free[0] + self.expected(spec))
        return max(free, default=0.0)


def crowding(processes: int, threads: int) -> float:
    """By how much runs slow each other down where they share cores."""
    cores = available_cores()
    return max(1.0, processes * threads / cores) / max(1.0, threads / cores)


def spoken(seconds: float) -> str:
    """45 s, 12 min, 2 h 10 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def announcement(forecast: Forecast, spec: RunSpec, threads: int) -> str:
    """How long it will take, and for a long sweep how to make it shorter."""
    count = len(forecast.running) + len(forecast.waiting)
    cores = min(forecast.processes * threads, available_cores())
    seconds = forecast.left()
    text = f"{count} run{'s' * (count > 1)}, about {spoken(seconds)} on {cores} core{'s' * (cores > 1)}"
    if seconds <= LONG_SECONDS:
        return text
    share = next((s for s in (0.5, 0.2, 0.1, 0.05, 0.02) if seconds * s <= LONG_SECONDS), 0.01)
    return f"{text}; with {_shorter(spec, share)} about {spoken(seconds * share)}"


def _shorter(spec: RunSpec, share: float) -> str:
    """The option that cuts the runs down to a share of their steps."""
    options = dict(spec.options)
    if "steps" in options:
        return f"--steps {max(1, round(int(options['steps']) * share))}"
    scale = Scale.parse(spec.scale)
    values = vars(dataclasses.replace(scale, steps=scale.steps * share))
    return "--scale " + ",".join(f"{key}={v:g}" for key, v in values.items() if v != 1)

"""Many runs: in parallel, in an append-only record, and never twice.

The record is a file of one JSON object per line. A run is written when it is finished, in one
piece, so a killed sweep loses only unfinished runs; the same command continues it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import BenchError
from ..report import progress_bar
from . import train
from .forecast import Forecast, Measured, announcement, crowding, measure, spoken
from .tasks import describe
from .train import Machine, Run, RunSpec


class Record:
    """The file of finished runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Run]:
        """All complete runs, each spec once. A last line cut short by a crash is passed over."""
        if not self.path.exists():
            return []
        runs: dict[RunSpec, Run] = {}
        for number, line in enumerate(self.path.read_text(encoding="utf-8").split("\n"), start=1):
            if not line.strip():
                continue
            try:
                run = json.loads(line)
                runs.setdefault(RunSpec.from_json(run["spec"]), run)
            except json.JSONDecodeError:
                continue
            except (KeyError, TypeError) as error:
                raise BenchError(
                    f"{self.path}, line {number} is not the record of a run ({error}): "
                    "choose another --out, or remove the file"
                ) from error
        return list(runs.values())

    @contextmanager
    def writer(self) -> Iterator[Callable[[Run], None]]:
        """A function that appends one run and returns when it is on the disk; appends are atomic."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            _lock(file.fileno(), self.path)

            def append(run: Run) -> None:
                end = file.seek(0, os.SEEK_END)
                line = json.dumps(run, allow_nan=False).encode() + b"\n"
                if end > 0:
                    file.seek(-1, os.SEEK_END)
                    line = b"\n" * (file.read(1) != b"\n") + line
                try:
                    while line:
                        line = line[file.write(line) :]
                    os.fsync(file.fileno())
                except OSError as error:
                    file.truncate(end)
                    raise BenchError(
                        f"cannot write {self.path}: {error.strerror}. The finished runs are kept: "
                        "free some disk space, and run the same command again"
                    ) from error

            yield append


def _lock(descriptor: int, path: Path) -> None:
    """Keep a second sweep from doing the same runs into the same record."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise BenchError(f"another sweep is writing {path}: wait for it, or use --out") from error


def require_one_problem(runs: Iterable[Run], new: tuple[RunSpec, Run] | None = None) -> None:
    """Refuse runs of one task that were done on different versions of it, or on other data.

    `new` is the identity of the runs to come. Older records lack some of it, which is not compared.
    """
    seen: dict[tuple[Any, ...], tuple[Any, RunSpec]] = {}
    facts = [(RunSpec.from_json(run["spec"]), run) for run in runs]
    for spec, fact in [*facts, *([new] if new else [])]:
        for key in train.IDENTITY:
            seed = spec.seed if key == "data" else None
            place = (key, spec.task, spec.scale, spec.options, spec.files, seed)
            value = fact.get(key)
            if value is None:
                continue
            known, first = seen.setdefault(place, (value, spec))
            if known != value:
                raise BenchError(
                    f"{spec.task} changed: {first.optimizer} at {first.lr:g} was run with {key} "
                    f"{known}, {spec.optimizer} at {spec.lr:g} has {value}. They do not compare: "
                    "choose another --out; the finished runs stay where they are"
                )


@contextmanager
def _progress(forecast: Forecast, total: int) -> Iterator[Callable[[Run], None]]:
    """A function to call with each finished run: draws a bar on a terminal, prints lines elsewhere."""
    terminal = sys.stderr.isatty()
    printed = time.monotonic()
    done = 0

    def show_finished(run: Run) -> None:
        nonlocal done, printed
        done += 1
        spec, now, left = run["spec"], time.monotonic(), spoken(forecast.left())
        outcome = "diverged" if run["status"] == "diverged" else f"{run['curve'][-1]['score']:.2f}"
        show(done / total, f"{spec['optimizer']} at {spec['lr']:g}: {outcome}, {left} left")
        if not terminal and (now - printed >= 20 or done == total):
            printed = now
            print(f"{done}/{total} runs, about {left} left", file=sys.stderr, flush=True)

    with progress_bar(f"{total} runs") as show:
        yield show_finished


def sweep(
    specs: Iterable[RunSpec], record: Record, machine: Machine, processes: int = 1
) -> list[Run]:
    """Do all runs that the record does not have yet; return the record's runs among `specs`.

    Runs are done seed by seed, so that a sweep stopped early still shows every step size.
    """
    wanted = sorted(dict.fromkeys(specs), key=lambda spec: spec.seed)
    chosen = set(wanted)
    with record.writer() as append:
        kept = [run for run in record.read() if _belongs(run, wanted)]
        done = {RunSpec.from_json(run["spec"]) for run in kept}
        require_one_problem(kept)
        missing = [spec for spec in wanted if spec not in done]
        if done & chosen:
            print(f"{len(done & chosen)} runs are in the record already", file=sys.stderr)
        if missing:
            _do(missing, kept, append, machine, min(processes, len(missing)))
    return [run for run in record.read() if RunSpec.from_json(run["spec"]) in chosen]


def _belongs(run: Run, wanted: Sequence[RunSpec]) -> bool:
    """Whether a run is of the same task, scale, options and files."""
    spec = RunSpec.from_json(run["spec"])
    one = wanted[0]
    same = (one.task, one.scale, one.options, one.files)
    return (spec.task, spec.scale, spec.options, spec.files) == same


def _do(
    missing: Sequence[RunSpec],
    kept: Sequence[Run],
    append: Callable[[Run], None],
    machine: Machine,
    processes: int,
) -> None:
    """Print a forecast, then do the runs and record each as it is finished."""
    failures: list[tuple[RunSpec, str]] = []
    with _workers(processes) as pool:
        measured = _measured(pool, missing, machine)
        require_one_problem(kept, (missing[0], measured.identity))
        forecast = Forecast(
            missing, measured.seconds, processes, crowding=crowding(processes, machine.threads)
        )
        if measured.identity:
            print(announcement(forecast, missing[0], machine.threads), file=sys.stderr, flush=True)
        with _progress(forecast, len(missing)) as show_finished:
            for spec, outcome in _execute(pool, missing, machine, processes):
                if isinstance(outcome, str):
                    failures.append((spec, outcome))
                    forecast.finish(spec, None)
                    continue
                append(outcome)
                forecast.finish(spec, outcome)
                show_finished(outcome)
    if failures:
        raise _failed(failures, len(missing))


def _measured(
    pool: ProcessPoolExecutor | None, specs: Sequence[RunSpec], machine: Machine
) -> Measured:
    """Times from a worker, which keeps the data that it read; none if the task fails."""
    try:
        if pool is None:
            return measure(specs, machine)
        return pool.submit(measure, specs, machine).result()
    except (BenchError, BrokenExecutor):
        raise
    except Exception:  # the runs themselves report the error
        return Measured(dict.fromkeys((spec.optimizer for spec in specs), 0.0), {})


def _failed(failures: Sequence[tuple[RunSpec, str]], total: int) -> BenchError:
    spec, error = failures[0]
    return BenchError(
        f"{len(failures)} of {total} runs failed and are not in the record. The first was "
        f"{spec.optimizer} at {spec.lr:g}, seed {spec.seed}: {error}"
    )


Outcome = tuple[RunSpec, Run | str]


@contextmanager
def _workers(processes: int) -> Iterator[ProcessPoolExecutor | None]:
    """Processes to run in; None to run in this one."""
    if processes <= 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _follow_parent) as pool:
        try:
            yield pool
        except BrokenExecutor as error:
            raise BenchError(
                "a worker process was killed, perhaps because memory ran out: use fewer --processes. "
                "The finished runs are in the record."
            ) from error
        except BaseException:
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _execute(
    pool: ProcessPoolExecutor | None, specs: Sequence[RunSpec], machine: Machine, processes: int
) -> Iterator[Outcome]:
    """Runs, or what went wrong with them, as they come."""
    if pool is None:
        for spec in specs:
            yield spec, _attempt(spec, machine)
        return
    waiting = deque(specs)
    pending: dict[Future[Run | str], RunSpec] = {}
    while waiting or pending:
        while waiting and len(pending) < 2 * processes:
            spec = waiting.popleft()
            pending[pool.submit(_attempt, spec, machine)] = spec
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            yield pending.pop(future), future.result()


def _follow_parent() -> None:
    """Leave interrupts to the parent, and do not outlive it if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_its_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_its_end, daemon=True).start()


def _attempt(spec: RunSpec, machine: Machine) -> Run | str:
    """One run, or its error as text; only a request that cannot be met stops the sweep."""
    try:
        return train.run(spec, machine)
    except BenchError:
        raise
    except Exception as error:
        return describe(error, spec.task)

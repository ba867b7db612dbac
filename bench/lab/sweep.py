"""Many runs: in parallel, in an append-only record, and never twice.

The record is a file of one JSON object per line. A run is written when it is finished, in one
piece, so a killed sweep loses only the runs under way; the same command goes on from there.
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
from .tasks import describe
from .train import Machine, RunSpec

Run = dict[str, Any]


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
        """A function that appends one run and returns when it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            _lock(file.fileno(), self.path)
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")

            def append(run: Run) -> None:
                file.write(json.dumps(run, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

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


@contextmanager
def _progress(total: int, already_done: int) -> Iterator[Callable[[Run], None]]:
    """Told of each finished run: a bar on a terminal, a line now and then elsewhere."""
    terminal = sys.stderr.isatty()
    began = said = time.monotonic()
    done = 0

    def tell(run: Run) -> None:
        nonlocal done, said
        done += 1
        spec, now = run["spec"], time.monotonic()
        outcome = "diverged" if run["status"] == "diverged" else f"{run['curve'][-1]['score']:.2f}"
        left = (now - began) / done * (total - done)
        show(done / total, f"{spec['optimizer']} at {spec['lr']:g}: {outcome}, {left:.0f} s left")
        if not terminal and (now - said >= 20 or done == total):
            said = now
            print(f"{done}/{total} runs, about {left:.0f} s left", file=sys.stderr, flush=True)

    if already_done:
        print(f"{already_done} runs are in the record already", file=sys.stderr)
    with progress_bar(f"{total} runs") as show:
        yield tell


def sweep(
    specs: Iterable[RunSpec], record: Record, machine: Machine, processes: int = 1
) -> list[Run]:
    """Do all runs that the record does not have yet; return the record's runs among `specs`.

    Runs are done seed by seed, so that a sweep stopped early still shows every step size.
    """
    wanted = sorted(dict.fromkeys(specs), key=lambda spec: spec.seed)
    failures: list[tuple[RunSpec, str]] = []
    with record.writer() as append:
        done = {RunSpec.from_json(run["spec"]) for run in record.read()}
        missing = [spec for spec in wanted if spec not in done]
        with _progress(len(missing), len(wanted) - len(missing)) as tell:
            for spec, outcome in _execute(missing, machine, min(processes, len(missing))):
                if isinstance(outcome, str):
                    failures.append((spec, outcome))
                    continue
                append(outcome)
                tell(outcome)
    if failures:
        raise _failed(failures, len(missing))
    asked = set(wanted)
    return [run for run in record.read() if RunSpec.from_json(run["spec"]) in asked]


def _failed(failures: Sequence[tuple[RunSpec, str]], total: int) -> BenchError:
    spec, error = failures[0]
    return BenchError(
        f"{len(failures)} of {total} runs failed and are not in the record. The first was "
        f"{spec.optimizer} at {spec.lr:g}, seed {spec.seed}: {error}"
    )


Outcome = tuple[RunSpec, Run | str]


def _execute(specs: Sequence[RunSpec], machine: Machine, processes: int) -> Iterator[Outcome]:
    """Runs, or what went wrong with them, as they come."""
    if processes <= 1:
        for spec in specs:
            yield spec, _attempt(spec, machine)
        return
    context = multiprocessing.get_context("spawn")
    waiting = deque(specs)
    pending: dict[Future[Run | str], RunSpec] = {}
    with ProcessPoolExecutor(processes, context, _follow_parent) as pool:
        try:
            while True:
                while waiting and len(pending) < 2 * processes:
                    spec = waiting.popleft()
                    pending[pool.submit(_attempt, spec, machine)] = spec
                if not pending:
                    return
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield pending.pop(future), future.result()
        except BrokenExecutor as error:
            raise BenchError(
                "a worker process was killed, perhaps for want of memory: use fewer --processes. "
                "The finished runs are in the record."
            ) from error
        except BaseException:
            for child in multiprocessing.active_children():
                child.terminate()
            raise


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

"""Runs, the record of a sweep, and how a stopped sweep continues."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from ngn_bench.errors import BenchError
from ngn_bench.lab import train
from ngn_bench.lab.sweep import Record, sweep
from ngn_bench.lab.train import Machine, RunSpec

SCALE = "steps=0.02,model=0.2,batch=1,context=1"


def spec(optimizer: str = "ngn-m", lr: float = 1.0, seed: int = 0, **more: object) -> RunSpec:
    return RunSpec("digits-mlp", optimizer, lr, seed, SCALE, **more)  # type: ignore[arg-type]


def outcome(run: dict) -> dict:
    """What must repeat: all but times and places."""
    return {key: run[key] for key in ("spec", "status", "curve", "telemetry", "diverged_at")}


def test_a_run_records_everything_about_itself() -> None:
    run = train.run(spec("ngn-mdv1", 0.01), Machine())
    assert run["status"] == "finished"
    assert run["metric"] == "accuracy"
    assert run["curve"][-1]["step"] == run["steps"]
    assert 0 <= run["curve"][-1]["score"] <= 100
    telemetry = run["telemetry"]
    assert telemetry["step"][-1] == run["steps"]
    assert all(0 < size <= 0.01 * (1 + 1e-6) for size in telemetry["step_size"])
    for layer in telemetry["layers"].values():
        assert len(layer["step_size"]) == len(layer["update"]) == len(telemetry["step"])
        assert all(size > 0 for size in layer["update"])
    assert run["environment"]["packages"]["torch"]
    assert run["environment"]["cpu"]
    assert RunSpec.from_json(json.loads(json.dumps(run["spec"]))) == spec("ngn-mdv1", 0.01)


def test_the_same_spec_gives_the_same_run() -> None:
    assert outcome(train.run(spec(), Machine())) == outcome(train.run(spec(), Machine()))
    other = train.run(spec(seed=1), Machine())
    assert other["curve"] != train.run(spec(), Machine())["curve"]


def test_micro_batches_change_nothing_but_rounding() -> None:
    whole = train.run(spec("adam", 1e-3), Machine())
    split = train.run(spec("adam", 1e-3), Machine(micro_batch=7))
    for one, other in zip(whole["curve"], split["curve"], strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)


def test_divergence_is_a_result() -> None:
    run = train.run(spec("sgdm", 1e30), Machine())
    assert run["status"] == "diverged"
    assert 1 <= run["diverged_at"] <= run["steps"]
    json.dumps(run, allow_nan=False)


def test_a_model_that_broke_in_its_last_step_has_diverged(tmp_path: Path) -> None:
    """Accuracy stays a number when all logits are NaN: only the held-out loss shows it."""
    one_step = RunSpec("digits-mlp", "sgdm", 1e30, 0, "steps=1e-9,model=0.2")
    (run,) = sweep([one_step], Record(tmp_path / "runs.jsonl"), Machine())
    assert run["steps"] == 1
    assert (run["status"], run["diverged_at"]) == ("diverged", 1)


def test_an_overflow_in_the_optimizer_is_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*arguments: object) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(train.optimizers, "step", overflow)
    run = train.run(spec(), Machine())
    assert (run["status"], run["diverged_at"]) == ("diverged", 1)


NO_TEST_SET = """
import torch
from torch import nn
from ngn_bench.lab import Classification

def no_test_set(setup):
    points, labels = torch.randn(20, 2), torch.arange(20) % 2
    return Classification(nn.Linear(2, 2), (points, labels), (points[:0], labels[:0]), 1, 10)
"""


def test_a_fault_of_the_task_is_not_divergence(tmp_path: Path) -> None:
    path = tmp_path / "no_test_set.py"
    path.write_text(NO_TEST_SET)
    with pytest.raises(BenchError, match="ZeroDivisionError"):
        sweep([RunSpec(f"{path}:no_test_set", "adam", 1e-3, 0)], Record(tmp_path / "r"), Machine())


def test_a_sweep_never_repeats_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(tmp_path / "runs.jsonl")
    specs = [spec(lr=lr) for lr in (0.1, 1.0)]
    first = sweep(specs, record, Machine())
    assert [run["spec"]["lr"] for run in first] == [0.1, 1.0]
    content = record.path.read_bytes()

    done: list[RunSpec] = []
    real = train.run

    def counted(one: RunSpec, machine: Machine) -> dict:
        done.append(one)
        return real(one, machine)

    monkeypatch.setattr(train, "run", counted)
    again = sweep([*specs, spec(lr=10.0)], record, Machine())
    assert done == [spec(lr=10.0)]
    assert len(again) == 3
    assert record.path.read_bytes().startswith(content)


def test_a_line_cut_short_is_done_again(tmp_path: Path) -> None:
    record = Record(tmp_path / "runs.jsonl")
    specs = [spec(lr=lr) for lr in (0.1, 1.0)]
    whole = sweep(specs, record, Machine())
    lines = record.path.read_bytes().splitlines()
    record.path.write_bytes(lines[0] + b"\n" + lines[1][: len(lines[1]) // 2])
    assert len(record.read()) == 1
    again = sweep(specs, record, Machine())
    assert [outcome(run) for run in again] == [outcome(run) for run in whole]


def test_runs_in_processes_equal_runs_in_line(tmp_path: Path) -> None:
    specs = [spec(lr=lr) for lr in (0.1, 1.0)]
    alone = sweep(specs, Record(tmp_path / "one.jsonl"), Machine())
    together = sweep(specs, Record(tmp_path / "two.jsonl"), Machine(), processes=2)

    def by_lr(runs: list) -> dict:
        return {run["spec"]["lr"]: outcome(run) for run in runs}

    assert by_lr(alone) == by_lr(together)


def started_sweep(*arguments: str) -> subprocess.Popen[bytes]:
    """A process of `ngn-bench sweep`, whose last argument is --out's, after two runs."""
    command = [sys.executable, "-m", "ngn_bench", "sweep", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path = Path(arguments[-1]) / "runs.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_a_killed_sweep_is_continued(tmp_path: Path) -> None:
    out = tmp_path / "out"
    lrs = "0.01,0.1,1,10,100,1000"
    arguments = ["--optimizers", "ngn-m,sgdm,ngn", "--lr", lrs, "--seeds", "2"]
    arguments += ["--scale", "steps=0.3", "--processes", "1", "--out", str(out)]
    path = out / "runs.jsonl"
    process = started_sweep(*arguments)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = path.read_bytes()
    assert 2 <= kept.count(b"\n") < 36

    record = Record(path)
    scale = record.read()[0]["spec"]["scale"]
    wanted = [
        RunSpec("digits-mlp", "ngn-m", lr, seed, scale) for lr in (0.01, 0.1, 1.0) for seed in (0,)
    ]
    runs = sweep(wanted, record, Machine())
    assert {RunSpec.from_json(run["spec"]) for run in runs} == set(wanted)
    assert path.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    specs = [RunSpec.from_json(json.loads(line)["spec"]) for line in path.open()]
    assert len(specs) == len(set(specs))


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_workers_do_not_outlive_a_killed_sweep(tmp_path: Path) -> None:
    process = started_sweep(
        "--optimizers", "ngn-m,sgdm", "--processes", "2", "--out", str(tmp_path)
    )
    deadline = time.monotonic() + 120
    workers = children_of(process.pid)
    assert len(workers) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_sweeps_do_not_share_a_record(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    record = Record(tmp_path / "runs.jsonl")
    with record.writer(), pytest.raises(BenchError, match="another sweep is writing"):
        sweep([spec()], record, Machine())


def test_a_foreign_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text('{"something": "else"}\n')
    with pytest.raises(BenchError, match="line 1 is not the record of a run"):
        Record(tmp_path / "runs.jsonl").read()


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """While this lasts, no file of this process grows over `size` bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_finished_runs(tmp_path: Path) -> None:
    record = Record(tmp_path / "runs.jsonl")
    specs = [spec(lr=lr) for lr in (0.1, 1.0, 10.0)]
    sweep(specs[:1], record, Machine())
    kept = record.path.read_bytes()
    space = len(kept) + len(kept) // 2
    with disk_of(space), pytest.raises(BenchError, match=r"runs\.jsonl.*finished runs are kept"):
        sweep(specs, record, Machine())
    assert record.path.read_bytes() == kept
    assert len(sweep(specs, record, Machine())) == 3


def test_a_record_of_another_version_of_the_task_is_refused(tmp_path: Path) -> None:
    """A task that changed, or other data: old and new runs do not compare."""
    record = Record(tmp_path / "runs.jsonl")
    sweep([spec(lr=0.1)], record, Machine())
    (run,) = record.read()
    for key, value, word in (
        ("version", 0, "version"),
        ("data", "01234567", "data"),
        ("steps", 3, "steps"),
        ("parameters", 5, "parameters"),
    ):
        record.path.write_text(json.dumps(run | {key: value}) + "\n")
        kept = record.path.read_bytes()
        with pytest.raises(BenchError, match=rf"{word}.*another --out"):
            sweep([spec(lr=0.1), spec(lr=1.0)], record, Machine())
        assert record.path.read_bytes() == kept
    old = {key: value for key, value in run.items() if key not in ("version", "data")}
    record.path.write_text(json.dumps(old) + "\n")
    assert len(sweep([spec(lr=0.1), spec(lr=1.0)], record, Machine())) == 2


def test_a_record_of_two_versions_is_not_shown(tmp_path: Path) -> None:
    record = Record(tmp_path / "runs.jsonl")
    runs = sweep([spec(lr=0.1), spec(lr=1.0)], record, Machine())
    record.path.write_text(
        "\n".join(json.dumps(run | {"version": k}) for k, run in enumerate(runs))
    )
    with pytest.raises(BenchError, match="version"):
        sweep([spec(lr=0.1), spec(lr=1.0)], record, Machine())


FAULTY = """
import torch
from torch import nn
from ngn_bench.lab import Classification

def faulty(setup):
    if setup.seed == 1:
        raise RuntimeError("the second seed does not work")
    points, labels = torch.randn(20, 2), torch.arange(20) % 2
    return Classification(nn.Linear(2, 2), (points, labels), (points, labels), 1, 10)
"""


def test_a_failing_run_is_reported_and_the_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "faulty_task.py"
    path.write_text(FAULTY)
    record = Record(tmp_path / "runs.jsonl")
    specs = [RunSpec(f"{path}:faulty", "adam", 1e-3, seed) for seed in (0, 1, 2)]
    with pytest.raises(BenchError, match=r"1 of 3 runs failed.*second seed does not work.*line 8"):
        sweep(specs, record, Machine())
    assert [run["spec"]["seed"] for run in record.read()] == [0, 2]


def test_a_task_that_returns_no_problem_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "no_problem.py"
    path.write_text("def three(setup):\n    return 3\n")
    with pytest.raises(BenchError, match=r"returned int; it should return a problem"):
        sweep([RunSpec(f"{path}:three", "adam", 1e-3, 0)], Record(tmp_path / "r"), Machine())


def test_schedules() -> None:
    from ngn_bench.lab.problems import three_stairs, warmup_cosine

    schedule = warmup_cosine(0.1, 1e-5)
    assert schedule(1.0, 1, 100) == pytest.approx(0.1)
    assert schedule(1.0, 10, 100) == pytest.approx(1.0)
    assert schedule(1.0, 55, 100) == pytest.approx((1 + 1e-5) / 2)
    assert schedule(1.0, 100, 100) == pytest.approx(1e-5)
    assert schedule(1e-6, 100, 100) == pytest.approx(1e-6)
    assert [three_stairs(1.0, step, 90) for step in (1, 30, 31, 61, 90)] == pytest.approx(
        [1, 1, 0.1, 0.01, 0.01]
    )
    assert math.isclose(three_stairs(2.0, 60, 90), 0.2)

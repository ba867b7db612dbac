"""The parts of the benchmark: the measuring core, the counting of bytes, the checks."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from algorithms import ALGORITHMS, Algorithm
from bench_runs import CPU
from ngn_bench import environment, report
from ngn_bench.contenders import check, traffic
from ngn_bench.contenders.registry import CONTENDERS
from ngn_bench.contenders.variants import NGN_VARIANTS
from ngn_bench.timing import measure, step, step_tables
from ngn_bench.timing.measure import Lane, Timing
from ngn_bench.timing.workloads import find_workload

from ngn_kernels.rules import RULES

ROOT = Path(__file__).parent.parent


def test_every_folder_of_the_package_is_installed() -> None:
    """setuptools installs the folders that pyproject.toml lists, and no others."""
    folders = {path.parent.name for path in ROOT.glob("bench/*/__init__.py")}
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert set(re.findall(r'"ngn_bench\.(\w+)"', text)) == folders


class CountingClock:
    """A clock without time: each run takes the time of its lane."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.visits: list[str] = []

    def time(self, run: Callable[[], object]) -> Timing:
        name = str(run())
        self.visits.append(name)
        return Timing(self.seconds[name], self.seconds[name] / 2)

    def flush(self) -> None:
        pass

    def mark(self) -> float:
        return 0.0

    def elapsed(self, start: float, end: float) -> float:
        return end - start


def test_lanes_take_turns_and_are_summarised() -> None:
    clock = CountingClock({"a": 0.03, "b": 0.06})
    lanes = [Lane("a", lambda: "a"), Lane("b", lambda: "b")]
    assert measure.measure(lanes, clock, 0.9)
    a, b = (measure.summarise(lane) for lane in lanes)
    assert a is not None
    assert b is not None
    assert (a.median, a.busy, a.spread) == pytest.approx((0.03, 0.015, 0.0))
    assert len(a.rounds) == len(b.rounds) == 10
    assert measure.paired_ratio(b, a) == pytest.approx(2.0)
    turns = "".join(clock.visits).replace("aa", "a").replace("aa", "a")
    assert re.search("ab+a+b", turns)


def test_a_slow_lane_leaves_the_others_their_rounds() -> None:
    clock = CountingClock({"a": 0.03, "b": 0.04, "c": 0.5})
    lanes = [Lane(name, lambda name=name: name) for name in "abc"]  # type: ignore[misc]
    assert measure.measure(lanes, clock, 1.75)
    assert [len(lane.rounds) for lane in lanes] == [10, 10, 2]


def test_a_slow_start_does_not_make_a_slow_lane() -> None:
    class Stalling(CountingClock):
        def time(self, run: Callable[[], object]) -> Timing:
            timing = super().time(run)
            return Timing(5.0) if self.visits.count("a") == 1 else timing

    lanes = [Lane(name, lambda name=name: name) for name in "abc"]  # type: ignore[misc]
    assert measure.measure(lanes, Stalling(dict.fromkeys("abc", 0.03)), 0.9)
    assert [len(lane.rounds) for lane in lanes] == [10, 10, 10]


def test_a_failing_lane_is_left_out() -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    lanes = [Lane("a", fail), Lane("b", lambda: "b")]
    assert measure.measure(lanes, CountingClock({"b": 0.01}), 0.1)
    assert lanes[0].failure == "RuntimeError: broken"
    assert measure.summarise(lanes[0]) is None
    assert measure.summarise(lanes[1]) is not None


def test_peak_extra_memory_counts_temporaries() -> None:
    a = torch.ones(1000)
    assert 8000 <= measure.peak_extra_bytes(lambda: (a + 1) * 2, CPU) < 8100
    assert measure.peak_extra_bytes(lambda: a.add_(1), CPU) < 100


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if not a.spectral], ids=str)
def test_traffic_of_the_rules(algorithm: Algorithm) -> None:
    """Rules, floors and the traffic that tests expect of the compiled kernels are the same columns."""
    rule = RULES[algorithm.rule_name]
    read = rule.reduce_reads, rule.apply_reads, rule.apply_writes
    assert tuple(map(sorted, read)) == tuple(map(sorted, algorithm.traffic))
    (variant,) = [v for v in NGN_VARIANTS.values() if v.algorithm == algorithm.rule_name]
    assert (variant.class_name, variant.options) == (algorithm.name, algorithm.options)
    words = sum(map(len, algorithm.traffic))
    assert traffic.PASSES[variant.label].floor_bytes(torch.float32) == 4 * words


def test_every_rule_is_tested_and_measured() -> None:
    assert [algorithm.rule_name for algorithm in ALGORITHMS] == list(RULES)
    without_directions = [a.rule_name for a in ALGORITHMS if not a.spectral]
    assert [variant.algorithm for variant in NGN_VARIANTS.values()] == without_directions
    assert {"ngnmuon:cpu", "ngnmuon:reference", "muon:torch", "muon:muon-optimizer"} <= set(
        CONTENDERS
    )


def test_matrices_of_muon_optimizer_are_orthogonalised() -> None:
    """The others step as with Adam."""
    pytest.importorskip("muon")
    matrix, vector = (torch.ones(*shape, requires_grad=True) for shape in ((8, 8), (8,)))
    optimizer = CONTENDERS["muon:muon-optimizer"].build([matrix, vector], lr=0.1)
    matrix.grad, vector.grad = torch.eye(8), torch.ones(8)
    optimizer.step()
    moved = (1.0 - matrix.detach()) / 0.1
    assert (
        float(torch.linalg.svdvals(moved).min()) > 0.6 and "exp_avg" not in optimizer.state[matrix]
    )
    assert torch.allclose(vector.detach(), torch.full((8,), 0.9))


def test_traffic_of_others() -> None:
    words = {"AdamW": 7, "SGDM": 5, "Momo": 7, "Momo-Adam": 10}
    labels = {variant.label for variant in NGN_VARIANTS.values()}
    assert set(traffic.PASSES) == labels | set(words)
    for rule, count in words.items():
        assert traffic.PASSES[rule].floor_bytes(torch.float32) == 4 * count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [name for name in CONTENDERS if CONTENDERS[name].unfused])
def test_state_is_as_large_as_the_model_of_it(name: str, dtype: torch.dtype) -> None:
    if name.startswith("momo"):
        pytest.importorskip("momo")
    contender = CONTENDERS[name]
    param = torch.ones(1000, dtype=dtype, requires_grad=True)
    param.grad = torch.ones_like(param)
    optimizer = contender.build([param])
    contender.step_function(optimizer)(torch.ones(()))
    state = [v for v in optimizer.state[param].values() if getattr(v, "shape", None) == param.shape]
    assert sum(value.nbytes for value in state) == 1000 * contender.passes.state_bytes(dtype)


def test_half_precision_floors() -> None:
    assert CONTENDERS["adamw:fused"].passes.floor_bytes(torch.bfloat16) == 14
    assert CONTENDERS["ngnmdv1:plain"].passes.floor_bytes(torch.bfloat16) == 18
    assert CONTENDERS["ngnmdv1:cpu"].passes.floor_bytes(torch.bfloat16) == 8 + 20


def test_traffic_of_operators() -> None:
    a, b = torch.ones(100), torch.ones(100)
    assert traffic.count_bytes(lambda: a + b) == 1200
    assert traffic.count_bytes(lambda: a.add_(b)) == 1200
    assert traffic.count_bytes(lambda: a.copy_(b)) == 800
    assert traffic.count_bytes(lambda: a.view(10, 10).sum()) == 400
    assert traffic.count_bytes(lambda: torch._foreach_mul_([a, b], 2.0)) == 1600


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name.endswith(":reference")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_accepts_and_rejects(name: str, dtype: torch.dtype) -> None:
    contender = CONTENDERS[name]
    assert check.check(contender, dtype, CPU).ok
    slower = dataclasses.replace(
        contender, build=lambda params, lr: contender.build(params, lr=0.9 * lr)
    )
    assert check.check(slower, dtype, CPU).ok is False


@pytest.mark.parametrize("size", [1000, 39_000])
def test_check_sees_an_error_anywhere(size: int) -> None:
    """Also beyond the first chunk of an engine that walks large tensors in chunks."""

    class Stopping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            params = self.param_groups[0]["params"]
            before = [p.detach().clone() for p in params]
            result = super().step(closure)
            for p, old in zip(params, before, strict=True):
                if p.numel() > size:
                    p.detach().view(-1)[size] = old.view(-1)[size]
            return result

    contender = dataclasses.replace(
        CONTENDERS["sgd:fused"], build=lambda params, lr: Stopping(params, lr=lr, momentum=0.9)
    )
    assert check.check(contender, torch.float32, CPU).ok is False


def test_a_trusted_form_is_compared_with_itself() -> None:
    for name in ("ngn:reference", "adamw:for-loop"):
        assert check.check(CONTENDERS[name], torch.float32, CPU).text == "= itself in float64"
    assert (
        check.check(CONTENDERS["adamw:fused"], torch.float32, CPU).text == "= for-loop in float64"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fastest_backend_is_the_automatic_one(dtype: torch.dtype) -> None:
    status = environment.backend_status(CPU)
    best = "cpu" if status["cpu"] == "ok" else "reference"
    assert environment.fastest_backend(CPU, dtype) == best
    assert environment.fastest_backend(torch.device("cuda"), dtype) in ("triton", "reference")


def test_free_memory_counts_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 200\nactive_file 300\ninactive_file 350\n")
    assert environment.memory_free(CPU) == 750
    (tmp_path / "memory.max").write_text("max\n")
    assert (environment.memory_free(CPU) or 0) > 750


def test_the_revision_is_that_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    module = tmp_path / "environment.py"
    module.write_text("")
    record = tmp_path / "results" / "reference.json"
    record.parent.mkdir()
    record.write_text("{}")
    monkeypatch.setattr(environment, "__file__", str(module))
    subprocess.run([*git, "init", "-q"], check=True)
    assert environment.git_revision() is None
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    revision = environment.git_revision()
    assert revision is not None
    assert re.fullmatch("[0-9a-f]{12}", revision)
    record.write_text("[]")
    assert environment.git_revision() == revision
    module.write_text("changed")
    assert environment.git_revision() == f"{revision}-dirty"


def test_quartiles_stay_inside_few_samples() -> None:
    lane = Lane("a", lambda: None, timings=[Timing(1.0, 0.5), Timing(2.0, 0.7)])
    summary = measure.summarise(lane)
    assert summary is not None
    assert (summary.low, summary.median, summary.high) == (1.25, 1.5, 1.75)
    assert summary.busy_low == pytest.approx(0.55)
    assert measure.paired_ratio(summary, summary) is None


class FakeEvent:
    """A CUDA event on a clock that ticks when the device works."""

    now = 0.0
    log: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.log.append("event")
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


def test_cuda_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "log", [])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: FakeEvent.log.append("wait"))

    def work() -> None:
        FakeEvent.log.append("work")
        FakeEvent.now += 0.25

    clock = measure.CudaClock(CPU, cache_bytes=64)
    timing = clock.time(work)
    # The device is idle before, and done with the work after the wall time is taken.
    assert FakeEvent.log == ["wait", "event", "work", "event", "wait"]
    assert timing.device == pytest.approx(0.25)
    assert timing.wall < 0.25
    start = clock.mark()
    work()
    assert clock.elapsed(start, clock.mark()) == pytest.approx(0.25)
    clock._buffer.fill_(1)
    clock.flush()
    assert not clock._buffer.any()


def test_large_models_and_many_contenders_get_more_time() -> None:
    adamw = CONTENDERS["adamw:fused"]
    plan = [(find_workload("one:8M"), [adamw] * 3), (find_workload("one:4M"), [adamw] * 2)]
    assert step._shares(plan) == [0.75, 0.25]
    assert step._shares(plan[1:]) == [1.0]


def step_record(**time: Any) -> dict[str, Any]:
    lane = Lane("a", lambda: None, timings=[Timing(0.002, 0.001)] * 2)
    row = step.Row(
        "one:8",
        "adamw:fused",
        "AdamW · fused",
        8,
        1,
        "float32",
        "cuda",
        check.Verdict(True, "= for-loop in float64"),
        28,
        28,
        time=measure.summarise(lane),
        ratio=1.0,
    )
    result = step.StepResult([row], {"copy": 1e9, "update": 2e9})
    return report.as_plain({**result.as_json(), "left_out": {}})


def test_device_time_has_a_column() -> None:
    (table,) = step_tables.step_tables(step_record())
    headings = [column.heading for column in table.columns]
    cells = dict(zip(headings, table.rows[0], strict=True))
    assert (cells["time/step"], cells["on device"]) == ("2.00 ms", "1.00 ms")
    assert cells["±"] == "0.0% (n=2)"
    assert cells["GB/s"] == "0.0"
    assert "Memory bandwidth 2.0 GB/s" in table.caption
    assert "copy 1.0, update 2.0" in table.caption


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rich_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    (table,) = step_tables.step_tables(step_record())
    stream = Terminal()
    report.print_table(table, stream)
    shown = stream.getvalue()
    assert "\x1b[1;36m" in shown  # the baseline stands out
    assert "AdamW · fused" in shown
    assert "\x1b" not in report.plain_table(table)

    monkeypatch.setattr(sys, "stderr", Terminal())
    with report.progress_bar("measuring") as progress:
        progress(0.5, "AdamW")
    assert "measuring" in sys.stderr.getvalue()  # type: ignore[attr-defined]


LONG = "a reason of many words " * 4
WIDE = report.Table(
    "a table of many columns",
    report.columns(
        "optimizer", "time/step", "±", "vs AdamW", "GB/s", "of memory", "state", "checked", text=(0, -1)
    ),
    [
        ["NGN-MDv1 · cpu · 8bit+bfloat16", "9.64 ms", "2.1% (n=3)", "0.43×", "14.9", "79%", "32.0 kB", LONG],
        ["AdamW · fused", "22.2 µs", "3.3%", "1.00×", "5.0", "26%", "32.0 kB", "= for-loop in float64"],
    ],
    caption="what the columns are, " * 8,
)  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 132, 200])
def test_no_name_or_number_is_cut_off_on_a_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    for name, value in (("COLUMNS", str(width)), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    stream = Terminal()
    report.print_table(WIDE, stream)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    parts = shown.count("NGN-MDv1 · cpu · 8bit+bfloat16")
    assert parts == shown.count("AdamW · fused") == 1 + shown.count("(continued)")
    assert (parts == 1) is (width >= 132)
    for column in WIDE.columns[1:]:
        assert shown.count(column.heading) == 1
    for row in WIDE.rows:
        assert all(cell in shown for cell in row[:-1])
    assert " ".join(shown.split()).count("what the columns are,") == 8


def test_cores_are_those_that_the_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert environment.available_cores() == 3
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert environment.available_cores() == 3
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert environment.available_cores() == 2
    (tmp_path / "cpu.max").write_text("1000 100000\n")
    assert environment.available_cores() == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    (tmp_path / "cpu.max").unlink()
    assert environment.available_cores() == 64

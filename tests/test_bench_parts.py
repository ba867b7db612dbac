"""The parts of the benchmark: the measuring core, the counting of bytes, the checks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from bench_runs import CPU
from ngn_bench import check, contenders, measure, traffic
from ngn_bench.contenders import CONTENDERS
from ngn_bench.measure import Lane, Timing


class CountingClock:
    """A clock without time: each run takes what its lane says."""

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


def test_traffic_floors_are_the_documented_words() -> None:
    words = {
        "NGN": 4,
        "NGN-M": 6,
        "NGN-D": 3,
        "NGN-D (RMS)": 5,
        "NGN-MDv1": 9,
        "NGN-MDv2": 7,
        "Dec-NGN-MDv1": 9,
        "NGN-MDv1W": 10,
        "AdamW": 7,
    }
    for rule, number in words.items():
        assert traffic.PASSES[rule].floor_bytes(torch.float32) == 4 * number


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


def test_fastest_backend_follows_the_status() -> None:
    assert contenders.fastest_backend({"triton": "ok", "cpu": "ok"}) == "triton"
    assert contenders.fastest_backend({"triton": "no GPU", "cpu": "ok"}) == "cpu"
    assert contenders.fastest_backend({"triton": "no", "cpu": "no"}) == "reference"

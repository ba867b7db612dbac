"""How long a sweep will take: the estimate before it, and what is left while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

from ngn_bench.errors import BenchError
from ngn_bench.lab import forecast as forecasts
from ngn_bench.lab import optimizers, train
from ngn_bench.lab.forecast import Forecast, announcement, measure, spoken
from ngn_bench.lab.sweep import Record, sweep
from ngn_bench.lab.train import Machine, RunSpec

SCALE = "steps=0.1,model=0.2,batch=1,context=1"


def spec(optimizer: str = "ngn-m", lr: float = 1.0, seed: int = 0, **more: Any) -> RunSpec:
    return RunSpec("digits-mlp", optimizer, lr, seed, SCALE, **more)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ended(seconds: float, status: str = "finished") -> dict[str, Any]:
    return {"seconds": seconds, "status": status}


def test_before_the_first_run_the_measured_times_count() -> None:
    specs = [spec(), spec(lr=10.0), spec("adam", 1.0), spec("adam", 10.0)]
    assert Forecast(specs, {"ngn-m": 10.0, "adam": 20.0}, 1, Clock()).left() == 60
    assert Forecast(specs, {"ngn-m": 10.0, "adam": 20.0}, 2, Clock()).left() == 30
    assert Forecast(specs, {"ngn-m": 10.0, "adam": 20.0}, 4, Clock()).left() == 20


def test_time_passes_for_the_runs_under_way() -> None:
    clock = Clock()
    forecast = Forecast([spec(), spec(lr=10.0), spec(lr=100.0)], {"ngn-m": 10.0}, 2, clock)
    clock.now = 4.0
    assert forecast.left() == 16
    clock.now = 10.0
    forecast.finish(spec(), ended(10.0))
    forecast.finish(spec(lr=10.0), ended(10.0))
    assert forecast.left() == 10
    clock.now = 19.0
    assert forecast.left() == 1
    clock.now = 25.0
    assert forecast.left() == 0


def test_finished_runs_correct_the_measured_times() -> None:
    clock = Clock()
    specs = [spec("adam"), spec(), spec(lr=10.0), spec(lr=100.0)]
    forecast = Forecast(specs, {"ngn-m": 10.0, "adam": 20.0}, 1, clock)
    clock.now = 30.0
    forecast.finish(spec("adam"), ended(30.0))
    assert forecast.left() == 45
    clock.now = 36.0
    forecast.finish(spec(), ended(6.0))
    assert forecast.pace == 1.2
    assert forecast.expected(spec(lr=10.0)) == 12


def test_a_run_that_diverged_does_not_speed_up_the_others() -> None:
    """It ended after a tenth of its steps: so will larger step sizes, but not smaller ones."""
    clock = Clock()
    specs = [
        spec(lr=10.0),
        spec(lr=100.0),
        spec(lr=10.0, seed=1),
        spec(lr=1.0),
        spec("adam", 100.0),
    ]
    forecast = Forecast(specs, {"ngn-m": 10.0, "adam": 20.0}, 1, clock)
    clock.now = 1.0
    forecast.finish(spec(lr=10.0), ended(1.0, "diverged"))
    assert forecast.pace == 1
    assert [forecast.expected(one) for one in specs[1:]] == [1, 1, 10, 20]
    assert forecast.left() == 32


def test_other_betas_do_not_share_a_forecast() -> None:
    forecast = Forecast([spec(), spec(betas=(0.6, 0.95))], {"ngn-m": 10.0}, 1, Clock())
    forecast.finish(spec(), ended(1.0, "diverged"))
    assert forecast.expected(spec(betas=(0.6, 0.95))) == 10


def test_a_failed_run_takes_its_place_with_it() -> None:
    forecast = Forecast([spec(), spec(lr=10.0)], {"ngn-m": 10.0}, 1, Clock())
    forecast.finish(spec(), None)
    assert forecast.left() == 10


def test_runs_may_finish_in_another_order_than_they_were_given() -> None:
    forecast = Forecast([spec(lr=float(k)) for k in range(1, 5)], {"ngn-m": 10.0}, 2, Clock())
    for lr in (4.0, 2.0, 1.0, 3.0):
        forecast.finish(spec(lr=lr), ended(10.0))
    assert forecast.left() == 0


def test_each_optimizer_is_measured_on_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only steps and batches move: the estimate counts each of them."""
    clock = Clock()
    real_step, real_backward = optimizers.step, train.Training.backward

    def step(name: str, *arguments: Any) -> None:
        clock.now += {"adam": 2.0, "ngn-m": 3.0}[name]
        real_step(name, *arguments)

    def backward(self: train.Training, batch: Any) -> Any:
        clock.now += 30.0
        return real_backward(self, batch)

    monkeypatch.setattr(forecasts.optimizers, "step", step)
    monkeypatch.setattr(train.Training, "backward", backward)
    monkeypatch.setattr(forecasts.time, "perf_counter", clock)
    measured = measure([spec(), spec(lr=10.0), spec("adam")], Machine())
    problem = train.build(spec(), Machine())
    scoring = problem.evaluations * (360 / 32) * 30 / 3
    assert measured.seconds == pytest.approx(
        {"ngn-m": problem.steps * 33 + scoring, "adam": problem.steps * 32 + scoring}
    )
    assert measured.identity == train.identity(problem)


def test_measuring_does_not_change_the_runs(tmp_path: Path) -> None:
    alone = train.run(spec(), Machine())
    (swept,) = sweep([spec()], Record(tmp_path / "runs.jsonl"), Machine())
    assert swept["curve"] == alone["curve"]


def test_a_sweep_says_how_long_it_will_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep([spec()], Record(tmp_path / "runs.jsonl"), Machine())
    assert "1 run, about 0 s on 1 core" in capsys.readouterr().err.splitlines()[0]
    sweep([spec()], Record(tmp_path / "runs.jsonl"), Machine())
    assert "about" not in capsys.readouterr().err


def test_a_long_sweep_comes_with_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "available_cores", lambda: 8)

    def text(one: RunSpec, seconds: float, processes: int = 2) -> str:
        return announcement(Forecast([one] * 1, {"ngn-m": seconds}, processes, Clock()), one, 1)

    full = RunSpec("mnist-mlp", "ngn-m", 1.0, 0)
    assert text(full, 500) == "1 run, about 8 min on 2 cores"
    assert text(full, 7800) == (
        "1 run, about 2 h 10 min on 2 cores; with --scale steps=0.05 about 6 min"
    )
    cut = RunSpec("mnist-mlp", "ngn-m", 1.0, 0, "steps=0.5,model=0.5,batch=1,context=1")
    assert text(cut, 3600).endswith("; with --scale steps=0.05,model=0.5 about 6 min")
    counted = RunSpec("mnist-mlp", "ngn-m", 1.0, 0, options=(("steps", "4000"),))
    assert text(counted, 3600).endswith("; with --steps 400 about 6 min")


def test_times_for_people() -> None:
    assert [spoken(s) for s in (0.4, 99, 100, 3600, 5940, 6000, 90000)] == [
        "0 s", "99 s", "2 min", "60 min", "99 min", "1 h 40 min", "25 h 00 min",
    ]  # fmt: skip


def test_a_task_without_its_data_fails_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="train-images-idx3-ubyte"):
        sweep([RunSpec("mnist-mlp", "adam", 1e-3, 0)], Record(tmp_path / "r"), Machine(tmp_path))


def test_runs_that_share_cores_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "available_cores", lambda: 2)
    assert forecasts.crowding(1, 1) == forecasts.crowding(2, 1) == forecasts.crowding(1, 2) == 1
    assert forecasts.crowding(6, 1) == 3
    assert forecasts.crowding(2, 4) == 2  # one alone was measured with its threads on two cores

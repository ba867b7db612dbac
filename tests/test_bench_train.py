"""`ngn-bench train` on small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_runs import CPU, Bench, rows_by_name
from ngn_bench.contenders.registry import CONTENDERS
from ngn_bench.timing import train


@pytest.mark.parametrize("clip", [None, "1.0"])
def test_train(bench: Bench, clip: str | None) -> None:
    text = bench.folder / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    picture = bench.folder / "train.png"
    command = ["train", "--model", "small-transformer", "--text", str(text), "--batch", "2"]
    command += ["--context", "8", "--optimizers", "ngnmdv1,ngnmdv1:plain", "--seconds", "0.3"]
    command += ["--device", "cpu", "--plot", str(picture), *(["--clip", clip] if clip else [])]
    record = bench.record(*command)
    assert record["kind"] == "train"
    assert record["rows"][0]["contender"] == "adamw:fused"
    assert len(record["rows"]) == 3
    for row in record["rows"]:
        assert 0 < row["update"] < row["time"]["median"]
        assert row["last_loss"] < row["first_loss"]
        assert row["ratio"] > 0
    assert picture.stat().st_size > 10_000
    output = bench.output()
    assert "2 × 8 tokens, bytes of text" in output
    assert "time/update" in output


def train_mlp(bench: Bench, *arguments: str, status: int = 0) -> dict[str, dict[str, Any]]:
    """Rows of a run on a small MLP, by contender."""
    command = ["train", "--model", "mlp", "--batch", "4", "--seconds", "0.1", "--device", "cpu"]
    return rows_by_name(bench.record(*command, *arguments, status=status))


def test_train_compiles_what_is_called_compiled(bench: Bench) -> None:
    steps = []

    def compile_(step: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            steps.append(1)
            return step(*args, **kwargs)

        return compiled

    bench.patch.setattr(torch, "compile", compile_)
    rows = train_mlp(bench, "--optimizers", "adamw:compiled")
    assert len(steps) > rows["adamw:compiled"]["time"]["samples"]


def test_train_shows_no_time_of_a_wrong_answer(bench: Bench) -> None:
    fused = CONTENDERS["sgd:fused"].build
    bench.replace("sgd:fused", build=lambda params, lr=0.1: fused(params, lr=0.9 * lr))
    rows = train_mlp(bench, "--optimizers", "sgd:fused", status=1)
    assert rows["sgd:fused"]["time"] is None
    assert "not timed: differs from for-loop" in rows["sgd:fused"]["note"]
    assert rows["adamw:fused"]["verdict"]["ok"] is True
    captured = bench.captured()
    assert rows["sgd:fused"]["note"] in captured.out
    assert "wrong answers from SGD momentum" in captured.err


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()])
def test_a_loop_that_stops_in_its_first_block_leaves_the_others(
    bench: Bench, error: BaseException
) -> None:
    iterate, calls = train.Loop.iterate, []

    def fail(loop: Any) -> None:
        if "momentum" in loop.optimizer.defaults:
            calls.append(1)
            if len(calls) == 8:
                raise error
        iterate(loop)

    bench.patch.setattr(train.Loop, "iterate", fail)
    interrupted = isinstance(error, KeyboardInterrupt)
    rows = train_mlp(bench, "--optimizers", "sgd:fused", status=130 if interrupted else 0)
    assert rows["adamw:fused"]["time"] is not None
    assert rows["sgd:fused"]["ratio"] is None
    if not interrupted:
        assert "out of luck" in rows["sgd:fused"]["note"]


def test_all_tasks_are_checked_before_the_first_is_trained(bench: Bench) -> None:
    bench.patch.setattr("ngn_bench.timing.train.make_task", lambda *_: pytest.fail("too early"))
    assert "Did you mean 'resnet20'?" in bench.failure("train", "--model", "mlp,resnet21")
    missing = str(bench.folder / "none.txt")
    arguments = ["train", "--model", "small-transformer", "--text", missing]
    assert "cannot read the text" in bench.failure(*arguments)
    message = bench.failure("train", "--model", "mlp", "--batch", "1000000000000")
    assert "in batches of 1,000,000,000,000 with 2 optimizers" in message
    arguments = ["train", "--model", "small-transformer", "--context", "16000000"]
    assert "--context" in bench.failure(*arguments)


def test_training_memory_counts_optimizers_and_activations() -> None:
    settings = train.TrainSettings(CPU, 1.0)
    both = [CONTENDERS["adamw:fused"], CONTENDERS["sgd:fused"]]
    plan = train.plan_task("mlp", both, settings)
    fixed, per_sample = train._memory_needed(plan, both)
    assert fixed == 89_610 * (4 + 16 + 12)
    pixels, hidden, logits = 784, 2 * 100, 10
    assert per_sample == pytest.approx(4 * (64 * pixels + pixels + hidden + 3 * logits), rel=0.02)
    plan = train.plan_task("resnet20", both, settings)
    assert train._memory_needed(plan, both)[1] > 1e6


def test_a_batch_that_was_left_open_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = [CONTENDERS["adamw:fused"]]
    settings = train.TrainSettings(CPU, 1.0)
    fixed, per_sample = train._memory_needed(train.plan_task("mlp", adamw, settings), adamw)
    monkeypatch.setattr(train, "memory_free", lambda device: fixed + 10 * per_sample + 1)
    assert train.plan_task("mlp", adamw, settings).batch == 10


def test_train_on_images(bench: Bench) -> None:
    rows = train_mlp(bench)
    assert [row["workload"] for row in rows.values()] == ["mlp", "mlp"]
    assert rows["adamw:fused"]["parameters"] == 89610


def test_train_sizes_the_batch_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = train.TrainSettings(CPU, 1.0)
    monkeypatch.setattr(train, "_matmul_speed", lambda settings: 1e11)
    assert train._fit_machine("transformer++-70m", settings) == (1, 256)
    monkeypatch.setattr(train, "_matmul_speed", lambda settings: 1e14)
    assert train._fit_machine("transformer++-70m", settings) == (180, 2048)

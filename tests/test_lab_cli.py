"""`ngn-bench sweep`, `ablate` and `toy`: whole commands on tiny work, and bad input."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from ngn_bench.cli import main
from ngn_bench.commands.lab import seeds, selected, step_sizes
from ngn_bench.errors import BenchError
from ngn_bench.lab import optimizers, toys

from ngn_kernels.formats import ROUNDINGS

TINY = ["--scale", "steps=0.05,model=0.2", "--processes", "1"]


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs.jsonl").open()]


def test_sweep_prints_tables_and_writes_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["sweep", "--optimizers", "NGNM,sgdm", "--lr", "0.1:10", "--seeds", "2", *TINY]
    assert main([*command, "--out", str(out), "--html"]) == 0
    printed = capsys.readouterr().out
    assert "good range" in printed
    assert "NGN-M" in printed
    runs = recorded(out)
    assert len(runs) == 2 * 3 * 2
    for name in ("resilience", "curves", "step-sizes", "updates"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "| NGN-M |" in (out / "tables.md").read_text("utf-8")
    assert (out / "report.html").read_text("utf-8").startswith("<!doctype html>")

    before = (out / "runs.jsonl").read_bytes()
    again = ["sweep", "--report-only", "--margin", "2", *TINY, "--out", str(out)]
    assert main(again) == 0
    assert "within 2 points of accuracy" in capsys.readouterr().out
    assert (out / "runs.jsonl").read_bytes() == before


def test_sweep_lists_tasks_and_optimizers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["sweep", "--list"]) == 0
    printed = capsys.readouterr().out
    for word in ("lm-transformer++", "imagenet1k-vit-tiny", "alr-smag", "momsps"):
        assert word in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("option", ["--margin", "--weight-decay"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "much"])
def test_bad_numbers_are_refused_before_any_run(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["sweep", f"{option}={value}", *TINY, "--out", str(tmp_path / "out")])
    assert f"argument {option}: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_picture_that_cannot_be_written_is_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["toy", "x2x4", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_known_loss_floor_reaches_the_optimizers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", "--task", "digits-smoothed", "--lr", "100", "--seeds", "1", *TINY]
    assert main([*command, "--loss-floor", "known", "--out", str(tmp_path)]) == 0
    assert main([*command, "--optimizers", "momo,sgdm", "--out", str(tmp_path)]) == 0
    runs = recorded(tmp_path)
    names = [run["spec"]["optimizer"] for run in runs]
    assert names == ["ngn-m", "momo", "ngn-mdv1", "momo-adam", "momo", "sgdm"]
    floors = [run["spec"]["options"].get("loss_floor") for run in runs]
    assert floors == ["known"] * 4 + [None] * 2
    assert runs[1]["telemetry"]["step_size"] != runs[4]["telemetry"]["step_size"]
    assert all(loss > 0.866 for run in runs for loss in run["telemetry"]["loss"])


def test_targets_caps_and_schedules_reach_the_optimizers_and_never_mix(tmp_path: Path) -> None:
    """With a cap a schedule scales γ, without one it scales the c that γ hardly depends on."""
    command = ["sweep", "--lr", "10", "--seeds", "1", *TINY, "--steps", "40"]
    command += ["--out", str(tmp_path)]
    assert (
        main([*command, "--optimizers", "ngn-m", "--loss-target", "0", "--schedule", "task"]) == 0
    )
    aims = [["--loss-target", "0.80"], ["--schedule", "cosine"], ["--step-cap", "lr"]]
    for count in range(1, 4):
        words = [word for aim in aims[:count] for word in aim]
        assert main([*command, "--optimizers", "ngn-m", *words]) == 0
    assert main([*command, "--step-cap", "1e1"]) == 0
    runs = recorded(tmp_path)
    options = [{k: v for k, v in r["spec"]["options"].items() if k != "steps"} for r in runs]
    target = {"loss_target": "0.8"}
    assert options == [
        {},
        target,
        target | {"schedule": "cosine"},
        target | {"schedule": "cosine", "step_cap": "lr"},
        *[{"step_cap": "10.0"}] * 2,
    ]
    assert main([*command, "--optimizers", "ngn-m", "--weight-decay", "0.01"]) == 0
    decayed = recorded(tmp_path)[-1]
    assert decayed["spec"]["weight_decay"] == 0.01
    assert decayed["telemetry"]["loss"][1:] != runs[0]["telemetry"]["loss"][1:]
    assert [run["spec"]["optimizer"] for run in runs[4:]] == ["ngn-m", "ngn-mdv1"]
    plain, aimed, cosine, capped, same = (run["telemetry"]["step_size"] for run in runs[:5])
    assert aimed[0] < 0.5 * plain[0] and same == plain  # without a schedule the cap is the lr
    # The first of two steps of warm-up, at half of the lr; 1/γ = 1/c + Q/2h.
    assert capped[0] == pytest.approx(aimed[0] / 2)
    assert 1 / cosine[0] == pytest.approx(1 / aimed[0] + 0.1)
    assert cosine[-1] == capped[-1] == 0


def test_schedule_free_has_a_schedule_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    command = ["sweep", "--optimizers", "schedulefree", "--lr", "0.5", "--seeds", "1", *TINY]
    command += ["--steps", "40", "--schedule", "cosine", "--out", str(tmp_path)]
    assert main(command) == 0
    (run,) = recorded(tmp_path)
    sizes = run["telemetry"]["step_size"]
    assert sizes[:3] == [0.25, 0.5, 0.5] and sizes[-1] == 0.5


WIDE = ["--scale", "steps=0.02", "--processes", "1", "--seeds", "1"]
"""Layers with enough elements to be stored in another format."""


def test_formats_of_the_state_reach_the_optimizers_and_never_mix(tmp_path: Path) -> None:
    command = ["sweep", "--lr", "0.01", *WIDE, "--out", str(tmp_path)]
    assert main([*command, "--optimizers", "ngn-mdv1", "--state", "float32"]) == 0
    assert main([*command, "--state", "8bit+bfloat16"]) == 0
    assert main([*command, "--state", "8bit"]) == 0
    runs = recorded(tmp_path)
    assert [run["spec"]["optimizer"] for run in runs] == ["ngn-mdv1", *["ngn-m", "ngn-mdv1"] * 2]
    options = [run["spec"]["options"] for run in runs]
    assert options == [{}, *[{"state": "8bit+bfloat16"}] * 2, *[{"state": "8bit"}] * 2]
    wide, mixed, narrow = (runs[place]["telemetry"] for place in (0, 2, 4))
    assert wide["loss"] != mixed["loss"] != narrow["loss"] != wide["loss"]
    for key in ("step_size", "step_size_mean"):
        sizes = [t["layers"]["hidden.1.weight"][key][9] for t in (wide, mixed, narrow)]
        assert sizes == pytest.approx([sizes[0]] * 3, rel=0.03)


def test_roundings_of_bfloat16_parameters(tmp_path: Path) -> None:
    """At a step size whose updates are below half an ulp, to nearest hardly anything moves."""
    command = ["sweep", "--optimizers", "ngn-mdv1", "--lr", "1e-5", *WIDE, "--out", str(tmp_path)]
    for words in (["mixed"], *(["bfloat16", "--rounding", name] for name in ROUNDINGS)):
        assert main([*command, "--dtype", *words]) == 0
    runs = recorded(tmp_path)
    stored = [
        (run["spec"]["options"].get("dtype"), run["spec"]["options"].get("rounding"))
        for run in runs
    ]
    rounded = [("bfloat16", None), ("bfloat16", "stochastic"), ("bfloat16", "exact")]
    assert stored == [("mixed", None), *rounded]
    loss = [run["curve"][-1]["loss"] for run in runs]
    first = runs[0]["telemetry"]["loss"][0]
    assert loss[3] == pytest.approx(loss[0], abs=2e-3)
    assert first - loss[0] > 1.5 * (first - loss[1])


def test_ablations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--lr", "1e-2", "--seeds", "1", *TINY]
    betas = ["ablate", "--betas", "--beta1", "0.6,0.9", "--beta2", "0.95", *common]
    assert main([*betas, "--out", str(tmp_path / "b")]) == 0
    assert "β₁ = 0.6" in capsys.readouterr().out
    record = (tmp_path / "b" / "runs.jsonl").read_bytes()
    (tmp_path / "b" / "betas.png").unlink()
    assert main([*betas, "--out", str(tmp_path / "b"), "--report-only"]) == 0
    assert (tmp_path / "b" / "betas.png").exists()
    assert (tmp_path / "b" / "runs.jsonl").read_bytes() == record
    decay = ["ablate", "--weight-decay", "--decay", "0,0.1", "--optimizers", "adamw,ngn-mdv1w"]
    assert main([*decay, *common, "--out", str(tmp_path / "w")]) == 0
    assert "λ = 0.1" in capsys.readouterr().out
    assert (tmp_path / "w" / "weight-decay.png").exists()


OWN = """
import torch
from torch import nn
from ngn_bench.lab import Classification

def own(setup):
    points, labels = torch.randn(20, 2), torch.arange(20) % 2
    return Classification(nn.Linear(2, 2), (points, labels), (points, labels), EPOCHS, 10)
"""


def test_an_edited_task_is_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "own_task.py", tmp_path / "out"
    command = ["sweep", "--task", f"{path}:own", "--optimizers", "sgd", "--lr", "0.1"]
    command += ["--seeds", "1", "--processes", "1", "--out", str(out)]

    def runs_after(code: str) -> list[int]:
        path.write_text(code)
        assert main(command) == 0
        return [run["steps"] for run in recorded(out)]

    assert runs_after(OWN.replace("EPOCHS", "1")) == [2]
    assert runs_after(OWN.replace("EPOCHS", "1")) == [2]
    assert runs_after(OWN.replace("EPOCHS", "2")) == [2, 4]
    path.write_text(OWN.replace("EPOCHS", "3"))
    assert main([*command, "--report-only"]) != 0
    assert "these files" in capsys.readouterr().err


def test_toy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path), "--data-dir", str(tmp_path)]
    assert main(["toy", "diabetes", *arguments]) == 0
    assert "not the paper's Pima set" in capsys.readouterr().out
    assert (tmp_path / "diabetes.png").exists()


def test_every_toy_has_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny: dict[str, dict[str, Any]] = {name: {"iterations": 20} for name in toys.TOYS}
    tiny["quadratic"] = {"lengths": (20,)}
    for name, options in tiny.items():
        monkeypatch.setitem(toys.TOYS, name, functools.partial(toys.TOYS[name], **options))
    assert main(["toy", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("picture: ") == len(list(tmp_path.glob("*.png"))) == 6
    for words in ("x² + x⁴: evaluations", "Rosenbrock from", "many minima: starts", "quadratic:"):
        assert words in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy", "rosenbrok"], "Did you mean 'rosenbrock'"),
        (["sweep", "--task", "mnist-mlpp"], "Did you mean 'mnist-mlp'"),
        (["sweep", "--optimizers", "ngnq"], "unknown optimizer"),
        (["sweep", "--state", "9bit"], "two of them for m and v, such as 8bit+bfloat16"),
        (["sweep", "--state", "8bit", "--optimizers", "sgdm"], "SGDM takes no --state"),
        (["sweep", "--rounding", "exact"], "add --dtype bfloat16"),
        (["sweep", "--lr", "1e-3;1e-2"], "--lr takes numbers"),
        (["sweep", "--lr", "0,1"], "positive numbers"),
        (["sweep", "--lr", "1:0.1"], "low:high"),
        (["sweep", "--lr", "1e-3:inf"], "low:high"),
        (["sweep", "--lr", "1e-3:1:2.5"], "low:high"),
        (["sweep", "--lr", "1e-3:1:nan"], "low:high"),
        (["sweep", "--lr", "1e-3:1:2:3"], "low:high"),
        (["sweep", "--seeds", "0"], "--seeds"),
        (["sweep", "--seeds", "nan"], "--seeds"),
        (["sweep", "--seeds", "3.7"], "--seeds"),
        (["sweep", "--seeds", "0,-1"], "--seeds"),
        (["sweep", "--steps", "0"], "at least 1"),
        (["sweep", "--scale", "3"], "--scale"),
        (["sweep", "--device", "cuda:99"], "not there"),
        (["sweep", "--threads", "0"], "at least 1"),
        (["sweep", "--loss-floor", "low"], "--loss-floor takes a number or known"),
        (["sweep", "--loss-floor", "known", *TINY], "digits-mlp knows no loss floor"),
        (["sweep", "--loss-floor", "1", "--optimizers", "adam", *TINY], "takes no loss floor"),
        (["sweep", "--loss-target", "1"], "--loss-target is in [0, 1), not 1"),
        (["sweep", "--loss-target", "nan"], "--loss-target is in [0, 1), not nan"),
        (["sweep", "--step-cap", "0"], "--step-cap takes a positive number or lr, not '0'"),
        (["sweep", "--step-cap", "inf"], "--step-cap takes a positive number or lr, not 'inf'"),
        (
            ["sweep", "--loss-target", "0.5", "--optimizers", "adam", *TINY],
            "Adam takes no --loss-target and no --step-cap: leave it out of --optimizers",
        ),
        (["sweep", "--step-cap", "lr", "--optimizers", "momo", *TINY], "Momo takes no --loss"),
        (["sweep", "--report-only"], "has no runs"),
        (["ablate", "--betas", "--report-only"], "has no runs"),
        (["sweep", "--task", "mnist-mlp", "--data-dir", "nowhere"], "train-images-idx3-ubyte"),
    ],
)
def test_bad_input_is_a_message_and_not_a_traceback(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "out")]) != 0
    assert message in capsys.readouterr().err


def test_ablate_requires_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ablate"])
    assert "--betas" in capsys.readouterr().err


def test_step_sizes_and_seeds() -> None:
    assert step_sizes("1e-3:1e2") == [1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0]
    assert step_sizes("1e-2:1:2") == [0.01, 0.0316, 0.1, 0.316, 1.0]
    assert step_sizes("1e-3:0.5") == [1e-3, 1e-2, 1e-1]
    assert step_sizes("1e-2:0.316:2") == [0.01, 0.0316, 0.1, 0.316]
    assert step_sizes("3,1") == [1.0, 3.0]
    assert seeds("3") == [0, 1, 2]
    assert seeds("4,7") == [4, 7]


def test_what_is_not_installed_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers.Entry, "installed", lambda entry: entry.module is None)
    names, missing = selected("ngn-m,momo,lion")
    assert names == ["ngn-m"]
    assert "pip install momo-opt" in missing[0]
    assert "pip install pytorch_optimizer" in missing[1]
    with pytest.raises(BenchError, match="none of these optimizers"):
        selected("momo")

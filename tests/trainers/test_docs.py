"""Every script of docs/trainers.md runs, and does what the page says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
SCRIPTS = {
    section.splitlines()[0]: script
    for section in PAGE.split("\n## ")[1:]
    for script in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
}


def run(title: str) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(SCRIPTS[title], title, "exec"), names)
    return names


def test_the_scripts_are_found() -> None:
    titles = ["transformers", "TRL", "Accelerate", "Lightning", "Fabric", "Ignite"]
    assert list(SCRIPTS) == [*titles, "Is it the right loss?"]


@pytest.mark.parametrize("title", ["transformers", "TRL"])
def test_the_loss_falls_and_shrink_is_logged(title: str) -> None:
    logs = [log for log in run(title)["trainer"].state.log_history if "loss" in log]
    assert len(logs) >= 8
    assert logs[-1]["loss"] < logs[0]["loss"]
    assert all(0 < log["ngn/shrink"] <= 1 for log in logs)


def test_accelerate(capsys: pytest.CaptureFixture[str]) -> None:
    run("Accelerate")
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_lightning() -> None:
    trainer = run("Lightning")["trainer"]
    assert trainer.callback_metrics["loss"] < 0.5
    (file,) = Path.cwd().rglob("metrics.csv")
    assert "ngn/shrink" in file.read_text()


@pytest.mark.parametrize("title", ["Fabric", "Ignite"])
def test_loops_with_a_line_of_their_own(title: str) -> None:
    names = run(title)
    assert 0 < float(names["optimizer"].shrink) < 1


def test_the_loss_that_the_step_saw(capsys: pytest.CaptureFixture[str]) -> None:
    run("Is it the right loss?")
    seen, mean = re.findall(r"\d+\.\d+", capsys.readouterr().out)
    assert float(seen) == pytest.approx(float(mean), rel=1e-3)

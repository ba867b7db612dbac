"""The script of docs/muon.md runs, and so do its first lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parents[1] / "docs" / "muon.md").read_text(encoding="utf-8")
FIRST, SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(script: str, **names: Any) -> dict[str, Any]:
    names["__name__"] = "script"
    exec(compile(script, "muon.md", "exec"), names)
    return names


def test_the_script_trains(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(SCRIPT)
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    said = capsys.readouterr().out
    assert "True ['layers.0.self_attn.in_proj_weight'" in said
    assert "False ['embed.weight', 'head.weight']" in said
    assert "ngn/shrink" in said


def test_the_first_lines() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = run(FIRST, model=model)["optimizer"]
    assert [g["spectral"] for g in optimizer.param_groups] == [True, False, False]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.1, 0.0]

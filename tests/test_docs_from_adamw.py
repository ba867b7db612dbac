"""The script of docs/from-adamw.md runs, and does what the page says of it; so do its other lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from ngn_kernels import NGNM, NGNMDv1

PAGE = (Path(__file__).parents[1] / "docs" / "from-adamw.md").read_text(encoding="utf-8")
FIRST, SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(script: str, **names: Any) -> dict[str, Any]:
    names["__name__"] = "script"
    exec(compile(script, "from-adamw.md", "exec"), names)
    return names


def test_a_run_moves_to_ngn_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(SCRIPT)
    first, second, third = names["first"], names["second"], names["third"]
    assert third < second < first, "each part goes on where the one before was"
    said = capsys.readouterr().out
    assert "ngn/shrink" in said and f"{second:.2f} with NGN" in said
    assert all(int(state["step"]) == 60 for state in names["adamw"].state.values())


def test_the_first_lines() -> None:
    optimizer = run(FIRST, model=torch.nn.Linear(3, 2))["optimizer"]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.decay_form == "adamw" and optimizer.param_groups[0]["step_cap"] == 1e-2


@pytest.mark.parametrize("name", ["fused", "foreach", "capturable", "amsgrad", "maximize"])
def test_options_of_adamw_are_answered(name: str) -> None:
    with pytest.raises(TypeError, match=f"NGNMDv1 has no option {name}: "):
        NGNMDv1([Parameter(torch.ones(2))], **{name: True})


def test_what_decay_does_at_a_large_lr() -> None:
    """lr * weight_decay of one step is the part that goes."""
    for lr, decay in ((3e-4, 0.1), (1.0, 3e-5)):
        p = Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = NGNMDv1([p], lr=lr, weight_decay=decay, decay_form="adamw")
        p.grad = torch.zeros_like(p)
        optimizer.step(loss=1.0)
        assert p.tolist() == pytest.approx([1 - 3e-5] * 3, rel=1e-12)


def test_the_norm_is_there_where_the_page_says() -> None:
    for optimizer, known in (
        (NGNM([Parameter(torch.ones(2))]), True),
        (NGNMDv1([Parameter(torch.ones(2))]), False),
        (NGNMDv1([Parameter(torch.ones(2))], max_grad_norm=1.0), True),
    ):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step(loss=1.0)
        assert ("ngn/grad_norm" in optimizer.metrics()) == known

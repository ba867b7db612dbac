"""The script of docs/from-adamw.md runs, and does what the page says of it; so do its other lines."""

from __future__ import annotations

import math
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


ROWS = re.findall(r"^\| (`\w+\(adamw.*) \| (.*) \|$", PAGE, re.MULTILINE)
BEGINS_ANEW = "a new schedule"
OLDER_TORCH = pytest.mark.skipif(
    torch.__version__ < (2, 8), reason="takes a step more with last_epoch"
)


def code_of(cell: str) -> list[str]:
    return [code for code in re.findall(r"`([^`]+)`", cell) if "(" in code]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(*row, id=row[0].split("(")[0], marks=OLDER_TORCH if "Cosine" in row[0] else [])
        for row in ROWS
    ],
)
def test_schedules_go_on(old: str, new: str) -> None:
    """By the code of the page's table: k times AdamW's lr, or, where it was 0, from the start."""
    modules = vars(torch.optim.lr_scheduler), vars(torch.optim.swa_utils)
    names: dict[str, Any] = {**modules[1], **modules[0], "NGNMDv1": NGNMDv1, "k": 100.0}
    params = [[Parameter(torch.ones(2))], [Parameter(torch.ones(3))]]
    adamw = torch.optim.AdamW(
        [{"params": params[0]}, {"params": params[1]}], lr=3e-3, betas=(0.9, 0.95)
    )
    names.update(adamw=adamw, f=lambda step: 1 - step / 60)
    names["old"] = scheduler = eval(code_of(old)[0], names)

    def steps(count: int, *schedulers: Any) -> None:
        for _ in range(count):
            for each in schedulers:
                each.optimizer.step(**({} if each.optimizer is adamw else {"loss": 1.0}))
                each.step(*([1.0] if "Plateau" in old else []))

    steps(20, scheduler)
    names["at"] = scheduler.last_epoch - 1
    names["ngn"] = NGNMDv1.from_adamw(adamw, lr=100.0 * 3e-3)
    for code in code_of(new):
        exec(code, names)
    ngn = names["ngn"]
    for _ in range(30):
        lrs = [[group["lr"] for group in o.param_groups] for o in (ngn, adamw)]
        if BEGINS_ANEW in new:
            lrs[1] = [3e-3 * (1 + math.cos(math.pi * names["new"].last_epoch / 40)) / 2] * 2
        assert lrs[0] == pytest.approx([100.0 * lr for lr in lrs[1]], rel=1e-6)
        steps(1, scheduler, names["new"])
    assert lrs[0][0] != pytest.approx(100.0 * 3e-3), "the schedule has done something"


def test_the_table_of_schedules_is_found() -> None:
    assert len(ROWS) == 8


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

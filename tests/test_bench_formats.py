"""ngn-bench with narrow state: what it counts, what it checks, what it prints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ngn_bench import cli
from ngn_bench.check import check
from ngn_bench.contenders import CONTENDERS, Contender, stored_as
from ngn_bench.errors import BenchError

BASE = CONTENDERS["ngnmdv1:reference"]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("state", "rounding", "dtype", "moved", "kept"),
    [
        ("float32", "nearest", torch.float32, 36, 8),
        ("bfloat16", "nearest", torch.float32, 26, 4),
        ("8bit+bfloat16", "nearest", torch.float32, 24.125, 3.0625),
        ("8bit", "nearest", torch.float32, 21.3125, 2.125),
        ("8bit", "nearest", torch.bfloat16, 13.3125, 2.125),
        ("bfloat16", "exact", torch.bfloat16, 22, 6),
    ],
)
def test_bytes(state: str, rounding: str, dtype: torch.dtype, moved: float, kept: float) -> None:
    """As counted by hand, and as an optimizer really holds them."""
    contender = stored_as(BASE, state, rounding)
    assert contender.passes.floor_bytes(dtype) == moved
    assert contender.passes.state_bytes(dtype) == kept
    param = torch.ones(6400, dtype=dtype, requires_grad=True)
    param.grad = torch.ones_like(param)
    optimizer = contender.build([param])
    contender.step_function(optimizer)(torch.ones(()))
    held = [value for key, value in optimizer.state[param].items() if key != "step"]
    assert sum(value.nbytes for value in held) == 6400 * kept


@pytest.mark.parametrize("state", ["bfloat16", "8bit", "8bit+bfloat16"])
def test_answers_are_checked(state: str) -> None:
    contender = stored_as(BASE, state, "nearest")
    assert check(contender, torch.float32, CPU).ok

    def wrong(params: Any, lr: float = 1e-2, **options: Any) -> Any:
        return contender.build(params, lr=1.001 * lr, **options)

    assert check(dataclasses.replace(contender, build=wrong), torch.float32, CPU).ok is False


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
def test_rounded_parameters_are_checked(rounding: str) -> None:
    assert check(stored_as(BASE, "float32", rounding), torch.bfloat16, CPU).ok


def test_names() -> None:
    assert stored_as(BASE, "float32", "nearest") is BASE
    assert stored_as(CONTENDERS["adamw:fused"], "8bit", "exact") is CONTENDERS["adamw:fused"]
    both: Contender = stored_as(BASE, "8bit+bfloat16", "exact")
    assert both.name == "ngnmdv1:reference/8bit+bfloat16/exact"
    with pytest.raises(BenchError, match="8bit"):
        stored_as(BASE, "8bits", "nearest")


def test_a_row_for_each_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "formats.json"
    words = [
        "step",
        "--workload",
        "one:8K",
        "--contenders",
        "ngnmdv1:reference",
        "--seconds",
        "0.5",
    ]
    assert cli.main([*words, "--state", "float32,8bit", "--json", str(out)]) == 0
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {"adamw:fused", "ngnmdv1:reference", "ngnmdv1:reference/8bit"}
    narrow, wide = rows["ngnmdv1:reference/8bit"], rows["ngnmdv1:reference"]
    assert narrow["verdict"]["ok"] and narrow["state_bytes"] < 0.28 * wide["state_bytes"]
    assert "NGN-MDv1 · reference · 8bit" in capsys.readouterr().out

"""The benchmark command line for tests: small bandwidth arrays, short runs, records to look at."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ngn_bench.cli import main
from ngn_bench.contenders.registry import CONTENDERS
from ngn_bench.timing import roofline

CPU = torch.device("cpu")
TINY = ["--workload", "many:3x5", "--seconds", "0.05", "--device", "cpu"]


def run(arguments: Sequence[str]) -> int:
    """The exit status of a command; bandwidth arrays of the real size would dominate these runs."""
    with mock.patch.object(roofline, "large_elements", lambda device: 2**14):
        return main(arguments)


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must end with status 2 and one clear message, and return that."""
    assert run(list(arguments)) == 2
    message = capsys.readouterr().err
    assert message.startswith("ngn-bench: ")
    assert "Traceback" not in message
    return message


def run_step(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "step.json"
    assert run(["step", *TINY, *arguments, "--json", str(path)]) == status
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def rows_by_name(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in record["rows"]}


def replace_contender(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    monkeypatch.setitem(CONTENDERS, name, dataclasses.replace(CONTENDERS[name], **changes))


def write(path: Path, record: dict[str, Any]) -> str:
    path.write_text(json.dumps(record))
    return str(path)

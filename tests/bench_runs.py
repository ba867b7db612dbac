"""The benchmark command line for tests: small bandwidth arrays, short runs, records to look at."""

from __future__ import annotations

import dataclasses
import json
import math
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
ROOFLINE = ["roofline", "--largest", "32k", "--seconds", "0.2", "--device", "cpu"]
TINY = ["--workload", "many:3x5", "--seconds", "0.05", "--device", "cpu"]


def run(arguments: Sequence[str]) -> int:
    """The exit status of a command; bandwidth arrays of the real size would dominate these runs."""
    with mock.patch.object(roofline, "large_elements", lambda device: 2**14):
        return main(arguments)


class Bench:
    """The command line with a folder for its files, and what a test replaces or reads of it."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self.patch, self.captured = folder, monkeypatch, capsys.readouterr

    def output(self) -> str:
        return str(self.captured().out)

    def failure(self, *arguments: str) -> str:
        """Run a command that must end with status 2 and one clear message, and return that."""
        assert run(arguments) == 2
        message = str(self.captured().err)
        assert message.startswith("ngn-bench: ")
        assert "Traceback" not in message
        return message

    def record(self, *command: str, status: int = 0) -> dict[str, Any]:
        """The record that a command writes."""
        return record_of(self.folder, *command, status=status)

    def step(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        return self.record("step", *TINY, *arguments, status=status)

    def rows(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """Those of a record of steps, by contender."""
        return rows_by_name(self.step(*arguments))

    def replace(self, name: str, **changes: Any) -> None:
        contender = dataclasses.replace(CONTENDERS[name], **changes)
        self.patch.setitem(CONTENDERS, name, contender)


def record_of(folder: Path, *command: str, status: int = 0) -> dict[str, Any]:
    path = folder / "record.json"
    assert run([*command, "--json", str(path)]) == status
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def rows_by_name(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in record["rows"]}


def raising_after(steps: int, error: BaseException) -> type[torch.optim.SGD]:
    """An optimizer whose steps raise after so many of them."""

    class Raising(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            Raising.calls += 1
            if Raising.calls > steps:
                raise error
            return super().step(closure)

    return Raising


def overflowing_after(steps: int) -> type[torch.optim.SGD]:
    """An optimizer that sets parameters to 0 in so many steps, and to infinity after them."""

    class Overflowing(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            Overflowing.calls += 1
            for p in self.param_groups[0]["params"]:
                p.detach().fill_(math.inf if Overflowing.calls > steps else 0.0)

    return Overflowing


def write(path: Path, record: dict[str, Any]) -> str:
    path.write_text(json.dumps(record))
    return str(path)

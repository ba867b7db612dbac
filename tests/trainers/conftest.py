"""These tests need the extra [trainers]; `make test-trainers` installs it and runs them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

NEEDED = ("accelerate", "ignite", "lightning", "pytorch_lightning", "transformers", "trl")
INSTALLED = all(importlib.util.find_spec(name) for name in NEEDED)
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its state in classes, and trainers write where they stand."""
    from accelerate.state import AcceleratorState, GradientState

    monkeypatch.chdir(tmp_path)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

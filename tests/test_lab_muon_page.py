"""docs/muon.md's tables, from runs made up for the purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from ngn_bench.cli import main
from ngn_bench.commands.sweep import planned
from ngn_bench.lab import muon_page, summary
from test_lab_results import run
from test_lab_summary import PARTIAL, repository

BASE = "ngn-bench sweep --task mnist-mlp --seeds 2 --optimizers"
COMMANDS = [f"{BASE} ngn-muon,muon --lr 0.1:10", f"{BASE} ngn-muon --lr 0.1:1 --loss-floor=-1e30"]


def losses(name: str, lr: float, *by_seed: float | None, **options: str) -> list[dict[str, Any]]:
    """Runs of seeds 0, 1 …; one without a loss diverged."""
    runs = []
    for seed, loss in enumerate(by_seed):
        one = run(name, lr, None if loss is None else 9.0, files="", seed=seed, options=options)
        if loss is not None:
            one["curve"][-1]["loss"] = loss
        runs.append(one)
    return runs


RUNS = [
    *losses("ngn-muon", 0.1, 2.0, 2.5),
    *losses("ngn-muon", 1.0, 2.0, 2.1),
    *losses("ngn-muon", 10.0, 1.0, None),
    *losses("muon", 1.0, 3.0),
    *losses("ngn-muon", 0.1, 2.0, 2.2, loss_floor="-1e30"),
]


def lab(folder: Path) -> Path:
    """A repository with a page on Muon."""
    kept = repository(folder, PARTIAL)
    entry = {"title": "A task", "folder": "a", "commands": COMMANDS, "pictures": []}
    (kept / muon_page.INDEX).write_text(json.dumps([entry]))
    (kept / "a").mkdir()
    (kept / "a" / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RUNS))
    (folder / "docs" / "muon.md").write_text("<!-- lab:a -->\nold\n<!-- /lab:a -->\n")
    return kept


def test_final_losses_by_step_size(tmp_path: Path) -> None:
    """Means over seeds, the best of a row in bold, and no mean where a seed diverged."""
    (sweep,) = summary.load(lab(tmp_path), planned, muon_page.INDEX)
    table = muon_page.losses_table(sweep)
    assert [column.heading for column in table.columns] == ["optimizer", "0.1", "1", "10", "seeds"]
    assert {row[0]: row[1:] for row in table.rows} == {
        "NGN-Muon": ["2.250", "**2.050**", "diverged", "2"],
        "Muon and Adam": ["–", "**3.000**", "–", "1"],
        "NGN-Muon, at ρ = 1": ["**2.100**", "–", "–", "2"],
    }


def test_the_page_has_the_table_and_its_commands(tmp_path: Path) -> None:
    lab(tmp_path)
    root = ["summary", "--root", str(tmp_path)]
    assert main([*root, "--check"]) == 1
    assert main([*root, "--write"]) == 0
    assert main([*root, "--check"]) == 0
    text = (tmp_path / "docs" / "muon.md").read_text()
    assert all(f"{command}\n" in text for command in COMMANDS)
    assert "| NGN-Muon | 2.250 |" in text and "**Not finished**: 7 of 16 runs are missing" in text

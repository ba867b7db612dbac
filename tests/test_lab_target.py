"""docs/loss-target.md's tables and picture, from runs made up for the purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from ngn_bench.cli import main
from ngn_bench.commands.sweep import planned
from ngn_bench.lab import summary, target
from ngn_bench.pages.readme import picture_source
from test_lab_results import run
from test_lab_summary import PARTIAL, repository

BASE = "ngn-bench sweep --task mnist-mlp --seeds 1 --optimizers"
COMMANDS = [
    f"{BASE} ngn-mdv1 --lr 0.1:10 --loss-target 0.8 --schedule cosine --step-cap lr",
    f"{BASE} ngn-mdv1 --lr 0.1:10 --schedule cosine --step-cap lr",
    f"{BASE} adam --lr 1e-3:1e-1 --schedule cosine",
    f"{BASE} prodigy --schedule cosine",
    f"{BASE} ngn-mdv1 --lr 1 --loss-target 0.8 --schedule cosine --step-cap lr --weight-decay 0.1",
    f"{BASE} adam --lr 1e-3:1e-1",
    f"{BASE} ngn-mdv1 --lr 1 --loss-target 0.8 --schedule cosine",
]
COSINE = {"schedule": "cosine"}
AIMED = {"loss_target": "0.8", "step_cap": "lr", **COSINE}


def scores(
    name: str, by_lr: dict[float, float | None], options: dict[str, str], **rest: Any
) -> list[dict[str, Any]]:
    return [run(name, lr, s, files="", options=options, **rest) for lr, s in by_lr.items()]


RUNS = [
    *scores("ngn-mdv1", {0.1: 97.3, 1.0: 97.2, 10.0: 96.0}, AIMED),
    *scores("adam", {1e-3: 97.0, 1e-2: 97.6, 1e-1: None}, COSINE),
    *scores("prodigy", {1.0: 97.05}, COSINE),
    *scores("ngn-mdv1", {1.0: 12.0}, AIMED, weight_decay=0.1),
    *scores("adam", {1e-2: 99.0}, {}),
    *scores("ngn-mdv1", {1.0: 50.0}, {"loss_target": "0.8", **COSINE}),
]


def aimed(folder: Path, runs: list[dict[str, Any]]) -> Path:
    """A repository whose page of loss targets has one task, and a second one without runs."""
    lab = repository(folder, PARTIAL)
    second = [command.replace("mnist-mlp", "digits-mlp") for command in COMMANDS]
    (lab / "targets.json").write_text(
        json.dumps(
            [
                {"title": "A task", "folder": "a", "commands": COMMANDS, "pictures": []},
                {"title": "Another", "folder": "b", "commands": second, "pictures": []},
            ]
        )
    )
    (lab / "a").mkdir()
    (lab / "a" / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in runs))
    parts = (
        "untuned",
        "target-at-one",
        "target-decades",
        "target-unscheduled",
        "target-status",
        "a",
    )
    text = "".join(f"<!-- lab:{part} -->\nold\n<!-- /lab:{part} -->\n" for part in parts)
    (folder / "docs" / "loss-target.md").write_text(text)
    return lab


def kept(folder: Path, runs: list[dict[str, Any]]) -> list[summary.Kept]:
    return summary.load(aimed(folder, runs), planned, target.INDEX)


def test_each_optimizer_at_one_setting_is_compared_with_tuned_adam(tmp_path: Path) -> None:
    table = target.untuned_table(kept(tmp_path, RUNS), target.UNTUNED)
    headings = [column.heading for column in table.columns]
    assert headings[:3] == ["task", "Adam, tuned", "NGN-MDv1, target 0.2, lr 0.01"]
    first, second, last = (dict(zip(headings, row, strict=True)) for row in table.rows)
    assert first["Adam, tuned"] == "97.60 (0.01)"
    assert first["NGN-MDv1, target 0.8, lr 1"] == "**97.20**"  # within half a point
    assert first["Prodigy, lr 1"] == "97.05"  # beyond it
    assert first["Adam, lr 0.001"] == "97.00" and first["Momo-Adam, lr 0.01"] == "–"
    assert set(list(second.values())[1:]) == {"–"}
    counts = ("NGN-MDv1, target 0.8, lr 1", "Momo-Adam, lr 0.01", "Prodigy, lr 1")
    assert [last[heading] for heading in counts] == ["1 of 1", "–", "0 of 1"]


def test_perplexities_are_compared_in_per_cent(tmp_path: Path) -> None:
    runs = [
        *scores("ngn-mdv1", {1.0: 10.19}, AIMED),
        *scores("adam", {1e-3: 10.0, 1e-2: 10.1}, COSINE),
        *scores("prodigy", {1.0: 10.21}, COSINE),
    ]
    runs = [one | {"metric": "perplexity"} for one in runs]
    table = target.untuned_table(kept(tmp_path, runs), target.UNTUNED)
    row = dict(zip((column.heading for column in table.columns), table.rows[0], strict=True))
    assert row["Adam, tuned"] == "10.00 (0.001)"
    assert row["NGN-MDv1, target 0.8, lr 1"] == "**10.19**" and row["Prodigy, lr 1"] == "10.21"


def test_nothing_is_compared_with_an_adam_that_is_not_tuned(tmp_path: Path) -> None:
    runs = [*scores("ngn-mdv1", {1.0: 98.0}, AIMED), *scores("adam", {1e-3: 97.0}, COSINE)]
    table = target.untuned_table(kept(tmp_path, runs), target.UNTUNED)
    assert table.rows[0][1:4] == ["97.00* (0.001)", "–", "98.00"]
    assert table.rows[-1][3] == "–"


def test_decades_are_those_of_the_same_options(tmp_path: Path) -> None:
    sweeps = kept(tmp_path, RUNS)
    table = target.decades_table(sweeps, target.SWEPT)
    assert table.rows == [["A task", "97.60; 0", "–", "–", "–", "97.30; ≥ 1", "–", "–"]]
    unscheduled = target.decades_table(sweeps, target.UNSCHEDULED)
    assert unscheduled.rows == [["A task", "99.00*; ≥ 0", "–", "–"]]


def test_readme_has_each_setting_and_the_decades_held(tmp_path: Path) -> None:
    sweeps = kept(tmp_path, RUNS)  # of the second task no Adam is known
    table = target.headline_table(sweeps, target.HEADLINE_SETTINGS)
    first, last = (
        dict(zip((column.heading for column in table.columns), row, strict=True))
        for row in table.rows
    )
    assert first["task"] == "A task" and first["Adam, tuned"] == "97.60"
    assert first["NGN-MDv1, target 0.8, lr 1"] == "**97.20**" and first["Prodigy, lr 1"] == "97.05"
    assert first["NGN-MDv1, target 0.2, lr 0.01"] == "–"
    assert first["decades, Adam"] == "0" and first["decades, NGN-MDv1, target 0.8"] == "≥ 1"
    counts = ("NGN-MDv1, target 0.8, lr 1", "Prodigy, lr 1", "NGN-MDv1, target 0.2, lr 0.01")
    assert [last[name] for name in counts] == ["1 of 1", "0 of 1", "–"]


def test_a_floor_is_named(tmp_path: Path) -> None:
    lab = aimed(tmp_path, [])
    with_floor = [f"{command} --loss-floor known" for command in COMMANDS[:1]]
    text = (lab / target.INDEX).read_text()
    (lab / target.INDEX).write_text(text.replace(COMMANDS[1], with_floor[0]))
    options = {**AIMED, "loss_floor": "known"}
    runs = [*RUNS[:1], *scores("ngn-mdv1", {0.1: 98.3}, options)]
    (lab / "a" / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in runs))
    (table,) = target.grid_tables(summary.load(lab, planned, target.INDEX)[0])
    assert [row[2:4] for row in table.rows] == [
        ["cosine", "97.30"],
        ["cosine, floor known", "98.30"],
    ]


def test_missing_runs_are_named_with_their_options(tmp_path: Path) -> None:
    first = kept(tmp_path, RUNS)[0]
    assert (len(first.runs), len(first.wanted)) == (10, 17)
    text = first.missing_text()
    assert "7 of 17 runs are missing" in text
    assert "NGN-MDv1, schedule cosine, step cap lr at 0.1, 1, 10" in text
    assert "Prodigy, schedule cosine at 0.1, 10" in text


def test_the_page_and_its_picture_are_checked(tmp_path: Path) -> None:
    lab = aimed(tmp_path, RUNS)
    root = ["summary", "--root", str(tmp_path)]
    assert main([*root, "--write"]) == 0
    page = (tmp_path / "docs" / "loss-target.md").read_text("utf-8")
    assert "\nold\n" not in page
    assert "| NGN-MDv1 | 0.8 | cosine | 97.30 | 97.20 | 96.00 |" in page
    assert "| NGN-MDv1 | 0.8 | cosine, decay 0.1 |  | 12.00 |  |" in page
    assert "| NGN-MDv1 | 0.8 | cosine, no cap |  | 50.00 |  |" in page
    assert "| Adam |  | cosine | 97.00 | 97.60 | diverged |" in page
    assert "| A task | – | 10 | 17 | 0 |" in page and "| Another | – | 0 | 17 | 0 |" in page
    picture = tmp_path / "docs" / "images" / target.PICTURE
    drawn = picture_source(picture)
    assert drawn is not None and main([*root, "--check"]) == 0
    changed = [*RUNS[:1], RUNS[1] | {"curve": RUNS[2]["curve"]}, *RUNS[2:]]
    (lab / "a" / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in changed))
    assert main([*root, "--check"]) == 1
    assert main([*root, "--write"]) == 0
    assert picture_source(picture) not in (None, drawn)
    picture.unlink()
    assert main([*root, "--check"]) == 1


def test_a_page_without_runs_has_no_picture(tmp_path: Path) -> None:
    assert target.picture_source(kept(tmp_path, [])) is None
    assert target.sections([]) == {}


def test_the_picture_of_the_readme_is_checked(tmp_path: Path) -> None:
    """It carries the fingerprint of the scores that it shows."""
    lab = aimed(tmp_path, RUNS)
    index = (lab / target.INDEX).read_text()
    (lab / target.INDEX).write_text(index.replace('"folder": "a"', '"folder": "target-mnist"'))
    (lab / "a").rename(lab / "target-mnist")
    page = tmp_path / "docs" / "loss-target.md"
    page.write_text("nothing generated")
    root = ["summary", "--root", str(tmp_path)]
    picture = tmp_path / "docs" / "images" / target.HEADLINE_PICTURE
    assert main([*root, "--check"]) == 1
    assert main([*root, "--write"]) == 0 and picture.exists()
    assert main([*root, "--check"]) == 0
    drawn = target.headline_figure(summary.load(lab, planned, target.INDEX))
    (panel,) = drawn.axes
    assert [len(line.get_xdata()) for line in panel.lines if line.get_linestyle() == "-"] == [2, 3]
    better = scores("adam", {1e-1: 98.0}, COSINE)
    kept = lab / "target-mnist" / "runs.jsonl"
    others = [*RUNS[:5], *RUNS[6:]]  # without the one that diverged
    kept.write_text("".join(json.dumps(one) + "\n" for one in [*others, *better]))
    assert main([*root, "--check"]) == 1

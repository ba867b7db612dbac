"""Ranges, tables, pictures and the page, from runs made up for the purpose."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from ngn_bench.lab import ablate, figures
from ngn_bench.lab.optimizers import OPTIMIZERS
from ngn_bench.lab.page import page
from ngn_bench.lab.paper import PAPER, paper_scores
from ngn_bench.lab.results import Results, grid_table, range_table, tables
from ngn_bench.lab.tasks import TASKS, Scale
from ngn_bench.report import markdown_table

LAYER = "hidden.0.weight"


def run(
    optimizer: str,
    lr: float,
    score: float | None,
    seed: int = 0,
    metric: str = "accuracy",
    **spec: Any,
) -> dict[str, Any]:
    """A run that ended with `score`, or diverged."""
    finished = score is not None
    loss = 0.1 if not finished else (100 - score) / 100 if metric == "accuracy" else math.log(score)
    curve = [{"step": k, "train_loss": loss + 0.1, "loss": loss, "score": score} for k in (5, 10)]
    sizes = [lr, lr / 2] if finished else []
    return {
        "spec": {
            "task": "mnist-mlp",
            "optimizer": optimizer,
            "lr": lr,
            "seed": seed,
            "scale": str(Scale()),
            "betas": None,
            "weight_decay": 0.0,
            "options": {},
        }
        | spec,
        "status": "finished" if finished else "diverged",
        "diverged_at": None if finished else 3,
        "metric": metric,
        "steps": 10,
        "curve": curve if finished else [],
        "telemetry": {
            "step": [5, 10] if finished else [],
            "step_size": sizes,
            "layers": {LAYER: {"step_size": sizes, "update": sizes}},
        },
        "skipped_steps": 0,
        "parameters": 1000,
        "seconds": 1.0,
        "finished_at": "2025-01-01T00:00:00+0000",
        "environment": {
            "packages": {"torch": "2.0", "rich": None},
            "python": "3.11",
            "platform": "Linux",
            "cpu": "a <cpu>",
            "threads": 1,
            "device": "cpu",
        },
        "command": ["ngn-bench", "sweep"],
    }


def accuracy_runs() -> list[dict[str, Any]]:
    scores = {
        "ngn-m": {0.01: 90.0, 0.1: 97.8, 1.0: 98.0, 10.0: 97.9, 100.0: 97.6},
        "sgdm": {0.01: 95.0, 0.1: 97.5, 1.0: 97.9, 10.0: None, 100.0: None},
        "adam": {1e-4: 97.0, 1e-3: 97.5, 1e-2: 96.6, 0.1: 10.0},
        "momo-adam": {1e-4: None, 1e-3: None},
    }
    return [
        run(name, lr, None if score is None else score + 0.1 * seed, seed)
        for name, by_lr in scores.items()
        for lr, score in by_lr.items()
        for seed in (0, 1)
    ]


def test_the_good_range_is_around_the_best_and_within_the_margin() -> None:
    results = Results(accuracy_runs())
    found = results.good_range("ngn-m", 0.5)
    assert found is not None
    assert (found.low, found.high) == (0.1, 100.0)
    assert found.decades == pytest.approx(3)
    assert (found.open_low, found.open_high) == (False, True)
    assert found.width == "≥ 3"
    narrow = results.good_range("ngn-m", 0.15)
    assert narrow is not None and (narrow.low, narrow.high) == (1.0, 10.0)


def test_a_step_size_at_which_a_seed_diverged_is_not_good() -> None:
    runs = [run("sgdm", lr, 97.0, seed) for lr in (0.1, 1.0, 10.0) for seed in (0, 1)]
    runs[-1] = run("sgdm", 10.0, None, 1)
    results = Results(runs)
    found = results.good_range("sgdm", 1.0)
    assert found is not None and found.high == 1.0
    assert str(results.cells["sgdm"][10.0]) == "diverged (1/2)"


def test_an_optimizer_that_always_diverged_has_no_range() -> None:
    results = Results(accuracy_runs())
    assert results.best("momo-adam") is None
    assert results.good_range("momo-adam", 1.0) is None


def test_ranges_around_the_best_of_all() -> None:
    results = Results(accuracy_runs())
    assert results.best_of_all() == pytest.approx(98.05)
    common = results.good_range("adam", 0.5, results.best_of_all())
    assert common is None or common.decades == 0


def test_perplexity_is_better_when_lower() -> None:
    scores = {1e-3: 7.2, 1e-2: 7.0, 1e-1: 7.3, 1.0: 9.0}
    results = Results([run("adam", lr, s, metric="perplexity") for lr, s in scores.items()])
    best = results.best("adam")
    assert best is not None and best.lr == 1e-2
    found = results.good_range("adam", 5.0)
    assert found is not None and (found.low, found.high) == (1e-3, 1e-1)


def test_the_headline_table_has_best_paper_and_width() -> None:
    shown = range_table(Results(accuracy_runs()), 0.5)
    headings = [column.heading for column in shown.columns]
    rows = {row[0]: dict(zip(headings, row, strict=True)) for row in shown.rows}
    assert rows["NGN-M"]["best accuracy"] == "98.05 ± 0.07"
    assert rows["NGN-M"]["paper"] == "97.97 ± 0.08"
    assert rows["NGN-M"]["decades"] == "≥ 3"
    assert rows["NGN-M"]["at 10× lr"] == "97.95"
    assert rows["NGN-M"]["at 100× lr"] == "97.65"
    assert rows["SGDM"]["at 10× lr"] == "diverged"
    assert rows["Adam"]["decades"] == "≥ 1"
    assert rows["Momo-Adam"]["best accuracy"] == "diverged"
    assert "0.5 points of accuracy" in shown.caption


def test_the_grid_table_shows_every_step_size() -> None:
    results = Results(accuracy_runs())
    text = markdown_table(grid_table(results, ["ngn-m", "sgdm"]))
    assert "90.05 ± 0.07" in text
    assert "diverged" in text


def test_skipped_steps_are_marked() -> None:
    runs = accuracy_runs()
    assert "†" not in markdown_table(grid_table(Results(runs), ["ngn-m"]))
    runs[2]["skipped_steps"] = 3
    shown = grid_table(Results(runs), ["ngn-m"])
    assert shown.rows[0][2].endswith("†")
    assert "†: the optimizer skipped steps as not finite, 3 in all" in shown.caption
    assert "†" in range_table(Results(runs), 0.5).caption


def test_lions_second_beta_is_explained() -> None:
    assert (
        "0.99 where others have 0.999" in range_table(Results([run("lion", 0.1, 97.0)]), 1).caption
    )


def test_the_papers_scores_belong_to_tasks_and_optimizers() -> None:
    assert {task.split()[0] for task in PAPER} <= set(TASKS)
    tokens = {"tokenizer": "tokenizer.json"}
    assert paper_scores("lm-transformer++", {"size": "1b", **tokens})["adam"] == (13.09, None)
    assert paper_scores("lm-transformer++", tokens)["ngn-mdv1"] == (33.84, 0.33)
    assert paper_scores("lm-transformer++", {}) == {}, "bytes are not the paper's tokens"
    assert paper_scores("digits-mlp", {}) == {}
    for scores in PAPER.values():
        assert set(scores) <= set(OPTIMIZERS)


def test_all_figures_are_drawn(tmp_path: Path) -> None:
    results = Results(accuracy_runs())
    drawn = figures.all_figures(results, 0.5)
    assert set(drawn) == {"resilience", "curves", "step-sizes", "layer-step-sizes", "updates"}
    for name, figure in drawn.items():
        path = figures.save(figure, tmp_path / f"{name}.png")
        assert path.read_bytes().startswith(b"\x89PNG")


def test_what_lies_above_the_picture_is_marked() -> None:
    scores = {1e-3: 7.0, 1e-2: 8.0, 1e-1: 1e6}
    results = Results([run("adam", lr, s, metric="perplexity") for lr, s in scores.items()])
    score = figures.resilience(results, 5.0).axes[0]
    (above,) = [line for line in score.lines if line.get_marker() == "^"]
    assert list(above.get_xdata()) == [1e-1]
    assert score.get_ylim()[1] < 1e6


def test_every_optimizer_has_a_colour() -> None:
    assert set(figures.COLOURS) == set(OPTIMIZERS)


def test_the_colours_of_a_family_differ() -> None:
    for one, other in itertools.combinations(OPTIMIZERS.values(), 2):
        if one.family == other.family:
            a, b = (bytes.fromhex(figures.COLOURS[entry.name][1:]) for entry in (one, other))
            assert math.dist(a, b) > 60, (one.name, other.name)


def test_the_page_is_one_file_that_needs_nothing_else() -> None:
    results = Results(accuracy_runs())
    shown = tables(results, 0.5)
    drawn = {"resilience": figures.resilience(results, 0.5)}
    text = page("A <title>", shown, drawn, results.runs)
    assert "A &lt;title&gt;" in text
    assert "a &lt;cpu&gt;" in text
    assert "ngn-bench sweep" in text
    assert "98.05 ± 0.07" in text
    sources = re.findall(r"(?:src|href)='([^']{0,30})", text)
    assert sources and all(source.startswith("data:image/svg+xml;base64,") for source in sources)


def test_beta_ablation_tables_and_picture() -> None:
    pairs = ablate.beta_pairs([0.6, 0.9], [0.8, 0.95])
    assert pairs == [(0.6, 0.95), (0.9, 0.95), (0.9, 0.8)]
    runs = [
        run(name, lr, score, metric="perplexity", betas=pair)
        for name in ("adam", "ngn-mdv1")
        for lr in (1e-3, 3e-2)
        for pair in pairs
        for score in [None if lr > 1e-2 and pair[0] < 0.9 else 40.0]
    ]
    shown, drawn = ablate.betas(runs)
    assert [table.title for table in shown] == [
        "mnist-mlp: perplexity of NGN-MDv1, β₂ = 0.95",
        "mnist-mlp: perplexity of NGN-MDv1, β₁ = 0.9",
        "mnist-mlp: perplexity of Adam, β₂ = 0.95",
        "mnist-mlp: perplexity of Adam, β₁ = 0.9",
        "the paper: perplexity of NGN-MDv1, β₂ = 0.95",
        "the paper: perplexity of NGN-MDv1, β₁ = 0.9",
        "the paper: perplexity of Adam, β₂ = 0.95",
        "the paper: perplexity of Adam, β₁ = 0.9",
    ]
    assert shown[4].rows[-1] == ["0.03", "278 ± 6", "129 ± 2", "34.6 ± 0.1", "35.6 ± 0.1"]
    assert all(len(row) == len(table.columns) for table in shown[4:] for row in table.rows)
    assert shown[0].rows[1] == ["0.03", "diverged", "40.00"]
    assert set(drawn) == {"betas"}


def test_decay_ablation_tables_and_picture() -> None:
    runs = [
        run(name, lr, 97.0, weight_decay=decay)
        for name in ("adamw", "dec-ngn-mdv1")
        for lr in (1e-3, 1e-2)
        for decay in (0.0, 0.1)
    ]
    shown, drawn = ablate.weight_decay(runs)
    assert [table.title for table in shown] == [
        "mnist-mlp: accuracy of Dec-NGN-MDv1",
        "mnist-mlp: accuracy of AdamW",
    ]
    assert [column.heading for column in shown[0].columns] == ["lr", "λ = 0", "λ = 0.1"]
    assert set(drawn) == {"weight-decay"}

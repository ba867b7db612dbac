"""The summary over kept records: tables with gaps, what is missing, thinned runs, the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from ngn_bench.cli import main
from ngn_bench.commands.sweep import planned
from ngn_bench.errors import BenchError
from ngn_bench.lab import summary, train
from ngn_bench.lab.results import Results, bound_shares
from ngn_bench.lab.sweep import Record, sweep
from ngn_bench.lab.train import Machine, RunSpec
from test_lab_results import run

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "ngn-bench sweep --task mnist-mlp --seeds 1 --optimizers ngn-m,sgdm --lr 0.1:1000"


def repository(folder: Path, runs: list[dict[str, Any]], commands: list[str] | None = None) -> Path:
    """A repository that keeps one sweep, with two pages to bring up to date."""
    lab = folder / "bench" / "results" / "lab"
    (lab / "one").mkdir(parents=True)
    entry = {"title": "A task", "folder": "one", "pictures": ["resilience"], "reaches_zero": "yes"}
    (lab / "sweeps.json").write_text(json.dumps([entry | {"commands": commands or [COMMAND]}]))
    (lab / "one" / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in runs))
    (folder / "docs").mkdir()
    old = "<!-- lab:{0} -->\nold\n<!-- /lab:{0} -->\n"
    for name, parts in (("stability.md", ("summary", "one")), ("precision.md", ("decades",))):
        text = "".join(old.format(part) for part in parts)
        (folder / "docs" / name).write_text(f"before\n{text}after\n")
    return lab


def scores(name: str, by_lr: dict[float, float | None]) -> list[dict[str, Any]]:
    return [run(name, lr, score, files="") for lr, score in by_lr.items()]


PARTIAL = [
    *scores("ngn-m", {0.1: 97.0, 1.0: 98.0, 10.0: 97.9, 1000.0: 97.8}),
    *scores("sgdm", {1.0: 97.5, 10.0: None}),
]


def rows(lab: Path) -> dict[str, list[str]]:
    table = summary.summary_table(summary.load(lab, planned))
    return {row[1]: list(row[2:]) for row in table.rows}


def test_a_gap_is_not_a_neighbour(tmp_path: Path) -> None:
    """100 is missing, so 1000 does not count, and the range may go on."""
    shown = rows(repository(tmp_path, PARTIAL))
    assert shown["NGN-M"] == ["98.00", "1", "≥ 1", "97.90", "–"]


def test_a_best_score_next_to_a_gap_is_marked(tmp_path: Path) -> None:
    shown = rows(repository(tmp_path, PARTIAL))
    assert shown["SGDM"] == ["97.50*", "1", "≥ 0", "diverged", "–"]
    whole = PARTIAL + scores("sgdm", {0.1: 97.9, 100.0: None, 1000.0: None})
    shown = rows(repository(tmp_path / "whole", whole))
    assert shown["SGDM"] == ["97.90", "0.1", "≥ 1", "97.50", "diverged"]


def test_what_never_ran_and_what_always_diverged(tmp_path: Path) -> None:
    runs = scores("sgdm", {0.1: None, 1.0: None})
    shown = rows(repository(tmp_path, runs))
    assert shown["NGN-M"] == ["–"] * 5
    assert shown["SGDM"] == ["diverged", "–", "–", "–", "–"]
    shown = rows(repository(tmp_path / "none", []))
    assert shown["SGDM"] == shown["NGN-M"] == ["–"] * 5


def test_runs_that_were_not_asked_for_do_not_count(tmp_path: Path) -> None:
    extra = [run("ngn-m", 1.0, 99.0, seed=7, files=""), run("adam", 1.0, 99.0, files="")]
    shown = rows(repository(tmp_path, PARTIAL + extra))
    assert set(shown) == {"NGN-M", "SGDM"}
    assert shown["NGN-M"][0] == "98.00"


def test_the_missing_runs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository(tmp_path, PARTIAL)
    assert main(["summary", "--root", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "4 of 10 runs are missing: NGN-M at 100; SGDM at 0.1, 100, 1000" in printed
    assert COMMAND in printed


def test_skipped_steps_are_explained(tmp_path: Path) -> None:
    runs = scores("ngn-m", {0.1: 97.0, 1.0: 98.0})
    runs[1]["skipped_steps"] = 12
    kept = summary.load(repository(tmp_path, runs), planned)
    text = summary.sections(kept)["one"]
    assert "98.00 †" in text and "†: the optimizer skipped steps as not finite, 12 in all." in text
    plain = summary.load(repository(tmp_path / "plain", PARTIAL), planned)
    assert "†" not in summary.sections(plain)["one"]


def test_documents_are_checked_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository(tmp_path, PARTIAL)
    root = ["summary", "--root", str(tmp_path)]
    assert main([*root, "--check"]) == 1
    assert "precision.md" in capsys.readouterr().out
    assert main([*root, "--write"]) == 0
    page = (tmp_path / "docs" / "stability.md").read_text("utf-8")
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert "| A task | NGN-M | 98.00 | 1 | ≥ 1 | 97.90 | – |" in page
    assert "**Not finished**: A task (6 of 10 runs)." in page
    assert "| NGN-M | 97.00 | 98.00 | 97.90 | – | 97.80 |" in page
    other = tmp_path / "docs" / "precision.md"
    widths = other.read_text("utf-8")
    assert "| A task * | yes | ≥ 1 | ≥ 0 | – | – | – | – |" in widths
    for name in ("summary", "one-resilience"):
        picture = tmp_path / "docs" / "images" / f"stability-{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*root, "--check"]) == 0
    other.write_text(widths.replace("≥ 1", "≥ 9"), "utf-8")
    assert main([*root, "--check"]) == 1


def test_an_unknown_part_of_a_document_is_an_error(tmp_path: Path) -> None:
    text = "<!-- lab:two -->\n<!-- /lab:two -->"
    with pytest.raises(BenchError, match="'two'"):
        summary.replaced(text, {"one": ""}, tmp_path)


TINY = "steps=0.3,model=0.2,batch=1,context=1"
SWEEP = (
    "ngn-bench sweep --task digits-mlp --scale steps=0.3,model=0.2 --seeds 2 --lr 1,10 "
    "--optimizers ngn-m,momo"
)


def test_kept_runs_are_the_start_of_a_resumed_sweep(tmp_path: Path) -> None:
    lab = repository(tmp_path, [], [SWEEP])
    specs = planned(SWEEP)
    source = Record(tmp_path / "source" / "runs.jsonl")
    sweep([s for s in specs if s.lr == 10], source, Machine())
    assert main(["summary", "--root", str(tmp_path), "--keep", str(tmp_path / "source")]) == 0
    assert main(["summary", "--root", str(tmp_path), "--keep", str(tmp_path / "source")]) == 0
    kept = Record(lab / "one" / "runs.jsonl")
    assert [RunSpec.from_json(one["spec"]) for one in kept.read()] == [
        RunSpec.from_json(one["spec"]) for one in source.read()
    ]
    assert len(kept.path.read_bytes()) < 0.5 * len(source.path.read_bytes())
    done: list[RunSpec] = []
    real = train.run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run", lambda one, machine: done.append(one) or real(one, machine))
        runs = sweep(specs, kept, Machine())
    assert done == [s for s in specs if s.lr == 1]
    assert len(runs) == 8
    Results(runs)


def test_a_thinned_run_has_the_same_results(tmp_path: Path) -> None:
    (whole,) = sweep(
        [RunSpec("digits-mlp", "momo", 1.0, 0, TINY)], Record(tmp_path / "r"), Machine()
    )
    thinned = summary.thin(whole)
    assert thinned["spec"] == whole["spec"]
    assert thinned["curve"][-1]["score"] == pytest.approx(whole["curve"][-1]["score"], rel=1e-6)
    assert bound_shares(thinned) == bound_shares(whole)
    steps = thinned["telemetry"]["step"]
    assert steps[:5] == [1, 2, 3, 5, 7] and steps[-1] == whole["steps"]
    at = [whole["telemetry"]["step"].index(step) for step in steps]
    sizes = [whole["telemetry"]["step_size"][place] for place in at]
    assert thinned["telemetry"]["step_size"] == pytest.approx(sizes, rel=1e-3)
    layer = thinned["telemetry"]["layers"]["head.weight"]
    assert len(layer["update"]) == len(layer["step_size"]) == len(steps)
    assert summary.thin(thinned) == thinned


def test_kept_runs_name_no_folder_of_their_machine() -> None:
    one = run("ngn-m", 1.0, 98.0)
    one["command"] = ["ngn-bench", "sweep", "--out", "/a/b", "--data-dir", "/c/d", "--seeds", "1"]
    assert summary.thin(one)["command"] == [
        *("ngn-bench", "sweep", "--data-dir", "DATA", "--seeds", "1"),
    ]


def bounded(name: str, lr: float, steps: list[int], sizes: list[float]) -> dict[str, Any]:
    one = run(name, lr, 98.0)
    one["telemetry"] |= {"step": steps, "step_size": sizes}
    return one


def test_steps_at_the_bound_are_counted() -> None:
    steps = [1, 2, 49, 50, 51, 60]
    momo = bounded("momo", 1.0, steps, [1.0, 0.995, 0.9, 0.5, 1.0, 0.2])
    assert bound_shares(momo) == (0.5, 0.5)
    # Momo-Adam's bound is α₀ / (1 − β₁ᵗ): 10, 5.26 and 1 in the steps 1, 2 and 60.
    adam = bounded("momo-adam", 1.0, [1, 2, 60], [10.0, 1.0, 1.0])
    assert bound_shares(adam) == (0.5, 1.0)
    assert bound_shares(bounded("momo", 1.0, [1, 2], [1.0, 1.0])) == (1.0, None)
    far = bounded("momo", 10.0, [1], [10.0])
    far["curve"][-1]["score"] = 50.0
    results = Results([momo, far])
    shown = [results.at_bound("momo", factor) for factor in (1, 10, 100)]
    assert shown == ["50 / 50", "100 / –", "–"]
    assert results.at_bound("sgdm", 1) == "–"


def test_the_documents_match_the_kept_records() -> None:
    assert main(["summary", "--root", str(ROOT), "--check"]) == 0


def test_formats_of_one_sweep_are_separate(tmp_path: Path) -> None:
    lab = repository(tmp_path, PARTIAL)
    states = {"": 98.0, " --state 8bit": 97.5, " --state 8bit+bfloat16": 97.75}
    base = "ngn-bench sweep --task mnist-mlp --seeds 1 --optimizers ngn-mdv1 --lr 0.1,1"
    entry = {"title": "Narrow", "folder": "narrow", "also": ["one"], "pictures": []}
    entry |= {"commands": [base + words for words in states]}
    (lab / "precision.json").write_text(json.dumps([entry]))
    runs = []
    for words, score in states.items():
        options = {"state": words.split()[1]} if words else {}
        for lr, lost in ((0.1, 0.0), (1.0, 0.25)):
            one = run("ngn-mdv1", lr, score - lost, files="")
            runs.append(one | {"spec": one["spec"] | {"options": options}})
    for folder, some in (("narrow", runs[2:]), ("one", PARTIAL + runs[:2])):
        (lab / folder).mkdir(exist_ok=True)
        text = "".join(json.dumps(one) + "\n" for one in some)
        (lab / folder / "runs.jsonl").write_text(text)
    page = tmp_path / "docs" / "precision.md"
    page.write_text(
        "<!-- lab:formats -->\n<!-- /lab:formats -->\n<!-- lab:narrow -->\n<!-- /lab:narrow -->"
    )
    (tmp_path / "bench" / "results" / "reference.json").write_text(
        json.dumps(
            {
                "rows": [
                    {
                        "workload": "transformer++-70m",
                        "dtype": "float32",
                        "contender": "ngnmdv1:cpu/8bit",
                        "ratio": 1.125,
                    }
                ]
            }
        )
    )
    assert main(["summary", "--root", str(tmp_path), "--write"]) == 0
    text = page.read_text("utf-8")
    assert '| NGN-MDv1 | `"float32"` | 8 | 36 | – | 98.00; ≥ 1 |' in text
    assert '| NGN-MDv1 | `"8bit"` | 2.125 | 21.31 | 1.12 | 97.50; ≥ 1 |' in text
    assert '| `("8bit", "bfloat16")` | 97.75 | 97.50 |' in text
    assert "6 runs" in text and "missing" not in text
    assert (tmp_path / "docs" / "images" / "precision.png").exists()
    assert main(["summary", "--root", str(tmp_path), "--check"]) == 0

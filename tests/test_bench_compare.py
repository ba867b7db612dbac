"""What is made from result files: `ngn-bench compare`, and the README's table and picture."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
from bench_runs import TINY, Bench, record_of, run, write
from ngn_bench.pages import plots, readme


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return record_of(
        tmp_path_factory.mktemp("measured"), "step", *TINY, "--contenders", "adamw:for-loop"
    )


@pytest.fixture
def result(measured: dict[str, Any]) -> dict[str, Any]:
    """A result with one workload and exactly known times."""
    record = copy.deepcopy(measured)
    for row, median in zip(record["rows"], (1.0, 2.0), strict=True):
        row["time"].update(median=median, low=0.99 * median, high=1.01 * median, samples=9)
        row["ratio"] = median
    record["rows"][0]["time"]["samples"] = 2
    record["memory_bandwidth"] = {"copy": 1e9, "update": 2e9}
    record["environment"]["revision"] = "0123abc"
    return record


def slowed(record: dict[str, Any], factor: float) -> dict[str, Any]:
    changed = copy.deepcopy(record)
    for name in ("median", "low", "high"):
        changed["rows"][1]["time"][name] *= factor
    changed["rows"][1]["ratio"] *= factor
    return changed


def compare(bench: Bench, old: dict[str, Any], new: dict[str, Any], *options: str) -> int:
    """The exit status of `ngn-bench compare` for two records."""
    files = write(bench.folder / "old.json", old), write(bench.folder / "new.json", new)
    return run(["compare", *files, *options])


@pytest.mark.parametrize("metric", ["time", "ratio"])
@pytest.mark.parametrize(
    ("factor", "options", "status", "word"),
    [
        (1.0, [], 0, "none of 2 rows"),
        (1.04, [], 0, "none of 2 rows"),
        (1.3, [], 1, "1 of 2 rows became slower"),
        (1.3, ["--threshold", "0.5"], 0, "none of 2 rows"),
        (0.5, [], 0, "faster"),
    ],
)
def test_compare(
    bench: Bench,
    result: dict[str, Any],
    factor: float,
    options: list[str],
    status: int,
    word: str,
    metric: str,
) -> None:
    assert compare(bench, result, slowed(result, factor), "--metric", metric, *options) == status
    assert word in bench.output()


def test_compare_widens_the_band_with_the_spread(bench: Bench, result: dict[str, Any]) -> None:
    noisy = slowed(result, 1.3)
    noisy["rows"][1]["time"].update(low=1.2, high=3.2)
    assert compare(bench, result, noisy) == 0


def test_compare_adds_the_spread_of_adamw_to_a_ratio(bench: Bench, result: dict[str, Any]) -> None:
    slower = slowed(result, 1.3)
    slower["rows"][0]["time"].update(low=0.7, high=1.3)
    assert compare(bench, result, slower) == 1
    assert compare(bench, result, slower, "--metric", "ratio") == 0


@pytest.mark.parametrize("refused", [True, False])
def test_what_is_no_longer_timed_is_a_regression(
    bench: Bench, result: dict[str, Any], refused: bool
) -> None:
    broken = copy.deepcopy(result)
    if refused:
        broken["not_run"]["many:3x5"] = {broken["rows"].pop()["label"]: "out of luck"}
    else:
        broken["rows"][1].update(time=None, ratio=None, note="out of luck")
    assert compare(bench, result, broken) == 1
    assert "no longer timed: many:3x5 · adamw:for-loop" in (output := bench.output())
    assert "out of luck" in output
    assert compare(bench, broken, result) == 0
    broken["rows"][-1].update(time=None, note="not measured: interrupted")
    broken["not_run"] = {}
    if not refused:
        assert compare(bench, result, broken) == 0


def test_training_on_other_batches_is_another_row(bench: Bench, result: dict[str, Any]) -> None:
    files = []
    for batch in (4, 8):
        record = copy.deepcopy({**result, "kind": "train"})
        for row in record["rows"]:
            row["description"] = f"batches of {batch} images"
        files.append(write(bench.folder / f"{batch}.json", record))
    assert run(["compare", files[0], files[0]]) == 0
    assert "share no workload" in bench.failure("compare", *files)


def test_compare_lists_what_does_not_match(bench: Bench, result: dict[str, Any]) -> None:
    other = copy.deepcopy(result)
    del other["rows"][1]
    other["environment"]["cpu"] = "another"
    assert compare(bench, result, other) == 0
    output = bench.output()
    assert "only in the old result: many:3x5 · adamw:for-loop" in output
    assert "→ another" in output
    assert "--metric ratio" in output


def with_formats(record: dict[str, Any]) -> dict[str, Any]:
    """A later result of the same preset, which has more rows."""
    more = copy.deepcopy(record)
    for name, dtype in (
        ("ngnmdv1:cpu/8bit", "float32"),
        ("ngnmdv1:cpu/exact@bfloat16", "bfloat16"),
    ):
        added = {"contender": name, "label": name.replace("/", " · "), "dtype": dtype}
        more["rows"].append({**more["rows"][1], **added})
    return more


@pytest.mark.parametrize("metric", ["time", "ratio"])
def test_compare_with_rows_that_only_one_has(
    bench: Bench, result: dict[str, Any], metric: str
) -> None:
    more = with_formats(result)
    for old, new, side in ((result, more, "new"), (more, result, "old")):
        assert compare(bench, old, new, "--metric", metric) == 0
        output = bench.output()
        for name in ("ngnmdv1:cpu/8bit · float32", "ngnmdv1:cpu/exact@bfloat16 · bfloat16"):
            assert f"only in the {side} result: many:3x5 · {name} · cpu" in output
        assert "none of 2 rows became slower" in output


def test_a_format_that_no_longer_runs_is_a_regression(bench: Bench, result: dict[str, Any]) -> None:
    more = with_formats(result)
    fewer = copy.deepcopy(more)
    labels = [fewer["rows"].pop()["label"] for _ in range(2)]
    fewer["not_run"]["many:3x5"] = dict.fromkeys(labels, "out of luck")
    assert compare(bench, more, fewer) == 1
    output = bench.output()
    for name in ("ngnmdv1:cpu/8bit · float32", "ngnmdv1:cpu/exact@bfloat16 · bfloat16"):
        assert f"no longer timed: many:3x5 · {name} · cpu: out of luck" in output
    # A run in another dtype does not measure these rows, but for the one with a dtype of its own.
    for row in fewer["rows"]:
        row["dtype"] = "bfloat16"
    assert compare(bench, more, fewer) == 1
    output = bench.output()
    assert "no longer timed: many:3x5 · ngnmdv1:cpu/exact@bfloat16" in output
    assert "only in the old result: many:3x5 · ngnmdv1:cpu/8bit" in output


def test_compare_bad_files(bench: Bench, result: dict[str, Any]) -> None:
    good = write(bench.folder / "good.json", result)
    assert "cannot read" in bench.failure("compare", good, str(bench.folder / "none.json"))
    (bench.folder / "text.json").write_text("hello")
    assert "is not JSON" in bench.failure("compare", good, str(bench.folder / "text.json"))
    assert "not a result" in bench.failure("compare", good, write(bench.folder / "empty.json", {}))
    newer = write(bench.folder / "newer.json", {**result, "schema": 99})
    assert "schema 99" in bench.failure("compare", good, newer)
    kind = write(bench.folder / "kind.json", {**result, "kind": "train"})
    assert "cannot compare" in bench.failure("compare", good, kind)
    apart = write(bench.folder / "apart.json", {**result, "rows": []})
    assert "share no workload" in bench.failure("compare", good, apart)
    damaged = write(bench.folder / "damaged.json", {**result, "rows": [{"workload": "x"}]})
    assert "damaged" in bench.failure("compare", good, damaged)
    for missing in ("environment", "packages", "label"):
        holed = copy.deepcopy(result)
        for holder in (holed, holed["environment"], holed["rows"][0]):
            holder.pop(missing, None)
        assert "damaged" in bench.failure(
            "compare", good, write(bench.folder / "holed.json", holed)
        )


def on_ranks(result: dict[str, Any]) -> dict[str, Any]:
    """A record of `ngn-bench ranks` with one row."""
    times = {"low": 1e-3, "median": 2e-3, "high": 3e-3, "fastest": 1e-3, "samples": 9}
    row = {"ranks": 2, "layout": "fsdp2", "optimizer": "NGN-MDv1", "time": times, "outside": times}
    row |= {"collectives": 1, "bytes": 64, "ratio": 0.25, "outside_ratio": 1.5, "same_bits": True}
    sizes = {"rows": [row], "tensors": 3, "side": 4, "threads": 1}
    command = ["ngn-bench", "ranks", "--ranks", "2"]
    return {**result, "kind": "ranks", "command": command, **sizes}


def test_readme_is_generated_and_checked(bench: Bench, result: dict[str, Any]) -> None:
    result["not_run"]["many:3x5"] = {"Momo · momo-opt": "out of luck"}
    rule = {"contender": "ngnm:cpu", "label": "NGN-M · cpu", "ratio": 0.5}
    result["rows"].append(copy.deepcopy(result["rows"][1]) | rule)
    text, source = bench.folder / "README.md", write(bench.folder / "reference.json", result)
    text.write_text(f"# Title\n\n{readme.marked('bench', 'old')}\n\nafter\n")
    picture = bench.folder / "images" / "step.png"
    loops = bench.folder / "loops.json"
    command = ["--readme", str(text), "--json", source, "--picture", str(picture)]
    ranks = write(bench.folder / "ranks.json", on_ranks(result))
    command += ["--loops", str(loops), "--docs", str(bench.folder), "--ranks", ranks]
    for file, page in readme.PAGES.items():
        (bench.folder / file).write_text(readme.marked(page.name, "old"))

    def check_finds(page: Path, old: str, new: str, says: str) -> None:
        """A change of a page, which the next writing takes back."""
        right = page.read_text()
        page.write_text(right.replace(old, new))
        assert readme.main([*command, "--check"]) == 1
        assert says in bench.output()
        assert readme.main(command) == 0
        assert page.read_text() == right

    assert readme.main([*command, "--check"]) == 1
    assert "old" in text.read_text()
    assert readme.main(command) == 0
    written = text.read_text()
    assert written.startswith("# Title\n")
    assert written.endswith("\n\nafter\n")
    rows = [line for line in written.splitlines() if line.startswith("|")]
    assert rows == [
        "| optimizer | bytes of state | 15 in 3 tensors |",
        "| :-- | --: | --: |",
        "| **AdamW · fused** | **8.80** | **1.00 s** |",
        "| NGN-M · cpu | 8.80 | 0.50 |",
    ]
    assert "at revision 0123abc" in written
    assert readme.main([*command, "--check"]) == 0
    assert readme.main(command) == 0
    assert text.read_text() == written

    speed = bench.folder / "speed.md"
    full = speed.read_text()
    assert "| AdamW · for-loop | 8.80 | 2.00 |\n| NGN-M · cpu | 8.80 | 0.50 |" in full
    assert "Workloads: many:3x5: 15 parameters in 3 tensors." in full
    assert "training iteration" not in full
    assert "![Time of one optimizer step against fused AdamW](images/step.png)" in full
    assert "AdamW · fused: = for-loop in float64; all others: = itself in float64.\n" in full
    assert "## many:3x5: 15 parameters in 3 tensors, float32\n" in full
    assert "| AdamW · for-loop | 2.00 s | 1.0% | 2.00× |" in full
    assert "| **AdamW · fused** | **1.00 s** | **1.0% (n=2)** | **1.00×** |" in full
    assert "Not run: Momo · momo-opt: out of luck.\n" in full
    assert "over 100 % means" in full
    assert "Memory bandwidth 2.0 GB/s" in full
    assert "at revision 0123abc" in full
    check_finds(speed, "2.00×", "1.90×", "speed.md does not match")
    narrow = (
        "| `NGNMDv1`, `DecNGNMDv1` | 26 / 4 | 24.12 / 3.06 | 21.31 / 2.12 | 22 / 6 | 13.31 / 2.12 |"
    )
    assert narrow in (bench.folder / "gpu.md").read_text()

    many = bench.folder / "ranks.md"
    assert "| 2 | FSDP2 | NGN-MDv1 | 2.00 ms |" in many.read_text()
    assert "Measured with `ngn-bench ranks --ranks 2` at revision 0123abc" in many.read_text()
    check_finds(many, "2.00 ms", "1.90 ms", f"ranks.md does not match {ranks}")

    page = bench.folder / "algorithms.md"
    assert "| NGN-MDv1, Dec-NGN-MDv1 | g, v | g, v↕, m↕, x↕ | 9 | 1.29 |" in page.read_text()
    check_finds(page, "| 9 |", "| 8 |", "algorithms.md does not match the rules")

    training = {**result, "kind": "train", "command": ["ngn-bench", "train", "--preset", "loops"]}
    write(loops, training)
    assert readme.main([*command, "--check"]) == 1
    assert "loops.json" in bench.output()
    assert readme.main(command) == 0
    sentence = "fused AdamW, took 2.00 (many:3x5, AdamW · for-loop), 0.50 (many:3x5, NGN-M · cpu)."
    assert sentence in speed.read_text()
    assert "`ngn-bench train --preset loops`" in speed.read_text()
    assert readme.main([*command, "--check"]) == 0
    speed.write_text(speed.read_text().replace("took 2.00", "took 0.96"))
    assert readme.main([*command, "--check"]) == 1
    loops.unlink()
    speed.write_text(full)
    assert readme.main([*command, "--check"]) == 0

    text.write_text(written.replace("| 0.50 |", "| 0.60 |"))
    assert readme.main([*command, "--check"]) == 1
    text.write_text(written)
    write(bench.folder / "reference.json", slowed(result, 1.0001))
    assert readme.main([*command, "--check"]) == 1
    assert "step.png does not match" in bench.output()
    text.write_text("no markers")
    assert readme.main(command) == 2


def test_nothing_in_the_picture_is_cut_or_covered(
    tmp_path: Path, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text inside the picture, and no two texts on each other, with rows of long names."""
    from matplotlib.text import Text

    record = with_formats(result)
    record["rows"][-1]["label"] = "NGN-MDv1 · cpu · 8bit+bfloat16 · stochastic · on bfloat16"
    record["rows"] += [
        {**row, "workload": name, "ratio": 33.333 * row["ratio"]}
        for name in ("transformer++-70m", "many-small", "one:4M", "one:1M")
        for row in record["rows"][:2]
    ]
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, path, record: drawn.append(figure))
    plots.plot_step(record, tmp_path / "step.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    texts = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text()
    ]
    assert {"33.3", "66.7", record["rows"][3]["label"], "½×"} <= {text for text, _ in texts}
    for text, box in texts:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
    for (text, box), (other, covered) in itertools.combinations(texts, 2):
        assert not (box.padded(-1).overlaps(covered.padded(-1))), (text, other)

"""`ngn-bench ranks`: local processes, and the projection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_runs import Bench, record_of, run
from helpers import FSDP2_ON_ONE_CPU
from ngn_bench.pages import readme
from ngn_bench.timing import projection, ranks

TINY = ["--tensors", "3", "--seconds", "0.05"]


@FSDP2_ON_ONE_CPU
def test_processes_are_started_and_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = record_of(tmp_path, "ranks", "--ranks", "1,2", *TINY)
    rows = {(row["ranks"], row["layout"], row["optimizer"]): row for row in record["rows"]}
    assert [key[:2] for key in rows if key[2] == "NGN-MDv1"] == [
        *((1, "alone"), (2, "alone"), (2, "ddp"), (2, "fsdp2"))
    ]
    for (number, layout, optimizer), row in rows.items():
        time, outside = row["time"], row["outside"]
        sends = optimizer == "NGN-MDv1" and layout != "alone"
        assert (row["collectives"], row["bytes"]) == ((1, 64) if sends else (0, 0))
        assert time["samples"] >= ranks.MIN_ROUNDS
        assert 0 < outside["fastest"] <= outside["median"]
        assert (outside["median"] < time["median"]) if sends else (outside == time)
        baseline = rows[number, layout, "AdamW · fused"]["time"]["median"]
        assert row["ratio"] == pytest.approx(time["median"] / baseline)
        alone = rows[number, "alone", optimizer]["outside"]["median"]
        assert row["outside_ratio"] == pytest.approx(outside["median"] / alone)
        replicated = layout == "ddp" or (layout == "fsdp2" and optimizer == "NGN-MDv1")
        assert row["same_bits"] is (True if replicated else None)
    output = capfd.readouterr().out
    assert "FSDP2" in output and "3 matrices of 32 × 32" in output


def fake_row(optimizer: str, layout: str, seconds: float, **other: Any) -> dict[str, Any]:
    time = {"median": seconds, "low": seconds, "high": seconds, "fastest": seconds, "samples": 9}
    row = {"ranks": 2, "layout": layout, "optimizer": optimizer, "time": time, "outside": time}
    return {**row, "collectives": 1, "bytes": 64, "same_bits": None, **other}


def test_ranks_that_differ_give_status_1(bench: Bench) -> None:
    rows = [
        fake_row("NGN-MDv1", "alone", 1.0),
        fake_row("AdamW · fused", "alone", 4.0),
        fake_row("NGN-MDv1", "ddp", 3.0, same_bits=False),
        fake_row("AdamW · fused", "ddp", 6.0, same_bits=True),
    ]
    bench.patch.setattr(ranks, "run_ranks", lambda settings, progress: ranks.with_ratios(rows))
    assert run(["ranks", "--ranks", "2", *TINY]) == 1
    captured = bench.captured()
    assert "ranks differ" in captured.err
    (line,) = [line for line in captured.out.splitlines() if "DDP" in line and "NGN-MDv1" in line]
    assert line.split()[-7:] == ["64", "B", "in", "1", "0.50×", "3.00×", "NO"]


def test_a_process_that_fails_is_reported() -> None:
    """Here an optimizer without parameters."""
    settings = ranks.RanksSettings((1,), tensors=-1, seconds=0.01)
    with pytest.raises(ranks.BenchError, match=r"with 1 process: (?s:.*)empty parameter list"):
        ranks.run_ranks(settings, lambda fraction, text: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "ranks.png"], "add --project"),
        (["--project", "--ranks", "2"], "leave out the options of a measurement"),
    ],
)
def test_options_that_do_not_go_together(bench: Bench, arguments: list[str], message: str) -> None:
    assert message in bench.failure("ranks", *arguments)


@pytest.mark.parametrize("numbers", ["0", "two", "1,65", ""])
def test_bad_numbers_of_ranks(bench: Bench, numbers: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["ranks", "--ranks", numbers])
    assert ended.value.code == 2
    assert "--ranks" in bench.captured().err


def test_projection(bench: Bench) -> None:
    picture = bench.folder / "projection.png"
    record = bench.record("ranks", "--project", "--plot", str(picture))
    rows = {row["gpus"]: row for row in record["projection"]}
    assert list(rows) == [8 * 2**k for k in range(12)]
    # 7 hops of 0.6 µs on NVLink and 6.6 µs to begin with; 512 bytes at 87.7 GB/s.
    assert rows[8]["gather"] == pytest.approx(6.6e-6 + 7 * 0.6e-6 + 512 / 87.7e9)
    # 2,048 nodes: 2,047 hops between them, 7 of 8 within, up a tree of 11 levels and down again.
    gather = 6.6e-6 + 14336 * 1e-6 + 2047 * 2.7e-6 + 64 * 16384 / 19e9
    clip = 6.8e-6 + 2 * (7 * 0.6e-6 + 11 * 5e-6) + 8 / 19e9
    assert rows[16384]["gather"] == pytest.approx(gather)
    assert rows[16384]["clip"] == pytest.approx(clip)
    assert rows[16384]["shares"]["gather"]["70M"] == pytest.approx(gather / (1.63 + gather))
    times = [row[what] for what in ("gather", "clip") for row in rows.values()]
    assert times == sorted(times[:12]) + sorted(times[12:])
    assert readme.picture_source(picture) is not None
    output = bench.output()
    assert "PROJECTION" in output and projection.percent(gather / (1.63 + gather)) in output

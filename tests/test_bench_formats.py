"""ngn-bench with narrow state: what it counts, what it checks, what it prints."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from bench_runs import CPU, ROOFLINE, Bench, overflowing_after, rows_by_name
from ngn_bench.commands.step import CPU_TABLE
from ngn_bench.contenders import traffic
from ngn_bench.contenders.check import check
from ngn_bench.contenders.registry import BASELINE, CONTENDERS, Contender, select, stored_as
from ngn_bench.errors import BenchError
from ngn_bench.timing import step
from ngn_bench.timing.workloads import find_workload

BASE = CONTENDERS["ngnmdv1:reference"]


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
    """As counted by hand, and as allocated by an optimizer."""
    contender = stored_as(BASE, state, rounding)
    assert contender.passes.floor_bytes(dtype) == moved
    assert contender.passes.state_bytes(dtype) == kept
    param = torch.ones(6400, dtype=dtype, requires_grad=True)
    param.grad = torch.ones_like(param)
    optimizer = contender.build([param])
    contender.step_function(optimizer)(torch.ones(()))
    state = [value for key, value in optimizer.state[param].items() if key != "step"]
    assert sum(value.nbytes for value in state) == 6400 * kept


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


def test_a_row_for_each_state(bench: Bench) -> None:
    words = ["--workload", "one:8K", "--contenders", "ngnmdv1:reference", "--seconds", "0.5"]
    rows = bench.rows(*words, "--state", "float32,8bit")
    assert set(rows) == {"adamw:fused", "ngnmdv1:reference", "ngnmdv1:reference/8bit"}
    narrow, wide = rows["ngnmdv1:reference/8bit"], rows["ngnmdv1:reference"]
    assert narrow["verdict"]["ok"] and narrow["state_bytes"] < 0.28 * wide["state_bytes"]
    assert "NGN-MDv1 · reference · 8bit" in bench.output()


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("ngnmdv1/8bit", ["ngnmdv1:cpu/8bit"]),
        ("ngnmdv1:reference/8bit+bfloat16", ["ngnmdv1:reference/8bit+bfloat16"]),
        ("NGNMDv1/bfloat16/exact@bfloat16", ["ngnmdv1:cpu/bfloat16/exact@bfloat16"]),
        ("ngnmdv1/exact/bfloat16", ["ngnmdv1:cpu/bfloat16/exact"]),
        ("ngnmdv2/float32/nearest", ["ngnmdv2:cpu"]),
        ("adamw:foreach@bfloat16", ["adamw:foreach@bfloat16"]),
        # Named by the columns that the rule has.
        ("ngnm/8bit+bfloat16", ["ngnm:cpu/8bit"]),
        ("ngnd-rms/8bit+bfloat16", ["ngnd-rms:cpu/bfloat16"]),
        ("ngnm/float32+8bit", ["ngnm:cpu"]),
        ("ngn/8bit", ["ngn:cpu"]),
    ],
)
def test_names_that_give_formats(written: str, names: list[str]) -> None:
    chosen = [contender.name for contender in select([written], "cpu")]
    assert sorted(chosen) == sorted([*names, BASELINE])


def test_formats_stand_behind_their_rule() -> None:
    chosen = select(["ngnmdv2/8bit", "ngnmdv1/8bit", "ngnmdv1", "ngnmdv1/8bit"], "cpu")
    names = [contender.name for contender in chosen]
    assert names == ["ngnmdv1:cpu/8bit", "ngnmdv1:cpu", "ngnmdv2:cpu/8bit", BASELINE]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--contenders", "adamw:fused/8bit"], "only NGN rules have formats"),
        (["--contenders", "ngnmdv1/8bit/bfloat16"], "names two formats"),
        (["--contenders", "ngnmdv1/8bits"], "Did you mean '8bit'?"),
        (["--contenders", "ngnmdv1@bflaot16"], "Did you mean 'bfloat16'?"),
        (["--contenders", "ngnmdv1/8bit", "--state", "bfloat16"], "leave out --state"),
        (["--preset", "cpu-table", "--state", "bfloat16"], "leave those out"),
    ],
)
def test_formats_that_cannot_be_measured(bench: Bench, words: list[str], message: str) -> None:
    assert message in bench.failure("step", *words, "--device", "cpu")


def test_bfloat16_parameters_among_float32_ones(bench: Bench) -> None:
    name = "ngnmdv1:reference/bfloat16/exact@bfloat16"
    record = bench.step("--workload", "one:8K", "--contenders", name)
    rows = rows_by_name(record)
    assert (rows[name]["dtype"], rows[BASELINE]["dtype"]) == ("bfloat16", "float32")
    assert rows[name]["verdict"]["ok"] is True
    assert rows[name]["bytes_floor"] == 22
    assert rows[name]["state_bytes"] == pytest.approx(6 * 8000, abs=8)
    assert rows[BASELINE]["state_bytes"] == pytest.approx(8 * 8000, abs=8)
    times = [rows[contender]["time"]["median"] for contender in (name, BASELINE)]
    assert rows[name]["ratio"] == pytest.approx(times[0] / times[1])
    output = bench.output()
    assert "8k parameters in 1 tensor, float32 on cpu" in output
    assert "NGN-MDv1 · reference · bfloat16 · exact · on bfloat16" in output


def test_parameters_of_one_type_leave_the_other(bench: Bench) -> None:
    """Timed steps may leave non-finite numbers in the parameters that a contender was given."""
    late = overflowing_after(8)
    bench.replace("adamw:foreach", build=late, build_trusted=None)
    chosen = "adamw:foreach@bfloat16,adamw:for-loop@bfloat16,adamw:for-loop"
    rows = bench.rows("--contenders", chosen)
    invalid = {name for name, row in rows.items() if row["time"] is None}
    assert invalid == {"adamw:foreach@bfloat16", "adamw:for-loop@bfloat16"}


def test_memory_counts_the_parameters_of_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = find_workload("one:1M")
    settings = step.Settings(CPU, torch.float32, 1.0)
    monkeypatch.setattr(step.roofline, "large_elements", lambda device: 0)
    both = select(["adamw:fused@bfloat16"], "cpu")
    # Parameters and gradients, and two moments: 16 bytes of float32, 8 of bfloat16.
    for needed, free in ((16e6, 15.9e6), (24e6, 23.9e6)):
        chosen = both if needed == 24e6 else [CONTENDERS[BASELINE]]
        monkeypatch.setattr(step, "memory_free", lambda device, free=free: free)
        with pytest.raises(BenchError, match="GiB"):
            step.require_memory(workload, chosen, settings)
        monkeypatch.setattr(step, "memory_free", lambda device, needed=needed: needed)
        step.require_memory(workload, chosen, settings)


def test_the_table_has_every_rule_and_format() -> None:
    """`--preset cpu-table` times these on every workload."""
    wanted = {"ngn:cpu", "ngnmdv1:cpu/bfloat16/exact@bfloat16", BASELINE}
    for rule in ("ngnmdv1", "ngnmdv2"):
        wanted |= {f"{rule}:cpu{form}" for form in ("", "/bfloat16", "/8bit+bfloat16", "/8bit")}
    wanted |= {f"ngnm:cpu{form}" for form in ("", "/bfloat16", "/8bit")}
    for workload, names in CPU_TABLE:
        chosen = {contender.name for contender in select(names, "cpu")}
        assert wanted <= chosen, workload
    largest = {contender.name for contender in select(CPU_TABLE[0][1], "cpu")}
    rivals = {name for name, contender in CONTENDERS.items() if contender.rival}
    assert len(rivals) == 3
    assert largest == wanted | rivals | {"ngnmdv1:plain", "momo-adam"}


def test_small_tensors_move_what_their_wide_state_does(bench: Bench) -> None:
    passes = stored_as(BASE, "8bit", "nearest").passes
    assert passes.mean_floor_bytes(torch.float32, [4096]) == 21.3125
    assert passes.mean_floor_bytes(torch.float32, [4095, 1]) == 36
    mean = passes.mean_floor_bytes(torch.float32, [3000, 3000, 6000])
    assert mean == pytest.approx((36 + 21.3125) / 2)
    exact = stored_as(BASE, "8bit", "exact").passes
    # Reduce g and v; apply g, v and m twice, and x with its remainder twice.
    assert exact.mean_floor_bytes(torch.bfloat16, [1]) == 2 + 4 + 2 + 8 + 8 + 8
    words = ["--workload", "many:3x5,one:8K", "--state", "8bit"]
    record = bench.step(*words, "--contenders", "ngnmdv1:reference")
    floors = {
        row["workload"]: row["bytes_floor"]
        for row in record["rows"]
        if row["contender"] == "ngnmdv1:reference/8bit"
    }
    assert floors == {"many:3x5": 36, "one:8K": 21.3125}


def test_floors_of_formats(bench: Bench) -> None:
    rules = traffic.stored_rules(["float32", "8bit+bfloat16"], "nearest")
    assert list(rules)[:3] == ["NGN", "NGN-M", "NGN-M · 8bit"]
    assert rules["NGN-MDv1"] == traffic.PASSES["NGN-MDv1"]
    assert rules["NGN-MDv1 · 8bit+bfloat16"].floor_bytes(torch.float32) == 24.125
    assert rules["AdamW"] == traffic.PASSES["AdamW"]
    found = {f["rule"]: f for f in bench.record(*ROOFLINE, "--state", "8bit")["floors"]}
    assert found["NGN-MDv1 · 8bit"]["bytes_per_parameter"] == 21.3125
    assert "NGN-MDv1" not in found
    assert "NGN-MDv1 · 8bit" in bench.output()
    assert "unknown state" in bench.failure(*ROOFLINE, "--state", "4bit")

"""`ngn-bench step`, `roofline` and `info` on tiny workloads, and bad input."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import TINY, failure, replace_contender, rows_by_name, run, run_step
from ngn_bench import contenders, measure, readme, step
from ngn_bench.contenders import CONTENDERS

CHOSEN = "ngnmdv1:reference,adamw"


def test_step_measures_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "step.png"
    record = run_step(tmp_path, "--contenders", CHOSEN, "--plot", str(picture))
    assert record["schema"] == 1
    assert record["kind"] == "step"
    assert record["interrupted"] is False
    assert record["command"] == ["ngn-bench", "step", *TINY, "--contenders", CHOSEN]
    environment = record["environment"]
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert set(environment["backends"]) == {"cpu", "triton", "reference"}
    rows = rows_by_name(record)
    assert set(rows) == {
        "ngnmdv1:reference",
        "adamw:fused",
        "adamw:foreach",
        "adamw:for-loop",
    }
    for row in rows.values():
        assert row["verdict"]["ok"] is True
        time = row["time"]
        assert 0 < time["fastest"] <= time["low"] <= time["median"] <= time["high"]
        assert time["samples"] >= measure.SLOW_VISITS
        assert row["ratio"] == pytest.approx(time["median"] / rows["adamw:fused"]["time"]["median"])
        assert row["bandwidth"] == pytest.approx(row["bytes_floor"] * 15 / time["median"])
        assert row["share"] == pytest.approx(
            row["bandwidth"] / record["memory_bandwidth"]["many:3x5"]
        )
    assert rows["adamw:fused"]["state_bytes"] >= 2 * 4 * 15
    assert rows["adamw:foreach"]["extra_bytes"] >= 4 * 15
    assert rows["adamw:foreach"]["bytes_code"] > rows["adamw:fused"]["bytes_code"] == 28
    assert readme.picture_source(picture) is not None
    output = capsys.readouterr().out
    assert "many:3x5: 15 parameters in 3 tensors, float32 on cpu" in output
    assert "NGN-MDv1 · reference" in output


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_step_in_other_dtypes(tmp_path: Path, dtype: str) -> None:
    record = run_step(tmp_path, "--contenders", "ngnm:reference", "--dtype", dtype)
    row = rows_by_name(record)["ngnm:reference"]
    assert row["dtype"] == dtype
    assert row["verdict"]["ok"] is True
    state = 8 if dtype == "float64" else 4
    param = {"float64": 8}.get(dtype, 2)
    assert row["bytes_floor"] == 4 * param + 2 * state


def test_step_with_cold_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes = []
    monkeypatch.setattr(step, "_flush_bytes", lambda: 4096)
    monkeypatch.setattr(measure.CpuClock, "flush", lambda self: flushes.append(1))
    record = run_step(tmp_path, "--contenders", "adamw:fused", "--cold")
    assert len(flushes) >= rows_by_name(record)["adamw:fused"]["time"]["samples"]


def test_step_on_shapes_and_on_a_model_factory(tmp_path: Path) -> None:
    shapes = tmp_path / "mine.json"
    shapes.write_text('{"weight": [4, 3], "bias": [4], "scale": []}')
    path = tmp_path / "step.json"
    command = ["step", "--shapes", str(shapes), "--workload", "ngn_bench.models:MLP"]
    command += ["--contenders", "adamw:fused", "--seconds", "0.05", "--json", str(path)]
    assert run([*command, "--device", "cpu"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["workload"], row["tensors"], row["parameters"]) for row in rows] == [
        ("ngn_bench.models:MLP", 6, 89610),
        ("mine", 3, 17),
    ]


def test_default_contenders_are_all_measured_or_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_step(tmp_path)
    named = {row["label"] for row in record["rows"]} | set(record["not_run"]["many:3x5"])
    expected = {c.label for c in CONTENDERS.values() if not c.compiled}
    assert named == expected
    output = capsys.readouterr().out
    for reason in record["not_run"]["many:3x5"].values():
        assert reason
        assert reason in output
    for row in record["rows"]:
        assert row["time"] is not None or row["note"]


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make these the only contenders there are."""
    monkeypatch.setattr(contenders, "CONTENDERS", {name: CONTENDERS[name] for name in names})


def test_step_without_options_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "ngn:reference", "adamw:fused")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ngn_bench.cli.DEFAULT_WORKLOADS", ("many:2x4",))
    assert run(["step", "--seconds", "0.05", "--device", "cpu"]) == 0
    assert json.loads((tmp_path / "ngn-bench-step.json").read_text())["rows"]
    assert (tmp_path / "ngn-bench-step.png").stat().st_size > 10_000


def test_small_machine_takes_the_smaller_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "adamw:fused")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step, "memory_free", lambda device: 2**27)
    monkeypatch.setattr("ngn_bench.cli.DEFAULT_WORKLOADS", ("one:64M",))
    monkeypatch.setattr("ngn_bench.cli.SMALL_MACHINE_WORKLOADS", ("many:2x4",))
    assert run(["step", "--seconds", "0.05", "--device", "cpu"]) == 0
    record = json.loads((tmp_path / "ngn-bench-step.json").read_text())
    assert {row["workload"] for row in record["rows"]} == {"many:2x4"}


def test_cpu_table_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = ("ngnmdv1", "ngnm", "ngnmdv2", "ngn")
    table = (("many:3x5", (*rules, "ngnmdv1:plain", "momo-adam")), ("one:64", rules))
    monkeypatch.setattr("ngn_bench.cli.CPU_TABLE", table)
    assert run(["step", "--preset", "cpu-table", "--seconds", "0.1", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "Time of a whole step(), relative to fused AdamW" in output
    assert re.search(r"one:64: 64 parameters in 1 tensor +\S+ µs +\d", output)
    assert run(["step", "--preset", "cpu-table", "--workload", "one:4"]) == 2


class Broken(torch.optim.SGD):
    """Moves half as far as it should."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p.sub_(0.5 * group["lr"] * p.grad)


def test_a_wrong_answer_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_contender(monkeypatch, "sgd:fused", build=Broken)
    record = run_step(tmp_path, "--contenders", "sgd:fused")
    row = rows_by_name(record)["sgd:fused"]
    assert row["time"] is None
    assert row["ratio"] is None
    assert "not timed: differs from for-loop in float64" in row["note"]
    assert row["note"] in capsys.readouterr().out


def test_a_contender_that_cannot_run_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "momo", None)
    record = run_step(tmp_path, "--contenders", "momo-all")
    reason = "momo-opt is not installed: pip install momo-opt"
    assert record["not_run"]["many:3x5"] == {
        "Momo · momo-opt": reason,
        "Momo-Adam · momo-opt": reason,
    }
    assert f"not run: Momo · momo-opt, Momo-Adam · momo-opt: {reason}" in capsys.readouterr().out


def test_a_contender_that_fails_while_measured_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            Failing.calls += 1
            if Failing.calls > 8:
                raise RuntimeError("out of luck")
            return super().step(closure)

    replace_contender(
        monkeypatch,
        "sgd:fused",
        build=lambda params, lr=0.1: Failing(params, lr=lr, momentum=0.9),
    )
    rows = rows_by_name(run_step(tmp_path, "--contenders", "sgd:fused"))
    assert "out of luck" in rows["sgd:fused"]["note"]
    assert rows["adamw:fused"]["time"] is not None


def test_an_interrupted_run_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            Interrupting.calls += 1
            if Interrupting.calls > 40:
                raise KeyboardInterrupt
            return super().step(closure)

    replace_contender(
        monkeypatch,
        "sgd:fused",
        build=lambda params, lr=0.1: Interrupting(params, lr=lr, momentum=0.9),
    )
    record = run_step(
        tmp_path, "--workload", "one:8,one:16", "--contenders", "sgd:fused", status=130
    )
    assert record["interrupted"] is True
    assert [row["workload"] for row in record["rows"]] == ["one:8", "one:8"]
    assert rows_by_name(record)["adamw:fused"]["time"]["samples"] > 0
    captured = capsys.readouterr()
    assert "AdamW · fused" in captured.out
    assert "interrupted" in captured.err


def test_unknown_names_suggest_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, "step", "--workload", "resnet2")
    assert "Did you mean 'resnet20'?" in message
    assert "many-small" in message
    message = failure(capsys, "step", *TINY, "--contenders", "ngn-mdv1")
    assert "Did you mean 'ngnmdv1'?" in message
    assert "momo-adam" in message
    assert "Did you mean 'float32'?" in failure(capsys, "step", *TINY, "--dtype", "flaot32")
    assert "Did you mean 'transformer++-70m'?" in failure(
        capsys, "train", "--model", "transformer-70m"
    )


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("one:many", "not a size"),
        ("one:0", "between 1 and"),
        ("many:12", "COUNTxSIZE"),
        ("no_such_module:fn", "cannot find the model factory"),
        ("ngn_bench.models:nothing", "cannot find the model factory"),
        ("ngn_bench.models:MODELS", "is a dict"),
        ("math:tau", "is a float"),
        ("collections:OrderedDict", "not a torch.nn.Module"),
        ("ngn_bench.models:build", "failed when called without arguments"),
        ("torch.nn:ReLU", "no trainable parameters"),
    ],
)
def test_bad_workloads(capsys: pytest.CaptureFixture[str], workload: str, message: str) -> None:
    assert message in failure(capsys, "step", "--workload", workload)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("3", "holds no list of shapes"),
        ("[]", "holds no list of shapes"),
        ("[[2, -1]]", "entry 0"),
        ("[[2], [1.5]]", "entry 1"),
        ("[[true]]", "entry 0"),
        ('["a"]', "entry 0"),
        ("[[0]]", "only empty tensors"),
        ("[[1099511627776, 2]]", "over 2^40"),
    ],
)
def test_bad_shapes_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(content)
    assert message in failure(capsys, "step", "--shapes", str(path))


def test_other_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot read the shapes file" in failure(
        capsys, "step", "--shapes", str(tmp_path / "none.json")
    )
    assert "must end in .png" in failure(capsys, "step", *TINY, "--plot", "picture.txt")
    assert "is not a device" in failure(capsys, "step", *TINY, "--device", "gpu7")
    assert "only cpu and cuda" in failure(capsys, "info", "--device", "meta")
    assert "trains on images" in failure(capsys, "train", "--model", "mlp", "--context", "8")
    assert "leave out --model" in failure(capsys, "train", "--preset", "loops", "--model", "mlp")
    short = tmp_path / "short.txt"
    short.write_text("to be")
    assert "5 bytes" in failure(
        capsys, "train", "--model", "small-transformer", "--text", str(short)
    )
    with pytest.raises(SystemExit, match="2"):
        run(["step", "--seconds", "-1"])
    with pytest.raises(SystemExit, match="2"):
        run(["step", "--threads", "two"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Use --device cpu" in failure(capsys, "step", *TINY[:-2], "--device", "cuda")


def test_memory_is_estimated_before_allocating(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "memory_free", lambda device: 2**30)
    monkeypatch.setattr(step, "_allocate", lambda *_: pytest.fail("memory was allocated"))
    message = failure(capsys, "step", "--workload", "gpt2", "--contenders", "ngnmdv1")
    assert "GiB" in message
    assert "Take a smaller workload" in message
    monkeypatch.setattr("ngn_bench.train.memory_free", lambda device: 2**30)
    message = failure(
        capsys, "train", "--model", "transformer++-70m", "--batch", "1", "--context", "64"
    )
    assert "needs about" in message


def test_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "roofline.json", tmp_path / "roofline.png"
    command = ["roofline", "--largest", "32k", "--seconds", "0.2", "--json", str(path)]
    assert run([*command, "--plot", str(picture), "--device", "cpu"]) == 0
    record = json.loads(path.read_text())
    assert [point["bytes"] for point in record["sweep"]] == [32000, 64000, 128000]
    largest = record["sweep"][-1]
    floors = {floor["rule"]: floor for floor in record["floors"]}
    best = max(largest[kernel] for kernel in ("read", "copy", "triad", "update"))
    assert floors["NGN-MDv1"]["reduce"] == pytest.approx(8 / best)
    assert floors["NGN-MDv1"]["apply"] == pytest.approx(28 / best)
    assert floors["NGN-MDv2"] == {**floors["AdamW"], "rule": "NGN-MDv2"}
    assert picture.stat().st_size > 10_000
    assert "Shortest step" in capsys.readouterr().out


def test_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "info.json"
    assert run(["info", "--json", str(path), "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert torch.__version__ in output
    assert "backend     reference on cpu: ok" in output
    assert json.loads(path.read_text())["environment"]["backends"]["reference"] == "ok"


def test_help_names_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ngn-bench", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("ngn_bench", run_name="__main__")
    output = capsys.readouterr().out
    for name in ("step", "train", "roofline", "compare", "info", "toy", "sweep", "ablate"):
        assert re.search(rf"^    {name} ", output, re.MULTILINE), name

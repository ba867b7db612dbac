"""The benchmark command line: every subcommand on tiny workloads, bad input, and its parts."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ngn_bench import check, contenders, measure, models, readme, roofline, step, traffic
from ngn_bench.cli import main
from ngn_bench.contenders import CONTENDERS
from ngn_bench.measure import Lane, Timing

CPU = torch.device("cpu")
CHOSEN = "ngnmdv1:reference,adamw"
TINY = ["--workload", "many:3x5", "--seconds", "0.05", "--device", "cpu"]


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth arrays of the real size would dominate these runs."""
    monkeypatch.setattr(roofline, "large_elements", lambda device: 2**14)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must end with status 2 and one clear message, and return that."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        message = capsys.readouterr().err
        assert message.startswith("ngn-bench: ")
        assert "Traceback" not in message
        return message

    return run


def run_step(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "step.json"
    assert main(["step", *TINY, *arguments, "--json", str(path)]) == status
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def rows_by_name(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in record["rows"]}


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
    assert main([*command, "--device", "cpu"]) == 0
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
    assert main(["step", "--seconds", "0.05", "--device", "cpu"]) == 0
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
    assert main(["step", "--seconds", "0.05", "--device", "cpu"]) == 0
    record = json.loads((tmp_path / "ngn-bench-step.json").read_text())
    assert {row["workload"] for row in record["rows"]} == {"many:2x4"}


def test_cpu_table_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = ("ngnmdv1", "ngnm", "ngnmdv2", "ngn")
    table = (("many:3x5", (*rules, "ngnmdv1:plain", "momo-adam")), ("one:64", rules))
    monkeypatch.setattr("ngn_bench.cli.CPU_TABLE", table)
    assert main(["step", "--preset", "cpu-table", "--seconds", "0.1", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "Time of a whole step(), relative to fused AdamW" in output
    assert re.search(r"one:64: 64 parameters in 1 tensor +\S+ µs +\d", output)
    assert main(["step", "--preset", "cpu-table", "--workload", "one:4"]) == 2


class Broken(torch.optim.SGD):
    """Moves half as far as it should."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p.sub_(0.5 * group["lr"] * p.grad)


def replace_contender(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    monkeypatch.setitem(CONTENDERS, name, dataclasses.replace(CONTENDERS[name], **changes))


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


def test_unknown_names_suggest_the_nearest(fails: Callable[..., str]) -> None:
    message = fails("step", "--workload", "resnet2")
    assert "Did you mean 'resnet20'?" in message
    assert "many-small" in message
    message = fails("step", *TINY, "--contenders", "ngn-mdv1")
    assert "Did you mean 'ngnmdv1'?" in message
    assert "momo-adam" in message
    assert "Did you mean 'float32'?" in fails("step", *TINY, "--dtype", "flaot32")
    assert "Did you mean 'transformer++-70m'?" in fails("train", "--model", "transformer-70m")


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
def test_bad_workloads(fails: Callable[..., str], workload: str, message: str) -> None:
    assert message in fails("step", "--workload", workload)


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
    fails: Callable[..., str], tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(content)
    assert message in fails("step", "--shapes", str(path))


def test_other_bad_input(fails: Callable[..., str], tmp_path: Path) -> None:
    assert "cannot read the shapes file" in fails("step", "--shapes", str(tmp_path / "none.json"))
    assert "must end in .png" in fails("step", *TINY, "--plot", "picture.txt")
    assert "is not a device" in fails("step", *TINY, "--device", "gpu7")
    assert "only cpu and cuda" in fails("info", "--device", "meta")
    assert "trains on images" in fails("train", "--model", "mlp", "--context", "8")
    assert "leave out --model" in fails("train", "--preset", "loops", "--model", "mlp")
    short = tmp_path / "short.txt"
    short.write_text("to be")
    assert "5 bytes" in fails("train", "--model", "small-transformer", "--text", str(short))
    with pytest.raises(SystemExit, match="2"):
        main(["step", "--seconds", "-1"])
    with pytest.raises(SystemExit, match="2"):
        main(["step", "--threads", "two"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(fails: Callable[..., str]) -> None:
    assert "Use --device cpu" in fails("step", *TINY[:-2], "--device", "cuda")


def test_memory_is_estimated_before_allocating(
    fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "memory_free", lambda device: 2**30)
    monkeypatch.setattr(step, "_allocate", lambda *_: pytest.fail("memory was allocated"))
    message = fails("step", "--workload", "gpt2", "--contenders", "ngnmdv1")
    assert "GiB" in message
    assert "Take a smaller workload" in message
    monkeypatch.setattr("ngn_bench.train.memory_free", lambda device: 2**30)
    message = fails("train", "--model", "transformer++-70m", "--batch", "1", "--context", "64")
    assert "needs about" in message


@pytest.mark.parametrize("clip", [None, "1.0"])
def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str], clip: str | None) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    path, picture = tmp_path / "train.json", tmp_path / "train.png"
    command = ["train", "--model", "small-transformer", "--text", str(text), "--batch", "2"]
    command += ["--context", "8", "--optimizers", "ngnmdv1,ngnmdv1:plain", "--seconds", "0.3"]
    command += ["--json", str(path), "--plot", str(picture), "--device", "cpu"]
    assert main(command + ([] if clip is None else ["--clip", clip])) == 0
    record = json.loads(path.read_text())
    assert record["kind"] == "train"
    assert record["rows"][0]["contender"] == "adamw:fused"
    assert len(record["rows"]) == 3
    for row in record["rows"]:
        assert 0 < row["update"] < row["time"]["median"]
        assert row["last_loss"] < row["first_loss"]
        assert row["ratio"] > 0
    assert picture.stat().st_size > 10_000
    output = capsys.readouterr().out
    assert "2 × 8 tokens, bytes of text" in output
    assert "time/update" in output


def test_train_on_images(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    command = ["train", "--model", "mlp", "--batch", "4", "--seconds", "0.1", "--json", str(path)]
    assert main([*command, "--device", "cpu"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["workload"] for row in rows] == ["mlp", "mlp"]
    assert rows[0]["parameters"] == 89610


def test_train_sizes_the_batch_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from ngn_bench import train

    settings = train.TrainSettings(CPU, 1.0)
    monkeypatch.setattr(train, "_matmul_speed", lambda settings: 1e11)
    assert train._fit_machine("transformer++-70m", settings) == (1, 256)
    monkeypatch.setattr(train, "_matmul_speed", lambda settings: 1e14)
    assert train._fit_machine("transformer++-70m", settings) == (180, 2048)


def test_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "roofline.json", tmp_path / "roofline.png"
    command = ["roofline", "--largest", "32k", "--seconds", "0.2", "--json", str(path)]
    assert main([*command, "--plot", str(picture), "--device", "cpu"]) == 0
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
    assert main(["info", "--json", str(path), "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert torch.__version__ in output
    assert "backend     reference on cpu: ok" in output
    assert json.loads(path.read_text())["environment"]["backends"]["reference"] == "ok"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_step(tmp_path_factory.mktemp("measured"), "--contenders", "adamw:for-loop")


@pytest.fixture
def result(measured: dict[str, Any]) -> dict[str, Any]:
    """A result with one workload and exactly known times."""
    record: dict[str, Any] = json.loads(json.dumps(measured))
    for row, median in zip(record["rows"], (1.0, 2.0), strict=True):
        row["time"].update(median=median, low=0.99 * median, high=1.01 * median)
        row["ratio"] = median
    return record


def write(path: Path, record: dict[str, Any]) -> str:
    path.write_text(json.dumps(record))
    return str(path)


def slowed(record: dict[str, Any], factor: float) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(record))
    for name in ("median", "low", "high"):
        changed["rows"][1]["time"][name] *= factor
    changed["rows"][1]["ratio"] *= factor
    return changed


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
    tmp_path: Path,
    result: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    factor: float,
    options: list[str],
    status: int,
    word: str,
    metric: str,
) -> None:
    old = write(tmp_path / "old.json", result)
    new = write(tmp_path / "new.json", slowed(result, factor))
    assert main(["compare", old, new, "--metric", metric, *options]) == status
    assert word in capsys.readouterr().out


def test_compare_widens_the_band_with_the_spread(tmp_path: Path, result: dict[str, Any]) -> None:
    noisy = slowed(result, 1.3)
    noisy["rows"][1]["time"].update(low=1.2, high=3.2)
    old = write(tmp_path / "old.json", result)
    assert main(["compare", old, write(tmp_path / "new.json", noisy)]) == 0


def test_compare_lists_what_does_not_match(
    tmp_path: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    other = json.loads(json.dumps(result))
    del other["rows"][1]
    other["environment"]["cpu"] = "another"
    command = ["compare", write(tmp_path / "a.json", result), write(tmp_path / "b.json", other)]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "only in the old result: many:3x5 · adamw:for-loop" in output
    assert "→ another" in output
    assert "--metric ratio" in output


def test_compare_bad_files(
    tmp_path: Path, result: dict[str, Any], fails: Callable[..., str]
) -> None:
    good = write(tmp_path / "good.json", result)
    assert "cannot read" in fails("compare", good, str(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("hello")
    assert "is not JSON" in fails("compare", good, str(tmp_path / "text.json"))
    assert "not a result" in fails("compare", good, write(tmp_path / "empty.json", {}))
    newer = write(tmp_path / "newer.json", {**result, "schema": 99})
    assert "schema 99" in fails("compare", good, newer)
    kind = write(tmp_path / "kind.json", {**result, "kind": "train"})
    assert "cannot compare" in fails("compare", good, kind)
    apart = write(tmp_path / "apart.json", {**result, "rows": []})
    assert "share no workload" in fails("compare", good, apart)
    damaged = write(tmp_path / "damaged.json", {**result, "rows": [{"workload": "x"}]})
    assert "damaged" in fails("compare", good, damaged)


def test_readme_is_generated_and_checked(
    tmp_path: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text, source = tmp_path / "README.md", write(tmp_path / "reference.json", result)
    text.write_text(f"# Title\n\n{readme.START}\nold\n{readme.END}\n\nafter\n")
    picture = tmp_path / "images" / "step.png"
    command = ["--readme", str(text), "--json", source, "--picture", str(picture)]
    assert readme.main([*command, "--check"]) == 1
    assert "old" in text.read_text()
    assert readme.main(command) == 0
    written = text.read_text()
    assert written.startswith("# Title\n")
    assert written.endswith("\n\nafter\n")
    assert "| AdamW · for-loop | 2.00 s | 2.00× |" in written
    assert "| **AdamW · fused** | **1.00 s** | **1.00×** |" in written
    assert "![Time of one optimizer step against fused AdamW](images/step.png)" in written
    assert readme.main([*command, "--check"]) == 0
    assert readme.main(command) == 0
    assert text.read_text() == written

    text.write_text(written.replace("2.00×", "1.90×"))
    assert readme.main([*command, "--check"]) == 1
    text.write_text(written)
    write(tmp_path / "reference.json", slowed(result, 1.0001))
    assert readme.main([*command, "--check"]) == 1
    assert "step.png does not match" in capsys.readouterr().out
    text.write_text("no markers")
    assert readme.main(command) == 2


def test_help_names_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ngn-bench", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("ngn_bench", run_name="__main__")
    output = capsys.readouterr().out
    for name in ("step", "train", "roofline", "compare", "info", "toy", "sweep", "ablate"):
        assert re.search(rf"^    {name} ", output, re.MULTILINE), name


class CountingClock:
    """A clock without time: each run takes what its lane says."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.visits: list[str] = []

    def time(self, run: Callable[[], object]) -> Timing:
        name = str(run())
        self.visits.append(name)
        return Timing(self.seconds[name], self.seconds[name] / 2)

    def flush(self) -> None:
        pass

    def mark(self) -> float:
        return 0.0

    def elapsed(self, start: float, end: float) -> float:
        return end - start


def test_lanes_take_turns_and_are_summarised() -> None:
    clock = CountingClock({"a": 0.03, "b": 0.06})
    lanes = [Lane("a", lambda: "a"), Lane("b", lambda: "b")]
    assert measure.measure(lanes, clock, 0.9)
    a, b = (measure.summarise(lane) for lane in lanes)
    assert a is not None
    assert b is not None
    assert (a.median, a.busy, a.spread) == pytest.approx((0.03, 0.015, 0.0))
    assert len(a.rounds) == len(b.rounds) == 10
    assert measure.paired_ratio(b, a) == pytest.approx(2.0)
    turns = "".join(clock.visits).replace("aa", "a").replace("aa", "a")
    assert re.search("ab+a+b", turns)


def test_a_slow_lane_leaves_the_others_their_rounds() -> None:
    clock = CountingClock({"a": 0.03, "b": 0.04, "c": 0.5})
    lanes = [Lane(name, lambda name=name: name) for name in "abc"]  # type: ignore[misc]
    assert measure.measure(lanes, clock, 1.75)
    assert [len(lane.rounds) for lane in lanes] == [10, 10, 2]


def test_a_failing_lane_is_left_out() -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    lanes = [Lane("a", fail), Lane("b", lambda: "b")]
    assert measure.measure(lanes, CountingClock({"b": 0.01}), 0.1)
    assert lanes[0].failure == "RuntimeError: broken"
    assert measure.summarise(lanes[0]) is None
    assert measure.summarise(lanes[1]) is not None


def test_peak_extra_memory_counts_temporaries() -> None:
    a = torch.ones(1000)
    assert 8000 <= measure.peak_extra_bytes(lambda: (a + 1) * 2, CPU) < 8100
    assert measure.peak_extra_bytes(lambda: a.add_(1), CPU) < 100


def test_traffic_floors_are_the_documented_words() -> None:
    words = {
        "NGN": 4,
        "NGN-M": 6,
        "NGN-D": 3,
        "NGN-D (RMS)": 5,
        "NGN-MDv1": 9,
        "NGN-MDv2": 7,
        "Dec-NGN-MDv1": 9,
        "NGN-MDv1W": 10,
        "AdamW": 7,
    }
    for rule, number in words.items():
        assert traffic.PASSES[rule].floor_bytes(torch.float32) == 4 * number


def test_traffic_of_operators() -> None:
    a, b = torch.ones(100), torch.ones(100)
    assert traffic.count_bytes(lambda: a + b) == 1200
    assert traffic.count_bytes(lambda: a.add_(b)) == 1200
    assert traffic.count_bytes(lambda: a.copy_(b)) == 800
    assert traffic.count_bytes(lambda: a.view(10, 10).sum()) == 400
    assert traffic.count_bytes(lambda: torch._foreach_mul_([a, b], 2.0)) == 1600


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name.endswith(":reference")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_accepts_and_rejects(name: str, dtype: torch.dtype) -> None:
    contender = CONTENDERS[name]
    assert check.check(contender, dtype, CPU).ok
    slower = dataclasses.replace(
        contender, build=lambda params, lr: contender.build(params, lr=0.9 * lr)
    )
    assert check.check(slower, dtype, CPU).ok is False


def test_fastest_backend_follows_the_status() -> None:
    assert contenders.fastest_backend({"triton": "ok", "cpu": "ok"}) == "triton"
    assert contenders.fastest_backend({"triton": "no GPU", "cpu": "ok"}) == "cpu"
    assert contenders.fastest_backend({"triton": "no", "cpu": "no"}) == "reference"


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("mlp", 6, 89_610),
        ("resnet20", 59, 269_722),
        ("resnet18", 62, 11_689_512),
        ("vgg16", 32, 15_245_130),
        ("vit-tiny", 152, 5_717_416),
        ("gpt2", 148, 124_439_808),
        ("transformer++-70m", 39, 70_760_960),
    ],
)
def test_models_have_their_published_sizes(name: str, tensors: int, parameters: int) -> None:
    shapes = models.parameter_shapes(name)
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_transformer_plus_hidden_sizes() -> None:
    for size, hidden in {"70m": 1408, "160m": 2048, "410m": 2816, "1b": 5504}.items():
        shapes = models.parameter_shapes(f"transformer++-{size}")
        assert shapes["blocks.0.down.weight"][1] == hidden
        assert shapes["blocks.0.gate_up.weight"][0] == 2 * hidden
        assert shapes["embed.weight"] == shapes["head.weight"]
        assert not any(key.endswith("bias") for key in shapes)


IMAGE = (2, 3, 32, 32)
SMALL_MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "mlp": ({"inputs": 12, "hidden": [5, 4]}, (2, 3, 4), (2, 10)),
    "resnet20": ({"width": 4}, IMAGE, (2, 10)),
    "resnet110": ({"width": 2}, IMAGE, (2, 100)),
    "resnet18": ({"width": 4, "classes": 7}, (2, 3, 64, 64), (2, 7)),
    "resnet18-32": ({"width": 4, "classes": 7}, IMAGE, (2, 7)),
    "vgg16": ({"width": 4, "batch_norm": True}, IMAGE, (2, 10)),
    "vit-cifar": ({"dim": 16, "depth": 2, "mlp_dim": 8}, IMAGE, (2, 10)),
    "vit-tiny": ({"dim": 64, "depth": 1, "image": 32, "classes": 5}, IMAGE, (2, 5)),
    "char-transformer": ({"layers": 2, "vocab": 11}, (2, 6), (2, 6, 11)),
    "word-lstm": ({"vocab": 11, "embed": 6, "hidden": 8}, (2, 6), (2, 6, 11)),
    "gpt2": ({"layers": 1, "dim": 24, "vocab": 11}, (2, 6), (2, 6, 11)),
    "transformer++-70m": ({"layers": 1, "dim": 32, "vocab": 11}, (2, 6), (2, 6, 11)),
}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_models_run_forwards_and_backwards(name: str) -> None:
    sizes, input_shape, output_shape = SMALL_MODELS[name]
    model = models.build(name, **sizes)
    is_text = len(input_shape) == 2
    inputs = torch.randint(11, input_shape) if is_text else torch.randn(input_shape)
    output = model(inputs)
    logits = output[0] if isinstance(output, tuple) else output
    assert tuple(logits.shape) == output_shape
    logits.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_modules_have_the_names_the_lab_observes() -> None:
    resnet = dict(models.build("resnet20").named_parameters())
    assert {f"layer{stage}.0.conv1.weight" for stage in (1, 2, 3)} <= set(resnet)
    vit = models.parameter_shapes("vit-cifar")
    assert {f"blocks.{block}.attn.qkv.weight" for block in (0, 3, 5)} <= set(vit)


@pytest.mark.parametrize("name", ["char-transformer", "gpt2", "transformer++-70m"])
def test_language_models_do_not_see_the_future(name: str) -> None:
    model = models.build(name, layers=2, dim=32, heads=2, vocab=11, context=8).eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    with pytest.raises(ValueError, match="do not fit the model's context of 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_rotary_attention_depends_on_distance_only() -> None:
    from ngn_bench.models.text import rotate

    angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
    cos, sin = angles.cos(), angles.sin()
    q = rotate(torch.ones(8, 4), cos, sin)
    k = rotate(torch.full((8, 4), 0.5), cos, sin)
    scores = q @ k.T
    torch.testing.assert_close(scores[5, 3], scores[7, 5])
    assert not torch.isclose(scores[5, 3], scores[5, 4])


def test_bad_model_sizes() -> None:
    with pytest.raises(ValueError, match="6n"):
        models.cifar_resnet(depth=21)
    with pytest.raises(ValueError, match="heads"):
        models.gpt2(dim=10, heads=3)
    with pytest.raises(ValueError, match="unknown Transformer"):
        models.transformer_plus("7b")
    with pytest.raises(ValueError, match="unknown model"):
        models.build("resnet")

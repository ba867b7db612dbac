"""`ngn-bench step`, `roofline` and `info` on tiny workloads, and bad input."""

from __future__ import annotations

import functools
import itertools
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import ROOFLINE, TINY, Bench, overflowing_after, raising_after, rows_by_name, run
from ngn_bench import environment
from ngn_bench.contenders import registry
from ngn_bench.contenders.registry import CONTENDERS
from ngn_bench.errors import BenchError
from ngn_bench.pages import readme
from ngn_bench.timing import measure, roofline, step, workloads

import ngn_kernels

CHOSEN = "ngnmdv1:reference,adamw"


def test_step_measures_and_records(bench: Bench) -> None:
    picture = bench.folder / "step.png"
    record = bench.step("--contenders", CHOSEN, "--plot", str(picture))
    assert record["schema"] == 1
    assert record["kind"] == "step"
    assert record["interrupted"] is False
    assert record["command"] == ["ngn-bench", "step", *TINY, "--contenders", CHOSEN]
    environment = record["environment"]
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert set(environment["backends"]) == {"cpu", "cuda", "triton", "reference"}
    rows = rows_by_name(record)
    memory = record["memory_bandwidth"]
    assert set(memory) == {"copy", "update"}
    assert set(rows) == {"ngnmdv1:reference", "adamw:fused", "adamw:foreach", "adamw:for-loop"}
    for row in rows.values():
        assert row["verdict"]["ok"] is True
        time = row["time"]
        assert 0 < time["fastest"] <= time["low"] <= time["median"] <= time["high"]
        assert time["samples"] >= measure.SLOW_VISITS
        assert row["ratio"] == pytest.approx(time["median"] / rows["adamw:fused"]["time"]["median"])
        assert row["bandwidth"] == pytest.approx(row["bytes_floor"] * 15 / time["median"])
        assert row["share"] == pytest.approx(row["bandwidth"] / max(memory.values()))
    assert rows["adamw:fused"]["state_bytes"] >= 2 * 4 * 15
    assert rows["adamw:foreach"]["extra_bytes"] >= 4 * 15
    assert rows["adamw:foreach"]["bytes_code"] > rows["adamw:fused"]["bytes_code"] == 28
    assert readme.picture_source(picture) is not None
    output = bench.output()
    assert "many:3x5: 15 parameters in 3 tensors, float32 on cpu" in output
    assert "NGN-MDv1 · reference" in output


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_step_in_other_dtypes(bench: Bench, dtype: str) -> None:
    record = bench.step("--contenders", "ngnm:reference", "--dtype", dtype)
    row = rows_by_name(record)["ngnm:reference"]
    assert row["dtype"] == dtype
    assert row["verdict"]["ok"] is True
    state = 8 if dtype == "float64" else 4
    param = {"float64": 8}.get(dtype, 2)
    assert row["bytes_floor"] == 4 * param + 2 * state
    assert rows_by_name(record)["adamw:fused"]["bytes_floor"] == 7 * param


def test_half_precision_is_timed_on_finite_parameters(bench: Bench) -> None:
    names = "ngnmdv1,ngnmdv2,ngnmdv1:plain,adamw,momo-all"
    rows = bench.step("--contenders", names, "--dtype", "float16")["rows"]
    assert len(rows) == 8
    assert [row["label"] for row in rows if row["time"] is None or row["note"]] == []


def test_non_finite_parameters_leave_the_other_contenders(bench: Bench) -> None:
    bench.replace("adamw:foreach", build=overflowing_after(1), build_trusted=None)
    rows = bench.rows("--contenders", "adamw:foreach,adamw:for-loop")
    assert rows["adamw:foreach"]["time"] is None
    assert "leaves non-finite parameters in float32" in rows["adamw:foreach"]["note"]
    assert rows["adamw:for-loop"]["time"] is not None


def test_no_time_is_shown_once_parameters_are_non_finite(bench: Bench) -> None:
    bench.replace("adamw:foreach", build=overflowing_after(9), build_trusted=None)
    for row in bench.step("--contenders", "adamw:foreach")["rows"]:
        assert row["time"] is None
        assert row["note"] == "not shown: parameters became non-finite while steps were timed"


def test_skipped_steps_are_no_time(bench: Bench) -> None:
    class Skipping(torch.optim.SGD):
        skipped_steps = torch.tensor(3)

    bench.replace("sgd:fused", build=Skipping, build_trusted=None)
    rows = bench.rows("--contenders", "sgd:fused")
    assert rows["sgd:fused"]["time"] is None
    assert rows["sgd:fused"]["note"] == "not shown: 3 of its steps were skipped"
    assert rows["adamw:fused"]["time"] is not None


def step_on_shapes(bench: Bench, shapes: str, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a run on a file of shapes."""
    path = bench.folder / "resnet20.json"
    path.write_text(shapes)
    command = ["step", "--shapes", str(path), "--seconds", "0.05", "--device", "cpu"]
    record = bench.record(*command, "--contenders", "adamw:fused", *arguments)
    rows: list[dict[str, Any]] = record["rows"]
    return rows


def test_gradients_move_between_steps(bench: Bench) -> None:
    seen = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            params = self.param_groups[0]["params"]
            if len(params) == 4:
                seen.append([p.grad.data_ptr() for p in params])
            return super().step(closure)

    bench.replace("sgd:fused", build=Watching, build_trusted=None)
    step_on_shapes(bench, "[[3], [5], [3], [3]]", "--contenders", "sgd:fused")
    assert len({tuple(sorted(pointers)) for pointers in seen}) == 1
    pairs = [list(zip(*steps, strict=True)) for steps in itertools.pairwise(seen)]
    moved = [[before != after for before, after in pair] for pair in pairs]
    # Between two visits of a lane, the others may have rotated the gradients back.
    assert moved.count([True, False, True, True]) > len(moved) / 2


def test_step_with_cold_caches(bench: Bench) -> None:
    flushes = []
    bench.patch.setattr(step, "_flush_bytes", lambda: 4096)
    bench.patch.setattr(measure.CpuClock, "flush", lambda self: flushes.append(1))
    record = bench.step("--contenders", "adamw:fused", "--cold")
    assert len(flushes) >= rows_by_name(record)["adamw:fused"]["time"]["samples"]


def test_step_on_shapes_and_on_a_model_factory(bench: Bench) -> None:
    shapes = '{"weight": [4, 3], "bias": [4], "scale": []}'
    rows = step_on_shapes(bench, shapes, "--workload", "ngn_bench.models:MLP")
    assert [(row["workload"], row["tensors"], row["parameters"]) for row in rows] == [
        ("ngn_bench.models:MLP", 6, 89610),
        ("shapes:resnet20", 3, 17),
    ]


def test_rows_of_a_file_and_of_a_model_stay_apart(bench: Bench) -> None:
    rows = step_on_shapes(bench, "[[3]]", "--workload", "resnet20,resnet20")
    assert [row["workload"] for row in rows] == ["resnet20", "shapes:resnet20"]


def test_a_factory_in_the_current_directory_that_needs_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_of_mine.py").write_text(
        "import torch\n"
        "def build():\n"
        "    layer = torch.nn.Linear(3, 2)\n"
        "    assert layer.weight.detach().sum().item() < 100.0\n"
        "    return layer\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    workload = workloads.find_workload("model_of_mine:build")
    assert workload.shapes == ((2, 3), (2,))


@pytest.mark.parametrize("options", [["--contenders", "ngnm"], ["--preset", "cpu-table"], []])
def test_compiled_adds_the_compiled_form(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    planned = []

    def stop(plan: list[Any], *_: Any) -> None:
        planned.extend(plan)
        raise BenchError("enough")

    monkeypatch.setattr(step, "run_step", stop)
    for compiled in ([], ["--compiled"]):
        planned.clear()
        assert run(["step", *options, *compiled, "--device", "cpu"]) == 2
        for _, chosen in planned:
            assert any(contender.compiled for contender in chosen) is bool(compiled)


def test_each_workload_is_compiled_anew(bench: Bench) -> None:
    resets = []
    bench.patch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    bench.patch.setattr(torch, "compile", lambda step: step)
    bench.step("--workload", "one:8,one:16", "--contenders", "adamw:compiled")
    assert len(resets) == 2


def test_default_contenders_are_all_measured_or_explained(bench: Bench) -> None:
    record = bench.step()
    named = {row["label"] for row in record["rows"]} | set(record["not_run"]["many:3x5"])
    expected = {c.label for c in CONTENDERS.values() if not c.compiled and not c.rival}
    assert named == expected
    output = bench.output()
    for reason in record["not_run"]["many:3x5"].values():
        assert reason
        assert reason in output
    for row in record["rows"]:
        assert row["time"] is not None or row["note"]


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make these the only contenders there are."""
    monkeypatch.setattr(registry, "CONTENDERS", {name: CONTENDERS[name] for name in names})


def test_step_without_options_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "ngn:reference", "adamw:fused")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ngn_bench.commands.step.DEFAULT_WORKLOADS", ("many:2x4",))
    assert run(["step", "--seconds", "0.05", "--device", "cpu"]) == 0
    assert json.loads((tmp_path / "ngn-bench-step.json").read_text())["rows"]
    assert (tmp_path / "ngn-bench-step.png").stat().st_size > 10_000


def test_small_machine_takes_the_smaller_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "adamw:fused")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step, "memory_free", lambda device: 2**27)
    monkeypatch.setattr("ngn_bench.commands.step.DEFAULT_WORKLOADS", ("one:64M",))
    monkeypatch.setattr("ngn_bench.commands.step.SMALL_MACHINE_WORKLOADS", ("many:2x4",))
    assert run(["step", "--seconds", "0.05", "--device", "cpu"]) == 0
    record = json.loads((tmp_path / "ngn-bench-step.json").read_text())
    assert {row["workload"] for row in record["rows"]} == {"many:2x4"}


def test_cpu_table_preset(bench: Bench) -> None:
    rules = ("ngnmdv1", "ngnm", "ngnmdv2", "ngn")
    table = (("many:3x5", (*rules, "ngnmdv1:plain", "momo-adam")), ("one:8K", rules))
    bench.patch.setattr("ngn_bench.commands.step.CPU_TABLE", table)
    assert run(["step", "--preset", "cpu-table", "--seconds", "0.1", "--device", "cpu"]) == 0
    output = bench.output()
    assert "Time of a step, relative to fused AdamW" in output
    assert re.search(r"optimizer +state +many:3x5 +one:8K\n", output)
    assert re.search(r"AdamW · fused +8\.00 +\S+ [mµ]s +\S+ [mµ]s\n", output)
    assert re.search(r"NGN-M · \S+ +4\.00 +\d+\.\d\d +\d+\.\d\d\n", output)
    assert re.search(r"Momo-Adam · momo-opt +\d+\.\d\d +\d+\.\d\d\n", output)
    assert run(["step", "--preset", "cpu-table", "--workload", "one:4"]) == 2


class Broken(torch.optim.SGD):
    """Moves half as far as it should."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p.sub_(0.5 * group["lr"] * p.grad)


def test_a_wrong_answer_is_not_timed(bench: Bench) -> None:
    bench.replace("sgd:fused", build=Broken)
    record = bench.step("--contenders", "sgd:fused", status=1)
    row = rows_by_name(record)["sgd:fused"]
    assert row["time"] is None
    assert row["ratio"] is None
    assert "not timed: differs from for-loop in float64" in row["note"]
    captured = bench.captured()
    assert row["note"] in captured.out
    assert captured.err == "ngn-bench: wrong answers from SGD momentum · fused\n"


def test_a_contender_that_cannot_run_is_listed(bench: Bench) -> None:
    bench.patch.setitem(sys.modules, "momo", None)
    record = bench.step("--contenders", "momo-all")
    reason = "momo-opt is not installed: pip install momo-opt"
    assert record["not_run"]["many:3x5"] == {
        "Momo · momo-opt": reason,
        "Momo-Adam · momo-opt": reason,
    }
    assert f"not run: Momo · momo-opt, Momo-Adam · momo-opt: {reason}" in bench.output()


def test_a_contender_that_fails_while_measured_leaves_the_others(bench: Bench) -> None:
    failing = functools.partial(raising_after(8, RuntimeError("out of luck")), momentum=0.9)
    bench.replace("sgd:fused", build=failing)
    rows = bench.rows("--contenders", "sgd:fused")
    assert "out of luck" in rows["sgd:fused"]["note"]
    assert rows["adamw:fused"]["time"] is not None


def test_an_interrupted_run_keeps_what_was_measured(bench: Bench) -> None:
    interrupting = functools.partial(raising_after(40, KeyboardInterrupt()), momentum=0.9)
    bench.replace("sgd:fused", build=interrupting)
    record = bench.step("--workload", "one:8,one:16", "--contenders", "sgd:fused", status=130)
    assert record["interrupted"] is True
    assert [row["workload"] for row in record["rows"]] == ["one:8", "one:8"]
    assert rows_by_name(record)["adamw:fused"]["time"]["samples"] > 0
    captured = bench.captured()
    assert "AdamW · fused" in captured.out
    assert "interrupted" in captured.err


def test_unknown_names_suggest_the_nearest(bench: Bench) -> None:
    message = bench.failure("step", "--workload", "resnet2")
    assert "Did you mean 'resnet20'?" in message
    assert "many-small" in message
    message = bench.failure("step", *TINY, "--contenders", "ngn-mdv1")
    assert "Did you mean 'ngnmdv1'?" in message
    assert "momo-adam" in message
    assert "Did you mean 'float32'?" in bench.failure("step", *TINY, "--dtype", "flaot32")
    assert "Did you mean 'transformer++-70m'?" in bench.failure(
        "train", "--model", "transformer-70m"
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
        ("many:1000Bx1", "over 1,000,000 tensors"),
        ("one:" + "9" * 400, "between 1 and"),
        ("one:" + "x" * 400, "not a size"),
        ("unfinished:fn", "cannot import 'unfinished': SyntaxError"),
        ("raising:fn", "cannot import 'raising': RuntimeError: on import"),
        ("leaving:fn", "cannot import 'leaving': SystemExit"),
    ],
)
def test_bad_workloads(bench: Bench, workload: str, message: str) -> None:
    (bench.folder / "unfinished.py").write_text("def fn(:")
    (bench.folder / "raising.py").write_text("raise RuntimeError('on import')")
    (bench.folder / "leaving.py").write_text("import sys; sys.exit()")
    bench.patch.syspath_prepend(str(bench.folder))
    shown = bench.failure("step", "--workload", workload)
    assert message in shown
    assert max(map(len, shown.splitlines())) < 300


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("3", "has no list of shapes"),
        ("[]", "has no list of shapes"),
        ("[[2, -1]]", "entry 0"),
        ("[[2], [1.5]]", "entry 1"),
        ("[[true]]", "entry 0"),
        ('["a"]', "entry 0"),
        ("[[0]]", "only empty tensors"),
        ("[[1099511627776, 2]]", "over 2^40"),
        (f"[[{'9' * 5000}]]", "is not JSON"),
        (f"[[{'9' * 4000}]]", "over 2^40"),
        (f"{'[' * 100_000}{']' * 100_000}", "is not JSON"),
        (f"{'[' * 500}{']' * 500}", "entry 0"),
    ],
    ids=lambda value: value[:20],
)
def test_bad_shapes_files(bench: Bench, content: str, message: str) -> None:
    path = bench.folder / "shapes.json"
    path.write_text(content)
    assert message in bench.failure("step", "--shapes", str(path))


def test_other_bad_input(bench: Bench) -> None:
    assert "cannot read the shapes file" in bench.failure(
        "step", "--shapes", str(bench.folder / "none.json")
    )
    assert "must end in .png" in bench.failure("step", *TINY, "--plot", "picture.txt")
    assert "is not a device" in bench.failure("step", *TINY, "--device", "gpu7")
    assert "only cpu and cuda" in bench.failure("info", "--device", "meta")
    assert "trains on images" in bench.failure("train", "--model", "mlp", "--context", "8")
    assert "leave out --model" in bench.failure("train", "--preset", "loops", "--model", "mlp")
    assert "leave out the @" in bench.failure(
        "train", "--model", "mlp", "--optimizers", "ngnmdv1@bfloat16"
    )
    short = bench.folder / "short.txt"
    short.write_text("to be")
    assert "5 bytes" in bench.failure("train", "--model", "small-transformer", "--text", str(short))
    with pytest.raises(SystemExit, match="2"):
        run(["info", "--threads", "99999999999"])
    with pytest.raises(SystemExit, match="2"):
        run(["step", "--seconds", "-1"])
    with pytest.raises(SystemExit, match="2"):
        run(["step", "--threads", "two"])


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("command", [["step", *TINY], ["roofline"], ["train", "--model", "mlp"]])
def test_outputs_are_tried_before_measuring(bench: Bench, command: list[str], option: str) -> None:
    bench.patch.setattr(measure, "measure", lambda *_: pytest.fail("something was measured"))
    bench.patch.setattr("ngn_bench.environment.describe", lambda *_: pytest.fail("too late"))
    folder = bench.folder / "folder.png"
    folder.mkdir()
    assert "it is a directory" in bench.failure(*command, option, str(folder))
    (bench.folder / "file").write_text("")
    below = str(bench.folder / "file" / "result.png")
    assert f"cannot write {below}" in bench.failure(*command, option, below)
    bench.patch.setitem(sys.modules, "matplotlib", None)
    bench.patch.setitem(sys.modules, "matplotlib.figure", None)
    good = str(bench.folder / "result.png")
    assert "a picture needs matplotlib" in bench.failure(*command, "--plot", good)
    assert not (bench.folder / "result.png.part").exists()


def test_the_chosen_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(environment, "select_device", torch.device)
    monkeypatch.setattr(environment, "describe", lambda device: pytest.fail("not reached"))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cuda:1", "cuda", "cpu:0"):
        assert run(["info", "--device", device, "--json", "."]) == 2
    assert chosen == [torch.device("cuda:1")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(bench: Bench) -> None:
    assert "Use --device cpu" in bench.failure("step", *TINY[:-2], "--device", "cuda")


def test_memory_is_estimated_before_allocating(bench: Bench) -> None:
    bench.patch.setattr(step, "memory_free", lambda device: 2**30)
    bench.patch.setattr(step, "_allocate", lambda *_: pytest.fail("memory was allocated"))
    message = bench.failure("step", "--workload", "gpt2", "--contenders", "ngnmdv1")
    assert "GiB" in message
    assert "Take a smaller workload" in message
    bench.patch.setattr("ngn_bench.timing.train.memory_free", lambda device: 2**30)
    message = bench.failure(
        "train", "--model", "transformer++-70m", "--batch", "1", "--context", "64"
    )
    assert "needs about" in message


def test_roofline(bench: Bench) -> None:
    picture = bench.folder / "roofline.png"
    record = bench.record(*ROOFLINE, "--plot", str(picture))
    assert [point["bytes"] for point in record["sweep"]] == [32000, 64000, 128000]
    largest = record["sweep"][-1]
    floors = {floor["rule"]: floor for floor in record["floors"]}
    best = max(largest["copy"], largest["update"])
    assert floors["NGN-MDv1"]["reduce"] == pytest.approx(8 / best)
    assert floors["NGN-MDv1"]["apply"] == pytest.approx(28 / best)
    assert floors["NGN-MDv2"] == {**floors["AdamW"], "rule": "NGN-MDv2"}
    assert picture.stat().st_size > 10_000
    assert "Shortest step" in bench.output()


def test_an_interrupted_roofline_keeps_what_was_measured(bench: Bench) -> None:
    lanes = roofline.bandwidth_lanes

    def interrupt(elements: int, *rest: Any) -> Any:
        if elements < 16_000:
            raise KeyboardInterrupt
        return lanes(elements, *rest)

    bench.patch.setattr(roofline, "bandwidth_lanes", interrupt)
    record = bench.record(*ROOFLINE, status=130)
    assert [point["bytes"] for point in record["sweep"]] == [64000, 128000]
    assert record["floors"]


def test_info(bench: Bench) -> None:
    record = bench.record("info", "--device", "cpu")
    output = bench.output()
    assert torch.__version__ in output
    assert "backend     reference on cpu: ok" in output
    assert record["environment"]["backends"]["reference"] == "ok"


def test_help_names_every_command(bench: Bench) -> None:
    bench.patch.setattr(sys, "argv", ["ngn-bench", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("ngn_bench", run_name="__main__")
    output = bench.output()
    for name in ("step", "train", "roofline", "compare", "info", "toy", "sweep", "ablate"):
        assert re.search(rf"^    {name} ", output, re.MULTILINE), name


def test_version(bench: Bench) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(["--version"])
    assert bench.output() == f"ngn_kernels {ngn_kernels.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["step", "--work", "one:8"],
        ["train", "--mod", "mlp"],
        ["roofline", "--sec", "1"],
        ["ranks", "--rank", "1"],
        ["compare", "--thr", "1", "a.json", "b.json"],
        ["info", "--dev", "cpu"],
        ["toy", "--data", "."],
        ["sweep", "--opt", "sgdm"],
        ["ablate", "--seed", "1", "--betas"],
        ["summary", "--rec", "."],
    ],
    ids=lambda words: words[0],
)
def test_options_are_not_shortened(bench: Bench, words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(words)
    assert f"unrecognized arguments: {words[1]}" in bench.captured().err


def test_without_matplotlib_there_is_a_table_and_no_picture(bench: Bench) -> None:
    only(bench.patch, "adamw:fused")
    bench.patch.chdir(bench.folder)
    bench.patch.setitem(sys.modules, "matplotlib", None)
    bench.patch.setitem(sys.modules, "matplotlib.figure", None)
    bench.patch.setattr("ngn_bench.commands.step.DEFAULT_WORKLOADS", ("many:2x4",))
    assert run(["step", "--seconds", "0.05", "--device", "cpu"]) == 0
    assert "wrote ngn-bench-step.json\n" in bench.output()
    assert not (bench.folder / "ngn-bench-step.png").exists()
    message = bench.failure("step", *TINY, "--plot", "picture.png")
    assert "pip install 'ngn_kernels[bench]'" in message

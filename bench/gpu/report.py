"""`make gpu-report`: what the GPU engines do on this machine, in a file and a page to attach to an issue.

It runs the tests for a GPU, times every engine beside torch's fused AdamW and the rivals that are
installed, and compares with what the memory allows. Without a GPU it says what it would have done.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch

from ngn_kernels import doctor

from .. import environment
from ..contenders.registry import CONTENDERS, missing_package
from ..pages.plots import has_matplotlib
from ..report import duration, read_json, record, write_json

TESTS = Path(__file__).resolve().parents[2] / "tests" / "test_gpu.py"
WORKLOADS = ("transformer++-70m", "one:16M", "one:1M", "many-small")
FORMS = ("ngnmdv1:{}", "ngnmdv2:{}", "ngnm:{}", "ngnmdv1:{}/bfloat16", "ngnmdv1:{}/8bit")
TENSORS = (1, 100, 10_000)
# Bytes per second at the vendors' peak, as in docs/gpu.md, where a device does not say its own.
PEAKS = {"AMD Instinct MI300X": 5.3e12}
PARTS = (
    "python -m ngn_kernels: the machine, and which engines run here",
    "tests/test_gpu.py: results, no waiting, CUDA graphs, several devices",
    "the first step of a process, and the host's time of later ones, of each engine",
    f"ngn-bench step on {', '.join(WORKLOADS)}: each engine, torch's fused AdamW, rivals",
    "all of it in one JSON file, and on one Markdown page with a picture",
)


def engines(device: torch.device) -> list[str]:
    """The fused backends that run here."""
    status = environment.backend_status(device)
    return [name for name, found in status.items() if found == "ok" and name != "reference"]


def contenders(names: list[str]) -> list[str]:
    rivals = [c.name for c in CONTENDERS.values() if c.rival and not missing_package(c.package)]
    return ["adamw:fused", *(form.format(name) for name in names for form in FORMS), *rivals]


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **more}, errors="replace"
    )


def run_tests(tests: Path, folder: Path) -> dict[str, Any]:
    """Numbers of tests by their outcome, and the first line of each failure."""
    if not tests.exists():
        return {"ran": False, "why": f"{tests} is not installed; run this in a clone"}
    results = folder / "tests.xml"
    done = run([sys.executable, "-m", "pytest", "-q", f"--junitxml={results}", str(tests)])
    if not results.exists():
        return {"ran": False, "why": (done.stdout + done.stderr)[-2000:]}
    (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
    failed = {
        f"{case.get('classname')}::{case.get('name')}": (found.get("message") or "")[:300]
        for case in suite.iter("testcase")
        for kind in ("failure", "error")
        if (found := case.find(kind)) is not None
    }
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return {"ran": True, **counts, "failed": failed}


def first_steps(names: list[str], device: str, tensors: tuple[int, ...]) -> list[dict[str, Any]]:
    """Each in a process of its own, where nothing was compiled before."""
    rows = []
    for name in names:
        for count in tensors:
            with tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, "-m", "ngn_bench.gpu.first_step", "--backend", name]
                command += ["--device", device, "--tensors", str(count)]
                done = run(command, TRITON_CACHE_DIR=cache)
            row: dict[str, Any] = {"engine": name, "tensors": count}
            if done.returncode:
                row["error"] = (done.stderr.strip().splitlines() or ["no message"])[-1]
            else:
                row |= json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
    return rows


def time_steps(
    names: list[str],
    device: str,
    workloads: tuple[str, ...],
    seconds: float,
    folder: Path,
    picture: Path,
) -> dict[str, Any]:
    """The record of `ngn-bench step`, or why there is none; its picture beside the report."""
    target = folder / "step.json"
    command = [sys.executable, "-m", "ngn_bench", "step", "--device", device]
    command += ["--workload", ",".join(workloads), "--contenders", ",".join(contenders(names))]
    command += ["--seconds", str(seconds), "--json", str(target)]
    done = run(command + (["--plot", str(picture)] if has_matplotlib() else []))
    if not target.exists():
        return {"why": (done.stdout + done.stderr)[-2000:]}
    return {"record": read_json(target, "step"), "status": done.returncode}


def peak_of(device: torch.device) -> float | None:
    """The bandwidth of a GPU's memory: two transfers a clock on NVIDIA's; None where it is not known."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    if torch.version.hip is None and kilohertz and bits:
        return 2 * kilohertz * 1e3 * bits / 8
    return PEAKS.get(properties.name)


def page(data: dict[str, Any], picture: Path) -> str:
    """The report in words and tables."""
    tests, steps = data["tests"], data["steps"]
    lines = ["# ngn_kernels on this GPU", "", "```", data["doctor"], "```", "", "## Tests", ""]
    if tests["ran"]:
        bad = tests["failures"] + tests["errors"]
        passed = tests["tests"] - bad - tests["skipped"]
        lines.append(f"{passed} passed, {bad} failed, {tests['skipped']} skipped.")
        lines += [f"- `{name}`: {message}" for name, message in tests["failed"].items()]
    else:
        lines.append(f"Not run: {tests['why']}")
    lines += ["", "## First step, and the host's time of later ones", ""]
    lines += ["| engine | tensors | first step | later: host |", "| :-- | --: | --: | --: |"]
    for row in data["first_steps"]:
        if "error" in row:
            times = f"{row['error']} | "
        else:
            times = f"{duration(row['first'])} | {duration(row['later'])}"
        lines.append(f"| {row['engine']} | {row['tensors']:,} | {times} |")
    lines += ["", "## Steps", ""]
    if "record" not in steps:
        return "\n".join([*lines, f"Not run: {steps['why']}", ""])
    peak = data["peak"]
    heads = ["workload", "contender", "time", "vs AdamW", "of the measured bandwidth"]
    heads += ["projected at the vendor's peak"] * (peak is not None)
    lines += [f"| {' | '.join(heads)} |", f"| :-- | :-- |{' --: |' * (len(heads) - 2)}"]
    for row in steps["record"]["rows"]:
        time = row.get("time")
        if not time:
            lines.append(
                f"| {row['workload']} | {row['label']} | {row['verdict']['text']} {row['note']} |"
            )
            continue
        measured = time["device_median"] or time["median"]
        cells = [row["workload"], row["label"], duration(measured)]
        cells.append("–" if row["ratio"] is None else f"{row['ratio']:.2f}")
        cells.append("–" if row["share"] is None else f"{row['share']:.0%}")
        if peak is not None:
            cells.append(duration(row["bytes_floor"] * row["parameters"] / peak))
        lines.append(f"| {' | '.join(cells)} |")
    if picture.exists():
        lines += ["", f"![Time of a step beside AdamW]({picture.name})"]
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m ngn_bench.gpu.report", description=__doc__
    )
    parser.add_argument("--output", type=Path, default=Path("build/gpu-report"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=240.0, help="of timing steps")
    parser.add_argument("--device", default="cuda", help="cpu: try the report itself")
    parser.add_argument("--workload", default=",".join(WORKLOADS), metavar="NAMES")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here: torch sees none. On a machine with one, this would run")
        print("\n".join(f"  {i}. {part}" for i, part in enumerate(PARTS, 1)))
        print(f"and write {args.output}/report.json, report.md and report.png.")
        return 0
    device = torch.device(args.device)
    folder: Path = args.output
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "report.png"
    picture.unlink(missing_ok=True)
    machine = environment.describe(device)
    names = engines(device)
    with tempfile.TemporaryDirectory() as scratch:
        print("running the tests", flush=True)
        tests = run_tests(TESTS, Path(scratch))
        print("timing first steps", flush=True)
        first = first_steps(names, args.device, TENSORS)
        print(f"timing steps, about {args.seconds:.0f} seconds", flush=True)
        workloads = tuple(args.workload.split(","))
        steps = time_steps(names, args.device, workloads, args.seconds, Path(scratch), picture)
    data = {
        "doctor": doctor.report(),
        "engines": names,
        "peak": peak_of(device),
        "tests": tests,
        "first_steps": first,
        "steps": steps,
    }
    write_json(folder / "report.json", record("gpu-report", list(sys.argv), machine, **data))
    (folder / "report.md").write_text(page(data, picture), encoding="utf-8")
    print(f"wrote {folder}/report.json and report.md: please attach them to an issue")
    failed = not tests["ran"] or tests["failures"] + tests["errors"] > 0
    return int(failed or "record" not in steps)


if __name__ == "__main__":
    sys.exit(main())

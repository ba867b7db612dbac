"""What `ngn-bench sweep` and `ablate` share: options, the runs that they ask for, tables and pictures."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import environment
from ..errors import BenchError
from ..lab import figures, optimizers
from ..lab.page import page
from ..lab.sweep import Record, sweep
from ..lab.tasks import Scale, find_task, fingerprint, task_file
from ..lab.train import Machine, Run, RunSpec
from ..report import Table, markdown_table, print_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN = {
    "state": "float32",
    "rounding": "nearest",
    "dtype": "float32",
    "loss_target": 0.0,
    "schedule": "task",
}
"""The defaults of options, which specs leave out."""


def add_places(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("NGN_DATA_DIR", "data")),
        metavar="DIR",
        help="folder with the data sets (default: $NGN_DATA_DIR, or ./data)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder for records and pictures (default: ngn-lab/NAME)",
    )


def add_running(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--task", default="digits-mlp", help="a task's name, or your own as file.py:function"
    )
    what.add_argument(
        "--seeds", default="3", metavar="N", help="how many (3), or which: 0,4,7; default: 3"
    )
    what.add_argument(
        "--scale",
        default="1",
        metavar="S",
        help="cut the paper's sizes down: 0.1, or some of steps=,model=,batch=,context=",
    )
    what.add_argument(
        "--steps", type=int, metavar="N", help="train so many steps, not as many as the task says"
    )
    model = parser.add_argument_group("lm-transformer++")
    model.add_argument("--size", help="70m, 160m, 410m, 1b, or dim=256,heads=4,layers=4")
    model.add_argument("--text", metavar="PATH", help="a text file, or a folder of .bin tokens")
    model.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; default: bytes")
    how = parser.add_argument_group("how to run it")
    how.add_argument("--device", default="cpu", help="cpu, cuda or auto (default: cpu)")
    how.add_argument("--processes", type=int, metavar="N", help="runs at once (default: all cores)")
    how.add_argument("--threads", type=int, default=1, metavar="N", help="threads per run (1)")
    how.add_argument("--micro-batch", type=int, metavar="N", help="split batches into such pieces")
    how.add_argument(
        "--loader-workers", type=int, default=0, metavar="N", help="ImageNet-1k: JPEG readers (0)"
    )
    how.add_argument(
        "--report-only", action="store_true", help="draw what the record has, train nothing"
    )
    how.add_argument("--html", action="store_true", help="also write report.html, one file")
    add_places(how)


def numbers(text: str, option: str) -> list[float]:
    """`1,2,3` as numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise BenchError(
            f"{option} takes numbers with commas between them, not {text!r}"
        ) from error


def step_sizes(text: str) -> list[float]:
    """`a,b,c`, or `low:high` in powers of ten, or `low:high:n` with n values per decade."""
    if ":" not in text:
        values = numbers(text, "--lr")
    else:
        low, high, per_decade, *rest = [*numbers(text.replace(":", ","), "--lr"), 1.0]
        counted = per_decade >= 1 and per_decade.is_integer()
        if rest[1:] or not 0 < low < high < math.inf or not counted:
            raise BenchError(f"--lr takes low:high or low:high:per-decade, not {text!r}")
        count = round(math.log10(high / low) * per_decade)
        exact = [low * 10 ** (k / per_decade) for k in range(count + 1)]
        rounded = [float(f"{value:.3g}") for value in exact]
        values = [r for r, e in zip(rounded, exact, strict=True) if min(r, e) <= high]
    if not all(0 < value < math.inf for value in values):
        raise BenchError(f"step sizes are positive numbers, not {text!r}")
    return sorted(set(values))


def seeds(text: str) -> list[int]:
    """`3` for the seeds 0, 1, 2, or `0,4,7` for these."""
    given = numbers(text, "--seeds")
    if given == [0] or not all(value.is_integer() and value >= 0 for value in given):
        raise BenchError(f"--seeds takes a number of seeds, or seeds, not {text!r}")
    values = [int(value) for value in given]
    return list(range(values[0])) if len(values) == 1 else values


def selected(text: str) -> tuple[list[str], list[str]]:
    """The installed optimizers among those named, and a line for each that is not."""
    names, missing = [], []
    for part in text.split(","):
        entry = optimizers.find(part.strip())
        if entry.installed():
            names.append(entry.name)
        else:
            missing.append(f"{entry.label} is left out: {entry.install_command}")
    if not names:
        raise BenchError("none of these optimizers is installed.\n" + "\n".join(missing))
    return list(dict.fromkeys(names)), missing


def folder_of(args: argparse.Namespace, name: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "-+_" else "-" for c in name)
    return args.out if args.out is not None else Path("ngn-lab") / safe


def _machine(args: argparse.Namespace) -> Machine:
    return Machine(
        args.data_dir,
        str(environment.select_device(args.device)),
        args.threads,
        args.micro_batch,
        args.loader_workers,
        tuple(args.command),
    )


def common_spec(args: argparse.Namespace) -> dict[str, Any]:
    find_task(args.task)
    names = ("size", "text", "tokenizer", "steps", "loss_floor", "step_cap", *PLAIN)
    options = {key: getattr(args, key, None) for key in names}
    given = {
        key: str(value)
        for key, value in options.items()
        if value is not None and value != PLAIN.get(key)
    }
    if "rounding" in given and given.get("dtype") != "bfloat16":
        raise BenchError("--rounding is of bfloat16 parameters: add --dtype bfloat16")
    optimizers.storage(given.get("state"), given.get("rounding"))
    own = [
        task_file(args.task),
        *(Path(given[key]) for key in ("text", "tokenizer") if key in given),
    ]
    return {
        "task": args.task,
        "scale": str(Scale.parse(args.scale)),
        "options": tuple(sorted(given.items())),
        "files": fingerprint([path for path in own if path is not None]),
    }


def train_missing(args: argparse.Namespace, specs: Sequence[RunSpec], folder: Path) -> list[Run]:
    processes = args.processes or environment.available_cores()
    counts = (processes, args.threads, args.micro_batch, args.steps)
    if any(count is not None and count < 1 for count in counts):
        raise BenchError("--processes, --threads, --micro-batch and --steps are at least 1")
    record = Record(folder / "runs.jsonl")
    try:
        return sweep(specs, record, _machine(args), processes)
    except KeyboardInterrupt:
        print(
            f"The finished runs are in {record.path}: the same command goes on from there, "
            "--report-only shows them."
        )
        raise


def recorded(
    folder: Path, common: dict[str, Any], wanted: Callable[[dict[str, Any]], bool]
) -> list[Run]:
    """The record's runs of this task, scale and files whose spec is wanted."""
    record = Record(folder / "runs.jsonl")
    same = common | {"options": dict(common["options"])}
    runs = []
    for run in record.read():
        spec = RunSpec.from_json(run["spec"]).as_json()
        if wanted(spec) and all(spec[key] == value for key, value in same.items()):
            runs.append(run)
    if not runs:
        raise BenchError(
            f"{record.path} has no runs of this task with this scale, these options and these files"
        )
    return runs


def publish(
    args: argparse.Namespace,
    folder: Path,
    title: str,
    shown: Sequence[Table],
    drawn: dict[str, Figure],
    runs: Sequence[Run],
) -> None:
    """Print tables, write them and the pictures, and print their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in shown:
        print_table(table)
    text = "\n".join(f"{t.title}\n\n{markdown_table(t)}\n{t.caption}\n" for t in shown)
    (folder / "tables.md").write_text(text, encoding="utf-8")
    if args.html:
        path = folder / "report.html"
        path.write_text(page(title, shown, drawn, runs), encoding="utf-8")
        print(f"report:  {path}")
    for name, figure in drawn.items():
        print(f"picture: {figures.save(figure, folder / f'{name}.png')}")
    print(f"tables:  {folder / 'tables.md'}")

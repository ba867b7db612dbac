"""`ngn-bench sweep`."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from typing import Any

from ngn_kernels.formats import ROUNDINGS

from ..errors import BenchError
from ..lab import figures, optimizers
from ..lab.results import Results, tables
from ..lab.tasks import TASKS
from ..lab.train import KNOWN_FLOOR, RunSpec
from . import lab, shared

DEFAULT_OPTIMIZERS = "ngn-m,sgdm,momo,ngn-mdv1,adam,momo-adam"
STORING_OPTIMIZERS = "ngn-m,ngn-mdv1"


def add(commands: shared.Commands) -> None:
    parser = commands.add_parser(
        "sweep",
        help="train at many step sizes: how wide is the good range?",
        description=(
            "Train a task with several optimizers at many step sizes and draw the step-size "
            "resilience curve. Finished runs are kept in DIR/runs.jsonl: the same command goes on "
            "where it was stopped. Without arguments: digits-mlp, which needs no data, in about "
            "two minutes on 2 cores."
        ),
    )
    parser.add_argument(
        "--optimizers",
        metavar="NAMES",
        help=f"default: {DEFAULT_OPTIMIZERS}",
    )
    parser.add_argument(
        "--lr",
        metavar="LRS",
        help="1e-3,1e-2 or 1e-3:1e2 (powers of ten) or 1e-3:1e2:3 (three per decade); "
        "default: eight powers of ten that suit the optimizer",
    )
    parser.add_argument(
        "--margin",
        type=float,
        metavar="M",
        help="what counts as good: points of accuracy (0.5) or per cent of perplexity (5)",
    )
    parser.add_argument(
        "--loss-floor",
        metavar="F",
        help="a lower bound of the loss, for the optimizers; known: the task's own. "
        "The default is then the optimizers that take one",
    )
    parser.add_argument(
        "--state",
        default="float32",
        help="how NGN optimizers store m and v: float32, bfloat16, 8bit, or both: 8bit+bfloat16. "
        f"The default is then {STORING_OPTIMIZERS}",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "mixed", "bfloat16"),
        default="float32",
        help="mixed: compute in bfloat16; bfloat16: parameters as well (default: the task's own)",
    )
    parser.add_argument(
        "--rounding",
        choices=ROUNDINGS,
        default="nearest",
        help="how NGN optimizers store parameters of bfloat16",
    )
    parser.add_argument(
        "--list", action="store_true", help="list tasks and optimizers, and what is not installed"
    )
    lab.add_running(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list()
    figures.pyplot()
    names, missing = lab.selected(swept(args))
    common = lab.common_spec(args)
    folder = lab.folder_of(args, args.task)
    if args.report_only:
        runs = lab.recorded(folder, common, lambda s: s["betas"] is None and s["weight_decay"] == 0)
    else:
        runs = lab.train_missing(args, _grid(args, names, common), folder)
    results = Results(runs)
    margin = args.margin if args.margin is not None else results.default_margin
    shown = tables(results, margin)
    drawn = figures.all_figures(results, margin)
    lab.publish(args, folder, f"Step-size sweep: {results.task}", shown, drawn, runs)
    for line in missing:
        print(line)
    return 0


def swept(args: argparse.Namespace) -> str:
    """The names of the optimizers of a sweep, as given or by default."""
    stored = (args.state, args.rounding) != (lab.PLAIN["state"], lab.PLAIN["rounding"])
    default = STORING_OPTIMIZERS if stored else DEFAULT_OPTIMIZERS
    if args.loss_floor is None:
        return args.optimizers or default
    if args.loss_floor != KNOWN_FLOOR and not math.isfinite(_number(args.loss_floor)):
        raise BenchError(f"--loss-floor takes a number or {KNOWN_FLOOR}, not {args.loss_floor!r}")
    taking = [name for name in default.split(",") if optimizers.find(name).floor]
    return args.optimizers or ",".join(taking)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _grid(args: argparse.Namespace, names: Sequence[str], common: dict[str, Any]) -> list[RunSpec]:
    """Each optimizer at each step size with each seed."""
    given = lab.step_sizes(args.lr) if args.lr else None
    return [
        RunSpec(**common, optimizer=name, lr=lr, seed=seed)
        for seed in lab.seeds(args.seeds)
        for name in names
        for lr in given or optimizers.OPTIMIZERS[name].grid
    ]


def _list() -> int:
    print("Tasks:")
    for name, build in TASKS.items():
        print(f"  {name:<28} {(build.__doc__ or '').splitlines()[0]}")
    print("  your_file.py:function        A task of your own.\n\nOptimizers:")
    for entry in optimizers.OPTIMIZERS.values():
        state = "" if entry.installed() else f"not installed: {entry.install_command}. "
        print(f"  {entry.name:<14} {entry.label:<20} {state}{entry.note}".rstrip())
    return 0


def planned(command: str) -> list[RunSpec]:
    """The runs that a command `ngn-bench sweep …` does."""
    parser = shared.Parser(prog="ngn-bench")
    add(parser.add_subparsers(required=True))
    args = parser.parse_args(shlex.split(command)[1:])
    names = [optimizers.find(name).name for name in swept(args).split(",")]
    return _grid(args, names, lab.common_spec(args))

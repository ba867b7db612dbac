"""`ngn-bench sweep`."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from ngn_kernels.formats import ROUNDINGS

from ..errors import BenchError
from ..lab import figures, optimizers
from ..lab.problems import SCHEDULES
from ..lab.results import Results, tables
from ..lab.tasks import TASKS
from ..lab.train import KNOWN_FLOOR, SWEPT_CAP, RunSpec
from . import lab, shared

DEFAULT_OPTIMIZERS = "ngn-m,sgdm,momo,ngn-mdv1,adam,momo-adam"
OWN_OPTIMIZERS = "ngn-m,ngn-mdv1"


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
        type=shared.at_least_zero,
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
        "--loss-target",
        type=float,
        default=0.0,
        metavar="T",
        help="each step of NGN optimizers takes this fraction of the loss for the lowest that it "
        "can reach, in [0, 1). "
        f"The default is then {OWN_OPTIMIZERS}",
    )
    parser.add_argument(
        "--step-cap",
        metavar="C",
        help="the step size that NGN optimizers compute ρ at: a number, or lr: each run's own, "
        "which its schedule does not change",
    )
    parser.add_argument(
        "--weight-decay",
        type=shared.at_least_zero,
        default=0.0,
        metavar="W",
        help="of all optimizers (0)",
    )
    parser.add_argument(
        "--schedule",
        choices=("task", *SCHEDULES),
        default="task",
        help="of the step size; cosine: warm-up over 5 %% of the steps, then a cosine to 0 "
        "(default: the task's own, for most tasks none)",
    )
    parser.add_argument(
        "--state",
        default="float32",
        help="how NGN optimizers store m and v: float32, bfloat16, 8bit, or both: 8bit+bfloat16. "
        f"The default is then {OWN_OPTIMIZERS}",
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
        decay = args.weight_decay
        runs = lab.recorded(
            folder, common, lambda s: s["betas"] is None and s["weight_decay"] == decay
        )
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
    _check_aim(args)
    plain = (lab.PLAIN["state"], lab.PLAIN["rounding"], lab.PLAIN["loss_target"], None)
    own = (args.state, args.rounding, args.loss_target, args.step_cap) != plain
    default = OWN_OPTIMIZERS if own else DEFAULT_OPTIMIZERS
    if args.loss_floor is None:
        return args.optimizers or default
    if args.loss_floor != KNOWN_FLOOR and not math.isfinite(_number(args.loss_floor)):
        raise BenchError(f"--loss-floor takes a number or {KNOWN_FLOOR}, not {args.loss_floor!r}")
    taking = [name for name in default.split(",") if optimizers.find(name).floor]
    return args.optimizers or ",".join(taking)


def _check_aim(args: argparse.Namespace) -> None:
    """Refuse a --loss-target or --step-cap that no run could take; write a cap in one form."""
    if not 0 <= args.loss_target < 1:
        raise BenchError(f"--loss-target is in [0, 1), not {args.loss_target:g}")
    if args.step_cap not in (None, SWEPT_CAP):
        if not 0 < _number(args.step_cap) < math.inf:
            raise BenchError(
                f"--step-cap takes a positive number or {SWEPT_CAP}, not {args.step_cap!r}"
            )
        args.step_cap = str(float(args.step_cap))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _grid(args: argparse.Namespace, names: Sequence[str], common: dict[str, Any]) -> list[RunSpec]:
    """Each optimizer at each step size with each seed."""
    given = lab.step_sizes(args.lr) if args.lr else None
    return [
        RunSpec(**common, optimizer=name, lr=lr, seed=seed, weight_decay=args.weight_decay)
        for seed in lab.seeds(args.seeds)
        for name in names
        for lr in given or optimizers.OPTIMIZERS[name].grid
    ]


def _list() -> int:
    print("Tasks:")
    for name, build in TASKS.items():
        _print_entry(f"  {name:<28} ", (build.__doc__ or "").splitlines()[0])
    print("  your_file.py:function        A task of your own.\n\nOptimizers:")
    width = max(map(len, optimizers.OPTIMIZERS))
    for entry in optimizers.OPTIMIZERS.values():
        state = "" if entry.installed() else f"not installed: {entry.install_command}. "
        _print_entry(f"  {entry.name:<{width}} {entry.label:<20} ", f"{state}{entry.note}")
    return 0


def _print_entry(name: str, text: str) -> None:
    """A line of a list, which goes on below itself where the terminal ends."""
    width = shutil.get_terminal_size().columns
    print(
        textwrap.fill(text, width, initial_indent=name, subsequent_indent=" " * len(name))
        or name.rstrip()
    )


def planned(command: str) -> list[RunSpec]:
    """The runs that a command `ngn-bench sweep …` does."""
    parser = shared.Parser(prog="ngn-bench")
    add(parser.add_subparsers(required=True))
    args = parser.parse_args(shlex.split(command)[1:])
    names = [optimizers.find(name).name for name in swept(args).split(",")]
    return _grid(args, names, lab.common_spec(args))

"""`ngn-bench step`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import environment, report
from ..contenders.registry import Contender, is_reference, select, stored_as
from ..errors import BenchError
from ..pages import plots
from ..timing import step
from ..timing import step_tables as tables
from ..timing.workloads import Workload, find_workload, read_shapes
from . import shared

DEFAULT_WORKLOADS = ("transformer++-70m", "resnet20")
SMALL_MACHINE_WORKLOADS = ("resnet18", "resnet20")
CPU_TABLE_ROWS = (
    *("ngnmdv1", "ngnmdv1/bfloat16", "ngnmdv1/8bit+bfloat16", "ngnmdv1/8bit"),
    *("ngnmdv1/bfloat16/exact@bfloat16", "ngnm", "ngnm/bfloat16", "ngnm/8bit"),
    *("ngnmdv2", "ngnmdv2/bfloat16", "ngnmdv2/8bit+bfloat16", "ngnmdv2/8bit", "ngn"),
)
CPU_TABLE = (
    ("transformer++-70m", (*CPU_TABLE_ROWS, "ngnmdv1:plain", "momo-adam", "rivals")),
    *((name, CPU_TABLE_ROWS) for name in ("one:4M", "one:1M", "resnet20", "many-small")),
)
DEFAULT_JSON = Path("ngn-bench-step.json")
DEFAULT_PLOT = Path("ngn-bench-step.png")


def add(commands: shared.Commands) -> None:
    parser = commands.add_parser(
        "step",
        help="time one optimizer step, contenders side by side",
        description="Time whole step() calls of the NGN optimizers, torch's and others, in "
        "turns, after checking each one's result on a small case.",
        epilog="Workloads: model names (resnet20, resnet18, vit-tiny, gpt2, transformer++-70m, …), "
        "many-small, one:64M, many:500x2K, or package.module:function for a model of your own. "
        "Contenders: ngnmdv1 (fastest backend), ngnmdv1:cpu, ngnmdv1/8bit (its m and v), "
        "ngnmdv1/bfloat16/exact@bfloat16 (on bfloat16 parameters), adamw, adamw:fused, sgd:fused, "
        "ngnmdv1:plain, momo, momo-adam, or the groups ngn-all, torch-all, momo-all, rivals, all; "
        "--list shows them. "
        f"Without options, results are also written to {DEFAULT_JSON} and, with matplotlib, to "
        f"{DEFAULT_PLOT}.",
    )
    parser.add_argument(
        "--workload", type=shared.names, metavar="NAMES", help="one or several, with commas"
    )
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="JSON list of shapes to run on")
    parser.add_argument(
        "--contenders", type=shared.names, metavar="NAMES", help="default: all that run"
    )
    parser.add_argument(
        "--preset",
        choices=("default", "cpu-table"),
        default="default",
        help="cpu-table: four rules and their formats on five workloads, as ratios to fused AdamW",
    )
    parser.add_argument(
        "--list", action="store_true", help="show the contenders, and why some do not run here"
    )
    shared.add_format_options(parser)
    parser.add_argument("--compiled", action="store_true", help="also AdamW under torch.compile")
    parser.add_argument(
        "--cold",
        action=argparse.BooleanOptionalAction,
        help="empty the caches before every step (default: on a GPU only)",
    )
    shared.add_measurement_options(parser, 40.0)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    device = shared.select_machine(args)
    if args.list:
        report.print_table(tables.contender_table(device))
        return 0
    if not (args.workload or args.shapes or args.contenders or args.preset != "default"):
        args.json = args.json or DEFAULT_JSON
        args.plot = args.plot or (DEFAULT_PLOT if plots.has_matplotlib() else None)
    shared.check_outputs(args)
    cold = device.type == "cuda" if args.cold is None else args.cold
    settings = step.Settings(device, shared.find_dtype(args.dtype), args.seconds, cold)
    machine = environment.describe(device)
    plan, left_out = _plan(args, settings)
    plan = [(workload, _stored(chosen, args)) for workload, chosen in plan]

    def as_record(result: step.StepResult) -> dict[str, Any]:
        data = result.as_json()
        return report.record("step", args.command, machine, **data, left_out=left_out)

    def keep(result: step.StepResult) -> None:
        if args.json:
            report.write_json(args.json, as_record(result))

    print(environment.machine_line(machine))
    with report.progress_bar("measuring") as progress:
        result = step.run_step(plan, settings, progress, keep)
    record = as_record(result)
    for table in tables.step_tables(record):
        report.print_table(table)
    if args.preset == "cpu-table":
        report.print_table(tables.ratio_table(record))
        print("\n".join(tables.slower_lines(record)))
    for line in tables.not_run_lines(record):
        print(line)
    drawn = any(row["ratio"] is not None for row in record["rows"])
    shared.write_outputs(args, record, plots.plot_step if drawn else None)
    return shared.exit_status(result.interrupted, record["rows"])


def _stored(contenders: list[Contender], args: argparse.Namespace) -> list[Contender]:
    """Each contender once, and those of this library once for each `--state`."""
    if not shared.formats_given(args):
        return contenders
    if any("/" in contender.name for contender in contenders):
        raise BenchError("--contenders names formats already; leave out --state and --rounding")
    each = [stored_as(c, state, args.rounding) for c in contenders for state in args.state]
    return list({contender.name: contender for contender in each}.values())


def _plan(
    args: argparse.Namespace, settings: step.Settings
) -> tuple[list[tuple[Workload, list[Contender]]], dict[str, dict[str, str]]]:
    """Workloads with their contenders, and the contenders left out by default with the reason."""
    backend = environment.fastest_backend(settings.device, settings.dtype)
    left_out: dict[str, dict[str, str]] = {}
    if args.preset == "cpu-table":
        if args.workload or args.shapes or args.contenders or shared.formats_given(args):
            raise BenchError(
                "--preset cpu-table fixes workloads, contenders and their formats; leave those out"
            )
        return [
            (find_workload(name), select(names, backend, args.compiled))
            for name, names in CPU_TABLE
        ], left_out

    def with_contenders(workload: Workload) -> tuple[Workload, list[Contender]]:
        if args.contenders:
            return workload, select(args.contenders, backend, args.compiled)
        chosen = select(["all"], backend, args.compiled)
        if workload.parameters <= step.SLOW_REFERENCE_PARAMETERS or backend == "reference":
            return workload, chosen
        slow = [contender for contender in chosen if is_reference(contender.name)]
        reason = (
            f"left out by default over {step.SLOW_REFERENCE_PARAMETERS // 10**6}M parameters; "
            "--contenders all measures them"
        )
        left_out[workload.name] = {contender.label: reason for contender in slow}
        return workload, [contender for contender in chosen if contender not in slow]

    workloads = [find_workload(name) for name in dict.fromkeys(args.workload or ())]
    if args.shapes:
        workloads.append(read_shapes(args.shapes))
    if workloads:
        return [with_contenders(workload) for workload in workloads], left_out
    plan = [with_contenders(find_workload(name)) for name in DEFAULT_WORKLOADS]
    try:
        for workload, contenders in plan:
            step.require_memory(workload, contenders, settings)
    except BenchError:
        left_out.clear()
        plan = [with_contenders(find_workload(name)) for name in SMALL_MACHINE_WORKLOADS]
    return plan, left_out

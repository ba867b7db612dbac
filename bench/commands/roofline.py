"""`ngn-bench roofline`."""

from __future__ import annotations

import argparse

from .. import environment, report
from ..pages import plots
from ..timing import roofline
from ..timing.workloads import parse_count
from .shared import (
    Commands,
    add_format_options,
    add_machine_options,
    add_output_options,
    add_seconds,
    check_outputs,
    exit_status,
    find_dtype,
    select_machine,
    write_outputs,
)


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "roofline",
        help="measure memory bandwidth, and each rule's shortest step from it",
        description="Measure read, copy, triad and update bandwidth over array sizes, and derive the "
        "shortest step that the memory allows for each rule.",
    )
    add_format_options(parser)
    add_seconds(parser, 15.0)
    parser.add_argument(
        "--largest", default=None, metavar="SIZE", help="elements of the largest array, as 32M"
    )
    add_machine_options(parser)
    add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    device = select_machine(args)
    check_outputs(args)
    dtype = find_dtype(args.dtype)
    largest = parse_count(args.largest) if args.largest else None
    machine = environment.describe(device)
    print(environment.machine_line(machine))
    with report.progress_bar("measuring") as progress:
        result = roofline.run_roofline(
            device, dtype, args.seconds, largest, progress, args.state, args.rounding
        )
    record = report.as_plain(report.record("roofline", args.command, machine, **result))
    for table in roofline.roofline_tables(record):
        report.print_table(table)
    write_outputs(args, record, plots.plot_roofline if record["floors"] else None)
    return exit_status(record["interrupted"])

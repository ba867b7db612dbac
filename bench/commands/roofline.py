"""`ngn-bench roofline`."""

from __future__ import annotations

import argparse

from .. import environment, report
from ..pages import plots
from ..timing import roofline
from ..timing.workloads import parse_count
from . import shared


def add(commands: shared.Commands) -> None:
    parser = commands.add_parser(
        "roofline",
        help="measure memory bandwidth, and each rule's shortest step from it",
        description="Measure read, copy, triad and update bandwidth over array sizes, and derive the "
        "shortest step that the memory allows for each rule.",
    )
    shared.add_format_options(parser)
    parser.add_argument("--largest", metavar="SIZE", help="elements of the largest array, as 32M")
    shared.add_measurement_options(parser, 15.0)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    device = shared.prepare(args)
    dtype = shared.find_dtype(args.dtype)
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
    shared.write_outputs(args, record, plots.plot_roofline if record["floors"] else None)
    return shared.exit_status(record["interrupted"])

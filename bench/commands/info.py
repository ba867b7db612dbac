"""`ngn-bench info`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import environment, report
from . import shared


def add(commands: shared.Commands) -> None:
    parser = commands.add_parser(
        "info", help="versions, hardware and backends", description="What this machine can run."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it as JSON")
    shared.add_machine_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    device = shared.select_machine(args)
    report.require_writable(args.json)
    machine = environment.describe(device)
    for line in report.info_lines(machine):
        print(line)
    shared.write_outputs(args, report.record("info", args.command, machine))
    return 0

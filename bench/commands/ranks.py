"""`ngn-bench ranks`."""

from __future__ import annotations

import argparse
import sys

import torch

from .. import environment, report
from ..errors import BenchError
from ..pages import plots
from ..timing import ranks
from ..timing.projection import project, projection_table
from . import shared

MAX_RANKS = 64


def _rank_numbers(text: str) -> tuple[int, ...]:
    parse = shared.positive(int, MAX_RANKS)
    return tuple(dict.fromkeys(parse(word) for word in text.split(",")))


def add(commands: shared.Commands) -> None:
    parser = commands.add_parser(
        "ranks",
        help="time a step on several local processes, under DDP and FSDP2",
        description="Start local processes (gloo) and train a model of many small tensors in each "
        "layout, with NGN-MDv1 and torch's fused AdamW in turns. The exit status is 1 if ranks that "
        "should have the same numbers do not. With --project, nothing is started: what the exchange "
        "of a step would cost on many GPUs, from a model of its latency.",
    )
    parser.add_argument(
        "--ranks", type=_rank_numbers, metavar="NUMBERS", help="processes (default 1,2,4)"
    )
    parser.add_argument(
        "--tensors", type=shared.positive(int, 10**5), help="tensors of the model (default 300)"
    )
    parser.add_argument(
        "--seconds", type=shared.positive(float), help="measuring time (default 60)"
    )
    parser.add_argument(
        "--threads",
        type=shared.positive(int, shared.MAX_THREADS),
        help="of each process (default 1)",
    )
    parser.add_argument("--project", action="store_true", help="the projection to 16,384 GPUs")
    shared.add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    shared.check_outputs(args)
    machine = environment.describe(torch.device("cpu"))
    if args.project:
        if args.ranks or args.tensors or args.seconds or args.threads:
            raise BenchError("--project measures nothing; leave out the options of a measurement")
        record = report.record("projection", args.command, machine, projection=project())
        report.print_table(projection_table(record))
    else:
        if args.plot:
            raise BenchError("--plot draws the projection: add --project, or leave it out")
        settings = ranks.RanksSettings(
            args.ranks or (1, 2, 4), args.tensors or 300, args.seconds or 60.0, args.threads or 1
        )
        print(environment.machine_line(machine))
        with report.progress_bar("measuring") as progress:
            rows = ranks.run_ranks(settings, progress)
        sizes = {"tensors": settings.tensors, "side": ranks.SIDE, "threads": settings.threads}
        record = report.record("ranks", args.command, machine, rows=rows, **sizes)
        report.print_table(ranks.ranks_table(record))
    shared.write_outputs(args, record, plots.plot_projection)
    if any(row["same_bits"] is False for row in record.get("rows", ())):
        print("ngn-bench: ranks differ that should have the same numbers", file=sys.stderr)
        return 1
    return 0

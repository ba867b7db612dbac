"""`ngn-bench toy`."""

from __future__ import annotations

import argparse

from ..errors import unknown_name
from ..lab import figures
from ..lab.toys import TOYS
from ..report import print_table
from . import lab, shared


def add(commands: shared.Commands) -> None:
    parser = commands.add_parser(
        "toy",
        help="the paper's toy problems, with their figures",
        description="Run the paper's toy problems, or one of them: print its table, draw its figure.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        default="all",
        help="diabetes, rosenbrock, x2x4, many-minima, quadratic, or all of them: all (default)",
    )
    lab.add_places(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    figures.pyplot()
    if args.name != "all" and args.name not in TOYS:
        raise unknown_name("toy", args.name, [*TOYS, "all"])
    for name in TOYS if args.name == "all" else [args.name]:
        toy = TOYS[name](args.data_dir)
        print(toy.note)
        folder = lab.folder_of(args, f"toy-{name}")
        for table in toy.tables:
            print_table(table)
        for file, figure in toy.figures.items():
            print(f"picture: {figures.save(figure, folder / f'{file}.png')}")
    return 0

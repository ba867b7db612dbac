"""`ngn-bench compare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import report
from ..timing.compare import METRICS, THRESHOLD, compare, comparison_table, environment_changes
from . import shared


def add(commands: shared.Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare two results; exit status 1 if something became slower",
        description="Compare two result files row by row. A change inside the noise band counts as "
        "none. The exit status is 1 if any row became slower, or is no longer timed because its "
        "contender fails or gives a wrong answer.",
    )
    parser.add_argument("old", type=Path, help="JSON of an earlier run")
    parser.add_argument("new", type=Path, help="JSON of a later run")
    parser.add_argument(
        "--threshold",
        type=shared.positive(float),
        default=THRESHOLD,
        help="least relevant change (0.05)",
    )
    parser.add_argument(
        "--metric", choices=METRICS, default="time", help="ratio: against fused AdamW"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    old, new = report.read_json(args.old), report.read_json(args.new)
    comparison = compare(old, new, args.threshold, args.metric)
    report.print_table(comparison_table(comparison, args.metric))
    for line in (*comparison.broken, *comparison.missing):
        print(line)
    changed = environment_changes(old, new)
    for line in changed:
        print(f"the environment differs: {line}")
    if changed and args.metric == "time":
        print("Across machines or versions, --metric ratio is the fairer comparison.")
    slower = len(comparison.slower)
    print(f"{slower or 'none'} of {len(comparison.changes)} rows became slower")
    return 1 if slower or comparison.broken else 0

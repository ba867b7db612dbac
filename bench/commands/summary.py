"""`ngn-bench summary`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..lab import figures, precision, summary
from ..pages.readme import picture_source
from ..report import print_table
from . import shared
from .sweep import planned

DOCUMENTS = ("docs/stability.md", "docs/precision.md")


def add(commands: shared.Commands) -> None:
    parser = commands.add_parser(
        "summary",
        help="one table and one picture over all sweeps whose records are kept",
        description=(
            "Print the table over all sweeps that ROOT/bench/results/lab keeps, and which of their "
            "runs are missing. Trains nothing."
        ),
    )
    parser.add_argument(
        "--root", type=Path, default=Path(), help="folder of the repository (default: this one)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        action="append",
        default=[],
        help="first add the runs of a sweep that wrote into DIR",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--write",
        action="store_true",
        help="bring docs/stability.md, docs/precision.md and the pictures up to date",
    )
    what.add_argument(
        "--check",
        action="store_true",
        help="exit 1 if one of these pages is out of date",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    folder = args.root / "bench" / "results" / "lab"

    def load() -> tuple[list[summary.Kept], list[summary.Kept]]:
        """The sweeps of docs/stability.md, and those of docs/precision.md if there are any."""
        narrow = (folder / precision.INDEX).exists()
        return summary.load(folder, planned), (
            summary.load(folder, planned, precision.INDEX) if narrow else []
        )

    for source in args.keep:
        kept, narrow = load()
        added = summary.keep(source / "runs.jsonl", [*kept, *narrow])
        print(f"{added} runs of {source} are kept now")
    kept, narrow = load()
    print_table(summary.summary_table(kept))
    for sweep in [*kept, *narrow]:
        if sweep.missing:
            print(f"{sweep.title}: {sweep.missing_text()}\n  " + "\n  ".join(sweep.commands))
    stale = []
    images = args.root / "docs" / "images"
    parts = summary.sections(kept) | precision.sections(narrow, args.root)
    for path in (args.root / name for name in DOCUMENTS):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        wanted = summary.replaced(text, parts, path)
        if wanted != text:
            stale.append(path)
            if args.write:
                path.write_text(wanted, encoding="utf-8")
                print(f"wrote {path}")
    if args.write:
        drawn = {"stability-summary.png": summary.summary_figure(kept)}
        for sweep in kept:
            drawn |= summary.pictures(sweep)
        if narrow:
            drawn["precision.png"] = precision.figure(narrow)
        for name, figure in drawn.items():
            print(f"picture: {figures.save(figure, images / name)}")
    headline, source = images / summary.HEADLINE_PICTURE, summary.headline_source(kept)
    if source is not None and picture_source(headline) != source:
        stale.append(headline)
        if args.write:
            figure = summary.headline_figure(kept)
            print(f"picture: {figures.save(figure, headline, source)}")
    if args.check and stale:
        names = " and ".join(str(path) for path in stale)
        print(f"{names} do not match the kept records: run ngn-bench summary --write")
        return 1
    return 0

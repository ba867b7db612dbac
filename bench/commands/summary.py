"""`ngn-bench summary`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..lab import figures, muon_page, precision, summary, target
from ..pages.readme import picture_source
from ..report import print_table
from . import shared
from .sweep import planned

DOCUMENTS = (
    "README.md",
    "docs/stability.md",
    "docs/precision.md",
    "docs/loss-target.md",
    "docs/muon.md",
)


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
        help="bring these pages and their pictures up to date: " + ", ".join(DOCUMENTS),
    )
    what.add_argument(
        "--check",
        action="store_true",
        help="exit 1 if one of these pages is out of date",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    folder = args.root / "bench" / "results" / "lab"

    def load() -> list[list[summary.Kept]]:
        """The sweeps of docs/stability.md, and those of the other pages if there are any."""
        return [
            summary.load(folder, planned, index) if (folder / index).exists() else []
            for index in ("sweeps.json", precision.INDEX, target.INDEX, muon_page.INDEX)
        ]

    for source in args.keep:
        added = summary.keep(source / "runs.jsonl", [sweep for page in load() for sweep in page])
        print(f"{added} runs of {source} are kept now")
    kept, narrow, aimed, muons = load()
    print_table(summary.summary_table(kept))
    for sweep in [*kept, *narrow, *aimed, *muons]:
        if sweep.missing:
            print(f"{sweep.title}: {sweep.missing_text()}\n  " + "\n  ".join(sweep.commands))
    stale = []
    images = args.root / "docs" / "images"
    parts = (
        summary.sections(kept)
        | precision.sections(narrow, args.root)
        | target.sections(aimed)
        | muon_page.sections(muons)
    )
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
    for name, source, draw in (
        (
            target.HEADLINE_PICTURE,
            target.headline_source(aimed),
            lambda: target.headline_figure(aimed),
        ),
        (target.PICTURE, target.picture_source(aimed), lambda: target.figure(aimed)),
    ):
        if source is not None and picture_source(images / name) != source:
            stale.append(images / name)
            if args.write:
                print(f"picture: {figures.save(draw(), images / name, source)}")
    if args.check and stale:
        names = " and ".join(str(path) for path in stale)
        print(f"{names} do not match the kept records: run ngn-bench summary --write")
        return 1
    return 0

"""Write the README's table and picture from the stored reference run, or check that they match.

`python -m ngn_bench.readme` rewrites what stands between the two markers; `--check` changes nothing
and exits with status 1 if it would.
"""

from __future__ import annotations

import argparse
import shlex
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import plots, report
from .contenders import BASELINE
from .environment import machine_line
from .errors import BenchError
from .report import Column, Table, duration, markdown_table, rows_of, size, workload_names
from .step_tables import headline_rows, workload_title

START = "<!-- bench:start -->"
END = "<!-- bench:end -->"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def benchmark_section(record: dict[str, Any], picture: str) -> str:
    """The Markdown between the markers."""
    parts = [f"![Time of one optimizer step against fused AdamW]({picture})\n"]
    for workload in workload_names(record):
        rows = rows_of(record, workload)
        speed = record["memory_bandwidth"].get(workload)
        measured = f"; memory bandwidth {speed / 1e9:.1f} GB/s" if speed else ""
        parts.append(f"**{workload_title(rows[0])}, {rows[0]['dtype']}**{measured}\n")
        parts.append(markdown_table(_table(rows)))
    command = shlex.join(record["command"])
    parts.append(f"{machine_line(record['environment'])}. Measured with `{command}`.\n")
    return "\n".join(parts)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = [
        Column("optimizer", right=False),
        Column("time per step"),
        Column("vs fused AdamW"),
        Column("GB/s"),
        Column("of memory bandwidth"),
        Column("bytes per parameter"),
        Column("state"),
        Column("extra memory"),
    ]
    timed = sorted(headline_rows(rows), key=lambda row: row["time"]["median"])
    cells = []
    for row in timed:
        line = [
            row["label"],
            duration(row["time"]["median"]),
            f"{row['ratio']:.2f}×",
            f"{row['bandwidth'] / 1e9:.1f}",
            "–" if row["share"] is None else f"{row['share']:.0%}",
            f"{row['bytes_code']:g}",
            size(row["state_bytes"]),
            size(row["extra_bytes"] or 0),
        ]
        cells.append([f"**{cell}**" for cell in line] if row["contender"] == BASELINE else line)
    return Table("", columns, cells)


def replace_section(text: str, section: str) -> str:
    """`text` with `section` between the markers."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise BenchError(f"the README must have {START} and then {END}, once each")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n{section}{END}{after}"


def picture_source(path: Path) -> str | None:
    """The fingerprint that `plots.save` stored in a PNG; None if there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if not data.startswith(PNG_SIGNATURE):
        return None
    position = len(PNG_SIGNATURE)
    while position + 8 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        kind = data[position + 4 : position + 8]
        body = data[position + 8 : position + 8 + length]
        key, _, value = body.partition(b"\0")
        if kind == b"tEXt" and key.decode("latin-1") == plots.SOURCE_KEY:
            return value.decode("latin-1")
        position += 12 + length
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ngn_bench.readme", description=__doc__)
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--json", type=Path, default=Path("bench/results/reference.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/images/step.png"))
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 if out of date"
    )
    args = parser.parse_args(arguments)
    try:
        return _run(args)
    except BenchError as error:
        print(f"ngn_bench.readme: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    record = report.read_json(args.json, "step")
    try:
        text = args.readme.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot read {args.readme}: {error.strerror}") from None
    try:
        picture = args.picture.relative_to(args.readme.parent).as_posix()
    except ValueError:
        raise BenchError(f"{args.picture} must lie below {args.readme}'s folder") from None
    wanted = replace_section(text, benchmark_section(record, picture))
    if args.check:
        stale = []
        if wanted != text:
            stale.append(str(args.readme))
        if picture_source(args.picture) != plots.record_digest(record):
            stale.append(str(args.picture))
        for path in stale:
            print(f"{path} does not match {args.json}: run python -m ngn_bench.readme")
        return 1 if stale else 0
    args.readme.write_text(wanted, encoding="utf-8")
    plots.plot_step(record, args.picture)
    print(f"wrote {args.readme} and {args.picture} from {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

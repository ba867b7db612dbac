"""Write what README and docs have between markers, or check that it matches its source.

README's table, and the picture and tables of docs/speed.md, come from the stored reference run, the
table of docs/ranks.md from a stored run of `ngn-bench ranks`, the docs' tables of traffic from the rules.
`python -m ngn_bench.pages.readme` rewrites them; `--check` changes nothing and exits with status 1
if it would.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import report
from ..contenders.registry import BASELINE
from ..contenders.traffic import PASSES, Passes, storage_of, stored
from ..contenders.variants import NGN_VARIANTS, NGNVariant
from ..environment import machine_line
from ..errors import BenchError
from ..report import (
    Column,
    Table,
    columns,
    duration,
    markdown_table,
    rows_of,
    size,
    spread_text,
    workload_names,
)
from ..timing.ranks import ranks_table
from ..timing.step_tables import (
    bytes_text,
    headline_rows,
    memory_line,
    not_run_lines,
    ratio_table,
    run_dtype,
    workload_title,
    workloads_line,
)
from . import plots

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


READING = (
    "±: half the distance between the quartiles, with the number n of samples where that is below "
    "5. GB/s counts the bytes that a rule must move; a share over 100 % means that much of "
    "the model stayed in a cache, which is faster than the memory. bytes moved: per parameter, by "
    "the code, where that is known. Tensors below 4,096 elements keep float32 state. on bfloat16: "
    "parameters and gradients are bfloat16, against float32 ones of the others."
)
HEADLINE = (BASELINE, "ngnm:cpu", "ngnmdv1:cpu", "ngnmdv1:cpu/8bit+bfloat16", "ngnmdv1:plain")
"""The contenders of README's table."""


def benchmark_section(record: dict[str, Any]) -> str:
    """README's: the ratios of a few contenders, and where they were measured."""
    rows = [row for row in record["rows"] if row["contender"] in HEADLINE]
    table = _ratios({**record, "rows": rows})
    titles = [workload_title(rows_of(record, name)[0]) for name in workload_names(record)]
    sizes = [title.partition(": ")[2].replace(" parameters", "") for title in titles]
    headings = columns("optimizer", "bytes of state", *sizes)
    return f"{markdown_table(Table('', headings, table.rows))}\n{_measured(record)}\n"


def _ratios(record: dict[str, Any]) -> Table:
    """Contenders down, workloads across, the baseline in bold."""
    table = ratio_table(record)
    headings = [table.columns[0], Column("bytes of state"), *table.columns[2:]]
    cells = [_bold(row) if i == table.bold else row for i, row in enumerate(table.rows)]
    return Table("", headings, cells)


def speed_section(record: dict[str, Any], picture: str, loops: dict[str, Any] | None = None) -> str:
    """All that was measured: ratios, a training loop's time, and a table for each workload."""
    parts = [
        "## Ratios to fused AdamW\n",
        f"![Time of one optimizer step against fused AdamW]({picture})\n",
        "Time of a whole step, relative to torch's fused AdamW, whose own times stand in its row:\n",
        markdown_table(_ratios(record)),
        f"{workloads_line(record)}\n",
    ]
    if loops is not None:
        parts.append(f"{loops_sentence(loops)}\n")
    for workload in workload_names(record):
        rows = rows_of(record, workload)
        parts.append(f"## {workload_title(rows[0])}, {run_dtype(rows)}\n")
        parts.append(markdown_table(_table(rows)))
    parts.append("## How to read the tables\n")
    parts.append(f"{READING} {memory_line(record)}".strip() + "\n")
    parts.append(f"{_checked(record)}\n")
    parts += [f"{line[0].upper()}{line[1:]}.\n" for line in not_run_lines(record)]
    parts.append(f"{_measured(record)}\n")
    return "\n".join(parts)


def _checked(record: dict[str, Any]) -> str:
    """What each contender's results were compared with, before anything was timed."""
    labels: dict[str, dict[str, None]] = {}
    for row in record["rows"]:
        if row["ratio"] is not None:
            labels.setdefault(row["verdict"]["text"], {})[row["label"]] = None
    most = max(labels, key=lambda text: len(labels[text]))
    parts = [f"{', '.join(found)}: {text}" for text, found in labels.items() if text != most]
    return (
        "Each contender's results on a small case were checked before it was timed; = means that "
        f"they agree. {'; '.join([*parts, f'all others: {most}'])}."
    )


def ranks_section(record: dict[str, Any]) -> str:
    """What a step on several local processes took."""
    table = ranks_table(record)
    return f"{markdown_table(table)}\n{table.caption}\n\n{_measured(record)}\n"


def _bold(cells: Sequence[str]) -> list[str]:
    return [f"**{cell}**" for cell in cells]


def _measured(record: dict[str, Any]) -> str:
    """Where and how a record was made."""
    revision = record["environment"].get("revision")
    at = f" at revision {revision}" if revision else ""
    command = shlex.join(record["command"])
    return f"{machine_line(record['environment'])}. Measured with `{command}`{at}."


def loops_sentence(record: dict[str, Any]) -> str:
    """How long a training iteration takes with each optimizer, relative to fused AdamW."""
    parts = [
        f"{row['ratio']:.2f} ({row['workload']}, {row['label']})"
        for row in record["rows"]
        if row["ratio"] is not None and row["contender"] != BASELINE
    ]
    if not parts:
        raise BenchError("the record of training loops has no ratio to fused AdamW")
    return (
        "A whole training iteration, relative to the same one with fused AdamW, took "
        f"{', '.join(parts)}. {_measured(record)}"
    )


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    headings = columns(
        "optimizer",
        "time per step",
        "±",
        "vs fused AdamW",
        "GB/s",
        "of memory",
        "bytes moved",
        "extra memory",
    )
    timed = sorted(headline_rows(rows), key=lambda row: row["time"]["median"])
    cells = []
    for row in timed:
        line = [
            row["label"],
            duration(row["time"]["median"]),
            spread_text(row["time"]),
            f"{row['ratio']:.2f}×",
            f"{row['bandwidth'] / 1e9:.1f}",
            "–" if row["share"] is None else f"{row['share']:.0%}",
            bytes_text(row["bytes_code"]),
            size(row["extra_bytes"] or 0),
        ]
        cells.append(_bold(line) if row["contender"] == BASELINE else line)
    return Table("", headings, cells)


def words_section() -> str:
    """What each rule moves, in words of one element."""
    adamw = PASSES["AdamW"].floor_bytes(torch.float32)
    headings = columns(
        "rule",
        "reduce reads",
        "apply reads and writes",
        "words per parameter",
        f"AdamW = {adamw // 4}",
        text=(0, 1, 2),
    )
    cells = []
    for passes, variants in _rules_by_passes().items():
        rule = variants[0].rule
        moved = [c + "↕" if c in rule.apply_writes else c for c in rule.apply_reads]
        total = passes.floor_bytes(torch.float32)
        cells.append(
            [
                ", ".join(variant.label for variant in variants),
                ", ".join(rule.reduce_reads) or "–",
                ", ".join(moved),
                str(total // 4),
                f"{total / adamw:.2f}",
            ]
        )
    return markdown_table(Table("", headings, cells))


def bytes_section() -> str:
    """What each rule moves, in bytes, compared with an AdamW whose state is float32 as well; and what it
    moves with narrow state."""
    adamw = dataclasses.replace(PASSES["AdamW"], wide_state=True)
    headings = columns(
        "rule", "fp32: reduce", "apply", "together", "vs AdamW", "bf16, fp32 state", "vs AdamW"
    )
    cells = []
    for passes, variants in _rules_by_passes().items():
        single, half = (passes.floor_bytes(t) for t in (torch.float32, torch.bfloat16))
        cells.append(
            [
                _class_names(variants),
                str(passes.reduce_bytes(torch.float32) or "–"),
                str(passes.apply_bytes(torch.float32)),
                str(single),
                f"{single / adamw.floor_bytes(torch.float32):.2f}",
                str(half),
                f"{half / adamw.floor_bytes(torch.bfloat16):.2f}",
            ]
        )
    return f"{markdown_table(Table('', headings, cells))}\n{_formats_table()}"


# `state=` and `rounding=` with the parameters' type, as columns.
SHOWN_FORMATS = (
    ("bfloat16", "nearest", torch.float32),
    ("8bit+bfloat16", "nearest", torch.float32),
    ("8bit", "nearest", torch.float32),
    ("bfloat16", "exact", torch.bfloat16),
    ("8bit", "nearest", torch.bfloat16),
)


def _formats_table() -> str:
    """Bytes that a step moves, and bytes of state, per parameter, by rule and format."""
    headings = ["rule: moved / state"]
    for state, rounding, dtype in SHOWN_FORMATS:
        exact = ", exact" if rounding == "exact" else ""
        short = "fp32" if dtype == torch.float32 else "bf16"
        headings.append(f"{short}, state {state}{exact}")
    cells = []
    for passes, variants in _rules_by_passes().items():
        line = [_class_names(variants)]
        for state, rounding, dtype in SHOWN_FORMATS:
            narrow = stored(passes, storage_of(state, rounding))
            moved, kept = narrow.floor_bytes(dtype), narrow.state_bytes(dtype)
            line.append(f"{bytes_text(moved)} / {bytes_text(kept)}")
        cells.append(line)
    return markdown_table(Table("", columns(*headings), cells))


def _class_names(variants: Sequence[NGNVariant]) -> str:
    return ", ".join(f"`{v.class_name}`{' RMS' if v.options else ''}" for v in variants)


def _rules_by_passes() -> dict[Passes, list[NGNVariant]]:
    found: dict[Passes, list[NGNVariant]] = {}
    for variant in NGN_VARIANTS.values():
        found.setdefault(PASSES[variant.label], []).append(variant)
    return found


@dataclasses.dataclass(frozen=True)
class Sources:
    """What the pages are made from: the stored records, and where the picture lies from docs/."""

    step: dict[str, Any]
    ranks: dict[str, Any]
    loops: dict[str, Any] | None
    picture: str


class Page(NamedTuple):
    """A page in docs/: its markers' name, what stands between them, and from which kinds of record."""

    name: str
    make: Callable[[Sources], str]
    kinds: tuple[str, ...] = ()


PAGES = {
    "algorithms.md": Page("words", lambda _: words_section()),
    "gpu.md": Page("bytes", lambda _: bytes_section()),
    "speed.md": Page(
        "speed", lambda s: speed_section(s.step, s.picture, s.loops), ("step", "loops")
    ),
    "ranks.md": Page("ranks", lambda s: ranks_section(s.ranks), ("ranks",)),
}


def marked(name: str, section: str) -> str:
    """A section between its markers, which Markdown does not show."""
    return f"<!-- {name}:start -->\n{section}<!-- {name}:end -->"


def replace_section(path: Path, name: str, section: str) -> tuple[str, str]:
    """The text of a page, as it is and with `section` between the markers."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from None
    start, end = marked(name, "").splitlines()
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise BenchError(f"{path} must have {start} and then {end}, once each")
    before, rest = text.split(start)
    after = rest.split(end)[1]
    return text, f"{before}{marked(name, section)}{after}"


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
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m ngn_bench.pages.readme", description=__doc__
    )
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--json", type=Path, default=Path("bench/results/reference.json"))
    parser.add_argument(
        "--loops",
        type=Path,
        default=Path("bench/results/loops.json"),
        help="the JSON of `ngn-bench train --preset loops`; may be absent",
    )
    parser.add_argument(
        "--ranks",
        type=Path,
        default=Path("bench/results/ranks.json"),
        help="the JSON of `ngn-bench ranks`",
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="the folder of the pages")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/step.png"))
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 if out of date"
    )
    args = parser.parse_args(arguments)
    try:
        return _run(args)
    except BenchError as error:
        print(f"ngn_bench.pages.readme: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    try:
        picture = args.picture.relative_to(args.docs).as_posix()
    except ValueError:
        raise BenchError(f"{args.picture} must lie below {args.docs}") from None
    record = report.read_json(args.json, "step")
    sources = Sources(
        record,
        report.read_json(args.ranks, "ranks"),
        report.read_json(args.loops, "train") if args.loops.exists() else None,
        picture,
    )
    files = {"step": args.json, "ranks": args.ranks, "loops": args.loops}
    pages = {args.readme: replace_section(args.readme, "bench", benchmark_section(record))}
    origins = {args.readme: str(args.json)}
    for file, page in PAGES.items():
        path = args.docs / file
        pages[path] = replace_section(path, page.name, page.make(sources))
        origins[path] = " and ".join(str(files[kind]) for kind in page.kinds) or "the rules"
    if args.check:
        stale = [
            f"{path} does not match {origins[path]}"
            for path, (text, wanted) in pages.items()
            if wanted != text
        ]
        if picture_source(args.picture) != plots.record_digest(record):
            stale.append(f"{args.picture} does not match {args.json}")
        for line in stale:
            print(f"{line}: run python -m ngn_bench.pages.readme")
        return 1 if stale else 0
    for path, (_, wanted) in pages.items():
        path.write_text(wanted, encoding="utf-8")
    plots.plot_step(record, args.picture)
    print(f"wrote {', '.join(map(str, pages))} and {args.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tables for people and JSON for machines."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .errors import BenchError

if TYPE_CHECKING:
    from rich.table import Table as RichTable

SCHEMA = 1
INTERRUPTED_NOTE = "not measured: interrupted"
REFRESH_SECONDS = 0.25
FEW_SAMPLES = 5
NARROWEST_TEXT = 24  # letters of a column of text that goes over several lines
RULE = 3  # letters between two columns on a terminal

Progress = Callable[[float, str], object]


def part_of(progress: Progress, index: int, count: int, name: str) -> Progress:
    """The progress of one of several parts, by its name."""

    def show(fraction: float, text: str) -> None:
        progress((index + fraction) / count, f"{name}: {text}" if text else name)

    return show


def workload_names(record: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["workload"] for row in record["rows"]))


def rows_of(record: dict[str, Any], workload: str) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if row["workload"] == workload]


def spread(time: dict[str, Any]) -> float:
    """`Summary.spread` of a time in a record."""
    return float((time["high"] - time["low"]) / 2 / time["median"])


def spread_text(time: dict[str, Any]) -> str:
    """The spread in percent, with the number of samples where that is small."""
    few = f" (n={time['samples']})" if time["samples"] < FEW_SAMPLES else ""
    return f"{spread(time):.1%}{few}"


def duration(seconds: float) -> str:
    """A time with three digits and a unit: 1.23 s, 45.6 ms, 789 µs."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def size(number: float) -> str:
    """Bytes with a unit: 283 MB, 1.13 GB."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= scale:
            return f"{_digits(number / scale)} {unit}"
    return f"{number:.0f} B"


def _digits(number: float) -> str:
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


@dataclasses.dataclass(frozen=True)
class Column:
    heading: str
    right: bool = True


def columns(*headings: str, text: Sequence[int] = (0,)) -> list[Column]:
    """Columns of numbers, but for those at the places `text`."""
    made = [Column(heading) for heading in headings]
    for place in text:
        made[place] = Column(headings[place], right=False)
    return made


@dataclasses.dataclass
class Table:
    """A titled table; the row of the index `bold` stands out."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    bold: int | None = None


def print_table(table: Table, stream: IO[str] | None = None) -> None:
    """With rich on a terminal, as aligned text elsewhere."""
    stream = stream or sys.stdout
    if stream.isatty():
        with contextlib.suppress(ImportError):
            _print_rich(table, stream)
            return
    print(plain_table(table), file=stream, flush=True)


def plain_table(table: Table) -> str:
    cells = [[column.heading for column in table.columns], *table.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    lines = [table.title] if table.title else []
    for index, row in enumerate(cells):
        aligned = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
        if index == 0:
            lines.append("  ".join("-" * width for width in widths))
    if table.caption:
        lines += textwrap.wrap(table.caption, 100)
    return "\n".join(lines) + "\n"


def fitted(table: Table, width: int) -> list[Table]:
    """The table, or parts of it that fit a width: each begins with the column of names."""
    wide = [
        max(len(cell) for cell in (column.heading, *(row[place] for row in table.rows)))
        for place, column in enumerate(table.columns)
    ]
    # Text but for the names may go over several lines.
    wide = [
        size if place == 0 or table.columns[place].right else min(size, NARROWEST_TEXT)
        for place, size in enumerate(wide)
    ]
    groups: list[list[int]] = [[0]]
    for place in range(1, len(wide)):
        used = sum(wide[k] + RULE for k in groups[-1]) + wide[place] + RULE
        if used > width and len(groups[-1]) > 1:
            groups.append([0])
        groups[-1].append(place)
    return [
        dataclasses.replace(
            table,
            title=table.title if index == 0 else f"{table.title} (continued)",
            columns=[table.columns[k] for k in places],
            rows=[[row[k] for k in places] for row in table.rows],
            caption=table.caption if index == len(groups) - 1 else "",
        )
        for index, places in enumerate(groups)
    ]


def _print_rich(table: Table, stream: IO[str]) -> None:
    from rich.console import Console

    console = Console(file=stream)
    for part in fitted(table, console.width - 1):
        console.print(_rich_table(part))
        if part.caption:
            console.print(part.caption, style="italic dim", highlight=False, markup=False)
            console.print()


def _rich_table(table: Table) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable

    shown = RichTable(
        title=table.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        title_style="bold",
    )
    for place, column in enumerate(table.columns):
        shown.add_column(
            column.heading,
            justify="right" if column.right else "left",
            no_wrap=column.right or place == 0,
        )
    for index, row in enumerate(table.rows):
        shown.add_row(*row, style="bold cyan" if index == table.bold else None)
    return shown


def markdown_table(table: Table) -> str:
    """The same table for a Markdown file."""
    rule = ["--:" if column.right else ":--" for column in table.columns]
    lines = [[column.heading for column in table.columns], rule, *table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda fraction, text: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda fraction, text: None
        return
    columns = (
        TextColumn("{task.fields[heading]}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # A refreshing thread would take time from what is measured: draw between runs instead.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    with bar:
        task = bar.add_task("", total=1.0, heading=title)
        drawn = 0.0

        def show(fraction: float, text: str) -> None:
            nonlocal drawn
            bar.update(task, completed=fraction, description=text)
            if time.monotonic() - drawn > REFRESH_SECONDS:
                bar.refresh()
                drawn = time.monotonic()

        yield show


def record(
    kind: str, command: Sequence[str], environment: dict[str, Any], **content: Any
) -> dict[str, Any]:
    """The content of a result file."""
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    return {
        "schema": SCHEMA,
        "kind": kind,
        "created": now.isoformat(),
        "command": list(command),
        "environment": environment,
        **content,
    }


def require_writable(path: Path | None) -> None:
    """Raise if a result cannot be written to `path`; called before anything is measured."""
    if path is None:
        return
    if path.is_dir():
        raise BenchError(f"cannot write {path}: it is a directory; give a file name in it")
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a result file atomically."""
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(data, indent=1, default=_plain) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from None


def as_plain(data: dict[str, Any]) -> dict[str, Any]:
    """The record as it is read back from its file."""
    plain: dict[str, Any] = json.loads(json.dumps(data, default=_plain))
    return plain


def info_lines(environment: dict[str, Any]) -> list[str]:
    """The environment for reading."""
    caches = ", ".join(f"{level} {size(number)}" for level, number in environment["caches"].items())
    memory = environment["memory"]
    lines = [
        f"revision    {environment['revision'] or 'unknown'}",
        f"python      {environment['python']} on {environment['platform']}",
        f"processor   {environment['cpu']}, {environment['cores']} core(s), {environment['simd']}",
        f"caches      {caches or 'unknown'}",
        f"memory      {'unknown' if memory is None else size(memory)}",
        f"threads     {environment['threads']}",
        f"GPUs        {', '.join(environment['gpus']) or 'none'}",
    ]
    packages = environment["packages"]
    width = max(map(len, packages)) + 1
    for package, version in packages.items():
        lines.append(f"{package:<{max(width, 12)}}{version or 'not installed'}")
    for backend, status in environment["backends"].items():
        lines.append(f"backend     {backend} on {environment['device']}: {status}")
    return lines


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} does not go into JSON")


def parse_json(path: Path, what: str = "") -> Any:
    """The content of a JSON file; `what` it is stands in errors."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {what}{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{what}{path} is not JSON: {error}") from None


def read_json(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Read a result file of ngn-bench; raise if it is anything else, or of another `kind`."""
    data = parse_json(path)
    if not isinstance(data, dict) or "schema" not in data or "kind" not in data:
        raise BenchError(f"{path} is not a result of ngn-bench: write one with --json")
    if data["schema"] != SCHEMA:
        raise BenchError(f"{path} has schema {data['schema']}; this version reads {SCHEMA}")
    environment = data.get("environment")
    if not isinstance(environment, dict) or not isinstance(environment.get("packages"), dict):
        raise BenchError(f"{path} is damaged: it does not say where it was measured")
    if kind is not None and data["kind"] != kind:
        raise BenchError(f"{path} is a result of `ngn-bench {data['kind']}`, not of `{kind}`")
    return data

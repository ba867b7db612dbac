"""Tables of a `step` result, made from its JSON record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .contenders import BASELINE, CONTENDERS, NGN_VARIANTS, is_ngn
from .report import Column, Table, duration, rows_of, size, spread_text, workload_names
from .roofline import memory_speed
from .workloads import count

COLUMNS = (
    Column("contender", right=False),
    Column("time/step"),
    Column("±"),
    Column("vs AdamW"),
    Column("GB/s"),
    Column("of memory"),
    Column("B/param"),
    Column("floor"),
    Column("state"),
    Column("extra"),
    Column("checked", right=False),
)
CAPTION = (
    "time/step: median of whole step() calls, contenders in turns; ±: half the distance between "
    "the quartiles, with the number n of samples where that is below 5. vs AdamW: ratio to torch's "
    "fused AdamW. GB/s counts the bytes that the rule must move (floor, per parameter). of memory: "
    "its share of the memory bandwidth; over 100 %, much stayed in a cache. B/param: bytes that "
    "the code moves. extra: most memory held during the step beyond parameters, gradients and "
    "state. checked: what its results were compared with; a trusted form only with itself in "
    "float64."
)


def memory_line(record: dict[str, Any]) -> str:
    """The bandwidth that shares refer to, and what it is; empty if it was not measured."""
    measured = record["memory_bandwidth"]
    speed = memory_speed(measured)
    if speed is None:
        return ""
    parts = ", ".join(f"{name} {speed / 1e9:.1f}" for name, speed in measured.items())
    return (
        f"Memory bandwidth {speed / 1e9:.1f} GB/s: the faster of copying and updating in place "
        f"({parts}) arrays that fit no cache, each in its fastest quarter, the best of the run."
    )


def workload_title(row: dict[str, Any]) -> str:
    tensors = f"{row['tensors']:,} tensor{'s' * (row['tensors'] != 1)}"
    return f"{row['workload']}: {count(row['parameters'])} parameters in {tensors}"


def headline_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for pictures: those with a ratio, without the reference where a faster form is there."""
    shown = [row for row in rows if row["ratio"] is not None]
    faster = [row for row in shown if not row["contender"].endswith(":reference")]
    return faster if any(is_ngn(row["contender"]) for row in faster) else shown


def step_tables(record: dict[str, Any]) -> list[Table]:
    """One table per workload."""
    tables = []
    device_time = any((row["time"] or {}).get("device_median") for row in record["rows"])
    columns = list(COLUMNS)
    if device_time:
        columns.insert(2, Column("on device"))
    for workload in workload_names(record):
        rows = rows_of(record, workload)
        title = f"{workload_title(rows[0])}, {rows[0]['dtype']} on {rows[0]['device']}"
        cells = [_cells(row, device_time) for row in rows]
        bold = next((i for i, row in enumerate(rows) if row["contender"] == BASELINE), None)
        tables.append(Table(title, columns, cells, bold=bold))
    if tables:
        tables[-1].caption = f"{CAPTION} {memory_line(record)}".strip()
    return tables


def _cells(row: dict[str, Any], device_time: bool) -> list[str]:
    time = row["time"]
    if time is None:
        timed = ["–"] * (5 + device_time)
    else:
        timed = [
            duration(time["median"]),
            *([duration(time["device_median"])] if device_time else []),
            spread_text(time),
            f"{row['ratio']:.2f}×" if row["ratio"] is not None else "–",
            f"{row['bandwidth'] / 1e9:.1f}",
            f"{row['share']:.0%}" if row["share"] is not None else "–",
        ]
    return [
        row["label"],
        *timed,
        f"{row['bytes_code']:g}",
        f"{row['bytes_floor']:g}",
        size(row["state_bytes"]),
        "–" if row["extra_bytes"] is None else size(row["extra_bytes"]),
        row["note"] or row["verdict"]["text"],
    ]


def not_run_lines(record: dict[str, Any]) -> list[str]:
    """Contenders that could not run or were left out, with the reason; those that share a reason
    share a line."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for refused in (record["not_run"], record["left_out"]):
        for workload, reasons in refused.items():
            for label, reason in reasons.items():
                grouped.setdefault((label, reason), []).append(workload)
    by_reason: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (label, reason), workloads in grouped.items():
        by_reason.setdefault((reason, tuple(workloads)), []).append(label)
    everywhere = tuple(record["not_run"])
    lines = []
    for (reason, places), labels in by_reason.items():
        where = "" if places == everywhere else f" (on {', '.join(places)})"
        lines.append(f"not run{where}: {_join_labels(labels)}: {reason}")
    return lines


def _join_labels(labels: list[str]) -> str:
    backends = {label.rpartition(" · ")[2] for label in labels}
    if len(labels) == len(NGN_VARIANTS) and len(backends) == 1:
        return f"all NGN rules on {backends.pop()}"
    return ", ".join(labels)


def ratio_table(record: dict[str, Any]) -> Table:
    """Workloads down, contenders across: each cell is the ratio to fused AdamW."""
    labels = {row["contender"]: row["label"] for row in record["rows"]}
    names = [name for name in labels if name != BASELINE]
    columns = [
        Column("workload", right=False),
        Column("fused AdamW"),
        *(Column(labels[name]) for name in names),
    ]
    cells = []
    for workload in workload_names(record):
        rows = {row["contender"]: row for row in rows_of(record, workload)}
        baseline = rows[BASELINE]["time"]
        line = [workload_title(rows[BASELINE]), duration(baseline["median"]) if baseline else "–"]
        for name in names:
            ratio = rows[name]["ratio"] if name in rows else None
            line.append("" if name not in rows else "–" if ratio is None else f"{ratio:.2f}×")
        cells.append(line)
    return Table("Time of a whole step(), relative to fused AdamW", columns, cells)


def slower_lines(record: dict[str, Any], rule: str = "ngnmdv1") -> list[str]:
    """How many times slower the unfused contenders are than `rule`, workload by workload."""
    lines = []
    for workload in workload_names(record):
        rows = {row["contender"]: row for row in rows_of(record, workload) if row["time"]}
        fused = next(
            (rows[f"{rule}:{b}"] for b in ("triton", "cpu") if f"{rule}:{b}" in rows), None
        )
        if fused is None:
            continue
        if fused["share"] is not None:
            lines.append(
                f"{workload}: {fused['label']} moves {fused['bandwidth'] / 1e9:.1f} GB/s, "
                f"{fused['share']:.0%} of the memory bandwidth"
            )
        for row in rows.values():
            if CONTENDERS[row["contender"].partition("/")[0]].unfused:
                times = row["time"]["median"] / fused["time"]["median"]
                lines.append(f"{workload}: {row['label']} takes {times:.1f}× as long")
    return lines

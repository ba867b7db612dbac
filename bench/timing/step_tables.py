"""Tables of a `step` result, made from its JSON record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..contenders.registry import (
    BASELINE,
    CONTENDERS,
    NGN_VARIANTS,
    base_name,
    is_ngn,
    is_reference,
    missing_package,
)
from ..environment import backend_status
from ..report import Column, Table, columns, duration, rows_of, size, spread_text, workload_names
from .roofline import memory_speed
from .workloads import count

COLUMNS = columns(
    "contender",
    "time/step",
    "±",
    "vs AdamW",
    "GB/s",
    "of memory",
    "B/param",
    "floor",
    "state",
    "extra",
    "checked",
    text=(0, -1),
)
CAPTION = (
    "time/step: median of whole step() calls, contenders in turns; ±: half the distance between "
    "the quartiles, with the number n of samples where that is below 5. vs AdamW: ratio to torch's "
    "fused AdamW. GB/s counts the bytes that the rule must move (floor, per parameter). of memory: "
    "its share of the memory bandwidth; over 100 %, much stayed in a cache. B/param: bytes that "
    "the code moves, where that is known. extra: most memory held during the step beyond "
    "parameters, gradients and state. checked: what its results were compared with; a trusted form "
    "only with itself in float64."
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


def run_dtype(rows: Sequence[dict[str, Any]]) -> str:
    """What parameters are, but for contenders that are named with a dtype of their own."""
    return next((row["dtype"] for row in rows if "@" not in row["contender"]), rows[0]["dtype"])


def bytes_text(number: float | None) -> str:
    """Bytes per parameter, with as many digits as say something."""
    return "–" if number is None else f"{round(number, 2):g}"


def headline_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for pictures: those with a ratio, without the reference where a faster form is there."""
    shown = [row for row in rows if row["ratio"] is not None]
    faster = [row for row in shown if not is_reference(row["contender"])]
    return faster if any(is_ngn(row["contender"]) for row in faster) else shown


def step_tables(record: dict[str, Any]) -> list[Table]:
    """One table per workload."""
    tables = []
    device_time = any((row["time"] or {}).get("device_median") for row in record["rows"])
    headings = list(COLUMNS)
    if device_time:
        headings.insert(2, Column("on device"))
    for workload in workload_names(record):
        rows = rows_of(record, workload)
        title = f"{workload_title(rows[0])}, {run_dtype(rows)} on {rows[0]['device']}"
        cells = [_cells(row, device_time) for row in rows]
        bold = next((i for i, row in enumerate(rows) if row["contender"] == BASELINE), None)
        tables.append(Table(title, headings, cells, bold=bold))
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
        bytes_text(row["bytes_code"]),
        bytes_text(row["bytes_floor"]),
        size(row["state_bytes"]),
        "–" if row["extra_bytes"] is None else size(row["extra_bytes"]),
        row["note"] or row["verdict"]["text"],
    ]


def contender_table(device: torch.device) -> Table:
    """Every contender, what it moves and keeps, and whether it runs here."""
    headings = columns("name", "contender", "B/param", "state", "here", text=(0, 1, -1))
    status = backend_status(device)
    running = ", ".join(backend for backend, found in status.items() if found == "ok")
    cells = []
    for name, contender in CONTENDERS.items():
        if is_ngn(name) and not is_reference(name):
            continue  # a rule has one row for all backends
        cells.append(
            [
                name.removesuffix(":reference"),
                contender.label.removesuffix(" · reference"),
                f"{contender.passes.floor_bytes(torch.float32):g}",
                f"{contender.passes.state_bytes(torch.float32):g}",
                running if is_ngn(name) else missing_package(contender.package) or "yes",
            ]
        )
    reasons = [f"{backend}: {found}." for backend, found in status.items() if found != "ok"]
    caption = (
        "B/param, state: bytes that a step must move and that stay, per float32 parameter. here: the "
        "backends that run, or what is missing. A rule's name may go on with a backend, the formats "
        "of m and v, the rounding of parameters, and their type: ngnmdv1:cpu/8bit+bfloat16, "
        "ngnmdv1/bfloat16/exact@bfloat16."
    )
    return Table(f"Contenders on {device}", headings, cells, " ".join([caption, *reasons]))


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
    """Contenders down, workloads across: each cell is the ratio to fused AdamW, whose own row has
    the times; and the bytes of state per parameter on the largest workload."""
    workloads = {name: rows_of(record, name) for name in workload_names(record)}
    headings = columns("optimizer", "state", *workloads)
    largest_first = sorted(workloads.values(), key=lambda rows: -rows[0]["parameters"])
    labels = {row["contender"]: row["label"] for rows in largest_first for row in rows}
    order = sorted(labels, key=lambda name: name != BASELINE)
    cells = []
    for name in order:
        found = [{row["contender"]: row for row in rows}.get(name) for rows in workloads.values()]
        timed = [row for row in found if row is not None and row["ratio"] is not None]
        if not timed:
            continue
        largest = max(timed, key=lambda row: row["parameters"])
        kept = largest["state_bytes"] / largest["parameters"]
        cells.append([labels[name], f"{kept:.2f}", *map(_ratio_cell, found)])
    caption = (
        "Time of a whole step() divided by that of torch's fused AdamW, whose own times stand in its "
        "row; all contenders of a workload took turns in one process. state: bytes per parameter "
        "that the optimizer keeps. " + workloads_line(record)
    )
    return Table("Time of a step, relative to fused AdamW", headings, cells, caption, bold=0)


def _ratio_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["ratio"] is None:
        return "–"
    if row["contender"] == BASELINE:
        return duration(row["time"]["median"])
    return f"{row['ratio']:.2f}"


def workloads_line(record: dict[str, Any]) -> str:
    """What the workloads of a record are, in a sentence."""
    titles = [workload_title(rows_of(record, name)[0]) for name in workload_names(record)]
    return f"Workloads: {'; '.join(titles)}."


def slower_lines(record: dict[str, Any], rule: str = "ngnmdv1") -> list[str]:
    """How many times slower the unfused contenders are than `rule`, workload by workload."""
    lines = []
    for workload in workload_names(record):
        rows = {row["contender"]: row for row in rows_of(record, workload) if row["time"]}
        fused = next(
            (rows[f"{rule}:{b}"] for b in ("cuda", "triton", "cpu") if f"{rule}:{b}" in rows), None
        )
        if fused is None:
            continue
        if fused["share"] is not None:
            lines.append(
                f"{workload}: {fused['label']} moves {fused['bandwidth'] / 1e9:.1f} GB/s, "
                f"{fused['share']:.0%} of the memory bandwidth"
            )
        for row in rows.values():
            contender = CONTENDERS[base_name(row["contender"])]
            if contender.unfused or contender.opaque:
                times = row["time"]["median"] / fused["time"]["median"]
                lines.append(f"{workload}: {row['label']} takes {times:.1f}× as long")
    return lines

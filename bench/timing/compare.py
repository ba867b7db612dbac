"""`ngn-bench compare`: did anything become slower between two result files?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..contenders.registry import BASELINE
from ..errors import BenchError
from ..report import INTERRUPTED_NOTE, Table, columns, duration, spread

THRESHOLD = 0.05
KINDS = ("step", "train")
METRICS = ("time", "ratio")

Key = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A row that both files have. `band` is the relative change that noise can explain."""

    workload: str
    label: str
    old: float
    new: float
    band: float

    @property
    def relative(self) -> float:
        return self.new / self.old - 1

    @property
    def verdict(self) -> str:
        if abs(self.relative) <= self.band:
            return "same"
        return "slower" if self.relative > 0 else "faster"


@dataclass(frozen=True)
class Comparison:
    """Rows timed in both results; what was timed once and is `broken` now, with the reason; and
    what is `missing` in one of them."""

    changes: list[Change]
    broken: list[str]
    missing: list[str]

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "slower"]


def compare(
    old: dict[str, Any], new: dict[str, Any], threshold: float = THRESHOLD, metric: str = "time"
) -> Comparison:
    """Match the rows of two records and distinguish changes from noise.

    The noise band of a row is the sum of both runs' spreads (half the distance between the
    quartiles), and at least `threshold`. The metric "ratio" compares ratios to fused AdamW, which
    also means something between machines; to its band, fused AdamW's own spreads are added.
    """
    if old["kind"] != new["kind"] or old["kind"] not in KINDS:
        raise BenchError(
            f"cannot compare a {old['kind']!r} result with a {new['kind']!r} one: "
            f"both must come from `ngn-bench {' or '.join(KINDS)}`"
        )
    try:
        return _compare(old, new, threshold, metric)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise BenchError(f"a result file is damaged: {error!r} in a row") from None


def _compare(old: dict[str, Any], new: dict[str, Any], threshold: float, metric: str) -> Comparison:
    old_rows, new_rows = _timed_rows(old, metric), _timed_rows(new, metric)
    failures = _failures(old_rows, new)
    broken = [
        f"no longer timed: {_name(key)}: {failures[key]}"
        for key in old_rows
        if key not in new_rows and key in failures
    ]
    shared = [key for key in new_rows if key in old_rows]
    if not shared and not broken:
        raise BenchError("the two results share no workload and contender that was timed in both")
    changes = [
        Change(
            key[0],
            new_rows[key]["label"],
            _value(old_rows[key], metric),
            _value(new_rows[key], metric),
            max(threshold, _noise(old_rows, key, metric) + _noise(new_rows, key, metric)),
        )
        for key in shared
    ]
    missing = [
        f"only in the old result: {_name(key)}"
        for key in old_rows
        if key not in new_rows and key not in failures
    ]
    missing += [f"only in the new result: {_name(key)}" for key in new_rows if key not in old_rows]
    return Comparison(changes, broken, missing)


Rows = dict[Key, dict[str, Any]]


def _key(row: dict[str, Any], contender: str | None = None) -> Key:
    """What makes two rows comparable; a training row also has its batches described."""
    described = [row["description"]] if "description" in row else []
    return (row["workload"], contender or row["contender"], row["dtype"], row["device"], *described)


def _timed_rows(record: dict[str, Any], metric: str) -> Rows:
    return {
        _key(row): row
        for row in record["rows"]
        if row["time"] is not None and (metric == "time" or row["ratio"] is not None)
    }


def _failures(old_rows: Rows, record: dict[str, Any]) -> dict[Key, str]:
    """Contenders of the run that have no time, with the reason."""
    failures = {
        _key(row): row["note"]
        for row in record["rows"]
        if row["time"] is None and row["note"] != INTERRUPTED_NOTE
    }
    # What could not even run has no row, only a label: it is found by the old one's.
    runs = {
        (row["workload"], row["dtype"], row["device"])
        for row in record["rows"]
        if not _own_dtype(row)
    }
    refused = record.get("not_run", {})
    for key, row in old_rows.items():
        reason = refused.get(row["workload"], {}).get(row["label"])
        same_run = (row["workload"], row["dtype"], row["device"]) in runs
        if reason is not None and (same_run or _own_dtype(row)):
            failures[key] = reason
    return failures


def _own_dtype(row: dict[str, Any]) -> bool:
    """Whether a contender has its parameters in a dtype of its own, which its label says."""
    return "@" in row["contender"]


def _value(row: dict[str, Any], metric: str) -> float:
    return float(row["time"]["median"] if metric == "time" else row["ratio"])


def _noise(rows: Rows, key: Key, metric: str) -> float:
    noise = spread(rows[key]["time"])
    baseline = _key(rows[key], BASELINE)
    if metric == "ratio" and baseline != key and baseline in rows:
        noise += spread(rows[baseline]["time"])
    return noise


def _name(key: Key) -> str:
    return " · ".join(key)


def environment_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between the machines and versions of two records."""
    before, after = old["environment"], new["environment"]
    lines = []
    for name in ("cpu", "gpus", "threads", "simd", "python"):
        if before.get(name) != after.get(name):
            lines.append(f"{name}: {before.get(name)} → {after.get(name)}")
    for package in sorted({*before["packages"], *after["packages"]}):
        versions = [environment["packages"].get(package) for environment in (before, after)]
        if versions[0] != versions[1]:
            lines.append(f"{package}: {versions[0]} → {versions[1]}")
    return lines


def comparison_table(comparison: Comparison, metric: str) -> Table:
    show = duration if metric == "time" else (lambda ratio: f"{ratio:.2f}×")
    headings = columns(
        "workload", "contender", "old", "new", "change", "noise band", "", text=(0, 1, -1)
    )
    rows = [
        [
            change.workload,
            change.label,
            show(change.old),
            show(change.new),
            f"{change.relative:+.1%}",
            f"±{change.band:.0%}",
            "" if change.verdict == "same" else change.verdict,
        ]
        for change in comparison.changes
    ]
    return Table(f"Change of {metric} per step", headings, rows)

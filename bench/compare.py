"""`ngn-bench compare`: did anything become slower between two result files?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import BenchError
from .report import Column, Table, duration, spread

THRESHOLD = 0.05
KINDS = ("step", "train")
METRICS = ("time", "ratio")

Key = tuple[str, str, str, str]


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
    changes: list[Change]
    missing: list[str]

    @property
    def regressions(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "slower"]


def compare(
    old: dict[str, Any], new: dict[str, Any], threshold: float = THRESHOLD, metric: str = "time"
) -> Comparison:
    """Match the rows of two records and tell changes from noise.

    The noise band of a row is the sum of both runs' spreads (half the distance between the
    quartiles), and at least `threshold`. The metric "ratio" compares ratios to fused AdamW, which
    also means something between machines.
    """
    if old["kind"] != new["kind"] or old["kind"] not in KINDS:
        raise BenchError(
            f"cannot compare a {old['kind']!r} result with a {new['kind']!r} one: "
            f"both must come from `ngn-bench {' or '.join(KINDS)}`"
        )
    old_rows, new_rows = _timed_rows(old, metric), _timed_rows(new, metric)
    shared = [key for key in new_rows if key in old_rows]
    if not shared:
        raise BenchError("the two results share no workload and contender that was timed in both")
    changes = [
        Change(
            key[0],
            new_rows[key]["label"],
            _value(old_rows[key], metric),
            _value(new_rows[key], metric),
            max(threshold, spread(old_rows[key]["time"]) + spread(new_rows[key]["time"])),
        )
        for key in shared
    ]
    missing = [f"only in the old result: {_name(key)}" for key in old_rows if key not in new_rows]
    missing += [f"only in the new result: {_name(key)}" for key in new_rows if key not in old_rows]
    return Comparison(changes, missing)


def _timed_rows(record: dict[str, Any], metric: str) -> dict[Key, dict[str, Any]]:
    try:
        return {
            (row["workload"], row["contender"], row["dtype"], row["device"]): row
            for row in record["rows"]
            if row["time"] is not None and (metric == "time" or row["ratio"] is not None)
        }
    except (KeyError, TypeError) as error:
        raise BenchError(f"a result file is damaged: {error!r} is missing in a row") from None


def _value(row: dict[str, Any], metric: str) -> float:
    return float(row["time"]["median"] if metric == "time" else row["ratio"])


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
    columns = [
        Column("workload", right=False),
        Column("contender", right=False),
        Column("old"),
        Column("new"),
        Column("change"),
        Column("noise band"),
        Column("", right=False),
    ]
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
    return Table(f"Change of {metric} per step", columns, rows)

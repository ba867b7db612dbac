"""What the memory allows: bandwidths of this machine, and each rule's shortest step from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contenders.traffic import stored_rules
from ..environment import cache_bytes, memory_free
from ..errors import BenchError
from ..report import Progress, Table, columns, size
from .measure import Clock, Lane, make_clock, measure, summarise

KERNELS = ("read", "copy", "triad", "update")
MEMORY_KERNELS = ("copy", "update")


def large_elements(device: torch.device) -> int:
    """Float32 elements of an array that does not fit any cache."""
    if device.type == "cuda":
        return 128 * 2**20
    last_level = max(cache_bytes().values(), default=32 * 2**20)
    return min(64 * 2**20, max(16 * 2**20, last_level))


def bandwidth_lanes(
    elements: int, device: torch.device, kernels: Sequence[str] = KERNELS
) -> tuple[list[Lane], dict[str, int]]:
    """Lanes that read, copy, compute a = b + s·c or a = s·a, and the bytes that each moves."""
    a = torch.ones(elements, device=device)
    b = torch.ones_like(a)
    c = torch.ones_like(a) if "triad" in kernels else b
    runs: dict[str, tuple[Callable[[], Tensor], int]] = {
        "read": (lambda: torch.sum(b), 1),
        "copy": (lambda: a.copy_(b), 2),
        "triad": (lambda: torch.add(b, c, alpha=3.0, out=a), 3),
        "update": (lambda: a.mul_(1.0), 2),
    }
    lanes = [Lane(name, runs[name][0]) for name in kernels]
    return lanes, {name: runs[name][1] * 4 * elements for name in kernels}


def speeds(lanes: Sequence[Lane], moved: dict[str, int]) -> dict[str, float]:
    """Bytes per second of each lane in its fastest quarter: noise only ever slows it down."""
    return {
        lane.name: moved[lane.name] / summary.busy_low
        for lane in lanes
        if (summary := summarise(lane))
    }


def memory_speed(bandwidth: dict[str, float]) -> float | None:
    """The memory bandwidth of a run: the faster of copying and updating in place.

    Optimizers update in place. A copy reaches less on most CPUs, where it also fetches the lines
    that it overwrites.
    """
    return max((bandwidth[name] for name in MEMORY_KERNELS if name in bandwidth), default=None)


def _bandwidths(
    elements: int, device: torch.device, clock: Clock, seconds: float
) -> dict[str, float] | None:
    """Bytes per second of each kernel on arrays of `elements`; None if interrupted."""
    try:
        lanes, moved = bandwidth_lanes(elements, device)
    except KeyboardInterrupt:
        return None
    return speeds(lanes, moved) if measure(lanes, clock, seconds) else None


@dataclass(frozen=True)
class Floor:
    """Shortest time of a rule's two passes, in seconds per parameter."""

    rule: str
    bytes_per_parameter: float
    reduce: float
    apply: float


def floors(
    speed: float,
    dtype: torch.dtype,
    states: Iterable[str] = ("float32",),
    rounding: str = "nearest",
) -> list[Floor]:
    """Each rule's floor, in each format: all of its bytes at the memory's speed."""
    return [
        Floor(
            rule,
            passes.floor_bytes(dtype),
            passes.reduce_bytes(dtype) / speed,
            passes.apply_bytes(dtype) / speed,
        )
        for rule, passes in stored_rules(states, rounding).items()
    ]


SMALLEST_ELEMENTS = 2**12


def run_roofline(
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    largest: int | None = None,
    progress: Progress = lambda fraction, text: None,
    states: Sequence[str] = ("float32",),
    rounding: str = "nearest",
) -> dict[str, Any]:
    """Bandwidths over array sizes, and the floors at the largest size, which fits no cache."""
    stored_rules(states, rounding)  # an unknown format is an error before anything is measured
    largest = largest or large_elements(device)
    free = memory_free(device)
    if free is not None and 3 * 4 * largest > free:
        raise BenchError(
            f"three arrays of {size(4 * largest)} do not fit the {size(free)} that are free on "
            f"{device}: take a smaller --largest"
        )
    sizes = [largest]
    while sizes[0] // 2 >= SMALLEST_ELEMENTS:
        sizes.insert(0, sizes[0] // 2)
    clock = make_clock(device)
    sweep: list[dict[str, float]] = []
    interrupted = False
    # The largest size carries the floors, so it comes first and gets a third of the time.
    for index, elements in enumerate(reversed(sizes)):
        progress(index / len(sizes), f"arrays of {size(4 * elements)}")
        share = seconds / 3 if index == 0 else seconds * 2 / 3 / max(1, len(sizes) - 1)
        found = _bandwidths(elements, device, clock, share)
        if found is None:
            interrupted = True
            break
        sweep.insert(0, {"bytes": 4 * elements, **found})
    speed = memory_speed(sweep[-1]) if sweep else None
    return {
        "sweep": sweep,
        "floors": floors(speed, dtype, states, rounding) if speed else [],
        "dtype": str(dtype).removeprefix("torch."),
        "interrupted": interrupted,
    }


def roofline_tables(record: dict[str, Any]) -> list[Table]:
    """Bandwidth by array size, and the floor of each rule, from the JSON record."""
    headings = columns("array", *(f"{kernel} GB/s" for kernel in KERNELS), text=())
    rows = [
        [size(point["bytes"]), *(f"{point[kernel] / 1e9:.1f}" for kernel in KERNELS)]
        for point in record["sweep"]
    ]
    tables = [Table("Memory bandwidth by array size", headings, rows)]
    if not record["floors"]:
        return tables
    adamw = next(f["reduce"] + f["apply"] for f in record["floors"] if f["rule"] == "AdamW")
    headings = columns("rule", "B/param", "reduce", "apply", "ns/param", "vs AdamW")
    cells = []
    for floor in record["floors"]:
        total = floor["reduce"] + floor["apply"]
        cells.append(
            [
                floor["rule"],
                f"{floor['bytes_per_parameter']:g}",
                f"{floor['reduce'] * 1e9:.2f}",
                f"{floor['apply'] * 1e9:.2f}",
                f"{total * 1e9:.2f}",
                f"{total / adamw:.2f}×",
            ]
        )
    caption = (
        "ns per parameter: the rule's bytes at the faster of copy and update in place on the "
        "largest arrays, each in its fastest quarter. No step of a model that fits no cache can be "
        "much shorter."
    )
    tables.append(Table(f"Shortest step, {record['dtype']}", headings, cells, caption))
    return tables

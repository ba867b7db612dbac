"""What the launches of any engine may touch, and what they have moved."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from ngn_kernels.backends.gpu import GpuBucket

from .memory import Memory, Traffic
from .ptx import Kernel
from .simulator import launch


class Launched(NamedTuple):
    kernel: str
    blocks: int
    traffic: Traffic


class Simulation:
    """Fill `memory` before a launch; `order`, `seed` and `check_races` say how its blocks run."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.order = "sequential"
        self.seed = 0
        self.check_races = True
        self.launches: list[Launched] = []

    def run(
        self, name: str, kernel: Kernel, blocks: int, threads: int, values: list[Any], shared: int
    ) -> None:
        traffic = launch(
            kernel,
            blocks,
            threads,
            values,
            self.memory,
            shared=shared,
            order=self.order,
            seed=self.seed,
            check_races=self.check_races,
        )
        self.launches.append(Launched(name, blocks, traffic))


def memory_of(prepared: GpuBucket, reduces: bool) -> Memory:
    """What a launch may touch, and what it may write."""
    inputs, report = prepared.memory.inputs, prepared.memory.report
    memory = Memory()
    for i, row in enumerate(prepared.bucket.rows):
        gradient = row.gradient(row.param.grad)
        columns = {"x": row.x, "g": gradient, "m": row.m, "v": row.v, "step": row.step}
        columns |= {"m_scale": row.m_scale, "v_scale": row.v_scale, "remainder": row.remainder}
        columns["d"] = row.direction
        for column, tensor in columns.items():
            if tensor is not None:
                memory.register(tensor, f"{column}{i}", read_only=reduces or column in "gd")
    fixed = {"table": prepared.table, "chunks": prepared.chunks, "groups": inputs.groups}
    for label, tensor in fixed.items():
        memory.register(tensor, label, read_only=True)
    memory.register(inputs.scalars, "inputs", read_only=True)
    memory.register(prepared.memory.sums, "sums", read_only=not reduces)
    if prepared.memory.totals is not prepared.memory.sums:
        memory.register(prepared.memory.totals, "totals", read_only=True)
    if reduces:
        memory.register(prepared.partials, "partials")
        memory.register(prepared.reduce_ticket, "ticket")
    else:
        memory.register(report.counts, "counts")
        memory.register(report.sizes, "sizes")
        memory.register(prepared.apply_ticket, "ticket")
    return memory


def column_bytes(launches: list[Launched]) -> dict[str, Counter[str]]:
    """Bytes read and written, by kernel and column: `{"apply": {"read x": ...}}`."""
    found: dict[str, Counter[str]] = {}
    for launched in launches:
        counter = found.setdefault(launched.kernel, Counter())
        for kind in ("read", "written"):
            for name, size in getattr(launched.traffic, kind).items():
                counter[f"{kind} {name.rstrip('0123456789')}"] += size
    return found

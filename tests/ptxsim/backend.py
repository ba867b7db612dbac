"""The Triton backend with compiled kernels, its tensors on the CPU, its GPU simulated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ngn_kernels.backends.triton_kernels as kernels
from ngn_kernels.backends.triton import TritonBackend
from ngn_kernels.plan import Bucket
from ngn_kernels.rules import Rule

from .driver import Launched, SimulatedGPU
from .memory import Memory


class SimulatedBackend(TritonBackend):
    """Registers what each launch may touch, and what it may write, before it runs."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        super().__init__(kernels, gpu.get_current_target, device_type="cpu")
        self.gpu = gpu

    def _launch(
        self, name: str, bucket: Bucket, rule: Rule, blocks: int, args: tuple[Any, ...]
    ) -> None:
        tables, board = bucket.prepared, bucket.board
        reduces = name == "reduce"
        memory = Memory()
        for i, row in enumerate(bucket.rows):
            columns = {"x": row.x, "g": row.gradient(), "m": row.m, "v": row.v, "step": row.step}
            for column, tensor in columns.items():
                if tensor is not None:
                    memory.register(tensor, f"{column}{i}", read_only=reduces or column == "g")
        fixed = {"table": tables.table, "chunks": tables.chunks, "groups": board.groups}
        for label, tensor in fixed.items():
            memory.register(tensor, label, read_only=True)
        memory.register(board.scalars, "scalars", read_only=reduces)
        memory.register(bucket.sums, "sums", read_only=not reduces)
        if reduces:
            memory.register(tables.partials, "partials")
            memory.register(tables.reduce_ticket, "ticket")
        else:
            memory.register(board.report, "report")
            memory.register(tables.apply_ticket, "ticket")
        self.gpu.memory = memory
        super()._launch(name, bucket, rule, blocks, args)


def column_bytes(launches: list[Launched]) -> dict[str, Counter[str]]:
    """Bytes read and written, by kernel and column: `{"apply": {"read x": ...}}`."""
    found: dict[str, Counter[str]] = {}
    for launched in launches:
        counter = found.setdefault(launched.kernel, Counter())
        for kind in ("read", "written"):
            for name, size in getattr(launched.traffic, kind).items():
                counter[f"{kind} {name.rstrip('0123456789')}"] += size
    return found

"""The Triton backend with compiled kernels, its tensors on the CPU, its GPU simulated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ngn_kernels.backends.triton.kernels as kernels
from ngn_kernels.backends.triton import TritonBackend, TritonBucket
from ngn_kernels.rules import Rule

from .driver import Launched, SimulatedGPU
from .memory import Memory


class SimulatedBackend(TritonBackend):
    """Registers what each launch may touch, and what it may write, before it runs."""

    def __init__(self, gpu: SimulatedGPU, kernels: Any = kernels) -> None:
        super().__init__(kernels, gpu.get_current_target, device_type="cpu")
        self.gpu = gpu

    def launch(
        self, prepared: TritonBucket, name: str, rule: Rule, args: tuple[Any, ...], index: int = -1
    ) -> None:
        tables, inputs, report = prepared, prepared.memory.inputs, prepared.memory.report
        reduces = name == "reduce"
        memory = Memory()
        for i, row in enumerate(prepared.bucket.rows):
            gradient = row.gradient(row.param.grad)
            columns = {"x": row.x, "g": gradient, "m": row.m, "v": row.v, "step": row.step}
            columns |= {"m_scale": row.m_scale, "v_scale": row.v_scale, "remainder": row.remainder}
            columns["d"] = row.direction
            for column, tensor in columns.items():
                if tensor is not None:
                    memory.register(tensor, f"{column}{i}", read_only=reduces or column in "gd")
        fixed = {"table": tables.table, "chunks": tables.chunks, "groups": inputs.groups}
        for label, tensor in fixed.items():
            memory.register(tensor, label, read_only=True)
        memory.register(inputs.scalars, "inputs", read_only=True)
        memory.register(prepared.memory.sums, "sums", read_only=not reduces)
        if prepared.memory.totals is not prepared.memory.sums:
            memory.register(prepared.memory.totals, "totals", read_only=True)
        if reduces:
            memory.register(tables.partials, "partials")
            memory.register(tables.reduce_ticket, "ticket")
        else:
            memory.register(report.counts, "counts")
            memory.register(report.sizes, "sizes")
            memory.register(tables.apply_ticket, "ticket")
        self.gpu.memory = memory
        super().launch(prepared, name, rule, args, index)


def column_bytes(launches: list[Launched]) -> dict[str, Counter[str]]:
    """Bytes read and written, by kernel and column: `{"apply": {"read x": ...}}`."""
    found: dict[str, Counter[str]] = {}
    for launched in launches:
        counter = found.setdefault(launched.kernel, Counter())
        for kind in ("read", "written"):
            for name, size in getattr(launched.traffic, kind).items():
                counter[f"{kind} {name.rstrip('0123456789')}"] += size
    return found

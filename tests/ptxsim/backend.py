"""The Triton engine with compiled kernels, its tensors on the CPU, its GPU simulated."""

from __future__ import annotations

from typing import Any

import ngn_kernels.backends.triton.kernels as kernels
from ngn_kernels.backends.triton import TritonBackend, TritonBucket
from ngn_kernels.rules import Rule

from .driver import SimulatedGPU
from .traffic import memory_of


class SimulatedBackend(TritonBackend):
    """Registers what each launch may touch before it runs."""

    def __init__(self, gpu: SimulatedGPU, kernels: Any = kernels) -> None:
        super().__init__(kernels, gpu.get_current_target, device_type="cpu")
        self.gpu = gpu

    def launch(
        self, prepared: TritonBucket, name: str, rule: Rule, args: tuple[Any, ...], index: int = -1
    ) -> None:
        self.gpu.memory = memory_of(prepared, name == "reduce")
        super().launch(prepared, name, rule, args, index)

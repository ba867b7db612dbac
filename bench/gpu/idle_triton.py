"""A driver for Triton without a GPU: kernels are compiled, cached and bound; launches do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton.runtime
from triton.backends.compiler import GPUTarget

import ngn_kernels.backends.triton.kernels as kernels
from ngn_kernels.backends.triton import TritonBackend


class IdleTriton:
    """Only the upload of a binary and the launch itself are left out."""

    def __init__(self, arch: int = 90) -> None:
        self.utils = self
        self._target = GPUTarget("cuda", arch, 32)

    @contextmanager
    def active(self) -> Iterator[Any]:
        """Launches go here meanwhile."""
        driver = triton.runtime.driver
        before = dict(vars(driver))
        driver.set_active(self)
        try:
            yield self
        finally:
            vars(driver).clear()
            vars(driver).update(before)

    def backend(self) -> TritonBackend:
        """For tensors on the CPU."""
        return TritonBackend(kernels, self.get_current_target, device_type="cpu")

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps what it has compiled by device: each architecture is one.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        module, function, registers, spills, most_threads = None, None, 0, 0, 1024
        return module, function, registers, spills, most_threads

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What runs one compiled kernel; called as Triton's own launchers are."""
        return lambda *arguments: None

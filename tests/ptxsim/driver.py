"""A Triton driver whose GPU is the simulator: the whole path of a launch runs without a device.

Triton's own argument binding, specialisation, compiler and kernel cache take part; only the
upload of the binary and the launch itself are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from .ptx import Kernel
from .traffic import Simulation

_kernels: dict[str, Kernel] = {}


class SimulatedGPU(Simulation):
    """A GPU for Triton."""

    name = "triton"

    def __init__(self, arch: int = 90) -> None:
        super().__init__()
        self.utils = self
        self._target = GPUTarget("cuda", arch, 32)

    @contextmanager
    def active(self) -> Iterator[SimulatedGPU]:
        """Launches go here meanwhile."""
        before = dict(vars(driver))
        driver.set_active(self)
        try:
            yield self
        finally:
            vars(driver).clear()
            vars(driver).update(before)

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
        if metadata.hash not in _kernels:
            file = get_cache_manager(metadata.hash).get_file(f"{source.name[:150]}.ptx")
            _kernels[metadata.hash] = Kernel(Path(file).read_text())
        kernel = _kernels[metadata.hash]
        given = [i for i, kind in enumerate(source.signature.values()) if kind != "constexpr"]

        def run(blocks: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            assert y == z == 1
            _packed_metadata, _launch_metadata, _enter, _exit, *arguments = rest
            values = [arguments[i] for i in given]
            # Triton appends pointers to scratch memory, which these kernels do not use.
            values += [0] * (len(kernel.parameters) - len(values))
            threads = metadata.num_warps * self._target.warp_size
            self.run(metadata.name, kernel, blocks, threads, values, metadata.shared)

        return run

"""A Triton driver whose GPU is the simulator: the whole path of a launch runs without a device.

Triton's own argument binding, specialisation, compiler and kernel cache take part; only the
upload of the binary and the launch itself are replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ngn_bench.gpu.idle_triton import IdleTriton
from triton.runtime.cache import get_cache_manager

from .ptx import Kernel
from .traffic import Simulation

_kernels: dict[str, Kernel] = {}


class SimulatedGPU(Simulation, IdleTriton):
    """A GPU for Triton."""

    name = "triton"

    def __init__(self, arch: int = 90) -> None:
        Simulation.__init__(self)
        IdleTriton.__init__(self, arch)

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

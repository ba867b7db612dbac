"""The CUDA engine on a simulated GPU: the launcher's own driver calls, with a driver that stands in.

The PTX is that of the very image that the module carries.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from typing import Any

from ngn_bench.gpu.stub_driver import StubDriver

from ngn_kernels.backends.cuda import CudaBackend, CudaBucket
from ngn_kernels.planning.plan import Memory as PlanMemory
from ngn_kernels.planning.rows import Bucket
from ngn_kernels.rules import Rule

from .image import ptx_of
from .ptx import Kernel, modules
from .traffic import Simulation, memory_of

MAGIC = 0xBA55ED50
_images: dict[int, dict[str, Kernel]] = {}


def image_at(address: int) -> bytes:
    """An image of which the driver is given the address only: its head says how long it is."""
    magic, _, head, size = struct.unpack("<IHHQ", ctypes.string_at(address, 16))
    assert magic == MAGIC
    return ctypes.string_at(address, head + size)


class SimulatedCuda(Simulation):
    """A GPU whose driver hands launches to the simulator; `change` may replace a kernel's PTX."""

    name = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.driver = StubDriver(self._load, self._launch)
        self.error: BaseException | None = None  # of a launch, which the driver cannot carry
        self.change: Any = None
        self._kernels: dict[str, Kernel] = {}

    def _load(self, device: int, address: int) -> int:
        image = image_at(address)
        key = zlib.crc32(image)
        if key not in _images:
            _images[key] = {n: Kernel(part) for n, part in modules(ptx_of(image)).items()}
        self._kernels = _images[key]
        return 0

    def _launch(
        self, device: int, name: bytes, blocks: int, threads: int, stream: int, argument: int
    ) -> int:
        try:
            kernel = self._kernels[name.decode()]
            values = [ctypes.string_at(argument, kernel.parameter_bytes)]
            kind = name.decode().split("_")[1]
            self.run(kind, kernel, blocks, threads, values, 0)
        except BaseException as error:
            self.error = error
            return 719
        return 0


class SimulatedCudaBackend(CudaBackend):
    """Registers what each launch may touch before it runs."""

    def __init__(self, gpu: SimulatedCuda) -> None:
        super().__init__(gpu.driver.engine, lambda device: 0, device_type="cpu")
        self.gpu = gpu

    def prepare(
        self, bucket: Bucket, memory: PlanMemory, rule: Rule, rounds: tuple[Rule | None, ...]
    ) -> CudaBucket:
        return SimulatedCudaBucket(self, bucket, memory, rule, rounds)


class SimulatedCudaBucket(CudaBucket):
    def __init__(self, backend: SimulatedCudaBackend, *rest: Any) -> None:
        super().__init__(backend, *rest)
        self.gpu = backend.gpu

    def reduce(self, index: int) -> None:
        self._run(True, lambda: super(SimulatedCudaBucket, self).reduce(index))

    def apply(self, last: bool) -> None:
        self._run(False, lambda: super(SimulatedCudaBucket, self).apply(last))

    def _run(self, reduces: bool, launch: Any) -> None:
        self.gpu.memory = memory_of(self, reduces)
        try:
            launch()
        except RuntimeError:
            error, self.gpu.error = self.gpu.error, None
            if error is not None:
                raise error from None
            raise

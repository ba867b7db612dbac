"""Fused GPU kernels of CUDA C++, for NVIDIA: csrc/cuda, compiled with the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch

from ..extension import why_missing
from ..planning.plan import Memory
from ..planning.rows import Bucket
from ..rules import Rule
from . import Unavailable
from .gpu import GpuBackend, GpuBucket

if why_missing("_cuda") is None:
    from .. import _cuda

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class CudaBackend(GpuBackend):
    name = "cuda"

    def __init__(
        self, engine: _cuda.Engine, stream: Callable[[int], int], device_type: str = "cuda"
    ) -> None:
        """`stream` returns torch's current stream of a device, as a number for the driver."""
        super().__init__(device_type, without_gpu="a simulator")
        self.engine, self.stream = engine, stream

    def refusal(self, device: torch.device) -> str | None:
        try:
            self.engine.load(device.index or 0)
        except _cuda.DriverError as error:
            return (
                f"{device} does not take the CUDA kernels: {error}; they are code for "
                f"sm_{_cuda.TARGETS.replace(' ', ', sm_')} by nvcc {_cuda.COMPILER}; a newer driver "
                "may take them, or a build by an nvcc of this driver's CUDA version"
            )
        return None

    def prepare(
        self, bucket: Bucket, memory: Memory, rule: Rule, rounds: tuple[Rule | None, ...]
    ) -> CudaBucket:
        return CudaBucket(self, bucket, memory, rule, rounds)


class CudaBucket(GpuBucket):
    """A bucket with its launches, whose arguments are in the driver's form already."""

    def __init__(
        self,
        backend: CudaBackend,
        bucket: Bucket,
        memory: Memory,
        rule: Rule,
        rounds: tuple[Rule | None, ...],
    ) -> None:
        super().__init__(bucket, memory, rule, rounds)
        self._device = self.key.device.index or 0
        self._stream = backend.stream
        launch = partial(self._launch, backend.engine, memory)
        self._reduce = [None if r is None else launch(r, updates=False) for r in rounds]
        self._apply = launch(rule, updates=True)

    def _launch(
        self, engine: _cuda.Engine, memory: Memory, rule: Rule, updates: bool
    ) -> _cuda.Launch:
        inputs, report, key = memory.inputs, memory.report, self.key
        return _cuda.Launch(
            engine=engine,
            device=self._device,
            updates=updates,
            rule=rule.flags,
            table=self.table.data_ptr(),
            rows=len(self.bucket.rows),
            chunks=self.chunks.data_ptr(),
            chunk_count=self.n_chunks,
            chunk_size=self.chunk_size,
            groups=inputs.groups.data_ptr(),
            group_count=len(inputs.groups),
            inputs=inputs.scalars.data_ptr(),
            sums=memory.sums.data_ptr(),
            totals=memory.totals.data_ptr(),
            bucket_count=len(memory.sums),
            index=memory.bucket_index,
            partials=self.partials.data_ptr(),
            counts=report.counts.data_ptr(),
            sizes=report.sizes.data_ptr(),
            ticket=(self.apply_ticket if updates else self.reduce_ticket).data_ptr(),
            **key.codes(),
        )

    def reduce(self, index: int) -> None:
        launch = self._reduce[index]
        assert launch is not None
        launch(self._stream(self._device))

    def apply(self, last: bool) -> None:
        self._apply(self._stream(self._device), last)


def current_stream(device: int) -> int:
    # The same without an object for each launch, where torch has it.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device))


def load() -> CudaBackend:
    reason = why_missing("_cuda")
    if reason is not None:
        raise Unavailable(reason)
    if torch.version.hip is not None:
        raise Unavailable("torch is built for AMD's GPUs")
    if not torch.cuda.is_available():
        raise Unavailable(
            "no GPU here: torch sees no CUDA device; install a torch build for your GPU"
        )
    try:
        return CudaBackend(_cuda.Engine(LIBRARY), current_stream)
    except (_cuda.NoDriver, _cuda.DriverError) as error:
        raise Unavailable(str(error)) from error

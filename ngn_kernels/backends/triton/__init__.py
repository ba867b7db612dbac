"""Fused GPU kernels, for NVIDIA and AMD: one launch of each kind serves all tensors of a bucket.

The kernels are in kernels.py; here are their compile-time constants and their launches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...layout import Flag
from ...planning.plan import Memory
from ...planning.rows import Bucket, BucketKey
from ...rules import Rule
from .. import Unavailable
from ..gpu import GpuBackend, GpuBucket

OLDEST = (3, 4)
THREADS = 256


def vector_length(dtypes: Iterable[torch.dtype]) -> int:
    """Elements that the widest of the types fits into 128 bits."""
    return 16 // max(dtype.itemsize for dtype in dtypes)


def column_types(kernel: str, rule: Rule, key: BucketKey) -> dict[str, torch.dtype]:
    """The element types of the columns that a kernel reads."""
    types = {"x": key.param, "g": key.grad, "m": key.m, "v": key.v, "d": torch.float32}
    read = rule.reduce_reads if kernel == "reduce" else rule.apply_reads
    return {column: types[column] for column in read}


def constants(kernel: str, rule: Rule, key: BucketKey) -> dict[str, Any]:
    """A kernel's compile-time constants; types of columns that it does not use play no part."""
    types = column_types(kernel, rule, key)
    state = [types[column] for column in "mv" if column in types]
    vector = vector_length(types.values())
    if kernel == "apply" and (key.rounding != "nearest" or set(state) - {torch.float32}):
        # Formats take more arithmetic; more elements per thread would not fit the registers.
        vector = min(vector, 4)
    flags = Flag if kernel == "apply" else (Flag.RMS, Flag.REGULARISED, Flag.DIRECTED)
    columns = "xgmv" if kernel == "apply" else "xgv"
    # Only reading parameters does not depend on their rounding, except for exact ones' remainders.
    matters = kernel == "apply" or (key.rounding == "exact" and "x" in types)
    return {
        **{flag.name: rule.has(flag) for flag in flags},
        **{f"{c.upper()}_TYPE": triton_type(types.get(c, torch.float32)) for c in columns},
        "ROUNDING": key.rounding if matters else "nearest",
        "QUANTISED": any(dtype.itemsize == 1 for dtype in state),
        "VECTOR": vector,
        "BLOCK": THREADS * vector,
    }


def triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def options(target: Any, v: torch.dtype) -> dict[str, Any]:
    """Compile options of a kernel for a target, with v of this type."""
    # Explicit, because Triton's default may change: without fusion the bits are those of the formulas.
    chosen = {"num_warps": THREADS // target.warp_size, "num_stages": 1, "enable_fp_fusion": False}
    if target.backend == "cuda":
        # Half of the GPU's warps stay resident. Without a bound some variants take 80 registers, and
        # others are limited to 48 by spilling. An 8-bit v needs more: three eighths stay resident.
        chosen["maxnreg"] = 72 if v == torch.uint8 else 64
    return chosen


class TritonBackend(GpuBackend):
    name = "triton"

    def __init__(self, kernels: Any, target: Callable[[], Any], device_type: str = "cuda") -> None:
        """`kernels` is the module of kernels, `target` returns the GPU to compile for."""
        super().__init__(device_type, without_gpu="Triton's interpreter")
        self.kernels = kernels
        self.target = target

    def prepare(
        self, bucket: Bucket, memory: Memory, rule: Rule, rounds: tuple[Rule | None, ...]
    ) -> TritonBucket:
        return TritonBucket(self, bucket, memory, rule, rounds)

    def launch(
        self, prepared: TritonBucket, name: str, rule: Rule, args: tuple[Any, ...], index: int = -1
    ) -> None:
        """Launch a kernel on the bucket's device; `index` is the round of a reduce."""
        key, blocks = prepared.key, prepared.n_chunks
        with self._device(key):
            compiled = prepared.compiled.get(index)
            if compiled is not None:
                kernel, values = compiled
                kernel[(blocks, 1, 1)](*args, *values)
                return
            named = constants(name, rule, key)
            kernel = getattr(self.kernels, name)
            compiled = kernel[(blocks,)](*args, **named, **options(self.target(), key.v))
            # The interpreter compiles nothing.
            if compiled is not None:
                prepared.compiled[index] = compiled, tuple(named.values())

    def _device(self, key: BucketKey) -> AbstractContextManager[Any]:
        """Triton launches on the current device, which may be another one."""
        return torch.cuda.device(key.device) if self.device_type == "cuda" else nullcontext()


class TritonBucket(GpuBucket):
    """A bucket with its compiled kernels and their arguments."""

    def __init__(
        self,
        backend: TritonBackend,
        bucket: Bucket,
        memory: Memory,
        rule: Rule,
        rounds: tuple[Rule | None, ...],
    ) -> None:
        super().__init__(bucket, memory, rule, rounds)
        self.backend = backend
        inputs, report = memory.inputs, memory.report
        head = (self.table, self.chunks, inputs.groups, inputs.scalars, memory.totals)
        counts = (len(bucket.rows), self.n_chunks, self.chunk_size, len(memory.sums))
        telemetry = (report.counts, report.sizes, self.apply_ticket)
        sums = (memory.sums, self.partials, self.reduce_ticket)
        self._reduce_args = (*head, *sums, *counts, memory.bucket_index)
        self._apply_args = (*head, *telemetry, *counts, len(inputs.groups))
        # Compiled kernels with their constants: of each round, and -1 of apply.
        self.compiled: dict[int, tuple[Any, tuple[Any, ...]]] = {}

    def reduce(self, index: int) -> None:
        rule = self.rounds[index]
        assert rule is not None
        self.backend.launch(self, "reduce", rule, self._reduce_args, index)

    def apply(self, last: bool) -> None:
        self.backend.launch(self, "apply", self.rule, (*self._apply_args, int(last)))


class InterpreterTarget:
    """Stands for a GPU where nothing is compiled."""

    backend, warp_size = "interpreter", 32


def load() -> TritonBackend:
    try:
        return _load()
    except Unavailable:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            raise Unavailable("Triton is not installed: pip install 'triton>=3.4'") from error
        raise Unavailable(
            f"Triton does not load ({type(error).__name__}: {error}): "
            "pip install --force-reinstall 'triton>=3.4'"
        ) from error


def _load() -> TritonBackend:
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST:
        raise Unavailable(f"Triton {triton.__version__} is too old: pip install 'triton>=3.4'")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        raise Unavailable(
            "no GPU here: torch sees no CUDA or ROCm device; install a torch build for your GPU, "
            "or set TRITON_INTERPRET=1 to run the kernels slowly on the CPU"
        )
    from . import kernels

    if interpreted:
        return TritonBackend(kernels, InterpreterTarget, device_type="cpu")
    return TritonBackend(kernels, triton.runtime.driver.active.get_current_target)

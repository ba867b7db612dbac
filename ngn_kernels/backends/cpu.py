"""The C++ extension: fused kernels over all tensors of a bucket, on torch's own threads."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..extension import why_missing
from ..planning.plan import Memory
from ..planning.rows import Bucket, BucketKey
from ..rules import Rule
from . import Unavailable, unfit_types

if why_missing() is None:
    from .. import _cpu


class CpuBackend:
    name = "cpu"

    def unfit(self, key: BucketKey) -> str | None:
        if key.device.type != "cpu":
            return f"they are on {key.device}; it takes tensors on the CPU"
        return unfit_types(key)

    def refusal(self, device: torch.device) -> str | None:
        return None

    def prepare(
        self, bucket: Bucket, memory: Memory, rule: Rule, rounds: tuple[Rule | None, ...]
    ) -> CpuBucket:
        return CpuBucket(bucket, memory, rule, rounds)


class CpuBucket:
    """One bucket's tables in the extension, which reads the host's memory as it is."""

    def __init__(
        self, bucket: Bucket, memory: Memory, rule: Rule, rounds: tuple[Rule | None, ...]
    ) -> None:
        key, inputs, report = bucket.key, memory.inputs, memory.report
        self._bucket = _cpu.Bucket(
            table=bucket.table,
            chunks=bucket.chunks(_cpu.CHUNK),
            groups=inputs.groups.numpy(),
            inputs=inputs.scalars.numpy(),
            sums=memory.sums.numpy(),
            totals=memory.totals.numpy(),
            index=memory.bucket_index,
            counts=report.counts.numpy(),
            sizes=report.sizes.numpy(),
            **key.codes(),
        )
        self._rule = rule.flags
        self._rounds = [(rule if summed is None else summed).flags for summed in rounds]

    def load_gradients(self) -> None:
        pass

    def reduce(self, index: int) -> None:
        self._bucket.reduce(self._rounds[index], torch.get_num_threads())

    def compute(self) -> None:
        pass

    def apply(self, last: bool) -> None:
        self._bucket.apply(self._rule, torch.get_num_threads(), last)

    def finish(self, params: list[Tensor]) -> None:
        increment_version(params)


def load() -> CpuBackend:
    reason = why_missing()
    if reason is not None:
        raise Unavailable(reason)
    _cpu.use_team_launcher(_team_launcher())
    return CpuBackend()


def _team_launcher() -> int:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded, or 0.

    Two pools of threads that spin against each other cost milliseconds; so torch's is shared.
    """
    folder = Path(torch.__file__).parent
    patterns = ("lib/libgomp*", "lib/libiomp5*", "lib/libomp*", "../torch.libs/libgomp*")
    found = [str(path) for pattern in patterns for path in sorted(folder.glob(pattern))]
    for name in (*found, "libgomp.so.1", "libomp.so.5", "libiomp5.so"):
        try:
            # NOLOAD: only a library that the process has already.
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            address = ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
        return address or 0
    return 0

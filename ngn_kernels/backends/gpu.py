"""What the GPU engines share: which buckets they serve, and a bucket's tables in the device's memory.

After the first step of a plan nothing is allocated on the device, nothing waits for it, and no address
changes, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..layout import Column, Sum
from ..planning.plan import Memory
from ..planning.rows import Bucket, BucketKey
from ..planning.transfer import numbers_of
from ..rules import Rule

# Chunks are a power of two of elements: many for a small model, and no more than a few
# thousand partial sums for a large one.
SMALLEST_CHUNK, LARGEST_CHUNK, WANTED_CHUNKS = 2048, 65536, 8192


def chunk_size(numel: int) -> int:
    """The number of elements per block in a bucket of `numel` elements."""
    fair = max(1, numel // WANTED_CHUNKS)
    return min(max(1 << (fair - 1).bit_length(), SMALLEST_CHUNK), LARGEST_CHUNK)


class GpuBackend:
    """An engine whose kernels read tables on the device."""

    name: str

    def __init__(self, device_type: str, without_gpu: str) -> None:
        """`without_gpu` is what runs the kernels where `device_type` is "cpu"."""
        self.device_type = device_type
        self._where = "a GPU" if device_type == "cuda" else f"the CPU, where {without_gpu} runs"

    def unfit(self, key: BucketKey) -> str | None:
        if key.device.type != self.device_type:
            return f"they are on {key.device}; it takes tensors on {self._where}"
        for what, dtype in (("parameters", key.param), ("gradients", key.grad)):
            if dtype not in (torch.float32, torch.bfloat16, torch.float16):
                return (
                    f"{what} of {dtype}; it takes float32, bfloat16 and float16: use those, "
                    'or backend="reference"'
                )
        for state in (key.m, key.v):
            if state == torch.float64:
                return (
                    f"state of {state}; it keeps float32, bfloat16 and 8-bit state: "
                    'load float32 state, or use backend="reference"'
                )
        return None

    def refusal(self, device: torch.device) -> str | None:
        return None


class GpuBucket:
    """What the kernels read and write for one bucket, at addresses that do not change."""

    def __init__(
        self, bucket: Bucket, memory: Memory, rule: Rule, rounds: tuple[Rule | None, ...]
    ) -> None:
        self.bucket, self.memory = bucket, memory
        self.rule, self.rounds = rule, rounds
        self.key, device = bucket.key, bucket.key.device
        self.chunk_size = chunk_size(int(bucket.table[Column.NUMEL].sum()))
        chunks = bucket.chunks(self.chunk_size)
        # Step counts advance in a bucket of empty tensors, too.
        self.host_chunks = chunks if len(chunks) else np.zeros((1, 2), dtype=np.int64)
        self.n_chunks = len(self.host_chunks)
        # On the CPU this shares the bucket's own memory.
        self.table = torch.from_numpy(bucket.table).to(device, non_blocking=True)
        self.chunks = torch.from_numpy(self.host_chunks).to(device, non_blocking=True)
        self.partials = torch.zeros(len(Sum), self.n_chunks, dtype=torch.float64, device=device)
        self.reduce_ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self.apply_ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self.gradients = numbers_of(self.table[Column.G], bucket.table[Column.G])

    def load_gradients(self) -> None:
        self.gradients.send()

    def compute(self) -> None:
        pass

    def finish(self, params: list[Tensor]) -> None:
        increment_version(params)

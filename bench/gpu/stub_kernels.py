"""Triton's kernels without their work: launches that only count, for what the host does around them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ngn_kernels.backends.triton import TritonBackend

Launch = tuple[str, tuple[int, ...]]


class CountedKernel:
    """Stands for a jit function, and for what it compiles to."""

    def __init__(self, name: str, launches: list[Launch]) -> None:
        self.name = name
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CountedKernel]:
        def launch(*args: Any, **options: Any) -> CountedKernel:
            self.launches.append((self.name, grid))
            return self

        return launch


def counting_backend(device_type: str) -> tuple[list[Launch], TritonBackend]:
    """The backend for tensors on such a device, and the list that its launches are noted in."""
    launches: list[Launch] = []
    kernels = SimpleNamespace(
        reduce=CountedKernel("reduce", launches), apply=CountedKernel("apply", launches)
    )
    target = SimpleNamespace(backend="cuda", warp_size=32)
    return launches, TritonBackend(kernels, lambda: target, device_type)

"""Stand-ins for Triton's kernels: launches are counted and compute nothing, to test the host's part."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ngn_kernels.backends.triton import TritonBackend

Launch = tuple[str, tuple[int, ...]]


class CountedKernel:
    """Replaces a jit function and its compiled kernel."""

    def __init__(self, name: str, launches: list[Launch]) -> None:
        self.name = name
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CountedKernel]:
        def launch(*args: Any, **options: Any) -> CountedKernel:
            self.launches.append((self.name, grid))
            return self

        return launch


def counting_backend(device_type: str) -> tuple[list[Launch], TritonBackend]:
    """A backend for tensors of a device type, and the list of its launches."""
    launches: list[Launch] = []
    kernels = SimpleNamespace(
        reduce=CountedKernel("reduce", launches), apply=CountedKernel("apply", launches)
    )
    target = SimpleNamespace(backend="cuda", warp_size=32)
    return launches, TritonBackend(kernels, lambda: target, device_type)

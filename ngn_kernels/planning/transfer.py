"""Numbers that the host writes and a device reads: written to `values`, and there after `send`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# Captures that may follow each other without an ordinary step between them.
SPARE = 4


class Numbers(Protocol):
    values: np.ndarray

    def send(self) -> None:
        """Bring `values` to the device without waiting for it."""


def numbers_of(target: Tensor, values: np.ndarray | None = None) -> Numbers:
    """The host's side of a tensor, with memory of its own or with the given one."""
    if target.device.type == "cpu":
        return Shared(target)
    if values is None:
        values = np.zeros(target.shape, dtype=str(target.dtype).removeprefix("torch."))
    return (Pinned if target.device.type == "cuda" else Copied)(target, values)


class Shared:
    """The tensor's own memory, on the CPU."""

    def __init__(self, target: Tensor) -> None:
        self.values = target.numpy()

    def send(self) -> None:
        pass


class Copied:
    """Sent when they have changed."""

    def __init__(self, target: Tensor, values: np.ndarray) -> None:
        self.target = target
        self.values = values
        self._sent: bytes | None = None

    def send(self) -> None:
        content = self.values.tobytes()
        if content != self._sent:
            self.target.copy_(torch.from_numpy(self.values))
            self._sent = content


class Pinned:
    """Sent when they have changed, from pinned memory that no copy still reads."""

    def __init__(self, target: Tensor, values: np.ndarray) -> None:
        self.target = target
        self.values = values
        self.in_graphs: dict[bytes, Tensor] = {}
        self._sent: bytes | None = None
        self._slots: list[tuple[Tensor, torch.cuda.Event]] = []
        self._spare: list[Tensor] = []
        self._refill()

    def send(self) -> None:
        content = self.values.tobytes()
        if is_capturing(self.target.device):
            self._capture(content)
        # What a replayed graph has sent is not known here.
        elif content != self._sent or self.in_graphs:
            self._refill()
            self._copy()
            self._sent = content

    def _capture(self, content: bytes) -> None:
        """Each replay reads this memory again: it belongs to the graph from now on."""
        if content not in self.in_graphs:
            # CUDA may refuse to pin more memory now.
            host = self._spare.pop() if self._spare else self._pin()
            self.in_graphs[content] = host.copy_(torch.from_numpy(self.values))
        self.target.copy_(self.in_graphs[content], non_blocking=True)

    def _copy(self) -> None:
        host, event = next((slot for slot in self._slots if slot[1].query()), (None, None))
        if host is None or event is None:
            host, event = self._pin(), torch.cuda.Event()
            self._slots.append((host, event))
        host.copy_(torch.from_numpy(self.values))
        self.target.copy_(host, non_blocking=True)
        event.record(torch.cuda.current_stream(self.target.device))

    def _refill(self) -> None:
        while len(self._spare) < SPARE:
            self._spare.append(self._pin())

    def _pin(self) -> Tensor:
        shape, dtype = self.target.shape, self.target.dtype
        return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True)


def is_capturing(device: torch.device) -> bool:
    """Whether work for this device goes into a CUDA graph at the moment."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()

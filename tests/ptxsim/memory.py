"""Registered allocations, and the traffic to each of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SECTOR = 32


class MemoryFault(RuntimeError):
    """An access outside every allocation, or a write to a read-only one."""


class MisalignedAccess(RuntimeError):
    """An address that is not a multiple of the width of the access."""


class _AddressSpace:
    """All of the process's memory as one array; it is touched only after a check."""

    START = 4096

    def __init__(self, width: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": ((1 << 47) // width,),
            "typestr": np.dtype(UNSIGNED[width]).str,
            "data": (self.START, False),
        }


_SPACE = {width: np.asarray(_AddressSpace(width)) for width in UNSIGNED}


@dataclass
class Allocation:
    name: str
    begin: int
    end: int
    read_only: bool
    owner: Any  # kept alive


@dataclass
class Traffic:
    """What one launch moved, in bytes by allocation, and in accesses by kind and width."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    read_sectors: Counter[str] = field(default_factory=Counter)
    written_sectors: Counter[str] = field(default_factory=Counter)
    accesses: Counter[tuple[str, int]] = field(default_factory=Counter)


class Memory:
    def __init__(self) -> None:
        self._allocations: list[Allocation] = []
        self._begins = np.zeros(0, np.uint64)
        self.traffic = Traffic()

    def register(self, tensor: torch.Tensor, name: str, read_only: bool = False) -> torch.Tensor:
        """Allow accesses to a dense tensor's memory, and count them under this name."""
        size = tensor.numel() * tensor.element_size()
        if size:
            begin = tensor.data_ptr()
            new = Allocation(name, begin, begin + size, read_only, tensor)
            at = int(np.searchsorted(self._begins, np.uint64(begin), side="right"))
            for other in self._allocations[max(at - 1, 0) : at + 1]:
                if other.begin < new.end and new.begin < other.end:
                    raise ValueError(f"{name} overlaps {other.name}")
            self._allocations.insert(at, new)
            self._begins = np.insert(self._begins, at, begin)
        return tensor

    def writable(self) -> list[tuple[int, int]]:
        """Where the allocations lie that are not read-only, in the order of their addresses."""
        return [(a.begin, a.end) for a in self._allocations if not a.read_only]

    def read(self, addresses: np.ndarray, width: int, lanes: int) -> list[np.ndarray]:
        """`lanes` neighbouring words of `width` bytes at each address."""
        self._check(addresses, width * lanes, "read")
        at = self._index(addresses, width)
        return [_SPACE[width][at + lane] for lane in range(lanes)]

    def write(self, addresses: np.ndarray, width: int, words: list[np.ndarray]) -> None:
        self._check(addresses, width * len(words), "write")
        at = self._index(addresses, width)
        for lane, values in enumerate(words):
            _SPACE[width][at + lane] = values

    def update(self, address: int, width: int, change: Any) -> np.generic:
        """Replace one word by what `change` makes of it, at once; the old word."""
        where = np.array([address], dtype=np.uint64)
        self._check(where, width, "read")
        self._check(where, width, "write")
        at = self._index(where, width)
        old = _SPACE[width][at]
        _SPACE[width][at] = change(old)
        return old[0]

    @staticmethod
    def _index(addresses: np.ndarray, width: int) -> np.ndarray:
        return ((addresses - np.uint64(_AddressSpace.START)) // np.uint64(width)).astype(np.int64)

    def _check(self, addresses: np.ndarray, size: int, kind: str) -> None:
        off = addresses % np.uint64(size)
        if off.any():
            worst = int(addresses[off != 0][0])
            raise MisalignedAccess(f"{kind} of {size} bytes at {worst:#x}, in {self.place(worst)}")
        self.traffic.accesses[kind, size] += len(addresses)
        owner = np.searchsorted(self._begins, addresses, side="right") - 1
        for index in np.unique(owner):
            mine = addresses[owner == index]
            found = self._allocations[index] if index >= 0 else None
            if found is None or int(mine.max()) + size > found.end:
                worst = int(mine.max() if found else mine.min())
                raise MemoryFault(f"{kind} of {size} bytes at {worst:#x}, {self.place(worst)}")
            if kind == "write" and found.read_only:
                raise MemoryFault(f"write to {found.name}, which is read-only")
            sectors = len(np.unique(mine // np.uint64(SECTOR)))
            if kind == "read":
                self.traffic.read[found.name] += size * len(mine)
                self.traffic.read_sectors[found.name] += sectors
            else:
                self.traffic.written[found.name] += size * len(mine)
                self.traffic.written_sectors[found.name] += sectors

    def place(self, address: int) -> str:
        """An address in words."""
        if not self._allocations:
            return "where nothing is registered"
        nearest = min(
            self._allocations, key=lambda a: max(a.begin - address, address - a.end + 1, 0)
        )
        return f"{address - nearest.begin} bytes from the start of {nearest.name}"

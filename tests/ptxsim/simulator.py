"""Blocks of threads, and the order in which they run."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .instructions import EXIT, WAIT, YIELD, DivergentBarrier
from .memory import UNSIGNED, Memory, MemoryFault, Traffic
from .ptx import SHARED_START, Kernel, Unsupported
from .races import Access, Races, Watch

MOST_STEPS = 2_000_000


class SharedMemory:
    """The memory that the threads of a block share; it starts as poison."""

    def __init__(self, size: int) -> None:
        self._bytes = np.full(size, 0xFF, np.uint8)

    def read(self, addresses: np.ndarray, width: int, lanes: int) -> list[np.ndarray]:
        at = self._index(addresses, width, lanes)
        return [self._bytes.view(UNSIGNED[width])[at + lane] for lane in range(lanes)]

    def write(self, addresses: np.ndarray, width: int, words: list[np.ndarray]) -> None:
        at = self._index(addresses, width, len(words))
        for lane, values in enumerate(words):
            self._bytes.view(UNSIGNED[width])[at + lane] = values

    def _index(self, addresses: np.ndarray, width: int, lanes: int) -> np.ndarray:
        at = addresses.astype(np.int64) - SHARED_START
        if (at < 0).any() or (at + width * lanes > len(self._bytes)).any():
            raise MemoryFault(f"outside the {len(self._bytes)} bytes of shared memory")
        if (at % (width * lanes)).any():
            raise MemoryFault(f"a shared access of {width * lanes} bytes that is not aligned")
        return at // width


class Block:
    def __init__(
        self,
        kernel: Kernel,
        index: int,
        blocks: int,
        threads: int,
        shared: int,
        races: Races | None,
    ) -> None:
        self.kernel = kernel
        self.threads = threads
        self.watch = None if races is None else Watch(races, index, shared)
        self.parameters = b""
        self._index, self._blocks = index, blocks
        self._memories: dict[str, Any] = {"shared": SharedMemory(-(-shared // 16) * 16)}
        # Registers start as poison: NaN, or all ones. Values are replaced, never written into.
        poison = {0: np.ones(threads, bool)}
        for width, kind in UNSIGNED.items():
            poison[width] = np.full(threads, (1 << 8 * width) - 1, kind)
        self.registers = [poison[width] for width in kernel.widths]
        # Threads that go together: those that run now (None for all), and where the others wait to.
        self.active: np.ndarray | None = None
        self._others: dict[int, np.ndarray] = {}
        self._parked: set[int] = set()  # those that can go on only with more threads

    def memory_of(self, space: str) -> Any:
        return self._memories[space]

    def touched(
        self, access: Access, addresses: np.ndarray, active: np.ndarray | slice | None
    ) -> None:
        if self.watch is not None:
            self.watch.touch(access, slice(None) if active is None else active, addresses)

    def special(self, name: str) -> np.ndarray:
        if name == "%tid.x":
            return np.arange(self.threads, dtype=np.uint32)
        values = {"%ctaid.x": self._index, "%nctaid.x": self._blocks, "%ntid.x": self.threads}
        if name not in values:
            raise Unsupported(f"special register {name}")
        return np.array([values[name]], np.uint32)

    def part(self, taken: np.ndarray, target: int) -> None:
        """Some of the running threads go on at `target`, or come to their end."""
        active = np.ones(self.threads, bool) if self.active is None else self.active
        self.active = active & ~taken
        if target != EXIT:
            self._join(target, taken)

    def _join(self, at: int, threads: np.ndarray) -> None:
        self._others[at] = self._others[at] | threads if at in self._others else threads
        self._parked.discard(at)

    def _is_ahead(self, at: int) -> bool:
        """Whether others must go on first, or are here and go on together with the running threads."""
        return at in self._others or at > min(self._others.keys() - self._parked, default=at)

    def _furthest_behind(self) -> int:
        """Where to go on: with those that are furthest behind, so that the others can be joined."""
        free = self._others.keys() - self._parked
        if not free:
            at = min(self._others)
            raise DivergentBarrier(
                f"{self._others[at].sum()} of {self.threads} threads: "
                f"{self.kernel.instructions[at].text}"
            )
        at = min(free)
        threads = self._others.pop(at)
        self.active = None if threads.all() else threads
        return at

    def run(self, memory: Memory, parameters: bytes) -> Iterator[None]:
        """Pauses after every access to memory and at every barrier."""
        self._memories["global"] = memory
        self.parameters = parameters
        code, at = self.kernel.code, 0
        for _ in range(MOST_STEPS):
            follow = code[at](self) if at < len(code) else EXIT
            if follow is None:
                at += 1
            elif follow == YIELD:
                at += 1
                yield
            elif follow == EXIT:
                if not self._others:
                    return
                at = self._furthest_behind()
            elif follow == WAIT:
                assert self.active is not None
                self._join(at, self.active)
                self._parked.add(at)
                at = self._furthest_behind()
            else:
                at = int(follow)
            if self._others and self._is_ahead(at):
                assert self.active is not None
                self._join(at, self.active)
                at = self._furthest_behind()
        raise RuntimeError(f"{self.kernel.name} has not come to an end after {MOST_STEPS} steps")


def launch(
    kernel: Kernel,
    blocks: int,
    threads: int,
    arguments: Sequence[Any],
    memory: Memory,
    *,
    shared: int = 0,
    order: str = "sequential",
    seed: int = 0,
    check_races: bool = True,
) -> Traffic:
    """Run all blocks; what they moved. Data races raise when all have run.

    Args:
        arguments: tensors for their addresses, integers, and the bytes of structs.
        shared: bytes of shared memory, beside what the kernel declares.
        order: "sequential", "reversed" or "random", one block after the other; or "interleaved",
            all of them side by side, switching at any access to memory.
    """
    if kernel.threads not in (None, threads):
        raise ValueError(f"{kernel.name} wants {kernel.threads} threads, not {threads}")
    if len(arguments) != len(kernel.parameters):
        raise TypeError(
            f"{kernel.name} takes {len(kernel.parameters)} arguments, not {len(arguments)}"
        )
    packed = bytearray(kernel.parameter_bytes)
    for (offset, width), value in zip(kernel.parameters.values(), arguments, strict=True):
        if isinstance(value, bytes):
            if len(value) != width:
                raise ValueError(f"a parameter of {width} bytes is given {len(value)}")
            packed[offset : offset + width] = value
            continue
        number = value.data_ptr() if isinstance(value, torch.Tensor) else int(value)
        struct.pack_into("<q" if width == 8 else "<i", packed, offset, number)
    draw = np.random.default_rng(seed)
    indices = list(range(blocks))
    if order == "reversed":
        indices.reverse()
    elif order == "random":
        draw.shuffle(indices)
    elif order not in ("sequential", "interleaved"):
        raise ValueError(f"order={order!r}")

    races = Races(kernel, blocks, threads, memory) if check_races else None

    def started(index: int) -> Iterator[None]:
        size = kernel.shared_bytes + shared
        return Block(kernel, index, blocks, threads, size, races).run(memory, bytes(packed))

    memory.traffic = Traffic()
    with np.errstate(all="ignore"):
        if order != "interleaved":
            for index in indices:
                for _ in started(index):
                    pass
        else:
            live = [started(index) for index in indices]
            while live:
                chosen = int(draw.integers(len(live)))
                if next(live[chosen], EXIT) == EXIT:
                    del live[chosen]
    if races is not None:
        races.check()
    return memory.traffic

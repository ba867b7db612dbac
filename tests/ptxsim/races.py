"""Data races: two accesses to the same bytes, one of them a write, that nothing orders.

The order is PTX's causality order: program order of one thread, `bar.sync` within a block, and a
release that an acquire has seen, each in a scope that includes the other thread. Nothing orders
the threads of a warp: lockstep is no promise, and shuffles move registers, not memory. Launches
follow each other in a stream, so each starts with a clean sheet.

Two accesses that are both strong (an atomic, or a load or store with an order), of the same width
and in scopes that include each other may meet without an order; all others race, and so do two
writes of the same value. It is stricter than PTX in four points: `.volatile` is weak, having seen
a relaxed write orders nothing, `fence.sc` is no more than `fence.acq_rel`, and a store ends what
was released at its address before, whoever stores.

Blocks have clocks, not threads. A block's clock ticks at each barrier and after each release; an
access is stamped with it. What a thread knows is, for every block, the stamp up to which a barrier
has completed all accesses, and beside that the stamps of single threads which have released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .memory import Memory
from .ptx import SHARED_START, Kernel

NOBODY, CROWD = -1, -2
# An epoch is a stamp and, in its low bits, the instruction.
INSTRUCTION_BITS = 20


class DataRace(RuntimeError):
    """Conflicting accesses without an order; the message has one example of each pair."""


class Access(NamedTuple):
    """What an instruction does to memory."""

    number: int  # of the instruction in its kernel
    text: str
    space: str
    width: int  # bytes of a word
    words: int
    reads: bool
    writes: bool
    order: str  # weak, relaxed, acquire, release or acq_rel
    scope: str  # cta or gpu; weak accesses have none

    @property
    def strong(self) -> bool:
        return self.order != "weak"

    @property
    def acquires(self) -> bool:
        return self.order in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        return self.order in ("release", "acq_rel")


class Known:
    """The accesses that have happened before, as far as a thread knows."""

    def __init__(self, blocks: int, threads: int) -> None:
        self.threads = threads
        self.all = np.full(blocks, -1, np.int64)  # of a whole block, up to this stamp
        self.single: dict[int, int] = {}  # of one thread, up to this stamp

    def copy(self) -> Known:
        made = Known(0, self.threads)
        made.all, made.single = self.all.copy(), self.single.copy()
        return made

    def join(self, other: Known) -> None:
        np.maximum(self.all, other.all, out=self.all)
        for thread, stamp in other.single.items():
            if stamp > self.single.get(thread, -1):
                self.single[thread] = stamp

    def covers(self, thread: int, stamp: int) -> bool:
        return stamp <= self.all[thread // self.threads] or stamp <= self.single.get(thread, -1)


class Carried:
    """What releases pass on to whoever acquires: across blocks, and within each block."""

    def __init__(self) -> None:
        self.wide: Known | None = None
        self.within: dict[int, Known] = {}

    def add(self, known: Known, scope: str, block: int) -> None:
        if scope != "cta":
            self.wide = _joined(self.wide, known)
        self.within[block] = _joined(self.within.get(block), known)

    def add_all(self, other: Carried) -> None:
        if other.wide is not None:
            self.wide = _joined(self.wide, other.wide)
        for block, known in other.within.items():
            self.within[block] = _joined(self.within.get(block), known)

    def seen(self, scope: str, block: int) -> list[Known]:
        """What reaches a thread of a block that acquires in a scope."""
        found = [self.within.get(block), self.wide if scope != "cta" else None]
        return [known for known in found if known is not None]


def _joined(old: Known | None, new: Known) -> Known:
    if old is None:
        return new.copy()
    old.join(new)
    return old


class Clock:
    """A block's time, and what its threads know."""

    def __init__(self, block: int, blocks: int, threads: int) -> None:
        self.block = block
        self.first = block * threads
        self.stamp = 0
        self.common = Known(blocks, threads)
        self.private: dict[int, Known] = {}  # of threads that acquired since the last barrier
        self.fenced: dict[int, Carried] = {}  # by release fences, for later strong writes
        self.observed: dict[int, Carried] = {}  # by strong reads, for later acquire fences

    def of(self, thread: int) -> Known:
        return self.private.get(thread, self.common)

    def barrier(self) -> None:
        for known in self.private.values():
            self.common.join(known)
        self.private.clear()
        self.common.all[self.block] = self.stamp
        self.stamp += 1

    def acquire(self, thread: int, found: list[Known]) -> None:
        if found and thread not in self.private:
            self.private[thread] = self.common.copy()
        for known in found:
            self.private[thread].join(known)

    def release(self, thread: int) -> Known:
        known = self.of(thread).copy()
        known.single[thread] = self.stamp
        self.stamp += 1
        return known

    def receive(self, thread: int, access: Access, carried: Carried) -> None:
        """A strong read has seen what was released there: now, or at a fence to come."""
        if access.acquires:
            self.acquire(thread, carried.seen(access.scope, self.block))
        else:
            self.observed.setdefault(thread, Carried()).add_all(carried)

    def fence(self, thread: int, order: str, scope: str) -> None:
        if order != "release" and thread in self.observed:
            self.acquire(thread, self.observed[thread].seen(scope, self.block))
        if order != "acquire":
            fenced = self.fenced.setdefault(thread, Carried())
            fenced.add(self.release(thread), scope, self.block)


# The last epochs of the threads of each block, -1 for none.
Epochs = dict[int, np.ndarray]


@dataclass
class Strong:
    """The strong accesses to a cell since its last weak write, by scope and width."""

    reads: dict[tuple[str, int], Epochs] = field(default_factory=dict)
    writes: dict[tuple[str, int], Epochs] = field(default_factory=dict)
    last_write: tuple[int, str, int] | None = None  # its block, scope and width
    carried: Carried = field(default_factory=Carried)


class Touch(NamedTuple):
    """An access that some threads of a block make; one entry per thread and cell."""

    clock: Clock
    access: Access
    threads: np.ndarray  # counted over all blocks
    cells: np.ndarray
    addresses: np.ndarray

    @property
    def epoch(self) -> int:
        return self.clock.stamp << INSTRUCTION_BITS | self.access.number


class Shadow:
    """The accesses to one memory that still matter, by cell: a word of the narrowest kind."""

    def __init__(self, races: Races, cells: int, cell_bytes: int) -> None:
        self.races = races
        self.threads = races.threads
        self.cell_bytes = cell_bytes
        # The last weak write, and the weak reads since: one in place, several in a crowd.
        self._writer = np.full(cells, NOBODY)
        self._written = np.zeros(cells, np.int64)
        self._reader = np.full(cells, NOBODY)
        self._read = np.zeros(cells, np.int64)
        self._crowds: dict[int, Epochs] = {}
        self._strong: dict[int, Strong] = {}
        self._is_strong = np.zeros(cells, bool)
        self._entry = np.zeros(cells, np.int64)

    def touch(
        self,
        clock: Clock,
        access: Access,
        threads: np.ndarray,
        cells: np.ndarray,
        addresses: np.ndarray,
    ) -> None:
        """One access of some threads, each to several cells from its first one on."""
        count = access.width * access.words // self.cell_bytes
        if count > 1:
            steps = np.arange(count)
            threads = np.repeat(threads, count)
            cells = (cells[:, None] + steps).ravel()
            addresses = (addresses[:, None] + self.cell_bytes * steps).ravel()
        if not access.strong:
            self._touch_weakly(Touch(clock, access, threads, cells, addresses))
            return
        for i in range(0, len(cells), count):
            word = slice(i, i + count)
            self._touch_strongly(
                Touch(clock, access, threads[word], cells[word], addresses[word]), int(threads[i])
            )

    def _touch_weakly(self, touch: Touch) -> None:
        threads, cells = touch.threads, touch.cells
        entries = np.arange(len(cells))
        self._entry[cells] = entries
        shared = self._entry[cells] != entries  # with a later entry of the same access
        self._check_writer(touch)
        for i in map(int, np.flatnonzero(self._is_strong[cells])):
            self._check_strong(touch, i, int(threads[i]), self._strong[int(cells[i])])
        if not touch.access.writes:
            self._note_reads(touch, shared)
            return
        for i in map(int, np.flatnonzero(shared)):
            self._race(touch, i, int(threads[self._entry[cells[i]]]), touch.epoch)
        self._check_readers(touch)
        # What is ordered before this write is ordered before all that is ordered after it.
        for cell in cells[self._is_strong[cells]]:
            self._strong.pop(int(cell), None)
        for cell in cells[self._reader[cells] == CROWD]:
            self._crowds.pop(int(cell), None)
        self._is_strong[cells] = False
        self._reader[cells] = NOBODY
        self._writer[cells] = threads
        self._written[cells] = touch.epoch

    def _touch_strongly(self, touch: Touch, thread: int) -> None:
        """One thread's strong access to one word."""
        clock, access = touch.clock, touch.access
        strongs = [self._strong.setdefault(int(cell), Strong()) for cell in touch.cells]
        self._is_strong[touch.cells] = True
        word = strongs[0]
        sees_last_write = False
        if access.reads and word.last_write is not None:
            block, scope, width = word.last_write
            near = block == clock.block
            sees_last_write = width == access.width
            sees_last_write &= near or "cta" not in (scope, access.scope)
        if sees_last_write:
            clock.receive(thread, access, word.carried)
        self._check_writer(touch)
        if access.writes:
            self._check_readers(touch)
        for i, strong in enumerate(strongs):
            self._check_strong(touch, i, thread, strong)
            for happens, forms in ((access.reads, strong.reads), (access.writes, strong.writes)):
                if happens:
                    epochs = forms.setdefault((access.scope, access.width), {})
                    self._add(epochs, thread, touch.epoch)
        if access.writes:
            word.last_write = clock.block, access.scope, access.width
            if not sees_last_write:
                word.carried = Carried()
            if access.releases:
                word.carried.add(clock.release(thread), access.scope, clock.block)
            if thread in clock.fenced:
                word.carried.add_all(clock.fenced[thread])

    def _note_reads(self, touch: Touch, shared: np.ndarray) -> None:
        clock, threads, cells = touch.clock, touch.threads, touch.cells
        reader = self._reader[cells]
        # A read that is ordered before this one need not be kept.
        kept = (reader >= 0) & (reader != threads)
        kept &= self._read[cells] >> INSTRUCTION_BITS > clock.common.all[reader // self.threads]
        crowded = shared | kept | (reader == CROWD)
        if crowded.any():
            for cell in map(int, np.unique(cells[crowded])):
                crowd = self._crowds.setdefault(cell, {})
                if self._reader[cell] >= 0:
                    self._add(crowd, int(self._reader[cell]), int(self._read[cell]))
                self._reader[cell] = CROWD
                mine = threads[cells == cell] - clock.first
                self._of_block(crowd, clock.block)[mine] = touch.epoch
            alone = self._reader[cells] != CROWD
            threads, cells = threads[alone], cells[alone]
        self._reader[cells] = threads
        self._read[cells] = touch.epoch

    def _check_writer(self, touch: Touch) -> None:
        self._check_each(touch, self._writer[touch.cells], self._written[touch.cells])

    def _check_readers(self, touch: Touch) -> None:
        readers = self._reader[touch.cells]
        self._check_each(touch, readers, self._read[touch.cells])
        for i in map(int, np.flatnonzero(readers == CROWD)):
            crowd = self._crowds.get(int(touch.cells[i]), {})
            for other, epoch in self._unordered(touch.clock, int(touch.threads[i]), crowd):
                self._race(touch, i, other, epoch)

    def _check_each(self, touch: Touch, others: np.ndarray, epochs: np.ndarray) -> None:
        """Against one earlier access per entry."""
        clock, threads = touch.clock, touch.threads
        stamps = epochs >> INSTRUCTION_BITS
        open_ = (others >= 0) & (others != threads)
        open_ &= stamps > clock.common.all[others // self.threads]
        if not open_.any():
            return
        for i in map(int, np.flatnonzero(open_)):
            if not clock.of(int(threads[i])).covers(int(others[i]), int(stamps[i])):
                self._race(touch, i, int(others[i]), int(epochs[i]))

    def _check_strong(self, touch: Touch, i: int, thread: int, strong: Strong) -> None:
        """Against the strong accesses to the cell of entry `i`."""
        access = touch.access
        for forms in (strong.writes, strong.reads) if access.writes else (strong.writes,):
            for (scope, width), epochs in forms.items():
                if access.strong and width == access.width:
                    # They may meet, if only within the block.
                    if "cta" not in (scope, access.scope):
                        continue
                    epochs = {b: e for b, e in epochs.items() if b != touch.clock.block}
                for other, epoch in self._unordered(touch.clock, thread, epochs):
                    self._race(touch, i, other, epoch)

    def _unordered(self, clock: Clock, thread: int, epochs: Epochs) -> list[tuple[int, int]]:
        """The accesses of others that a thread does not know of, as thread and epoch."""
        known = clock.of(thread)
        found = []
        for block, theirs in epochs.items():
            for i in np.flatnonzero(theirs >> INSTRUCTION_BITS > known.all[block]):
                other, epoch = block * self.threads + int(i), int(theirs[i])
                if other != thread and not known.covers(other, epoch >> INSTRUCTION_BITS):
                    found.append((other, epoch))
        return found

    def _race(self, touch: Touch, i: int, other: int, epoch: int) -> None:
        address = int(touch.addresses[i])
        self.races.note(other, epoch, int(touch.threads[i]), touch.access, address)

    def _of_block(self, epochs: Epochs, block: int) -> np.ndarray:
        if block not in epochs:
            epochs[block] = np.full(self.threads, -1)
        return epochs[block]

    def _add(self, epochs: Epochs, thread: int, epoch: int) -> None:
        block, i = divmod(thread, self.threads)
        self._of_block(epochs, block)[i] = epoch


class Races:
    """Watches one launch."""

    def __init__(self, kernel: Kernel, blocks: int, threads: int, memory: Memory) -> None:
        assert len(kernel.code) < 1 << INSTRUCTION_BITS
        self.kernel = kernel
        self.blocks = blocks
        self.threads = threads
        self._memory = memory
        self._found: dict[tuple[int, int], str] = {}
        # Nothing races where nobody may write.
        spans = np.array(memory.writable(), np.int64).reshape(-1, 2)
        cell = self.cell_bytes("global")
        self._begins, self._ends = spans[:, 0] // cell * cell, spans[:, 1]
        sizes = -(-(self._ends - self._begins) // cell)
        self._first_cells = np.cumsum(sizes) - sizes
        self._shadow = Shadow(self, int(sizes.sum()), cell)

    def cell_bytes(self, space: str) -> int:
        """The narrowest word that the kernel uses in a space."""
        widths = [a.width for a in self.kernel.accesses.values() if a.space == space]
        return min(widths, default=1)

    def access_of(self, epoch: int) -> Access:
        return self.kernel.accesses[epoch & (1 << INSTRUCTION_BITS) - 1]

    def touch_global(
        self, clock: Clock, access: Access, threads: np.ndarray, addresses: np.ndarray
    ) -> None:
        if not len(self._begins):
            return
        owner = np.searchsorted(self._begins, addresses, side="right") - 1
        inside = (owner >= 0) & (addresses < self._ends[owner])
        if not inside.all():
            if not inside.any():
                return
            threads, addresses, owner = threads[inside], addresses[inside], owner[inside]
        offsets = (addresses - self._begins[owner]) // self._shadow.cell_bytes
        self._shadow.touch(clock, access, threads, self._first_cells[owner] + offsets, addresses)

    def note(self, earlier: int, epoch: int, later: int, access: Access, address: int) -> None:
        """Keep one example of each pair of instructions."""
        first = self.access_of(epoch)
        if (first.number, access.number) not in self._found:
            place = "shared memory" if access.space == "shared" else self._memory.place(address)
            self._found[first.number, access.number] = (
                f"  at {address:#x}, {place}\n"
                f"    {self._name(earlier)}: {first.text}\n"
                f"    {self._name(later)}: {access.text}"
            )

    def _name(self, thread: int) -> str:
        return f"block {thread // self.threads}, thread {thread % self.threads}"

    def check(self) -> None:
        """Raise if there were any."""
        if self._found:
            pairs = "\n".join(self._found.values())
            raise DataRace(f"{self.kernel.name}: nothing orders these accesses\n{pairs}")


class Watch:
    """Follows one block of a launch."""

    def __init__(self, races: Races, block: int, shared_bytes: int) -> None:
        self._races = races
        self._clock = Clock(block, races.blocks, races.threads)
        self._threads = self._clock.first + np.arange(races.threads)
        cell = races.cell_bytes("shared")
        self._shared = Shadow(races, -(-shared_bytes // cell), cell)

    def touch(self, access: Access, active: np.ndarray | slice, addresses: np.ndarray) -> None:
        """An access of the active threads, each at its address."""
        threads, addresses = self._threads[active], addresses.astype(np.int64)
        if access.space == "global":
            self._races.touch_global(self._clock, access, threads, addresses)
        else:
            cells = (addresses - SHARED_START) // self._shared.cell_bytes
            self._shared.touch(self._clock, access, threads, cells, addresses)

    def barrier(self) -> None:
        self._clock.barrier()

    def fence(self, active: np.ndarray | slice, order: str, scope: str) -> None:
        for thread in map(int, self._threads[active]):
            self._clock.fence(thread, order, scope)

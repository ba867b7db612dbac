"""What the simulator calls a data race: litmus tests in PTX, and random programs beside an oracle."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("these tests compile, the interpreter does not", allow_module_level=True)
pytest.importorskip("triton")

from ptxsim import DataRace, DivergentBarrier, Kernel, Memory, launch
from ptxsim.ptx import SHARED_START
from ptxsim.races import Access, Races, Watch

THREADS = 64
# %p1 holds for one thread, %p2 for another one; %p3 for a third, of the first one's block.
ENTRY = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p) .reqntid 64
{{
.reg .pred %p<8>; .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>;
.shared .align 16 .b8 S[64];
ld.param.b64 %rd1, [p];
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.b32 %r2, 1;
mul.wide.u32 %rd2, %r1, 64; cvt.u64.u32 %rd3, %r0; add.s64 %rd2, %rd2, %rd3; cvt.u32.u64 %r3, %rd2;
setp.eq.u32 %p1, %r3, 0; setp.eq.u32 %p2, %r3, {other}; setp.eq.u32 %p3, %r3, 5;
{body}
ret;
}}
"""
# The other thread, as counted over all blocks of 64.
OTHERS = {"warp": 1, "block": 40, "grid": 64 + 7}
NEXT = "[%rd1+32]"  # a second flag


def run(*bodies: str, other: int = OTHERS["grid"], **options: Any) -> torch.Tensor:
    """What lies in memory after launches, one after the other."""
    data = torch.zeros(16, dtype=torch.int32)
    memory = Memory()
    memory.register(data, "data")
    for body in bodies:
        kernel = Kernel(ENTRY.format(other=other, body=body))
        launch(kernel, 2, THREADS, [data], memory, shared=64, **options)
    return data


# What programs are written in besides PTX: data and a flag, by weak instructions in capitals.
FORMS = {
    "STORE": "st.global.b32 [%rd1], %r2",
    "LOAD": "ld.global.b32 %r4, [%rd1]",
    "SET": "st.global.b32 [%rd1+16], %r2",
    "GET": "ld.global.b32 %r5, [%rd1+16]",
    "set": "st.{}.global.b32 [%rd1+16], %r2",
    "get": "ld.{}.global.b32 %r5, [%rd1+16]",
    "add": "atom.global.{}.add.u32 %r5, [%rd1+16], %r2",
    "FENCE": "fence.acq_rel.gpu",
    "BAR": "(bar.sync 0)",
    "SHUFFLE": "(shfl.sync.bfly.b32 %r6, %r2, 1, 31, -1)",
}


def by(guard: str, code: str) -> str:
    """Instructions of one thread; those in parentheses are of all threads."""
    found = []
    for instruction in filter(None, map(str.strip, code.split(";"))):
        word, _, how = instruction.partition(" ")
        ptx = FORMS[word].format(how) if word in FORMS else instruction
        everyone = re.fullmatch(r"\((.*)\)", ptx)
        found.append(f"{everyone[1]};" if everyone else f"@{guard} {ptx};")
    return "\n".join(found)


def races(first: str, second: str, where: str) -> bool:
    """Whether one thread's code races with that of another one, which follows it."""
    try:
        run(by("%p1", first) + by("%p2", second), other=OTHERS[where])
    except DataRace as race:
        assert "nothing orders" in str(race)
        return True
    return False


# What the first thread does, what the second one does after it, and where that is no race.
LITMUS = """
two reads | LOAD | LOAD | everywhere
write, read | STORE | LOAD | nowhere
read, write | LOAD | STORE | nowhere
write, write | STORE | st.global.b32 [%rd1], %r0 | nowhere
write, write of the same value | STORE | STORE | nowhere
neighbours | st.global.b16 [%rd1], %h1 | st.global.b16 [%rd1+2], %h1; ld.global.b32 %r4, [%rd1+4] | everywhere
part of a vector | st.global.v4.b32 [%rd1], {%r2, %r2, %r2, %r2} | ld.global.b16 %h1, [%rd1+14] | nowhere
beside a vector | st.global.v2.b32 [%rd1], {%r2, %r2} | ld.global.b16 %h1, [%rd1+8] | everywhere
hints are weak | STORE | ld.global.cg.b32 %r4, [%rd1] | nowhere
volatile is weak | st.volatile.global.b32 [%rd1], %r2 | ld.volatile.global.b32 %r4, [%rd1] | nowhere
two relaxed atomics | add gpu.relaxed | add gpu.relaxed | everywhere
two atomics of a block | add cta.relaxed | add cta.relaxed | near
atomics of two scopes | add cta.relaxed | add gpu.relaxed | near
an atomic's scope is gpu unless it says otherwise | add relaxed | add sys.relaxed | everywhere
red | red.global.gpu.add.u32 [%rd1+16], %r2 | add gpu.relaxed | everywhere
atomics of two widths | add gpu.relaxed | atom.global.gpu.relaxed.add.u64 %rd4, [%rd1+16], %rd3 | nowhere
an atomic, a weak read | add gpu.relaxed | GET | nowhere
an atomic, a weak write | add gpu.relaxed | SET | nowhere
a weak write, an atomic | SET | add gpu.relaxed | nowhere
a weak read, an atomic | GET | add gpu.relaxed | nowhere
an atomic, a strong read | add gpu.relaxed | get relaxed.gpu | everywhere
a strong read, a weak write | get relaxed.gpu | SET | nowhere
two strong reads and a weak one | get relaxed.cta | get relaxed.gpu; GET | everywhere
# Message passing: data, then a flag; the flag, then the data.
weak flag | STORE; SET | GET; LOAD | nowhere
release, acquire | STORE; set release.gpu | get acquire.gpu; LOAD | everywhere
release, acquire, of the block | STORE; set release.cta | get acquire.cta; LOAD | near
release to the block | STORE; set release.cta | get acquire.gpu; LOAD | near
acquire from the block | STORE; set release.gpu | get acquire.cta; LOAD | near
relaxed, acquire | STORE; set relaxed.gpu | get acquire.gpu; LOAD | nowhere
release, relaxed | STORE; set release.gpu | get relaxed.gpu; LOAD | nowhere
release, weak read | STORE; set release.gpu | GET; LOAD | nowhere
release and acquire of two widths | st.release.gpu.global.b64 [%rd1+16], %rd3 | get acquire.gpu | nowhere
released too early | set release.gpu; STORE | get acquire.gpu; LOAD | nowhere
acquired too late | STORE; set release.gpu | LOAD; get acquire.gpu | nowhere
the wrong flag | STORE; set release.gpu | ld.acquire.gpu.global.b32 %r5, [%rd1+32]; LOAD | nowhere
read before a write | LOAD; set release.gpu | get acquire.gpu; STORE | everywhere
read before a write, relaxed | LOAD; set relaxed.gpu | get relaxed.gpu; STORE | nowhere
the ticket | STORE; add gpu.acq_rel | add gpu.acq_rel; LOAD | everywhere
the ticket, relaxed | STORE; add gpu.relaxed | add gpu.relaxed; LOAD | nowhere
the ticket, of the block | STORE; add cta.acq_rel | add cta.acq_rel; LOAD | near
the ticket, reset | add gpu.acq_rel | add gpu.acq_rel; SET | everywhere
# By PTX's letter the reset is ordered, since the relaxed atomic has seen the other: stricter.
the ticket, relaxed and reset | add gpu.relaxed | add gpu.relaxed; SET | nowhere
a store ends what was released | STORE; set release.gpu; set relaxed.gpu | get acquire.gpu; LOAD | nowhere
an atomic goes on with it | STORE; set release.gpu; add gpu.relaxed | get acquire.gpu; LOAD | everywhere
fences | STORE; FENCE; set relaxed.gpu | get relaxed.gpu; FENCE; LOAD | everywhere
membar | STORE; membar.gl; set relaxed.gpu | get relaxed.gpu; membar.gl; LOAD | everywhere
fences and a weak flag | STORE; membar.gl; SET | GET; membar.gl; LOAD | nowhere
fences of the block | STORE; fence.acq_rel.cta; set relaxed.gpu | get relaxed.gpu; FENCE; LOAD | near
a fence of a block acquires | STORE; FENCE; set relaxed.gpu | get relaxed.gpu; fence.acq_rel.cta; LOAD | near
a fence, acquire | STORE; fence.release.gpu; set relaxed.gpu | get acquire.gpu; LOAD | everywhere
release, a fence | STORE; set release.gpu | get relaxed.gpu; fence.acquire.gpu; LOAD | everywhere
a fence that only releases | STORE; set release.gpu | get relaxed.gpu; fence.release.gpu; LOAD | nowhere
a fence that only acquires | STORE; fence.acquire.gpu; set relaxed.gpu | get acquire.gpu; LOAD | nowhere
no fence before the flag | STORE; set relaxed.gpu; FENCE | get relaxed.gpu; FENCE; LOAD | nowhere
no fence after the flag | STORE; FENCE; set relaxed.gpu | FENCE; get relaxed.gpu; LOAD | nowhere
fences alone | STORE; fence.sc.gpu | fence.sc.gpu; LOAD | nowhere
a barrier | STORE; BAR | LOAD | near
a barrier before a write | LOAD; BAR | STORE | near
a shuffle | STORE; SHUFFLE | LOAD | nowhere
shared memory | st.shared.b32 [S], %r2 | ld.shared.b32 %r4, [S] | far
shared memory, overwritten | ld.shared.b32 %r4, [S+4] | st.shared.b32 [S+4], %r2 | far
shared memory, a barrier | st.shared.b32 [S], %r2; BAR | ld.shared.b32 %r4, [S] | everywhere
shared memory, a shuffle | st.shared.b32 [S], %r2; SHUFFLE | ld.shared.b32 %r4, [S] | far
shared memory, another word | st.shared.b64 [S], %rd1 | ld.shared.b32 %r4, [S+8] | everywhere
"""
FINE = {"everywhere": {*OTHERS}, "near": {"warp", "block"}, "far": {"grid"}, "nowhere": set()}
CASES = [line.split(" | ") for line in LITMUS.split("\n")[1:-1] if line[0] != "#"]


@pytest.mark.parametrize("where", OTHERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_litmus(case: list[str], where: str) -> None:
    _, first, second, fine = case
    assert races(first, second, where) == (where not in FINE[fine])


TICKET = {
    # A thread's data, its block's barrier, one thread's ticket; then the same way back.
    "as it should be": ("BAR", "acq_rel", "acq_rel", "BAR", False),
    "no barrier before": ("", "acq_rel", "acq_rel", "BAR", True),
    "no barrier after": ("BAR", "acq_rel", "acq_rel", "", True),
    "relaxed before": ("BAR", "acquire", "acq_rel", "BAR", True),
    "relaxed after": ("BAR", "acq_rel", "release", "BAR", True),
}


@pytest.mark.parametrize("name", TICKET)
def test_one_thread_speaks_for_its_block(name: str) -> None:
    """Thread 5 of block 0 writes, thread 0 takes the ticket; of block 1, threads 7 and 9 likewise."""
    before, first, second, after, racy = TICKET[name]
    ticket = by("%p5", f"add gpu.{first}") + by("%p6", f"add gpu.{second}")
    body = (
        "setp.eq.u32 %p5, %r3, 0; setp.eq.u32 %p6, %r3, 73;"
        + by("%p3", f"STORE; {before}")
        + ticket
        + by("%p2", f"{after}; LOAD")
    )
    if racy:
        with pytest.raises(DataRace, match=r"block 0, thread 5: (?s:.*)block 1, thread 7: "):
            run(body)
    else:
        run(body)


def test_a_release_passes_through_a_third_thread() -> None:
    """Causality is transitive, whatever carries it."""
    chain = by("%p1", "STORE; set release.cta")
    chain += by("%p3", f"get acquire.cta; st.release.gpu.global.b32 {NEXT}, %r2")
    run(chain + by("%p2", f"ld.acquire.gpu.global.b32 %r5, {NEXT}; LOAD"))
    with pytest.raises(DataRace):
        run(chain + by("%p2", "get relaxed.gpu; LOAD"))


@pytest.mark.parametrize("scope", ["gpu", "cta"])
def test_what_a_relaxed_atomic_passes_on(scope: str) -> None:
    """A release of another block, unless the atomic's scope leaves that block out.

    A second flag orders the atomic, so that it is no race itself, but not the thread that follows.
    """
    body = "setp.eq.u32 %p6, %r3, 73;"
    body += by("%p1", f"STORE; set release.gpu; st.release.gpu.global.b32 {NEXT}, %r2")
    body += by("%p2", f"ld.acquire.gpu.global.b32 %r5, {NEXT}; add {scope}.relaxed")
    body += by("%p6", "get acquire.gpu; LOAD")
    if scope == "gpu":
        run(body)
        return
    with pytest.raises(DataRace, match=" 0 bytes from the start of data") as race:
        run(body)
    assert str(race.value).count("  at 0x") == 1


def test_an_order_that_was_not_seen_is_none() -> None:
    """The reader comes first and finds no flag: what it reads then is a race."""
    with pytest.raises(DataRace):
        run(
            by("%p1", "STORE; set release.gpu") + by("%p2", "get acquire.gpu; LOAD"),
            order="reversed",
        )


def test_a_race_names_both_sides() -> None:
    with pytest.raises(DataRace) as race:
        run(by("%p1", "st.global.b32 [%rd1+8], %r2;") + by("%p2", "ld.global.b64 %rd4, [%rd1+8];"))
    message = str(race.value)
    assert re.search(r"at 0x[0-9a-f]+, 8 bytes from the start of data", message)
    assert "block 0, thread 0: @%p1 st.global.b32 [%rd1+8], %r2" in message
    assert "block 1, thread 7: @%p2 ld.global.b64 %rd4, [%rd1+8]" in message
    assert message.count("block") == 2


def test_all_pairs_of_instructions_are_named() -> None:
    with pytest.raises(DataRace) as race:
        run(by("%p1", "STORE") + by("%p2", "LOAD; STORE; ld.global.b32 %r6, [%rd1+16]"))
    assert str(race.value).count("  at 0x") == 2


def test_all_threads_store_one_word() -> None:
    with pytest.raises(DataRace, match=r"block 0, thread 63: st.*\n.*block 0, thread 0: st"):
        run(FORMS["STORE"] + ";")


def test_launches_follow_each_other() -> None:
    store, load = by("%p1", "STORE"), by("%p2", "LOAD")
    with pytest.raises(DataRace):
        run(store + load)
    run(store, load, store)


def test_the_check_may_be_left_out() -> None:
    assert int(run(FORMS["STORE"] + ";", check_races=False)[0]) == 1


def test_a_barrier_for_some_threads_is_refused() -> None:
    with pytest.raises(DivergentBarrier, match=r"1 of 64 threads: @%p1 bar.sync 0"):
        run("@%p1 bar.sync 0;")


# Random programs. The oracle knows every access and every edge of the order, and closes it.

GRID, WIDE, WORDS = 2, 3, 5  # blocks, threads of each, words of memory
ORDERS = {
    "ld": ["relaxed", "acquire"],
    "st": ["relaxed", "release"],
    "atom": ["relaxed", "acquire", "release", "acq_rel"],
    "fence": ["acquire", "release", "acq_rel"],
}


class Event(NamedTuple):
    thread: int
    kind: str  # ld, st, atom, fence or bar
    order: str = "weak"
    scope: str = ""
    word: int = 0
    width: int = 4

    @property
    def block(self) -> int:
        return self.thread // WIDE

    @property
    def is_access(self) -> bool:
        return self.kind in ("ld", "st", "atom")

    @property
    def form(self) -> tuple[str, int, str, str]:
        return self.kind, self.width, self.order, self.scope

    def overlaps(self, other: Event) -> bool:
        ends = [4 * event.word + event.width for event in (self, other)]
        return 4 * self.word < ends[1] and 4 * other.word < ends[0]

    def reaches(self, other: Event) -> bool:
        """Whether both are strong, in scopes that include each other."""
        near = self.block == other.block
        strong = "weak" not in (self.order, other.order)
        return strong and (near or "cta" not in (self.scope, other.scope))

    def may_meet(self, other: Event) -> bool:
        """Morally strong, as PTX calls it."""
        return self.reaches(other) and (self.word, self.width) == (other.word, other.width)


def random_event(draw: random.Random) -> Event:
    thread, scope = draw.randrange(GRID * WIDE), draw.choice(["cta", "gpu", "gpu"])
    kind = draw.choice(["ld", "ld", "st", "st", "atom", "atom", "fence", "bar"])
    if kind == "bar":
        return Event(thread - thread % WIDE, "bar")
    order = draw.choice(ORDERS[kind])
    if kind == "fence":
        return Event(thread, kind, order, scope)
    # Data lies in the first words, flags in the last ones, mostly.
    word = draw.randrange(WORDS)
    width = 8 if word in (0, 2) and draw.random() < 0.15 else 4
    if kind != "atom" and draw.random() < (0.9 if word < 3 else 0.2):
        return Event(thread, kind, word=word, width=width)
    return Event(thread, kind, order, scope, word, width)


class Oracle:
    """What has happened before each event, one after the other."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.before: list[set[int]] = []

    def add(self, event: Event) -> bool:
        """Whether it races with an earlier one."""
        known: set[int] = set()
        for i, other in enumerate(self.events):
            if "bar" in (other.kind, event.kind):
                follows = other.block == event.block
            else:
                follows = other.thread == event.thread
            if follows or (event.order in ("acquire", "acq_rel") and self._releases(i, event)):
                known |= self.before[i] | {i}
        races = any(
            i not in known
            and event.is_access
            and other.is_access
            and event.overlaps(other)
            and {event.kind, other.kind} != {"ld"}
            and not event.may_meet(other)
            for i, other in enumerate(self.events)
        )
        self.events.append(event)
        self.before.append(known)
        return races

    def drop_last(self) -> None:
        self.events.pop()
        self.before.pop()

    def _releases(self, i: int, acquiring: Event) -> bool:
        """Whether event `i` is a release that this new event acquires."""
        release = self.events[i]
        if release.order not in ("release", "acq_rel") or not release.reaches(acquiring):
            return False
        if acquiring.kind == "fence":
            mine = [
                (j, e)
                for j, e in enumerate(self.events)
                if e.thread == acquiring.thread and e.kind in ("ld", "atom")
            ]
        else:
            mine = [(len(self.events), acquiring)]
        seen = {write for j, read in mine for write in self._observed(j, read)}
        if release.kind != "fence":
            return i in seen
        return any(w > i and self.events[w].thread == release.thread for w in seen)

    def _observed(self, j: int, reader: Event) -> list[int]:
        """The strong writes that a read at place `j` sees: the last one, and those it goes on with."""
        found = []
        while reader.kind in ("ld", "atom"):
            writes = [
                i
                for i, e in enumerate(self.events[:j])
                if e.kind in ("st", "atom") and e.overlaps(reader)
            ]
            if not writes or not self.events[writes[-1]].may_meet(reader):
                break
            j = writes[-1]
            reader = self.events[j]
            found.append(j)
        return found


def random_program(draw: random.Random, longest: int = 40) -> tuple[list[Event], int | None]:
    """Events, and which of them is the first to race: the last one, if any."""
    oracle = Oracle()
    for i in range(longest):
        # Most races are taken back, or programs would be short.
        while oracle.add(random_event(draw)):
            if draw.random() < 0.04:
                return oracle.events, i
            oracle.drop_last()
    return oracle.events, None


def first_reported(events: Sequence[Event]) -> int | None:
    """The event at which the simulator sees its first race."""
    forms = list(dict.fromkeys(e.form for e in events))
    accesses = {
        i: Access(i, kind, "global", width, 1, kind != "st", kind != "ld", order, scope)
        for i, (kind, width, order, scope) in enumerate(forms)
    }
    data = torch.zeros(WORDS, dtype=torch.int64)
    memory = Memory()
    memory.register(data, "data")
    kernel: Any = SimpleNamespace(name="k", code=[], accesses=accesses)
    launched = Races(kernel, GRID, WIDE, memory)
    watches = [Watch(launched, block, 0) for block in range(GRID)]
    for now, event in enumerate(events):
        block, thread = divmod(event.thread, WIDE)
        one = slice(thread, thread + 1)
        if event.kind == "bar":
            watches[block].barrier()
        elif event.kind == "fence":
            watches[block].fence(one, event.order, event.scope)
        else:
            access = accesses[forms.index(event.form)]
            watches[block].touch(access, one, np.array([data.data_ptr() + 4 * event.word]))
        try:
            launched.check()
        except DataRace:
            return now
    return None


def test_random_programs_beside_an_oracle() -> None:
    draw = random.Random(0)
    outcomes = []
    for _ in range(1000):
        events, expected = random_program(draw)
        assert first_reported(events) == expected, "\n".join(map(str, events))
        outcomes.append(expected)
    assert outcomes.count(None) > 100
    assert sum(outcome is not None and outcome > 10 for outcome in outcomes) > 100


def test_shared_memory_starts_where_addresses_do() -> None:
    """Cells of shared memory are counted from its first address, which is not zero."""
    assert SHARED_START > 0
    with pytest.raises(DataRace, match=f"at {SHARED_START + 12:#x}, shared memory"):
        run(by("%p1", "st.shared.b32 [S+12], %r2;") + by("%p3", "ld.shared.b32 %r4, [S+12];"))

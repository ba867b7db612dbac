"""What each instruction does to the threads of a block."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .memory import UNSIGNED
from .ptx import WIDTHS, Instruction, Kernel, Unsupported, members
from .races import Access

FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "f32x2": np.float32}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
WARP = 32
# Nothing of these shows in a memory that is sequentially consistent, nor do they order anything.
HINTS = {"weak", "volatile", "ca", "cg", "cs"}
# Atomics have one without saying so, loads and stores are weak.
ORDERS = {
    "ld": ("relaxed", "acquire"),
    "st": ("relaxed", "release"),
    "atom": ("relaxed", "acquire", "release", "acq_rel"),
    "red": ("relaxed", "release"),
}
SCOPES = {"cta": "cta", "gpu": "gpu", "sys": "gpu", "gl": "gpu"}

# A step of a block, given its active threads (None for all): where to go on, YIELD, WAIT, or None.
Step = Callable[[Any, "np.ndarray | None"], "int | str | None"]
YIELD = "yield"
WAIT = "wait"  # for the threads that have not come here yet; nothing was done
EXIT = -1


class DivergentBarrier(RuntimeError):
    """A barrier that only some threads of a block come to: the others would wait for ever."""


Handler = Callable[[Kernel, Instruction], Step]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    def note(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return note


def translate(kernel: Kernel, instruction: Instruction) -> Callable[[Any], int | str | None]:
    """One instruction, with its guard, as a step of a block."""
    instruction = replace(instruction, modifiers=list(instruction.modifiers))
    try:
        step = HANDLERS[instruction.name](kernel, instruction)
        if instruction.modifiers:
            raise Unsupported(f"modifiers {instruction.modifiers}")
    except (KeyError, ValueError, Unsupported) as error:
        raise Unsupported(f"{instruction.text}: {error!r}") from error
    if instruction.guard is None:
        return lambda block: step(block, block.active)
    guard, negated = kernel.registers[instruction.guard], instruction.negated
    branches = instruction.name in ("bra", "ret")

    def guarded(block: Any) -> int | str | None:
        active = block.registers[guard] ^ negated
        if block.active is not None:
            active = active & block.active
        if not active.any():
            return None
        if active.all():
            return step(block, None)
        if not branches:
            return step(block, active)
        if block.active is not None and (active == block.active).all():
            return step(block, active)
        target = step(block, active)
        assert isinstance(target, int)
        block.part(active, target)
        return None

    return guarded


def numbers(kind: str) -> Any:
    """The numpy type in which a PTX type calculates."""
    if kind in FLOATS:
        return FLOATS[kind]
    return SIGNED[WIDTHS[kind]] if kind[0] == "s" else UNSIGNED[WIDTHS[kind]]


def elementwise(
    kernel: Kernel, instruction: Instruction, kinds: str | list[str], result: str, function: Any
) -> Step:
    """target = function(sources), each as numbers of its type, which may be one for all."""
    target, *operands = instruction.operands
    write = kernel.target(target, result)
    if isinstance(kinds, str):
        kinds = [kinds] * len(operands)
    sources = [
        (kernel.source(operand, kind), bool if kind == "pred" else numbers(kind))
        for operand, kind in zip(operands, kinds, strict=True)
    ]
    bits = UNSIGNED[WIDTHS[result]] if WIDTHS[result] else bool

    def step(block: Any, active: np.ndarray | None) -> None:
        values = [read(block).view(kind) for read, kind in sources]
        write(block, np.asarray(function(*values)).view(bits), active)

    return step


_fma = ctypes.CDLL(None).fma
_fma.restype, _fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    if a.dtype != np.float64:
        raise Unsupported("fma of anything but float64")
    # What threads compute alike is computed once.
    distinct, back = np.unique(
        np.stack(np.broadcast_arrays(a, b, c)).view(np.uint64), axis=1, return_inverse=True
    )
    results = np.array([_fma(*column) for column in distinct.view(np.float64).T])
    return results[back.ravel()]


FLOAT_OPERATIONS = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": fused},
    **{"sqrt": np.sqrt, "abs": np.abs, "neg": np.negative, "min": np.fmin, "max": np.fmax},
}


def flushed(values: np.ndarray) -> np.ndarray:
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values)


@handles(*FLOAT_OPERATIONS, "mad", "rem")
def arithmetic(kernel: Kernel, instruction: Instruction) -> Step:
    name, kinds = instruction.name, instruction.take_types()
    kind, count = kinds[0], len(instruction.operands) - 1
    if kind not in FLOATS:
        return integer(kernel, instruction, kind)
    rounded = instruction.take("rn")
    if name in ("div", "fma", "sqrt") and rounded is None:
        raise Unsupported("rounding other than to nearest")
    function = FLOAT_OPERATIONS[name]
    if instruction.take("ftz"):
        if kind != "f32":
            raise Unsupported("ftz of anything but float32")
        plain = function
        function = lambda *values: flushed(plain(*map(flushed, values)))  # noqa: E731
    sources = [kind] * count
    if len(kinds) == 2:
        # Mixed precision: the first operands are narrower, the last one is not.
        sources = [kinds[1]] * (count - 1) + [kind]
        narrow = function
        wide = numbers(kind)
        function = lambda *values: narrow(*(v.astype(wide) for v in values))  # noqa: E731
    return elementwise(kernel, instruction, sources, kind, function)


def integer(kernel: Kernel, instruction: Instruction, kind: str) -> Step:
    name = instruction.name
    part = instruction.take("lo", "wide")
    if name in ("mul", "mad"):
        wide = f"{kind[0]}{16 * WIDTHS[kind]}" if part == "wide" else kind
        container = numbers(wide)

        def multiply(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> np.ndarray:
            product = a.astype(container) * b.astype(container)
            return product + c[0] if c else product

        kinds = [kind, kind] + ([wide] if name == "mad" else [])
        return elementwise(kernel, instruction, kinds, wide, multiply)
    functions = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}
    functions |= {"neg": np.negative, "rem": np.fmod}
    return elementwise(kernel, instruction, kind, kind, functions[name])


@handles("rcp")
def reciprocal(kernel: Kernel, instruction: Instruction) -> Step:
    kinds = instruction.take_types()
    if instruction.take("rn"):
        (kind,) = kinds
        return elementwise(kernel, instruction, kind, kind, lambda x: numbers(kind)(1) / x)
    if kinds != ["f64"] or not (instruction.take("approx") and instruction.take("ftz")):
        raise Unsupported("form of rcp")

    def upper_half(x: np.ndarray) -> np.ndarray:
        # The hardware delivers no more than these bits.
        kept = (1 / x).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)
        return kept.view(np.float64)

    return elementwise(kernel, instruction, kinds, "f64", upper_half)


COMPARISONS = {
    **{"eq": np.equal, "lt": np.less, "le": np.less_equal},
    **{"ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal},
}


@handles("setp")
def compare(kernel: Kernel, instruction: Instruction) -> Step:
    how = instruction.modifiers.pop(0)
    (kind,) = instruction.take_types()
    compared = COMPARISONS[how[:2]]
    if kind not in FLOATS:
        return elementwise(kernel, instruction, kind, "pred", compared)
    unordered = how.endswith("u")

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        nan = np.isnan(a) | np.isnan(b)
        return compared(a, b) | nan if unordered else compared(a, b) & ~nan

    return elementwise(kernel, instruction, kind, "pred", function)


@handles("selp")
def select(kernel: Kernel, instruction: Instruction) -> Step:
    (kind,) = instruction.take_types()
    choose = lambda a, b, condition: np.where(condition, a, b)  # noqa: E731
    return elementwise(kernel, instruction, [kind, kind, "pred"], kind, choose)


LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@handles(*LOGIC)
def logic(kernel: Kernel, instruction: Instruction) -> Step:
    (kind,) = instruction.take_types()
    return elementwise(kernel, instruction, kind, kind, LOGIC[instruction.name])


@handles("shl", "shr")
def shift(kernel: Kernel, instruction: Instruction) -> Step:
    (kind,) = instruction.take_types()
    bits = 8 * WIDTHS[kind]
    left = instruction.name == "shl"

    def function(values: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        most = np.minimum(amounts, bits - 1).astype(values.dtype)
        if left:
            return np.where(amounts < bits, values << most, 0).astype(values.dtype)
        if kind[0] == "s":
            return values >> most
        return np.where(amounts < bits, values >> most, 0).astype(values.dtype)

    return elementwise(kernel, instruction, [kind, "u32"], kind, function)


@handles("clz")
def leading_zeros(kernel: Kernel, instruction: Instruction) -> Step:
    if instruction.take_types() != ["b32"]:
        raise Unsupported("form of clz")

    def function(values: np.ndarray) -> np.ndarray:
        # The exponent of a float64, which represents each of these numbers, is that of the highest bit.
        return (32 - np.frexp(values.astype(np.float64))[1]).astype(np.uint32)

    return elementwise(kernel, instruction, "b32", "b32", function)


@handles("cvta")
def convert_address(kernel: Kernel, instruction: Instruction) -> Step:
    """Between generic addresses and global ones, which are the same."""
    if not (instruction.take("to") and instruction.take("global")):
        raise Unsupported("form of cvta")
    (kind,) = instruction.take_types()
    return elementwise(kernel, instruction, kind, kind, lambda values: values)


@handles("bfe")
def extract_bits(kernel: Kernel, instruction: Instruction) -> Step:
    if instruction.take_types() != ["u32"]:
        raise Unsupported("form of bfe")

    def function(values: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
        wide = values.astype(np.uint64) >> (first & 255).astype(np.uint64)
        mask = (np.uint64(1) << np.minimum(count & 255, 32).astype(np.uint64)) - np.uint64(1)
        return (wide & mask).astype(np.uint32)

    return elementwise(kernel, instruction, "u32", "u32", function)


@handles("prmt")
def permute_bytes(kernel: Kernel, instruction: Instruction) -> Step:
    instruction.take_types()

    def function(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        joined = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result = np.zeros(1, np.uint64)
        for byte in range(4):
            pick = (selector >> np.uint32(4 * byte)) & np.uint32(15)
            chosen = joined >> (8 * (pick & 7)).astype(np.uint64) & np.uint64(255)
            # The highest bit of a selector asks for the sign of that byte, eight times.
            chosen = np.where(pick & 8, (chosen >> np.uint64(7)) * np.uint64(255), chosen)
            result = result | chosen << np.uint64(8 * byte)
        return result.astype(np.uint32)

    return elementwise(kernel, instruction, "b32", "b32", function)


def truncated(values: np.ndarray, ends: np.iinfo) -> np.ndarray:
    """Towards zero; what does not fit becomes the nearest end, and NaN zero."""
    wide = np.trunc(np.nan_to_num(values.astype(np.float64), nan=0.0))
    return np.clip(wide, ends.min, ends.max).astype(ends.dtype)


@handles("cvt")
def convert(kernel: Kernel, instruction: Instruction) -> Step:
    to, origin = instruction.take_types()
    rounding = instruction.take("rn")
    narrows = WIDTHS[to] < WIDTHS[origin] or origin not in FLOATS
    if to in FLOATS and narrows and rounding is None:
        raise Unsupported("a narrowing conversion without rounding")
    container, result = numbers(to), to
    function = lambda values: values.astype(container)  # noqa: E731
    if to not in FLOATS and origin in FLOATS:
        if instruction.take("rzi") is None:
            raise Unsupported("rounding other than towards zero")
        function = lambda values: truncated(values, np.iinfo(container))  # noqa: E731
    elif to[0] == "s":
        # A register that is wider than the type gets the sign in all its upper bits.
        width = max(kernel.widths[kernel.registers[instruction.operands[0]]], WIDTHS[to])
        result = f"s{8 * width}"
        function = lambda values: values.astype(container).astype(SIGNED[width])  # noqa: E731
    return elementwise(kernel, instruction, origin, result, function)


@handles("mov")
def move(kernel: Kernel, instruction: Instruction) -> Step:
    (kind,) = instruction.take_types()
    target, source = instruction.operands
    width = WIDTHS[kind]
    if source.startswith("{"):
        parts = members(source)
        part = width // len(parts)
        reads = [kernel.source(p, f"b{8 * part}") for p in parts]
        write = kernel.target(target, kind)

        def join(block: Any, active: np.ndarray | None) -> None:
            total = np.zeros(1, UNSIGNED[width])
            for i, read in enumerate(reads):
                total = total | read(block).astype(UNSIGNED[width]) << UNSIGNED[width](8 * part * i)
            write(block, total, active)

        return join
    if target.startswith("{"):
        parts = members(target)
        part = width // len(parts)
        writes = [kernel.target(p, f"b{8 * part}") for p in parts]
        read_whole = kernel.source(source, kind)

        def split(block: Any, active: np.ndarray | None) -> None:
            whole = read_whole(block)
            for i, write in enumerate(writes):
                bits = whole >> UNSIGNED[width](8 * part * i)
                write(block, bits.astype(UNSIGNED[part]), active)

        return split
    read, write = kernel.source(source, kind), kernel.target(target, kind)
    return lambda block, active: write(block, read(block), active)


def access_form(kernel: Kernel, instruction: Instruction) -> tuple[Access, str]:
    """What an ld, st, atom or red does to memory, and the type of its words."""
    instruction.modifiers = [m for m in instruction.modifiers if m not in HINTS]
    order = instruction.take(*ORDERS[instruction.name])
    scope = SCOPES.get(instruction.take("cta", "gpu", "sys") or "")
    space = (instruction.take("global", "shared", "shared::cta", "param") or "").split("::")[0]
    lanes = instruction.take("v2", "v4", "v8")
    (kind,) = instruction.take_types()
    if not space:
        raise Unsupported("an access of unknown space")
    updates = instruction.name in ("atom", "red")
    if updates:
        order, scope = order or "relaxed", scope or "gpu"
    if (order is None) != (scope is None):
        raise Unsupported("an order without a scope, or a scope without an order")
    access = Access(
        instruction.index,
        f"{instruction.text} ({instruction.line})" if instruction.line else instruction.text,
        space,
        WIDTHS[kind],
        int(lanes[1:]) if lanes else 1,
        reads=updates or instruction.name == "ld",
        writes=updates or instruction.name == "st",
        order=order or "weak",
        scope=scope or "",
    )
    if space != "param":
        kernel.accesses[instruction.index] = access
    return access, kind


@handles("ld")
def load(kernel: Kernel, instruction: Instruction) -> Step:
    access, _ = access_form(kernel, instruction)
    space, width, lanes = access.space, access.width, access.words
    target, source = instruction.operands
    writes = [kernel.target(name, f"b{8 * width}") for name in members(target)]
    addresses = kernel.address(source)
    if space == "param":

        def parameter(block: Any, active: np.ndarray | None) -> None:
            where = np.unique(
                addresses(block)
                if active is None
                else np.broadcast_to(addresses(block), block.threads)[active]
            )
            if len(where) != 1 or where[0] % (width * lanes):
                raise Unsupported(
                    "a parameter of which threads read different parts, or an unaligned part"
                )
            raw = block.parameters[int(where[0]) : int(where[0]) + width * lanes]
            for write, word in zip(writes, np.frombuffer(raw, UNSIGNED[width]), strict=True):
                write(block, np.array([word]), active)

        return parameter

    def step(block: Any, active: np.ndarray | None) -> str:
        where = np.broadcast_to(addresses(block), block.threads)
        where = where if active is None else where[active]
        words = block.memory_of(space).read(where, width, lanes)
        block.touched(access, where, active)
        for write, values in zip(writes, words, strict=True):
            if active is not None:
                spread = np.zeros(block.threads, UNSIGNED[width])
                spread[active] = values
                values = spread
            write(block, values, active)
        return YIELD

    return step


@handles("st")
def store(kernel: Kernel, instruction: Instruction) -> Step:
    access, _ = access_form(kernel, instruction)
    target, source = instruction.operands
    addresses = kernel.address(target)
    reads = [kernel.source(name, f"b{8 * access.width}") for name in members(source)]

    def step(block: Any, active: np.ndarray | None) -> str:
        chosen = slice(None) if active is None else active
        where = np.broadcast_to(addresses(block), block.threads)[chosen]
        words = [np.broadcast_to(read(block), block.threads)[chosen] for read in reads]
        block.memory_of(access.space).write(where, access.width, words)
        block.touched(access, where, active)
        return YIELD

    return step


@handles("atom", "red")
def atomic(kernel: Kernel, instruction: Instruction) -> Step:
    access, kind = access_form(kernel, instruction)
    if access.space != "global":
        raise Unsupported("an atomic outside global memory")
    function = {"add": np.add, "max": np.maximum}[instruction.take("add", "max") or ""]
    if kind in FLOATS:
        raise Unsupported("an atomic on floats: its result would depend on the order of blocks")
    # red is an atom whose old value nobody wants.
    target = "_" if instruction.name == "red" else instruction.operands[0]
    address, source = instruction.operands[-2:]
    write, read = kernel.target(target, kind), kernel.source(source, kind)
    addresses, container, width = kernel.address(address), numbers(kind), access.width

    def step(block: Any, active: np.ndarray | None) -> str:
        where = np.broadcast_to(addresses(block), block.threads)
        values = np.broadcast_to(read(block), block.threads)
        threads = np.flatnonzero(np.ones(block.threads, bool) if active is None else active)
        old = np.zeros(block.threads, UNSIGNED[width])
        for thread in threads:
            operand = values[thread : thread + 1].view(container)

            def update(word: np.ndarray, operand: np.ndarray = operand) -> np.ndarray:
                return function(word.view(container), operand).view(word.dtype)

            old[thread] = block.memory_of("global").update(int(where[thread]), width, update)
            block.touched(access, where[thread : thread + 1], slice(thread, thread + 1))
        write(block, old, active)
        return YIELD

    return step


@handles("bar")
def barrier(kernel: Kernel, instruction: Instruction) -> Step:
    reduces = instruction.take("red") is not None
    if reduces:
        if not instruction.take("or") or instruction.take_types() != ["pred"]:
            raise Unsupported("form of bar.red")
        write = kernel.target(instruction.operands[0], "pred")
        read = kernel.source(instruction.operands[2], "pred")
    elif instruction.take("sync") is None:
        raise Unsupported("form of bar")
    if len(instruction.operands) != (3 if reduces else 1):
        raise Unsupported("a barrier of some threads only")

    def step(block: Any, active: np.ndarray | None) -> str:
        if active is not None:
            if instruction.guard is None:
                return WAIT
            raise DivergentBarrier(f"{active.sum()} of {block.threads} threads: {instruction.text}")
        if reduces:
            write(block, np.array([read(block).any()]), None)
        if block.watch is not None:
            block.watch.barrier()
        return YIELD

    return step


@handles("fence", "membar")
def fence(kernel: Kernel, instruction: Instruction) -> Step:
    order = "acq_rel"
    if instruction.name == "fence":
        order = instruction.take("acquire", "release", "acq_rel", "sc") or order
        scope = SCOPES[instruction.take("cta", "gpu", "sys") or ""]
    else:
        scope = SCOPES[instruction.take("cta", "gl", "sys") or ""]

    def step(block: Any, active: np.ndarray | None) -> None:
        if block.watch is not None:
            block.watch.fence(slice(None) if active is None else active, order, scope)

    return step


@handles("shfl")
def shuffle(kernel: Kernel, instruction: Instruction) -> Step:
    how = instruction.take("bfly", "idx")
    if not (instruction.take("sync") and how):
        raise Unsupported("form of shfl")
    (kind,) = instruction.take_types()
    targets, source, *choice, _ = instruction.operands
    target, _, valid = targets.partition("|")
    write, read = kernel.target(target, kind), kernel.source(source, kind)
    write_valid = kernel.target(valid or "_", "pred")
    operand, limits = (kernel.source(text, "u32") for text in choice)

    def step(block: Any, active: np.ndarray | None) -> str | None:
        if active is not None:
            warps = active.reshape(-1, WARP)
            if (warps.any(axis=1) != warps.all(axis=1)).any():
                if instruction.guard is None:
                    return WAIT
                raise Unsupported("a shuffle of some threads only")
        lane = np.arange(block.threads) % WARP
        other, limit = operand(block).astype(np.int64), limits(block).astype(np.int64)
        segment, most = limit >> 8 & 31, limit & 31
        last = lane & segment | most & ~segment
        from_lane = lane ^ other if how == "bfly" else lane & segment | other & ~segment & 31
        inside = from_lane <= last
        partner = np.arange(block.threads) - lane + np.where(inside, from_lane, lane)
        values = np.broadcast_to(read(block), block.threads)
        write(block, values[partner], active)
        write_valid(block, np.broadcast_to(inside, block.threads), active)
        return None

    return step


@handles("redux")
def warp_reduce(kernel: Kernel, instruction: Instruction) -> Step:
    if not (instruction.take("sync") and instruction.take("max")):
        raise Unsupported("form of redux")
    (kind,) = instruction.take_types()
    target, source, _ = instruction.operands
    write, read = kernel.target(target, kind), kernel.source(source, kind)
    container = numbers(kind)

    def step(block: Any, active: np.ndarray | None) -> None:
        if active is not None:
            raise Unsupported("a reduction of some threads only")
        values = np.ascontiguousarray(np.broadcast_to(read(block), block.threads)).view(container)
        largest = np.repeat(values.reshape(-1, WARP).max(axis=1), WARP)
        write(block, largest.view(UNSIGNED[WIDTHS[kind]]), None)

    return step


@handles("bra")
def branch(kernel: Kernel, instruction: Instruction) -> Step:
    instruction.take("uni")
    target = kernel.labels[instruction.operands[0]]
    return lambda block, active: target


@handles("trap")
def trap(kernel: Kernel, instruction: Instruction) -> Step:
    def step(block: Any, active: np.ndarray | None) -> None:
        raise RuntimeError(f"{kernel.name} has come to a trap")

    return step


@handles("ret")
def finish(kernel: Kernel, instruction: Instruction) -> Step:
    return lambda block, active: EXIT

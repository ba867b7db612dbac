"""PTX text to a kernel: parameters, registers, labels, and one closure per instruction."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import UNSIGNED

if TYPE_CHECKING:
    from .races import Access

WIDTHS = {
    "pred": 0,
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"f16": 2, "f32": 4, "f64": 8, "f32x2": 8},
}
SHARED_START = 1024


class Unsupported(NotImplementedError):
    """An instruction, or a form of one, that the simulator does not know."""


@dataclass
class Instruction:
    text: str
    index: int
    line: str  # of the source, as PTX names it
    guard: str | None
    negated: bool
    name: str
    modifiers: list[str]
    operands: list[str]

    @staticmethod
    def parse(text: str, index: int = 0, line: str = "") -> Instruction:
        match = re.fullmatch(
            r"(?:@\s*(!?)\s*([\w%$]+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)", text, re.S
        )
        if not match:
            raise Unsupported(f"cannot parse: {text}")
        negation, guard, name, modifiers, operands = match.groups()
        return Instruction(
            text,
            index,
            line,
            guard,
            negation == "!",
            name,
            modifiers.split(".")[1:],
            split_operands(operands),
        )

    def take(self, *names: str) -> str | None:
        """Remove one of these modifiers, if it is there."""
        for name in names:
            if name in self.modifiers:
                self.modifiers.remove(name)
                return name
        return None

    def take_types(self) -> list[str]:
        types: list[str] = []
        while self.modifiers and self.modifiers[-1] in WIDTHS:
            types.insert(0, self.modifiers.pop())
        return types


def split_operands(text: str) -> list[str]:
    """At commas, but not inside braces or brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    return [part.strip() for part in parts if part.strip()]


def members(operand: str) -> list[str]:
    """The parts of {a, b}, or the operand itself."""
    return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]


def literal(text: str, width: int) -> int | None:
    """The bits of a constant, or None if the text is not one."""
    if match := re.fullmatch(r"0[fF]([\da-fA-F]{8})", text):
        single = np.array([int(match[1], 16)], np.uint32).view(np.float32)
        return int(
            single.astype(np.float64).view(np.uint64)[0] if width == 8 else int(match[1], 16)
        )
    if match := re.fullmatch(r"0[dD]([\da-fA-F]{16})", text):
        return int(match[1], 16)
    if re.fullmatch(r"-?(0[xX][\da-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0) & ((1 << 8 * max(width, 1)) - 1)
    return None


PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)[^,\[]*?\s([\w$]+)\s*(?:\[(\d+)\])?\s*(?:,|$)"
)
SHARED = re.compile(
    r"(?:\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?\s*;"
)


def modules(ptx: str) -> dict[str, str]:
    """A module of several entries as a module for each of them, by its name."""
    at = [match.start() for match in re.finditer(r"^\s*(?:\.visible\s+)?\.entry\s", ptx, re.M)]
    head = ptx[: at[0]]
    found = {}
    for begin, end in zip(at, [*at[1:], len(ptx)], strict=True):
        part = ptx[begin:end]
        name = re.search(r"\.entry\s+([\w$]+)", part)
        assert name
        # Between two entries stand the shared variables of the second one.
        body = part[: part.rindex("}") + 1]
        before = "\n".join(match[0] for match in SHARED.finditer(ptx[:begin]) if match[3] in body)
        found[name[1]] = f"{SHARED.sub('', head)}\n{before}\n{body}"
    return found


class Kernel:
    """One entry of a module, ready to run."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.S)
        entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", text, re.S)
        if not entry or len(re.findall(r"\.entry\s", text)) != 1:
            raise Unsupported("a module with exactly one entry is expected")
        self.name = entry[1]
        self.parameters: dict[str, tuple[int, int]] = {}
        offset = 0
        for align, kind, name, count in PARAMETER.findall(entry[2]):
            width = WIDTHS[kind] * int(count or 1)
            aligned = int(align) if count else width
            offset = -(-offset // aligned) * aligned
            self.parameters[name] = (offset, width)
            offset += width
        self.parameter_bytes = offset
        size = re.search(r"\.(?:req|max)ntid\s+(\d+)", entry[3])
        self.threads = int(size[1]) if size else None
        self.shared: dict[str, int] = {}  # addresses; of what is sized by the launch, too
        self.shared_bytes = 0
        for match in SHARED.finditer(text):
            align, kind, name, count = match.groups()
            aligned = int(align or WIDTHS[kind])
            self.shared_bytes = -(-self.shared_bytes // aligned) * aligned
            self.shared[name] = SHARED_START + self.shared_bytes
            self.shared_bytes += WIDTHS[kind] * (1 if count is None else int(count or 0))
        self.registers: dict[str, int] = {}
        self.widths: list[int] = []
        self.labels: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        self.accesses: dict[int, Access] = {}  # by instruction, once `code` is there
        self._files = dict(re.findall(r'\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]*)"', text))
        self._parse(_body(text, entry.end()))

    def _parse(self, body: str) -> None:
        line = ""
        # Registers of nested scopes, by their names there: outside, a name may be another register's.
        scopes: list[dict[str, str]] = [{}]
        count = 0
        body = re.sub(r"^\s*\.file\b.*$", "", body, flags=re.M)
        for statement in re.sub(r"^\s*(\.loc\b.*)$", r"\1;", body, flags=re.M).split(";"):
            rest = " ".join(statement.split())
            while match := re.match(r"([{}])\s*|([\w$]+)\s*:\s*", rest):
                if match[1] == "{":
                    scopes.append({})
                    count += 1
                elif match[1]:
                    scopes.pop()
                else:
                    self.labels[match[2]] = len(self.instructions)
                rest = rest[match.end() :]
            if rest.startswith(".reg") and len(scopes) > 1:
                names = split_operands(rest.split(None, 2)[2])
                scopes[-1] |= {name: f"{name}${count}" for name in names}
            for scope in reversed(scopes):
                for name, inner in scope.items():
                    rest = re.sub(rf"(?<![\w%$]){re.escape(name)}(?![\w$])", inner, rest)
            if rest.startswith(".reg"):
                self._declare(rest)
            elif match := re.match(r"\.loc (\d+) (\d+)", rest):
                line = f"{self._files.get(match[1], '?')}:{match[2]}"
            elif rest and not rest.startswith("."):
                self.instructions.append(Instruction.parse(rest, len(self.instructions), line))

    def _declare(self, text: str) -> None:
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text)
        if not match:
            raise Unsupported(text)
        for name in split_operands(match[2]):
            many = re.fullmatch(r"([\w%$]+)<(\d+)>", name)
            names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
            for register in names:
                self.registers[register] = len(self.widths)
                self.widths.append(WIDTHS[match[1]])

    @cached_property
    def code(self) -> list[Callable[[Any], Any]]:
        from .instructions import translate

        return [translate(self, instruction) for instruction in self.instructions]

    # Operands, as functions of a block that give one value per thread

    def source(self, operand: str, kind: str) -> Callable[[Any], np.ndarray]:
        """The operand's bits, or its truth for a predicate."""
        width = WIDTHS[kind]
        if operand.startswith("%") and operand not in self.registers:
            return lambda block: block.special(operand)
        if operand in self.registers:
            index, stored = self.registers[operand], self.widths[self.registers[operand]]
            if stored == width:
                return lambda block: block.registers[index]
            if stored < width:
                raise Unsupported(f"{operand} is too narrow for .{kind}")
            narrow = UNSIGNED[width]
            return lambda block: block.registers[index].astype(narrow)
        if operand in self.shared or operand in self.parameters:
            start = self.shared.get(operand) or self.parameters[operand][0]
            address = np.array([start], UNSIGNED[width])
            return lambda block: address
        bits = literal(operand, width)
        if bits is None:
            raise Unsupported(f"operand {operand}")
        constant = np.array([bits], UNSIGNED[width] if width else bool)
        return lambda block: constant

    def target(self, operand: str, kind: str) -> Callable[[Any, np.ndarray, Any], None]:
        """Write bits to a register, only for the active threads."""
        if operand == "_":
            return lambda block, values, active: None
        index = self.registers[operand]
        stored = self.widths[index]
        if stored < WIDTHS[kind]:
            raise Unsupported(f"{operand} is too narrow for .{kind}")
        container = UNSIGNED[stored] if stored else bool

        def write(block: Any, values: np.ndarray, active: np.ndarray | None) -> None:
            values = values.astype(container, copy=False)
            if active is not None:
                values = np.where(active, values, block.registers[index])
            elif len(values) == 1:
                values = np.repeat(values, block.threads)
            block.registers[index] = values

        return write

    def address(self, operand: str) -> Callable[[Any], np.ndarray]:
        match = re.fullmatch(r"\[\s*([\w%$]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        if not match:
            raise Unsupported(f"address {operand}")
        offset = int(match[2] or "0", 0)
        if match[1] in self.shared or match[1] in self.parameters:
            start = self.shared.get(match[1]) or self.parameters[match[1]][0]
            fixed = np.array([start + offset], np.uint64)
            return lambda block: fixed
        index = self.registers[match[1]]
        shift = np.uint64(offset & (1 << 64) - 1)
        return lambda block: block.registers[index].astype(np.uint64) + shift


def _body(text: str, start: int) -> str:
    """Up to the brace that closes the entry."""
    depth, at = 1, start
    while depth:
        brace = re.compile(r"[{}]").search(text, at)
        if not brace:
            raise Unsupported("an entry without an end")
        depth += 1 if brace[0] == "{" else -1
        at = brace.end()
    return text[start : at - 1]

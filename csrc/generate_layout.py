"""Write the C++ header of ngn_kernels/layout.py: `python generate_layout.py layout.h`."""

from __future__ import annotations

import runpy
import sys
from enum import IntEnum
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parent / "ngn_kernels" / "layout.py"
# Struct of a table's row, the type of its fields, and those fields that are of another type.
STRUCTS = {
    "Column": ("TensorRow", "int64_t"),
    "GroupColumn": ("Group", "double"),
    "Input": ("Inputs", "double"),
    "Sum": ("Sums", "double"),
    "Count": ("Counts", "int64_t"),
}
POINTERS = {
    "X": "void*",
    "G": "const void*",
    "M": "void*",
    "V": "void*",
    "STEP": "float*",
    "M_SCALE": "float*",
    "V_SCALE": "uint32_t*",
    "REMAINDER": "int16_t*",
    "D": "const void*",
}
SCOPED = {"Reason": "int64_t", "DType": "int", "Rounding": "int"}
NUMBERS = {"int": "int64_t", "Word": "uint32_t", "float": "double"}


def header(source: Path = SOURCE) -> str:
    names = runpy.run_path(str(source))
    layout = {k: v for k, v in names.items() if not k.startswith("_")}
    lines: list[str] = []
    for name, value in layout.items():
        if isinstance(value, type) and issubclass(value, IntEnum) and value is not IntEnum:
            lines += _enum(name, value)
        elif type(value).__name__ in NUMBERS:
            kind = type(value).__name__
            text = value.hex() if kind == "float" else str(int(value))
            lines.append(f"constexpr {NUMBERS[kind]} {name} = {text};")
    return "\n".join(
        [
            "// Made of ngn_kernels/layout.py by csrc/generate_layout.py: edit that module.",
            "#pragma once",
            "",
            "#include <cstdint>",
            "",
            "namespace ngn {",
            "",
            *lines,
            f"constexpr uint32_t LAYOUT_CHECKSUM = {names['checksum'](names)}u;",
            f"constexpr uint32_t SOURCES_CHECKSUM = {names['sources_checksum'](FOLDER)}u;",
            "",
            "}  // namespace ngn",
            "",
        ]
    )


def _flags(members: type[IntEnum]) -> list[str]:
    fields = ", ".join(m.name.lower() for m in members)
    bits = ", ".join(f"(flags >> {int(m)} & 1) != 0" for m in members)
    return [
        "struct Rule {",
        f"  bool {fields};",
        "};",
        f"constexpr Rule rule_of(int64_t flags) {{ return {{{bits}}}; }}",
        f"constexpr int FLAG_COUNT = {len(members)};",
        "",
    ]


def _enum(name: str, members: type[IntEnum]) -> list[str]:
    if name == "Flag":
        return _flags(members)
    if name in STRUCTS:
        assert [int(member) for member in members] == list(range(len(members))), name
        struct, kind = STRUCTS[name]
        fields = [
            f"  {POINTERS.get(m.name, kind) if name == 'Column' else kind} {m.name.lower()};"
            for m in members
        ]
        return [f"struct {struct} {{", *fields, "};", ""]
    scoped = name in SCOPED
    values = ", ".join(f"{m.name.lower() if scoped else m.name} = {int(m)}" for m in members)
    kind = f"class {name} : {SCOPED[name]}" if scoped else f"{name} : int"
    return [
        f"enum {kind} {{ {values} }};",
        f"constexpr int {name.upper()}_COUNT = {len(members)};",
        "",
    ]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(header(), encoding="utf-8")

"""Triton's constants: the numbers of layout.py and the members of its enums, by their names there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton.language as tl

from ... import layout

INFINITY = tl.constexpr(float("inf"))
GROUP_COLUMNS, SUMS = tl.constexpr(len(layout.GroupColumn)), tl.constexpr(len(layout.Sum))
# How a column is rounded, by the name that a bucket's key has for it.
NEAREST, STOCHASTIC, EXACT = (tl.constexpr(r.name.lower()) for r in layout.Rounding)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


for _name, _value in vars(layout).items():
    if isinstance(_value, (int, float)):
        globals()[_name] = tl.constexpr(float(_value) if isinstance(_value, float) else int(_value))
_TABLES = layout.Column, layout.GroupColumn, layout.Input, layout.Sum, layout.Count, layout.Size
for _enum in (*_TABLES, layout.Reason):
    for _member in _enum:
        assert _member.name not in globals(), f"layout.py has two numbers named {_member.name}"
        globals()[_member.name] = tl.constexpr(int(_member))

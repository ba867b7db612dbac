"""How many bytes a step moves per parameter: what the rule needs, and what its code does.

The floor is counted from the rule: each stream once per pass, two passes where a scalar step size
needs a sum over all parameters before the first write. What unfused code moves is counted from
the operators that it calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ngn_kernels.formats import FLOAT32, FORMATS, SMALL, STATE_FORMATS, Storage
from ngn_kernels.rules import Rule

from ..errors import unknown_name
from .variants import NGN_VARIANTS


@dataclass(frozen=True)
class Passes:
    """Streams of a rule: g gradient, d given direction, x parameter, m momentum, v second moment.

    `reduce` moves before the step size is known, `apply` after it; a stream that is read and
    written stands twice. `wide_state` keeps m and v in float32 also for parameters in half
    precision; otherwise they have the parameters' dtype. `narrow` has the bytes of m and v where
    they are stored in fewer, and the bytes of x's remainder.
    """

    reduce: str
    apply: str
    wide_state: bool = False
    narrow: dict[str, float] = field(default_factory=dict, hash=False)

    def reduce_bytes(self, dtype: torch.dtype) -> float:
        return self._bytes(self.reduce, dtype)

    def apply_bytes(self, dtype: torch.dtype) -> float:
        return self._bytes(self.apply, dtype)

    def floor_bytes(self, dtype: torch.dtype) -> float:
        """Bytes per parameter that the rule must move when the model fits no cache."""
        return self.reduce_bytes(dtype) + self.apply_bytes(dtype)

    def mean_floor_bytes(self, dtype: torch.dtype, sizes: Iterable[int]) -> float:
        """The same over tensors of these sizes; small ones keep m and v as wide as they were."""
        wide = {stream: width for stream, width in self.narrow.items() if stream not in "mv"}
        small = dataclasses.replace(self, narrow=wide).floor_bytes(dtype)
        large = self.floor_bytes(dtype)
        counts = list(sizes)
        below = sum(count for count in counts if count < SMALL)
        return large + (small - large) * below / sum(counts)

    def state_bytes(self, dtype: torch.dtype) -> float:
        """Bytes per parameter that the rule keeps from step to step."""
        kept = self._bytes(set(self.reduce + self.apply) & {"m", "v"}, dtype)
        return kept + self.narrow.get("x", 0)

    def _bytes(self, streams: Iterable[str], dtype: torch.dtype) -> float:
        state = max(4, dtype.itemsize) if self.wide_state else dtype.itemsize
        width = {
            "g": dtype.itemsize,
            "d": max(4, dtype.itemsize),
            "m": state,
            "v": state,
            **self.narrow,
        }
        width["x"] = dtype.itemsize + self.narrow.get("x", 0)
        return sum(width[stream] for stream in streams)


def passes_of(rule: Rule) -> Passes:
    applied = rule.apply_reads + rule.apply_writes
    return Passes("".join(rule.reduce_reads), "".join(applied), wide_state=True)


def narrowed(passes: Passes, streams: str, width: float) -> Passes:
    """The same with some streams in so many bytes an element."""
    return dataclasses.replace(passes, narrow={**passes.narrow, **dict.fromkeys(streams, width)})


def storage_of(state: str, rounding: str) -> Storage:
    """Formats as the command line names them: "8bit+bfloat16" is m's and v's."""
    m, _, v = state.partition("+")
    for name in (m, v or m):
        if name not in STATE_FORMATS:
            raise unknown_name("state", name, STATE_FORMATS, "Two: 8bit+bfloat16.")
    return Storage.of((m, v or m), rounding)


def stored(passes: Passes, storage: Storage) -> Passes:
    """A rule's streams with m and v in these formats, and with x's remainder if `rounding` keeps one."""
    for stream, key in zip("mv", FORMATS, strict=True):
        form = FORMATS[key][getattr(storage, key)]
        if form is not FLOAT32:
            passes = narrowed(passes, stream, form.bytes)
    return narrowed(passes, "x", 2) if storage.rounding == "exact" else passes


def format_words(passes: Passes, storage: Storage) -> list[str]:
    """The parts of a contender's name that say which formats differ from the default."""
    formats = [
        getattr(storage, key) for s, key in zip("mv", FORMATS, strict=True) if s in passes.apply
    ]
    words = ["+".join(dict.fromkeys(formats)), storage.rounding]
    return [word for word in words if word not in ("", "float32", "nearest")]


PASSES = {
    **{variant.label: passes_of(variant.rule) for variant in NGN_VARIANTS.values()},
    "AdamW": Passes("", "gvvmmxx"),
    "SGDM": Passes("", "gmmxx"),
    # Momo needs ⟨x, d⟩, ⟨x, g⟩ and ‖d‖² of the new average d before it can move x; it stores d
    # on the way, and does not come back to g.
    "Momo": Passes("gmmx", "mxx"),
    "Momo-Adam": Passes("gvvmmx", "vmxx"),
}


def stored_rules(states: Iterable[str], rounding: str) -> dict[str, Passes]:
    """`PASSES` with a row for each format of an NGN rule's m and v."""
    rules = {}
    ngn = {variant.label for variant in NGN_VARIANTS.values()}
    storages = [storage_of(state, rounding) for state in states]
    for rule, passes in PASSES.items():
        for storage in storages if rule in ngn else ():
            rules[" · ".join([rule, *format_words(passes, storage)])] = stored(passes, storage)
        if rule not in ngn:
            rules[rule] = passes
    return rules


class _ByteCounter(TorchDispatchMode):
    """Adds up the bytes of the tensors that each operator reads and writes."""

    OVERWRITES = ("copy_", "fill_", "zero_")

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_view(func):
            return result
        name = func.overloadpacket.__name__
        arguments = func._schema.arguments
        given = list(zip(arguments, args, strict=False))
        given += [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]
        for argument, value in given:
            size = _bytes(value)
            written = argument.alias_info is not None and argument.alias_info.is_write
            overwritten = written and (
                name.lstrip("_").removeprefix("foreach_") in self.OVERWRITES or argument.is_out
            )
            self.total += size * (written + (not overwritten))
        if not any(a.alias_info is not None and a.alias_info.is_write for a in arguments):
            self.total += _bytes(result)
        return result


def _is_view(func: Any) -> bool:
    """Operators whose results alias an argument without writing it move nothing."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _bytes(value: Any) -> int:
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_iter(value)
        if isinstance(leaf, Tensor) and leaf.dim() > 0
    )


def count_bytes(run: Callable[[], object]) -> int:
    """Bytes that the torch operators called by `run` read and write; scalars are not counted."""
    counter = _ByteCounter()
    with counter:
        run()
    return counter.total

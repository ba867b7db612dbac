"""How many bytes a step moves per parameter: what the rule needs, and what its code does.

The floor is counted from the rule: each stream once per pass, two passes where a scalar step size
needs a sum over all parameters before the first write. What unfused code moves is counted from
the operators that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass(frozen=True)
class Passes:
    """Streams of a rule: g gradient, x parameter, m momentum, v second moment.

    `reduce` is read before the step size is known; of the apply pass, `reads` come in and
    `writes` go out.
    """

    reduce: str
    reads: str
    writes: str

    def reduce_bytes(self, dtype: torch.dtype) -> int:
        return _stream_bytes(self.reduce, dtype)

    def apply_bytes(self, dtype: torch.dtype) -> int:
        return _stream_bytes(self.reads + self.writes, dtype)

    def floor_bytes(self, dtype: torch.dtype) -> int:
        """Bytes per parameter that the rule must move when the model fits no cache."""
        return self.reduce_bytes(dtype) + self.apply_bytes(dtype)


def _stream_bytes(streams: str, dtype: torch.dtype) -> int:
    state = max(dtype.itemsize, torch.float32.itemsize)
    return sum(dtype.itemsize if stream in "gx" else state for stream in streams)


PASSES = {
    "NGN": Passes("g", "gx", "x"),
    "NGN-M": Passes("g", "gmx", "mx"),
    "NGN-D": Passes("", "gx", "x"),
    "NGN-D (RMS)": Passes("", "gvx", "vx"),
    "NGN-MDv1": Passes("gv", "gvmx", "vmx"),
    "NGN-MDv2": Passes("", "gvmx", "vmx"),
    "Dec-NGN-MDv1": Passes("gv", "gvmx", "vmx"),
    "NGN-MDv1W": Passes("gvx", "gvmx", "vmx"),
    "AdamW": Passes("", "gvmx", "vmx"),
    "SGDM": Passes("", "gmx", "mx"),
    # Momo needs ⟨x, d⟩, ⟨x, g⟩ and ‖d‖² of the new average d before it can move x.
    "Momo": Passes("gmx", "gmx", "mx"),
    "Momo-Adam": Passes("gvmx", "gvmx", "vmx"),
}


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

"""What every specialisation must compile to, on GPUs that are not here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import product

import pytest
import torch
from ngn_bench.gpu.triton_report import TARGETS, Target, Variant, compile_variant, resources


def on_each_target(variants: Iterable[Variant]) -> pytest.MarkDecorator:
    cases = list(product(variants, TARGETS))
    ids = [f"{variant}-{target.name}".replace(" ", "-") for variant, target in cases]
    return pytest.mark.parametrize(("variant", "target"), cases, ids=ids)


def check_resources(variant: Variant, target: Target) -> None:
    """No spills, room for half of the warps, and 128 bits at a time.

    Of narrow state no spills in a loop, room for three eighths where v has 8 bits, and at least four
    elements at a time.
    """
    compiled = compile_variant(variant, target)
    used = resources(compiled, target)
    narrow = variant.key.narrow
    spilled = used.spilled_in_loops if narrow else used.spilled
    assert spilled == 0, f"{spilled} spilled"
    room = 0.375 if variant.v == torch.uint8 else 0.5
    assert target.occupancy(used.registers) >= room, f"{used.registers} registers"

    vector = variant.constants["VECTOR"]
    widths = Counter(vector * dtype.itemsize for dtype, _ in variant.columns.values())
    written = Counter(
        vector * dtype.itemsize for dtype, writes in variant.columns.values() if writes
    )
    if narrow:
        assert vector >= 4
        # Four bytes are an ordinary word.
        widths.pop(4, None)
        written.pop(4, None)
    else:
        assert max(widths) == 16, "the widest column moves 128 bits at a time"
    if target.backend == "cuda":
        assert used.loads == widths
        assert used.stores == written
        check_ptx(compiled.asm["ptx"])
    else:
        # The last block's scalars are of 64 bits, too: only the widest can be told apart.
        assert used.loads[16] >= widths[16]
        assert used.stores[16] >= written[16]
        check_amd(compiled.asm["llir"], compiled.asm["amdgcn"])


def check_ptx(ptx: str) -> None:
    """Nothing is fused, approximated or flushed to zero; no atomics on floats."""
    for instruction in re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.[\w:]+)+)", ptx, re.M):
        name, *modifiers = instruction.split(".")
        if "f32" in modifiers or "f32x2" in modifiers:
            assert name not in ("fma", "mad", "rcp", "rsqrt", "ex2", "lg2"), instruction
            assert name != "sqrt" or "rn" in modifiers, instruction
            assert name != "div" or "rn" in modifiers, instruction
            # Without its rounding, ptxas may contract a product and a sum.
            assert name not in ("add", "sub", "mul") or "rn" in modifiers, instruction
            assert "ftz" not in modifiers or name == "abs", instruction
        if name in ("atom", "red"):
            assert not any(m.startswith(("f", "bf")) for m in modifiers), instruction


FLOATS = r"(?:float|<\d+ x float>)"


def check_amd(llir: str, assembly: str) -> None:
    """The same of LLVM's code: AMD's exact division and root are fused steps in the assembly."""
    for operation, flags in re.findall(rf"= (fadd|fsub|fmul|fdiv) ([a-z ]*){FLOATS} ", llir):
        assert not flags, f"{operation} {flags}"
    assert not re.search(r"llvm\.(fma|fmuladd|amdgcn\.\w+)\.(v\d+)?f32", llir)
    assert "!fpmath" not in llir and '"denormal-fp-math-f32"="ieee"' in llir
    assert not re.search(r"atomicrmw f|atomic_(pk_)?(add|min|max)_f", llir + assembly)
    if not re.search(rf"= fdiv {FLOATS}|@llvm\.sqrt\.f32", llir):
        assert not re.search(r"v_(pk_)?(fma|fmac|mac|mad)_\w*f32", assembly)

"""Every specialisation compiled for GPUs that are not here: registers, spills, widths of access."""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("these tests compile, the interpreter does not", allow_module_level=True)
pytest.importorskip("triton")

from ngn_kernels.backends.triton import chunk_size
from ngn_kernels.backends.triton_report import (
    TARGETS,
    Target,
    Variant,
    compile_variant,
    main,
    resources,
    variants,
)
from ngn_kernels.rules import RULES

ALL = list(variants())
# float16 takes the most registers, so it stands for mixed types on the target that has the fewest.
CASES = [
    (variant, target)
    for variant in ALL
    for target in TARGETS
    if variant.param == variant.grad
    and (variant.param != torch.float16 or target.name in ("sm_100", "gfx1100"))
]


def test_the_variants_are_all_there() -> None:
    """Two kernels; nothing but the rule and the element types makes another one."""
    assert len(ALL) == len(set(ALL)) == 96
    for name, rule in RULES.items():
        for kernel in ("reduce", "apply"):
            if kernel == "reduce" and rule.coordinate:
                continue
            wanted = Variant(kernel, rule, torch.bfloat16, torch.float32).constants
            assert any(v.kernel == kernel and v.constants == wanted for v in ALL), (name, kernel)


@pytest.mark.parametrize(
    ("variant", "target"), CASES, ids=[f"{v}-{t.name}".replace(" ", "-") for v, t in CASES]
)
def test_resources(variant: Variant, target: Target) -> None:
    compiled = compile_variant(variant, target)
    used = resources(compiled, target)
    assert used.spilled == 0
    assert target.occupancy(used.registers) >= 0.5, f"{used.registers} registers"

    vector = variant.constants["VECTOR"]
    widths = Counter(vector * dtype.itemsize for dtype, _ in variant.columns.values())
    written = Counter(
        vector * dtype.itemsize for dtype, writes in variant.columns.values() if writes
    )
    assert max(widths) == 16, "the widest column moves 128 bits at a time"
    if target.backend == "cuda":
        assert used.loads == widths
        assert used.stores == written
        check_ptx(compiled.asm["ptx"])
    else:
        # The last block's scalars are of 64 bits, too: only the widest can be told apart.
        assert used.loads[16] >= widths[16]
        assert used.stores[16] >= written[16]


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


def test_occupancy_counts_whole_blocks() -> None:
    sm = TARGETS[0]
    assert sm.occupancy(32) == 1
    assert sm.occupancy(64) == 0.5
    assert sm.occupancy(65) < 0.5


@pytest.mark.parametrize(
    ("numel", "size"),
    [(1, 2048), (10**6, 2048), (124_000_000, 16384), (10**9, 65536), (70 * 10**9, 65536)],
)
def test_chunks_fit_small_and_large_models(numel: int, size: int) -> None:
    assert chunk_size(numel) == size
    assert -(-numel // size) < 2**31


def test_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngn_kernels.backends.triton_report.variants", lambda: ALL[:1])
    main(["--target", "sm_90", "--target", "gfx942"])
    lines = capsys.readouterr().out.splitlines()
    assert "sm_90" in lines[1] and "gfx942" in lines[1] and "sm_80" not in lines[1]
    assert re.search(r"reduce plain .* \d+ \(\d+%\) 16/0", lines[2])

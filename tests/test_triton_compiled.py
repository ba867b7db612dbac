"""Every rule compiled for GPUs that are not here: registers, spills, widths of access.

Gradients of another type than their parameters are in test_triton_compiled_mixed.py.
"""

from __future__ import annotations

import os
import re

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("these tests compile, the interpreter does not", allow_module_level=True)
pytest.importorskip("triton")

from compiled import check_resources, on_each_target
from ngn_bench.gpu.triton_report import (
    TARGETS,
    Target,
    Variant,
    main,
    narrow_variants,
    spills_in_loops,
    variants,
)

from ngn_kernels.backends.gpu import chunk_size
from ngn_kernels.rules import RULES

ALL = list(variants())


def test_the_variants_are_all_there() -> None:
    """Two kernels; nothing but the rule and the element types makes another one."""
    assert len(ALL) == len(set(ALL)) == 111
    for name, rule in RULES.items():
        for kernel in ("reduce", "apply"):
            if kernel == "reduce" and rule.coordinate:
                continue
            wanted = Variant(kernel, rule, torch.bfloat16, torch.float32).constants
            assert any(v.kernel == kernel and v.constants == wanted for v in ALL), (name, kernel)


@on_each_target(variant for variant in ALL if variant.param == variant.grad)
def test_resources(variant: Variant, target: Target) -> None:
    check_resources(variant, target)


@on_each_target(narrow_variants())
def test_resources_of_narrow_numbers(variant: Variant, target: Target) -> None:
    check_resources(variant, target)


def test_spills_are_looked_for_in_loops() -> None:
    code = """
        /*0000*/  STL [R1], R26 ;  /* 0x0000001a01007387 */
        /*0010*/  @P0 BRA 0x40 ;
        /*0020*/  LDL.LU R0, [R1] ;
        /*0030*/  BRA.U !UP0, 0x10 ;
        /*0040*/  LDL R2, [R1+0x4] ;
    """
    assert spills_in_loops(code) == 1
    assert spills_in_loops(code.replace("BRA.U !UP0, 0x10", "EXIT")) == 0


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
    monkeypatch.setattr("ngn_bench.gpu.triton_report.variants", lambda: ALL[:1])
    monkeypatch.setattr("ngn_bench.gpu.triton_report.narrow_variants", lambda: ())
    main(["--target", "sm_90", "--target", "gfx942"])
    lines = capsys.readouterr().out.splitlines()
    assert "sm_90" in lines[1] and "gfx942" in lines[1] and "sm_80" not in lines[1]
    assert re.search(r"reduce plain .* \d+ \(\d+%\) 16/0", lines[2])

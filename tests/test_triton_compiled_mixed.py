"""The specialisations whose gradients are of another type than the parameters: many, so apart."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("these tests compile, the interpreter does not", allow_module_level=True)
pytest.importorskip("triton")

from compiled import check_resources, on_each_target
from ngn_bench.gpu.triton_report import Target, Variant, variants


@on_each_target(variant for variant in variants() if variant.param != variant.grad)
def test_resources(variant: Variant, target: Target) -> None:
    check_resources(variant, target)

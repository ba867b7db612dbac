"""The formats in Triton: a block goes through each, with the bits of formats.py.

Interpreted, or compiled and run by the simulator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from test_narrow import SAMPLES
from torch import Tensor

from ngn_kernels import formats
from ngn_kernels.formats import FORMATS

triton = pytest.importorskip("triton")

import triton.language as tl

from ngn_kernels.backends.triton import triton_type
from ngn_kernels.backends.triton.columns import column_at, load, noise, noise_words, store

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.essential


@triton.jit
def through(
    values, back, row, n,
    TYPE: tl.constexpr, ROUNDING: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store all values, load them again, and store what was loaded."""
    where = column_at(row, row + 1, tl.program_id(0).to(tl.int64), TYPE, ROUNDING)
    words = noise_words(tl.load(row + 2), tl.load(row + 3).to(tl.int32), tl.load(row + 4))
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        b_random = noise(words, o)
        b = tl.load(values + o, mask=o < n, other=0.0)
        store(where, first, n, b, b_random, TYPE, VECTOR, BLOCK, ROUNDING)
        tl.store(back + o, load(where, first, n, TYPE, VECTOR, BLOCK, ROUNDING), mask=o < n)


# The format in the kernels, and what formats.py makes of values and noise: codes, beside them, back.
def encoded(key: str, name: str):
    form = FORMATS[key][name]

    def wanted(values: Tensor, random: Tensor):
        code, scale = form.encode(values, random)
        return code, scale, form.decode(code, scale)

    return wanted


def half(function):
    def wanted(values: Tensor, random: Tensor):
        code = function(values, random)
        return code, None, code.float()

    return wanted


def split(values: Tensor, random: Tensor):
    near, remainder = formats.split_bfloat16(values)
    return near, remainder, formats.join_bfloat16(near, remainder)


CASES = {
    "m 8bit": (torch.int8, "nearest", encoded("momentum_buffer", "8bit")),
    "m bfloat16": (torch.bfloat16, "nearest", encoded("momentum_buffer", "bfloat16")),
    "v 8bit": (torch.uint8, "stochastic", encoded("exp_avg_sq", "8bit")),
    "v bfloat16": (torch.bfloat16, "stochastic", encoded("exp_avg_sq", "bfloat16")),
    "x float16": (torch.float16, "stochastic", half(formats.stochastic_float16)),
    "x exact": (torch.bfloat16, "exact", split),
}
LIMITS = {"m 8bit": 127 * 2.0**121, "m bfloat16": 3.38e38, "v bfloat16": 3.38e38}
PLACES = (0, 0, 0), (7, 62, 64), (7, 63, 2**32 - 77), (2**33 + 5, 100_000, 2**40 + 3)


def sample(case: str) -> Tensor:
    """All samples one after the other, each from a block on, to a size that ends within one."""
    most = 65504.0 if case == "x float16" else LIMITS.get(case, 3.38e38)
    values = torch.cat([formats.blocks_of(values).flatten() for values in SAMPLES.values()])
    values = values[: len(values) - 17].clamp(max=most)
    if case[0] != "v":
        values[1::2] *= -1
    return values


@pytest.fixture
def gpu() -> Iterator[object]:
    if INTERPRETED:
        with nullcontext():
            yield None
        return
    from ptxsim.driver import SimulatedGPU

    with SimulatedGPU().active() as simulated:
        yield simulated


@pytest.mark.parametrize("vector", [4, 1])
@pytest.mark.parametrize("case", CASES)
def test_blocks_have_the_bits_of_the_table(case: str, vector: int, gpu) -> None:
    kind, rounding, wanted = CASES[case]
    values = sample(case)
    if vector == 4:
        values = values[: len(values) // 64 * 64]
    n = len(values)
    for number, step, first in PLACES:
        key = formats.noise_key(number)
        random = formats.noise(key, torch.tensor(float(step)), n, first)
        code, beside, back = wanted(values, random)
        found = torch.zeros_like(code)
        scale = torch.zeros(1) if beside is None else torch.zeros_like(beside)
        result = torch.full_like(values, float("nan"))
        row = torch.tensor([found.data_ptr(), scale.data_ptr(), key, step + 1, first])
        if gpu is not None:
            tensors = {"codes": found, "beside": scale, "back": result, "row": row}
            for name, tensor in {"values": values, **tensors}.items():
                gpu.memory.register(tensor, name, read_only=name in ("values", "row"))
        constants = {"TYPE": triton_type(kind), "ROUNDING": rounding}
        options = {} if INTERPRETED else {"num_warps": 8, "enable_fp_fusion": False}
        block = 256 * vector
        through[(1,)](values, result, row, n, **constants, VECTOR=vector, BLOCK=block, **options)
        if gpu is not None:
            gpu.memory = type(gpu.memory)()
        assert torch.equal(found.view(torch.uint8), code.view(torch.uint8))
        assert beside is None or torch.equal(scale.view(torch.uint8), beside.view(torch.uint8))
        assert torch.equal(result.view(torch.int32), back.view(torch.int32))

"""How m, v and 16-bit parameters are stored: the table of formats, in plain torch.

Every format is integer arithmetic on float32 patterns, or a product with a power of two, so that every
backend gives the same bits. Noise is a hash of (parameter, step, element), not a generator's state.
docs/precision.md says which to choose; csrc/math/formats.h and csrc/cpu/quant_block.h have the same
functions by the same names.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import (
    BFLOAT16_LIMIT,
    ELEMENT_STRIDE,
    GOLDEN,
    INT8_LIMIT,
    LARGEST_V,
    LEAST_SHIFT,
    MIX1,
    MIX2,
    MOST_SHIFT,
    QUANT_BLOCK,
    STEP_STRIDE,
    STOCHASTIC_BFLOAT16_LIMIT,
    WINDOW,
    Rounding,
)

SMALL = 4096  # parameters with fewer elements keep float32 state
WORD = 0xFFFFFFFF


# Noise


def mixed(x: Any) -> Any:
    """A bijection of 32-bit numbers without visible structure; for an int or an int64 tensor."""
    x = (x ^ (x >> 16)) * MIX1 & WORD
    x = (x ^ (x >> 15)) * MIX2 & WORD
    return x ^ (x >> 16)


def noise_key(parameter_index: int) -> int:
    """Two words derived from a parameter's index in the optimizer, as one signed number."""
    low = mixed(parameter_index + 0x9E3779B9 & WORD)
    both = mixed(low ^ (parameter_index >> 32) ^ 0x85EBCA6B) << 32 | low
    return both - (1 << 64) if both >= 1 << 63 else both


def noise(key: int, step: Tensor, numel: int, offset: int = 0) -> Tensor:
    """32 random bits, in an int64, for each element of a parameter that has taken `step` steps.

    A hash for each quantisation block and window of steps, to which equal strides along the block
    and along the steps are added: the elements of a block and the steps of a window round up evenly.

    Args:
        offset: index of the first element in the whole parameter, if this rank has a part of it.
    """
    index = torch.arange(offset, offset + numel, device=step.device)
    count = step.to(torch.int64) + 1
    start = mixed((key & WORD) + count // WINDOW * GOLDEN & WORD)
    mask = mixed((key >> 32 & WORD) ^ start)
    x = (index // QUANT_BLOCK & WORD) * GOLDEN & WORD ^ start
    x = (x ^ (x >> 16)) * MIX1 + mask & WORD
    x = (x ^ (x >> 15)) * MIX2 & WORD
    x = x ^ (x >> 16)
    return x + index % QUANT_BLOCK * ELEMENT_STRIDE + count % WINDOW * STEP_STRIDE & WORD


def other_noise(random: Tensor) -> Tensor:
    """For parameters, so that they do not share v's."""
    return random * GOLDEN & WORD


# 8-bit and 16-bit formats of flat float32 tensors in memory order


def bits_of(value: Tensor) -> Tensor:
    """The float32 patterns as integers; int64, so that nothing overflows."""
    return value.contiguous().view(torch.int32).to(torch.int64) & WORD


def float_of(bits: Tensor) -> Tensor:
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def blocks_of(value: Tensor) -> Tensor:
    """A row for each quantisation block; zeros fill the last one and change no scale."""
    missing = -value.numel() % QUANT_BLOCK
    return torch.nn.functional.pad(value, (0, missing)).view(-1, QUANT_BLOCK)


def encode_m(m: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """int8, and a power of two for each block: the least with |m| <= 127 scale."""
    rows = blocks_of(m)
    largest = bits_of(rows.abs().amax(1, keepdim=True))
    exponent = ((largest + 0x1FFFF >> 23) - 6).clamp(min=1)
    # 128 and a random fraction of 16 bits: truncating the sum rounds stochastically.
    above = rows * float_of(254 - exponent << 23) + float_of(
        blocks_of(random) & 0xFFFF | 0x43000000
    )
    quantised = (above.to(torch.int32) - 128).to(torch.int8)
    return quantised.flatten()[: m.numel()], float_of(exponent << 23).flatten()


def decode_m(quantised: Tensor, scale: Tensor) -> Tensor:
    return (blocks_of(quantised).float() * scale[:, None]).flatten()[: quantised.numel()]


def encode_v(v: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """uint8, and a word for each block: steps of 2^shift in the pattern, from the top down."""
    bits = blocks_of(bits_of(v).clamp(max=LARGEST_V))
    top = bits.amax(1, keepdim=True)
    bottom = torch.where(bits > 0, bits, top).amin(1, keepdim=True)
    shift = torch.full_like(top, MOST_SHIFT)
    for finer in range(MOST_SHIFT - 1, LEAST_SHIFT - 1, -1):
        steps = (top + (1 << finer) - 1 >> finer) - (bottom >> finer)
        shift = torch.where(steps <= 254, finer, shift)
    one = 1 << shift
    highest = top + one - 1 >> shift
    # Rounding up a little more often keeps the mean of 1 / sqrt(v), which the step depends on.
    low = bits & one - 1
    up = torch.minimum(low, one - low) >> 25 - shift
    byte = (bits + up + (blocks_of(random) >> 32 - shift) >> shift) + 255 - highest
    byte = torch.maximum(byte, (256 - highest).clamp(min=1))
    byte = torch.where(bits > 0, byte, 0).to(torch.uint8)
    return byte.flatten()[: v.numel()], (highest << 5 | shift).to(torch.int32).flatten()


def decode_v(quantised: Tensor, scale: Tensor) -> Tensor:
    byte, word = blocks_of(quantised).to(torch.int64), scale[:, None].to(torch.int64)
    bits = torch.where(byte > 0, byte - 255 + (word >> 5) << (word & 31), 0)
    return float_of(bits).flatten()[: quantised.numel()]


def stochastic_bfloat16(value: Tensor, random: Tensor) -> Tensor:
    """One of a value's two bfloat16 neighbours, the nearer one more often; finite up to 0x1.fep127."""
    return float_of(bits_of(value) + (random >> 16) >> 16 << 16 & WORD).bfloat16()


def stochastic_float16(value: Tensor, random: Tensor) -> Tensor:
    """The same in float16, subnormal numbers included; finite up to 65504."""
    bits = bits_of(value)
    magnitude = bits & 0x7FFFFFFF
    normal = magnitude - 0x38000000 + (random >> 19) >> 13
    # Below 2^-14 in units of 2^-24: 1024 and a random fraction of 13 bits; the sum is truncated.
    small = float_of(magnitude).clamp(max=2.0**-14) * 2.0**24
    subnormal = (small + float_of(random >> 19 | 0x44800000)).to(torch.int64) - 1024
    half = torch.where(magnitude < 0x38800000, subnormal, normal)
    return torch.where(bits >= 1 << 31, half - (1 << 15), half).to(torch.int16).view(torch.float16)


def split_bfloat16(value: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16, and the low 16 bits of the float32.

    Ties go away from zero: to even, the two float32 numbers half-way below and above a bfloat16
    would have the same bits.
    """
    bits = bits_of(value)
    low = bits & 0xFFFF
    remainder = torch.where(low >= 1 << 15, low - (1 << 16), low).to(torch.int16)
    return float_of(bits + 0x8000 >> 16 << 16 & WORD).bfloat16(), remainder


def join_bfloat16(near: Tensor, remainder: Tensor) -> Tensor:
    """The float32 of which split_bfloat16 returned the parts."""
    return float_of(bits_of(near.float()) + remainder.to(torch.int64) & WORD)


class Format(NamedTuple):
    """How one column of the state is stored."""

    storage: torch.dtype
    scale: torch.dtype | None  # one number for each quantisation block
    limit: float  # the largest magnitude that it can store
    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    decode: Callable[[Tensor, Tensor | None], Tensor]

    @property
    def bytes(self) -> float:
        """Of an element and its share of the scale."""
        scale = 0 if self.scale is None else self.scale.itemsize
        return self.storage.itemsize + scale / QUANT_BLOCK


def largest_below(limit: float) -> float:
    """The float32 before a positive one."""
    (bits,) = struct.unpack("<I", struct.pack("<f", limit))
    return float(struct.unpack("<f", struct.pack("<I", bits - 1))[0])


LARGEST = torch.finfo(torch.float32).max
FLOAT32 = Format(torch.float32, None, LARGEST, lambda x, _: (x, None), lambda x, _: x)

# By the key of the column in a parameter's state, and the name that `state=` gives it.
FORMATS: dict[str, dict[str, Format]] = {
    "momentum_buffer": {
        "float32": FLOAT32,
        "bfloat16": Format(
            torch.bfloat16,
            None,
            largest_below(BFLOAT16_LIMIT),
            lambda m, _: (m.bfloat16(), None),
            lambda stored, _: stored.float(),
        ),
        "8bit": Format(torch.int8, torch.float32, largest_below(INT8_LIMIT), encode_m, decode_m),  # type: ignore[arg-type]
    },
    "exp_avg_sq": {
        "float32": FLOAT32,
        # Rounding to nearest would leave v unchanged where it decays by less than half an ulp.
        "bfloat16": Format(
            torch.bfloat16,
            None,
            largest_below(STOCHASTIC_BFLOAT16_LIMIT),
            lambda v, random: (stochastic_bfloat16(v, random), None),
            lambda stored, _: stored.float(),
        ),
        "8bit": Format(torch.uint8, torch.int32, LARGEST, encode_v, decode_v),  # type: ignore[arg-type]
    },
}
STATE_FORMATS = ("float32", "bfloat16", "8bit")

# How parameters of 16 bits are stored; wider ones are not rounded.
ROUNDINGS = tuple(rounding.name.lower() for rounding in Rounding)
REMAINDER = "remainder"  # state key for the low bits of a parameter that "exact" stores


def rounding_of(dtype: torch.dtype, rounding: str) -> str:
    """How parameters of a type are stored under the optimizer's option `rounding`."""
    exact = rounding == "exact" and dtype == torch.bfloat16
    stochastic = rounding == "stochastic" and dtype in (torch.bfloat16, torch.float16)
    return rounding if exact or stochastic else "nearest"


def narrow_format(key: str, dtype: torch.dtype) -> Format | None:
    """The format that stores a column in this type; None if it is not narrower than float32."""
    named = FORMATS[key].values()
    return next((f for f in named if f.storage == dtype and f is not FLOAT32), None)


def scale_key(key: str) -> str:
    """The state key of a column's scales."""
    return f"{key}_scale"


class Storage(NamedTuple):
    """The optimizer's options: the formats of m and v, and the rounding of parameters."""

    momentum_buffer: str = "float32"
    exp_avg_sq: str = "float32"
    rounding: str = "nearest"

    @classmethod
    def of(cls, state: Any, rounding: Any) -> Storage:
        """From the options `state=` and `rounding=`."""
        if rounding not in ROUNDINGS:
            names = ", ".join(f'"{name}"' for name in ROUNDINGS)
            raise ValueError(f"rounding={rounding!r}: must be one of {names}")
        pair = (state, state) if isinstance(state, str) else state
        known = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not known or not all(name in STATE_FORMATS for name in pair):
            names = ", ".join(f'"{name}"' for name in STATE_FORMATS)
            raise ValueError(f"state={state!r}: must be one of {names}, or a pair of them (m, v)")
        m, v = pair
        return cls(m, v, rounding)

    @property
    def given(self) -> str | tuple[str, str]:
        """The value of `state=`."""
        m, v = self.momentum_buffer, self.exp_avg_sq
        return m if m == v else (m, v)

    @property
    def narrow(self) -> bool:
        """Whether m or v is narrower than float32."""
        return (self.momentum_buffer, self.exp_avg_sq) != ("float32", "float32")


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def decoded(stored: Tensor, scale: Tensor | None, form: Format) -> Tensor:
    """As float32, in the memory order of `stored`."""
    values = torch.empty_like(stored, dtype=torch.float32)
    in_memory_order(values).copy_(form.decode(in_memory_order(stored), scale))
    return values


def encoded(values: Tensor, random: Tensor, form: Format) -> tuple[Tensor, Tensor | None]:
    """In a format, in the memory order of the values, which are dense."""
    flat, scale = form.encode(in_memory_order(values), random)
    stored = torch.empty_like(values, dtype=form.storage)
    in_memory_order(stored).copy_(flat)
    return stored, scale

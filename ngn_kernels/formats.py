"""How m, v and 16-bit parameters are stored: the one table of formats, in plain torch.

Every code is integer arithmetic on float32 patterns, or a product with a power of two, so that every
backend has the same bits. Noise is a hash of (parameter, step, element) and no generator's state.
docs/precision.md says which to choose; csrc/formats.h has the same functions by the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

QUANTUM = 64  # elements that share a scale
SMALL = 4096  # parameters with fewer elements keep float32 state
LEAST_SHIFT, MOST_SHIFT = 14, 20  # of the steps of an 8-bit v
WINDOW = 64  # steps whose noise is spread evenly over the interval
STRIDE, STEP = 0x93F96EC5, 0x9E379E37  # of noise, from an element and from a step to the next
WORD = 0xFFFFFFFF


# Noise


def mixed(x: Any) -> Any:
    """A bijection of 32-bit numbers without visible structure; of an int, or an int64 tensor."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return x ^ (x >> 16)


def noise_key(parameter: int) -> int:
    """Two words derived from a parameter's number in the optimizer, as one signed number."""
    first = mixed(parameter + 0x9E3779B9 & WORD)
    both = mixed(first ^ (parameter >> 32) ^ 0x85EBCA6B) << 32 | first
    return both - (1 << 64) if both >= 1 << 63 else both


def noise(key: int, step: Tensor, numel: int, first: int = 0) -> Tensor:
    """32 random bits, in an int64, for each element of a parameter that has taken `step` steps.

    A hash for each quantum and window; from there, equal strides along the quantum and along the
    steps, so that both the elements of a quantum and the steps of a window round up evenly.

    Args:
        first: the place of the first one, where a part of the parameter lies here.
    """
    place = torch.arange(first, first + numel, device=step.device)
    count = step.to(torch.int64) + 1
    start = mixed((key & WORD) + count // WINDOW * 0x9E3779B1 & WORD)
    more = mixed((key >> 32 & WORD) ^ start)
    x = (place // QUANTUM & WORD) * 0x9E3779B1 & WORD ^ start
    x = (x ^ (x >> 16)) * 0x7FEB352D + more & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return (x ^ (x >> 16)) + place % QUANTUM * STRIDE + count % WINDOW * STEP & WORD


def other_noise(random: Tensor) -> Tensor:
    """For parameters, so that they do not share v's."""
    return random * 0x9E3779B1 & WORD


# Codes: flat float32 tensors in memory order, and back.


def bits_of(value: Tensor) -> Tensor:
    """The float32 patterns as integers; int64, so that nothing overflows."""
    return value.contiguous().view(torch.int32).to(torch.int64) & WORD


def float_of(bits: Tensor) -> Tensor:
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def quanta(value: Tensor) -> Tensor:
    """A row for each quantum; zeros fill the last one and change no scale."""
    missing = -value.numel() % QUANTUM
    return torch.nn.functional.pad(value, (0, missing)).view(-1, QUANTUM)


def encode_m(m: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """int8, and a power of two for each quantum: the least with |m| <= 127 scale."""
    rows = quanta(m)
    largest = bits_of(rows.abs().amax(1, keepdim=True))
    exponent = ((largest + 0x1FFFF >> 23) - 6).clamp(min=1)
    # 128, and a random fraction of 16 bits: what the sum cuts off was rounded at random.
    above = rows * float_of(254 - exponent << 23) + float_of(quanta(random) & 0xFFFF | 0x43000000)
    codes = (above.to(torch.int32) - 128).to(torch.int8)
    return codes.flatten()[: m.numel()], float_of(exponent << 23).flatten()


def decode_m(code: Tensor, scale: Tensor) -> Tensor:
    return (quanta(code).float() * scale[:, None]).flatten()[: code.numel()]


def encode_v(v: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """uint8, and a word for each quantum: steps of 2^shift in the pattern, from the top down."""
    bits = quanta(bits_of(v).clamp(max=0x7F000000))
    top = bits.amax(1, keepdim=True)
    bottom = torch.where(bits > 0, bits, top).amin(1, keepdim=True)
    shift = torch.full_like(top, MOST_SHIFT)
    for finer in range(MOST_SHIFT - 1, LEAST_SHIFT - 1, -1):
        codes = (top + (1 << finer) - 1 >> finer) - (bottom >> finer)
        shift = torch.where(codes <= 254, finer, shift)
    one = 1 << shift
    highest = top + one - 1 >> shift
    # Rounding up a little more often keeps the mean of 1 / sqrt(v), which the step depends on.
    rest = bits & one - 1
    up = torch.minimum(rest, one - rest) >> 25 - shift
    code = (bits + up + (quanta(random) >> 32 - shift) >> shift) + 255 - highest
    code = torch.maximum(code, (256 - highest).clamp(min=1))
    code = torch.where(bits > 0, code, 0).to(torch.uint8)
    return code.flatten()[: v.numel()], (highest << 5 | shift).to(torch.int32).flatten()


def decode_v(code: Tensor, scale: Tensor) -> Tensor:
    codes, word = quanta(code).to(torch.int64), scale[:, None].to(torch.int64)
    bits = torch.where(codes > 0, codes - 255 + (word >> 5) << (word & 31), 0)
    return float_of(bits).flatten()[: code.numel()]


def stochastic_bfloat16(value: Tensor, random: Tensor) -> Tensor:
    """A bfloat16 neighbour of each value, the nearer one more often; finite up to 0x1.fep127."""
    return float_of(bits_of(value) + (random >> 16) >> 16 << 16 & WORD).bfloat16()


def stochastic_float16(value: Tensor, random: Tensor) -> Tensor:
    """The same of float16, subnormal numbers included; finite up to 65504."""
    bits = bits_of(value)
    magnitude = bits & 0x7FFFFFFF
    normal = magnitude - 0x38000000 + (random >> 19) >> 13
    # Below 2^-14 in units of 2^-24: 1024, and a random fraction of 13 bits, cut off after the sum.
    small = float_of(magnitude).clamp(max=2.0**-14) * 2.0**24
    subnormal = (small + float_of(random >> 19 | 0x44800000)).to(torch.int64) - 1024
    half = torch.where(magnitude < 0x38800000, subnormal, normal)
    return torch.where(bits >= 1 << 31, half - (1 << 15), half).to(torch.int16).view(torch.float16)


def split_bfloat16(value: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16, and the 16 bits that it lacks.

    Ties go away from zero: to even, the two float32 numbers half-way below and above a bfloat16
    would have the same bits.
    """
    bits = bits_of(value)
    low = bits & 0xFFFF
    remainder = torch.where(low >= 1 << 15, low - (1 << 16), low).to(torch.int16)
    return float_of(bits + 0x8000 >> 16 << 16 & WORD).bfloat16(), remainder


def join_bfloat16(near: Tensor, remainder: Tensor) -> Tensor:
    """The float32 that was split."""
    return float_of(bits_of(near.float()) + remainder.to(torch.int64) & WORD)


class Format(NamedTuple):
    """How one column of the state is stored."""

    storage: torch.dtype
    scale: torch.dtype | None  # of one number for each quantum
    limit: float  # the largest magnitude that it can hold
    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    decode: Callable[[Tensor, Tensor | None], Tensor]

    @property
    def bytes(self) -> float:
        """Of an element and its share of the scale."""
        beside = 0 if self.scale is None else self.scale.itemsize
        return self.storage.itemsize + beside / QUANTUM


LARGEST = torch.finfo(torch.float32).max
LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max
FLOAT32 = Format(torch.float32, None, LARGEST, lambda x, _: (x, None), lambda x, _: x)

# By the key of the column in a parameter's state, and the name that `state=` gives it.
FORMATS: dict[str, dict[str, Format]] = {
    "momentum_buffer": {
        "float32": FLOAT32,
        "bfloat16": Format(
            torch.bfloat16,
            None,
            float.fromhex("0x1.fefffep127"),  # what is larger is nearest to infinity
            lambda m, _: (m.bfloat16(), None),
            lambda code, _: code.float(),
        ),
        "8bit": Format(torch.int8, torch.float32, 127 * 2.0**121, encode_m, decode_m),  # type: ignore[arg-type]
    },
    "exp_avg_sq": {
        "float32": FLOAT32,
        # To nearest, a decay by less than half an ulp would leave v standing still.
        "bfloat16": Format(
            torch.bfloat16,
            None,
            LARGEST_BFLOAT16,
            lambda v, random: (stochastic_bfloat16(v, random), None),
            lambda code, _: code.float(),
        ),
        "8bit": Format(torch.uint8, torch.int32, LARGEST, encode_v, decode_v),  # type: ignore[arg-type]
    },
}
STATE_FORMATS = ("float32", "bfloat16", "8bit")

# How parameters of 16 bits are stored. Those of 32 and more have nothing to round.
ROUNDINGS = ("nearest", "stochastic", "exact")
REMAINDER = "remainder"  # where "exact" keeps the bits that a bfloat16 parameter lacks


def rounding_of(dtype: torch.dtype, rounding: str) -> str:
    """How parameters of a type are stored, by what the optimizer was told."""
    exact = rounding == "exact" and dtype == torch.bfloat16
    stochastic = rounding == "stochastic" and dtype in (torch.bfloat16, torch.float16)
    return rounding if exact or stochastic else "nearest"


def narrow_format(key: str, dtype: torch.dtype) -> Format | None:
    """The format whose codes have this type; None of one that is no narrower than float32."""
    named = FORMATS[key].values()
    return next((f for f in named if f.storage == dtype and f is not FLOAT32), None)


def scale_key(key: str) -> str:
    """Where the scales of a column lie in a parameter's state."""
    return f"{key}_scale"


class Storage(NamedTuple):
    """What an optimizer was told: the formats of m and v, and the rounding of parameters."""

    momentum_buffer: str = "float32"
    exp_avg_sq: str = "float32"
    rounding: str = "nearest"

    @classmethod
    def of(cls, state: Any, rounding: Any) -> Storage:
        """What `state=` and `rounding=` ask for."""
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
        """As `state=` says it."""
        m, v = self.momentum_buffer, self.exp_avg_sq
        return m if m == v else (m, v)

    @property
    def narrow(self) -> bool:
        """Whether m or v is narrower than float32."""
        return (self.momentum_buffer, self.exp_avg_sq) != ("float32", "float32")


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor, one after the other as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def decoded(code: Tensor, scale: Tensor | None, form: Format) -> Tensor:
    """As float32, in the memory order of the codes."""
    values = torch.empty_like(code, dtype=torch.float32)
    in_memory_order(values).copy_(form.decode(in_memory_order(code), scale))
    return values


def encoded(values: Tensor, random: Tensor, form: Format) -> tuple[Tensor, Tensor | None]:
    """Codes in the memory order of the values, which are dense."""
    flat, scale = form.encode(in_memory_order(values), random)
    code = torch.empty_like(values, dtype=form.storage)
    in_memory_order(code).copy_(flat)
    return code, scale

"""How the kernels load and store a column: the functions of ngn_kernels/formats.py by the same names.

A block of values is a power of two of elements in float32, VECTOR neighbours per thread, and begins
with a quantisation block. What a quantisation block shares is a tensor with one number for every
VECTOR elements, one per thread that has a part of it; `spread` repeats it for all elements.

A column is stored in its TYPE with its ROUNDING: int8 is a quantised m, uint8 a quantised v.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

from .layout_constants import (
    BFLOAT16_LIMIT,
    ELEMENT_STRIDE,
    EXACT,
    FLOAT16_LIMIT,
    GOLDEN,
    INFINITY,
    INT8_LIMIT,
    LARGEST_V,
    LEAST_SHIFT,
    MIX1,
    MIX2,
    MOST_SHIFT,
    NEAREST,
    QUANT_BLOCK,
    STEP_STRIDE,
    STOCHASTIC,
    STOCHASTIC_BFLOAT16_LIMIT,
    STOCHASTIC_FLOAT16_LIMIT,
    WINDOW,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LEAST_STEP = tl.constexpr(1 << LEAST_SHIFT.value)


def device(function: Any) -> Any:
    """A function that kernels call."""
    # Triton's interpreter sets up its whole language again at each call of a jit function; a plain
    # function called from a kernel does the same in a fraction of the time.
    return function if INTERPRETED else triton.jit(function)


# An argument per line would hide the functions behind their lists.
# fmt: off

@device
def bits_of(b):
    return b.to(tl.uint32, bitcast=True)


@device
def float_of(b):
    return b.to(tl.float32, bitcast=True)


# Noise

@device
def mixed(x):
    """A bijection of 32-bit numbers without visible structure."""
    x = (x ^ (x >> 16)) * MIX1
    x = (x ^ (x >> 15)) * MIX2
    return x ^ (x >> 16)


@device
def noise_words(key, count, index):
    """What the noise of a parameter's elements from `index` on shares in the step with this count."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    start = mixed(low + (count // WINDOW).to(tl.uint32) * GOLDEN)
    turn = (count % WINDOW).to(tl.uint32) * STEP_STRIDE
    block, skip = (index // QUANT_BLOCK).to(tl.uint32), (index % QUANT_BLOCK).to(tl.int32)
    return block, skip, start, mixed(high ^ start), turn


@device
def noise(words, o):
    """32 random bits for each of the elements at offsets `o`."""
    block, skip, start, mask, turn = words
    b_index = skip + o.to(tl.int32)
    x = (block + (b_index // QUANT_BLOCK).to(tl.uint32)) * GOLDEN ^ start
    x = (x ^ (x >> 16)) * MIX1 + mask
    x = (x ^ (x >> 15)) * MIX2
    return (x ^ (x >> 16)) + (b_index % QUANT_BLOCK).to(tl.uint32) * ELEMENT_STRIDE + turn


@device
def other_noise(b_random):
    """For parameters, so that they do not share v's."""
    return b_random * GOLDEN


# Quantisation blocks

@device
def spread(b, VECTOR: tl.constexpr):
    """One number per thread, repeated for each of its elements."""
    if VECTOR > 1:
        wide = tl.broadcast_to(tl.expand_dims(b, 1), (b.shape[0], VECTOR))
        return tl.reshape(wide, (b.shape[0] * VECTOR,))
    else:
        return b


@device
def largest_of_threads(b, VECTOR: tl.constexpr):
    """The largest over the threads that share a quantisation block, for each of them."""
    PARTS: tl.constexpr = QUANT_BLOCK // VECTOR
    rows = tl.reshape(b, (b.shape[0] // PARTS, PARTS))
    most = tl.expand_dims(tl.max(rows, axis=1), 1)
    return tl.reshape(tl.broadcast_to(most, (b.shape[0] // PARTS, PARTS)), (b.shape[0],))


@device
def largest_in_block(b, VECTOR: tl.constexpr):
    """The same over all elements."""
    if VECTOR > 1:
        b = tl.max(tl.reshape(b, (b.shape[0] // VECTOR, VECTOR)), axis=1)
    return largest_of_threads(b, VECTOR)


@device
def encode_m(b_m, b_random, VECTOR: tl.constexpr):
    """int8, and a power of two for each block: the least with |m| <= 127 scale."""
    largest = largest_in_block(bits_of(tl.abs(b_m)), VECTOR)
    exponent = tl.maximum((largest + 0x1FFFF >> 23).to(tl.int32) - 6, 1)
    b_inverse = spread(float_of(254 - exponent << 23), VECTOR)
    # 128 and a random fraction of 16 bits: truncating the sum rounds stochastically.
    b_above = b_m * b_inverse + float_of(b_random & 0xFFFF | 0x43000000)
    return (b_above.to(tl.int32) - 128).to(tl.int8), float_of(exponent << 23)


@device
def decode_m(b_quantised, scale, VECTOR: tl.constexpr):
    return b_quantised.to(tl.float32) * spread(scale, VECTOR)


@device
def steps_of_v(top, bottom, shift):
    """The number of steps of 2^shift from the least to the largest pattern of a block."""
    return (top + (1 << shift) - 1 >> shift) - (bottom >> shift)


@device
def encode_v(b_v, b_random, VECTOR: tl.constexpr):
    """uint8, and a word for each block: steps of 2^shift in the pattern, from the top down."""
    b_bits = tl.minimum(bits_of(b_v), LARGEST_V)
    top = largest_in_block(b_bits, VECTOR).to(tl.int32)
    # Over the positive ones: modulo 2^32, the least number has the largest negative.
    bottom = (0 - largest_in_block(0 - b_bits, VECTOR)).to(tl.int32)
    # The index of the highest bit of the range, as the exponent of a float that represents it exactly.
    shift = (float_bits(top - bottom >> 7 | LEAST_STEP) >> 23).to(tl.int32) - 127
    shift += (steps_of_v(top, bottom, shift) > 254).to(tl.int32)
    shift = tl.minimum(shift, MOST_SHIFT)
    highest = top + (1 << shift) - 1 >> shift

    b_shift, b_highest = spread(shift.to(tl.uint32), VECTOR), spread(highest, VECTOR)
    b_one = tl.full(b_bits.shape, 1, tl.uint32) << b_shift
    # Rounding up a little more often keeps the mean of 1 / sqrt(v), which the step depends on.
    b_low = b_bits & b_one - 1
    b_up = tl.minimum(b_low, b_one - b_low) >> 25 - b_shift
    b_step = b_bits + b_up + (b_random >> 32 - b_shift) >> b_shift
    b_byte = tl.maximum(b_step.to(tl.int32) + 255 - b_highest, tl.maximum(256 - b_highest, 1))
    return tl.where(b_bits > 0, b_byte, 0).to(tl.uint8), highest << 5 | shift


@device
def float_bits(number):
    return bits_of(number.to(tl.float32))


@device
def decode_v(b_quantised, word, VECTOR: tl.constexpr):
    b_word = spread(word, VECTOR)
    b_byte = b_quantised.to(tl.int32)
    return float_of(tl.where(b_byte > 0, b_byte - 255 + (b_word >> 5) << (b_word & 31), 0))


# Numbers of 16 bits, as their patterns

@device
def nearest_bfloat16(b):
    bits = bits_of(b)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@device
def stochastic_bfloat16(b, b_random):
    """One of a value's two bfloat16 neighbours, the nearer one more often; finite up to 0x1.fep127."""
    return bits_of(b) + (b_random >> 16) >> 16


@device
def stochastic_float16(b, b_random):
    """The same in float16, subnormal numbers included; finite up to 65504."""
    b_bits = bits_of(b)
    b_magnitude = b_bits & 0x7FFFFFFF
    b_fraction = b_random >> 19
    b_normal = b_magnitude - 0x38000000 + b_fraction >> 13
    # Below 2^-14 in units of 2^-24: 1024 and a random fraction of 13 bits; the sum is truncated.
    b_small = tl.minimum(tl.abs(b), 2.0**-14) * 2.0**24
    b_subnormal = (b_small + float_of(b_fraction | 0x44800000)).to(tl.int32) - 1024
    b_half = tl.where(b_magnitude < 0x38800000, b_subnormal.to(tl.uint32), b_normal)
    return b_half | (b_bits >> 16 & 0x8000)


# Columns: the address of the values, and that of their scales or remainders

@device
def address(column, begin, TYPE: tl.constexpr):
    """The address of element `begin` of a row."""
    return tl.load(column) + begin * (TYPE.primitive_bitwidth // 8)


@device
def column_at(column, extra, begin, TYPE: tl.constexpr, ROUNDING: tl.constexpr = NEAREST):
    """The addresses of element `begin` of a row and of its scale or remainder, 0 without one.

    `extra` is the table's number for the address of the scales or remainders.
    """
    if TYPE == tl.int8 or TYPE == tl.uint8:
        return address(column, begin, TYPE), address(extra, begin // QUANT_BLOCK, tl.float32)
    elif ROUNDING == EXACT:
        return address(column, begin, TYPE), address(extra, begin, tl.int16)
    else:
        return address(column, begin, TYPE), 0


@device
def is_aligned(column, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    return tl.load(column) % (VECTOR * (TYPE.primitive_bitwidth // 8)) == 0


@device
def pointer(address, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """An address as a pointer that is aligned to VECTOR elements.

    The hint is always true: if the address is not aligned, this is a different address, and the
    caller has no elements there. A hint on the address itself would also apply to the unaligned path.
    """
    BYTES: tl.constexpr = VECTOR * (TYPE.primitive_bitwidth // 8)
    if VECTOR > 1:
        return tl.multiple_of((address // BYTES * BYTES).to(tl.pointer_type(TYPE)), BYTES)
    else:
        return address.to(tl.pointer_type(TYPE))


@device
def load_bits(address, o, mask, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    return tl.load(pointer(address, TYPE, VECTOR) + o, mask=mask, other=0)


@device
def store_bits(address, o, b, mask, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    tl.store(pointer(address, TYPE, VECTOR) + o, b.to(TYPE), mask=mask)


@device
def scale_offsets(i, n, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of scales, and which threads have the first elements of a quantisation block."""
    o = i + VECTOR * tl.arange(0, BLOCK // VECTOR)
    return o.to(tl.uint32) // QUANT_BLOCK, (o < n) & (o.to(tl.uint32) % QUANT_BLOCK == 0)


@device
def load_scale(address, i, n, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """The pattern of a block's scale, read only by the thread that will store it."""
    o, mask = scale_offsets(i, n, VECTOR, BLOCK)
    own = tl.load(address.to(tl.pointer_type(tl.uint32)) + o, mask=mask, other=0)
    return largest_of_threads(own, VECTOR)


@device
def store_scale(address, i, n, scale, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    o, mask = scale_offsets(i, n, VECTOR, BLOCK)
    tl.store(address.to(tl.pointer_type(tl.uint32)) + o, scale.to(tl.uint32, bitcast=True), mask=mask)


@device
def load(
    at, i, n,
    TYPE: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, ROUNDING: tl.constexpr = NEAREST,
):
    """A block of values from element `i` on, as float32; zeros from element `n` on."""
    p, p_extra = at
    o = i + tl.arange(0, BLOCK)
    mask = o < n
    if TYPE == tl.int8:
        scale = float_of(load_scale(p_extra, i, n, VECTOR, BLOCK))
        return decode_m(load_bits(p, o, mask, TYPE, VECTOR), scale, VECTOR)
    elif TYPE == tl.uint8:
        word = load_scale(p_extra, i, n, VECTOR, BLOCK).to(tl.int32)
        return decode_v(load_bits(p, o, mask, TYPE, VECTOR), word, VECTOR)
    elif TYPE == tl.bfloat16:
        # With integers, as in convert.h: Triton's interpreter truncates bfloat16.
        b_bits = load_bits(p, o, mask, tl.uint16, VECTOR).to(tl.uint32) << 16
        if ROUNDING == EXACT:
            b_bits += load_bits(p_extra, o, mask, tl.int16, VECTOR).to(tl.int32).to(tl.uint32)
        return float_of(b_bits)
    else:
        return tl.load(pointer(p, TYPE, VECTOR) + o, mask=mask, other=0.0).to(tl.float32)


@device
def store(
    at, i, n, b, b_random,
    TYPE: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, ROUNDING: tl.constexpr = NEAREST,
):
    """Store a block of float32 values, all below the column's limit."""
    p, p_extra = at
    o = i + tl.arange(0, BLOCK)
    mask = o < n
    if TYPE == tl.int8:
        b_quantised, scale = encode_m(b, b_random, VECTOR)
        store_bits(p, o, b_quantised, mask, TYPE, VECTOR)
        store_scale(p_extra, i, n, scale, VECTOR, BLOCK)
    elif TYPE == tl.uint8:
        b_quantised, word = encode_v(b, b_random, VECTOR)
        store_bits(p, o, b_quantised, mask, TYPE, VECTOR)
        store_scale(p_extra, i, n, word, VECTOR, BLOCK)
    elif TYPE == tl.bfloat16 and ROUNDING == EXACT:
        # Ties go away from zero.
        store_bits(p, o, bits_of(b) + 0x8000 >> 16, mask, tl.uint16, VECTOR)
        store_bits(p_extra, o, bits_of(b), mask, tl.int16, VECTOR)
    elif TYPE == tl.bfloat16:
        b_bits = stochastic_bfloat16(b, b_random) if ROUNDING == STOCHASTIC else nearest_bfloat16(b)
        store_bits(p, o, b_bits, mask, tl.uint16, VECTOR)
    elif TYPE == tl.float16 and ROUNDING == STOCHASTIC:
        store_bits(p, o, stochastic_float16(b, b_random), mask, tl.uint16, VECTOR)
    else:
        store_bits(p, o, b, mask, TYPE, VECTOR)


@device
def limit(TYPE: tl.constexpr, ROUNDING: tl.constexpr = NEAREST):
    """The smallest magnitude that a column cannot store."""
    if TYPE == tl.bfloat16:
        return STOCHASTIC_BFLOAT16_LIMIT if ROUNDING == STOCHASTIC else BFLOAT16_LIMIT
    elif TYPE == tl.float16:
        return STOCHASTIC_FLOAT16_LIMIT if ROUNDING == STOCHASTIC else FLOAT16_LIMIT
    elif TYPE == tl.int8:
        return INT8_LIMIT
    else:
        return INFINITY

"""How the kernels load and store a column: the functions of formats.py by the same names, on blocks.

A block is a power of two of elements in float32, VECTOR neighbours to a thread, and begins with a
quantum. What a quantum shares is kept once for each thread that has a part of it: a tensor with one
number for every VECTOR elements, which `spread` gives to all of them.

A column is stored in its TYPE and by its ROUNDING: int8 is m's code, uint8 is v's.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

from .. import formats

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

NEAREST, STOCHASTIC, EXACT = (tl.constexpr(name) for name in formats.ROUNDINGS)
QUANTUM, WINDOW = tl.constexpr(formats.QUANTUM), tl.constexpr(formats.WINDOW)
LEAST_STEP = tl.constexpr(1 << formats.LEAST_SHIFT)
MOST_SHIFT = tl.constexpr(formats.MOST_SHIFT)
STRIDE, STEP = tl.constexpr(formats.STRIDE), tl.constexpr(formats.STEP)

# The smallest magnitudes that a column cannot hold.
INFINITY = tl.constexpr(float("inf"))
BFLOAT16_LIMIT = tl.constexpr(float.fromhex("0x1.ffp127"))
FLOAT16_LIMIT = tl.constexpr(65520.0)
STOCHASTIC_BFLOAT16_LIMIT = tl.constexpr(float.fromhex("0x1.fe0002p127"))
STOCHASTIC_FLOAT16_LIMIT = tl.constexpr(float.fromhex("0x1.ffc002p15"))
INT8_LIMIT = tl.constexpr(float.fromhex("0x1.fc0002p127"))


def device(function: Any) -> Any:
    """A function that kernels call."""
    # Triton's interpreter prepares its whole language anew at each call of a jit function; called
    # from a kernel, a plain function does the same in a fraction of the time.
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
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@device
def noise_words(key, count, index):
    """What the noise of a row's elements from `index` on shares in the step of this count."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    start = mixed(low + (count // WINDOW).to(tl.uint32) * 0x9E3779B1)
    turn = (count % WINDOW).to(tl.uint32) * STEP
    return (index // QUANTUM).to(tl.uint32), (index % QUANTUM).to(tl.int32), start, mixed(high ^ start), turn


@device
def noise(words, o):
    """32 random bits for each of the elements at offsets `o`."""
    quantum, skipped, start, more, turn = words
    b_place = skipped + o.to(tl.int32)
    x = (quantum + (b_place // QUANTUM).to(tl.uint32)) * 0x9E3779B1 ^ start
    x = (x ^ (x >> 16)) * 0x7FEB352D + more
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x ^ (x >> 16)) + (b_place % QUANTUM).to(tl.uint32) * STRIDE + turn


@device
def other_noise(b_random):
    """For parameters, so that they do not share v's."""
    return b_random * 0x9E3779B1


# Quanta

@device
def spread(b, VECTOR: tl.constexpr):
    """What threads have, for each of their elements."""
    if VECTOR > 1:
        wide = tl.broadcast_to(tl.expand_dims(b, 1), (b.shape[0], VECTOR))
        return tl.reshape(wide, (b.shape[0] * VECTOR,))
    else:
        return b


@device
def largest_of_threads(b, VECTOR: tl.constexpr):
    """Of the threads that share a quantum, for each of them."""
    PARTS: tl.constexpr = QUANTUM // VECTOR
    rows = tl.reshape(b, (b.shape[0] // PARTS, PARTS))
    most = tl.expand_dims(tl.max(rows, axis=1), 1)
    return tl.reshape(tl.broadcast_to(most, (b.shape[0] // PARTS, PARTS)), (b.shape[0],))


@device
def largest_in_quantum(b, VECTOR: tl.constexpr):
    """The same of all elements."""
    if VECTOR > 1:
        b = tl.max(tl.reshape(b, (b.shape[0] // VECTOR, VECTOR)), axis=1)
    return largest_of_threads(b, VECTOR)


@device
def encode_m(b_m, b_random, VECTOR: tl.constexpr):
    """int8, and a power of two for each quantum: the least with |m| <= 127 scale."""
    largest = largest_in_quantum(bits_of(tl.abs(b_m)), VECTOR)
    exponent = tl.maximum((largest + 0x1FFFF >> 23).to(tl.int32) - 6, 1)
    b_inverse = spread(float_of(254 - exponent << 23), VECTOR)
    # 128, and a random fraction of 16 bits: what the sum cuts off was rounded at random.
    b_above = b_m * b_inverse + float_of(b_random & 0xFFFF | 0x43000000)
    return (b_above.to(tl.int32) - 128).to(tl.int8), float_of(exponent << 23)


@device
def decode_m(b_code, scale, VECTOR: tl.constexpr):
    return b_code.to(tl.float32) * spread(scale, VECTOR)


@device
def codes_of_v(top, bottom, shift):
    """How many steps of 2^shift there are from the least to the largest of a quantum."""
    return (top + (1 << shift) - 1 >> shift) - (bottom >> shift)


@device
def encode_v(b_v, b_random, VECTOR: tl.constexpr):
    """uint8, and a word for each quantum: steps of 2^shift in the pattern, from the top down."""
    b_bits = tl.minimum(bits_of(b_v), 0x7F000000)
    top = largest_in_quantum(b_bits, VECTOR).to(tl.int32)
    # Of those that are not zero: modulo 2^32, the least number has the largest negative.
    bottom = (0 - largest_in_quantum(0 - b_bits, VECTOR)).to(tl.int32)
    # The place of the highest bit of the range, as the exponent of a float that has it exactly.
    shift = (float_bits(top - bottom >> 7 | LEAST_STEP) >> 23).to(tl.int32) - 127
    shift += (codes_of_v(top, bottom, shift) > 254).to(tl.int32)
    shift = tl.minimum(shift, MOST_SHIFT)
    highest = top + (1 << shift) - 1 >> shift

    b_shift, b_highest = spread(shift.to(tl.uint32), VECTOR), spread(highest, VECTOR)
    b_one = tl.full(b_bits.shape, 1, tl.uint32) << b_shift
    # Rounding up a little more often keeps the mean of 1 / sqrt(v), which the step depends on.
    b_rest = b_bits & b_one - 1
    b_up = tl.minimum(b_rest, b_one - b_rest) >> 25 - b_shift
    b_step = b_bits + b_up + (b_random >> 32 - b_shift) >> b_shift
    b_code = tl.maximum(b_step.to(tl.int32) + 255 - b_highest, tl.maximum(256 - b_highest, 1))
    return tl.where(b_bits > 0, b_code, 0).to(tl.uint8), highest << 5 | shift


@device
def float_bits(number):
    return bits_of(number.to(tl.float32))


@device
def decode_v(b_code, word, VECTOR: tl.constexpr):
    b_word = spread(word, VECTOR)
    b_code = b_code.to(tl.int32)
    return float_of(tl.where(b_code > 0, b_code - 255 + (b_word >> 5) << (b_word & 31), 0))


# Numbers of 16 bits, as their patterns

@device
def nearest_bfloat16(b):
    bits = bits_of(b)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@device
def stochastic_bfloat16(b, b_random):
    """A bfloat16 neighbour of each value, the nearer one more often; finite up to 0x1.fep127."""
    return bits_of(b) + (b_random >> 16) >> 16


@device
def stochastic_float16(b, b_random):
    """The same of float16, subnormal numbers included; finite up to 65504."""
    b_bits = bits_of(b)
    b_magnitude = b_bits & 0x7FFFFFFF
    b_fraction = b_random >> 19
    b_normal = b_magnitude - 0x38000000 + b_fraction >> 13
    # Below 2^-14 in units of 2^-24: 1024, and a random fraction of 13 bits, cut off after the sum.
    b_small = tl.minimum(tl.abs(b), 2.0**-14) * 2.0**24
    b_subnormal = (b_small + float_of(b_fraction | 0x44800000)).to(tl.int32) - 1024
    b_half = tl.where(b_magnitude < 0x38800000, b_subnormal.to(tl.uint32), b_normal)
    return b_half | (b_bits >> 16 & 0x8000)


# Columns: where one lies is an address, and the address of what is beside it, a scale or a remainder

@device
def address(column, begin, TYPE: tl.constexpr):
    """Where element `begin` of a row lies."""
    return tl.load(column) + begin * (TYPE.primitive_bitwidth // 8)


@device
def place(column, beside, begin, TYPE: tl.constexpr, ROUNDING: tl.constexpr = NEAREST):
    """Where element `begin` of a row lies, and its scale or its remainder, if there is one."""
    if TYPE == tl.int8 or TYPE == tl.uint8:
        return address(column, begin, TYPE), address(beside, begin // QUANTUM, tl.float32)
    elif ROUNDING == EXACT:
        return address(column, begin, TYPE), address(beside, begin, tl.int16)
    else:
        return address(column, begin, TYPE), 0


@device
def is_aligned(column, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    return tl.load(column) % (VECTOR * (TYPE.primitive_bitwidth // 8)) == 0


@device
def pointer(address, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """An address as a pointer that is aligned to VECTOR elements.

    The hint is always true: where the address is not aligned, this is another address, and the
    caller has no elements there. A hint on the address itself would stick to it, and the unaligned
    path would vectorise too.
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
def scale_places(first, n, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of scales, and the thread that has the first elements of a quantum."""
    o = first + VECTOR * tl.arange(0, BLOCK // VECTOR)
    return o.to(tl.uint32) // QUANTUM, (o < n) & (o.to(tl.uint32) % QUANTUM == 0)


@device
def load_scale(address, first, n, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """The pattern of a quantum's scale, which only the thread that will store it reads from memory."""
    o, mask = scale_places(first, n, VECTOR, BLOCK)
    mine = tl.load(address.to(tl.pointer_type(tl.uint32)) + o, mask=mask, other=0)
    return largest_of_threads(mine, VECTOR)


@device
def store_scale(address, first, n, scale, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    o, mask = scale_places(first, n, VECTOR, BLOCK)
    tl.store(address.to(tl.pointer_type(tl.uint32)) + o, scale.to(tl.uint32, bitcast=True), mask=mask)


@device
def load(
    where, first, n,
    TYPE: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, ROUNDING: tl.constexpr = NEAREST,
):
    """A block of values from element `first` on, as float32; zeros from element `n` on."""
    p, p_beside = where
    o = first + tl.arange(0, BLOCK)
    mask = o < n
    if TYPE == tl.int8:
        scale = float_of(load_scale(p_beside, first, n, VECTOR, BLOCK))
        return decode_m(load_bits(p, o, mask, TYPE, VECTOR), scale, VECTOR)
    elif TYPE == tl.uint8:
        word = load_scale(p_beside, first, n, VECTOR, BLOCK).to(tl.int32)
        return decode_v(load_bits(p, o, mask, TYPE, VECTOR), word, VECTOR)
    elif TYPE == tl.bfloat16:
        # By integers, as in convert.h: Triton's interpreter truncates bfloat16.
        b_bits = load_bits(p, o, mask, tl.uint16, VECTOR).to(tl.uint32) << 16
        if ROUNDING == EXACT:
            b_bits += load_bits(p_beside, o, mask, tl.int16, VECTOR).to(tl.int32).to(tl.uint32)
        return float_of(b_bits)
    else:
        return tl.load(pointer(p, TYPE, VECTOR) + o, mask=mask, other=0.0).to(tl.float32)


@device
def store(
    where, first, n, b, b_random,
    TYPE: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, ROUNDING: tl.constexpr = NEAREST,
):
    """A block of float32 values, none of them beyond the column's limit."""
    p, p_beside = where
    o = first + tl.arange(0, BLOCK)
    mask = o < n
    if TYPE == tl.int8:
        b_code, scale = encode_m(b, b_random, VECTOR)
        store_bits(p, o, b_code, mask, TYPE, VECTOR)
        store_scale(p_beside, first, n, scale, VECTOR, BLOCK)
    elif TYPE == tl.uint8:
        b_code, word = encode_v(b, b_random, VECTOR)
        store_bits(p, o, b_code, mask, TYPE, VECTOR)
        store_scale(p_beside, first, n, word, VECTOR, BLOCK)
    elif TYPE == tl.bfloat16 and ROUNDING == EXACT:
        # Ties go away from zero, as in formats.py.
        store_bits(p, o, bits_of(b) + 0x8000 >> 16, mask, tl.uint16, VECTOR)
        store_bits(p_beside, o, bits_of(b), mask, tl.int16, VECTOR)
    elif TYPE == tl.bfloat16:
        b_bits = stochastic_bfloat16(b, b_random) if ROUNDING == STOCHASTIC else nearest_bfloat16(b)
        store_bits(p, o, b_bits, mask, tl.uint16, VECTOR)
    elif TYPE == tl.float16 and ROUNDING == STOCHASTIC:
        store_bits(p, o, stochastic_float16(b, b_random), mask, tl.uint16, VECTOR)
    else:
        store_bits(p, o, b, mask, TYPE, VECTOR)


@device
def limit(TYPE: tl.constexpr, ROUNDING: tl.constexpr = NEAREST):
    """The smallest magnitude that a column cannot hold."""
    if TYPE == tl.bfloat16:
        return STOCHASTIC_BFLOAT16_LIMIT if ROUNDING == STOCHASTIC else BFLOAT16_LIMIT
    elif TYPE == tl.float16:
        return STOCHASTIC_FLOAT16_LIMIT if ROUNDING == STOCHASTIC else FLOAT16_LIMIT
    elif TYPE == tl.int8:
        return INT8_LIMIT
    else:
        return INFINITY

"""The one source of the numbers that Python, C++ and Triton share: tables, codes, formats.

It imports neither torch nor the package, because the build of the extension runs it, too:
csrc/generate_layout.py turns it into the C++ header layout.h. backends/triton/layout_constants.py turns it
into Triton's constants when the kernels are loaded.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

# Tables: arrays of 8-byte numbers that the host, the engines and GPUs share


class Column(IntEnum):
    """The columns of a bucket's table, which has one row per parameter; tensors are addresses."""

    X = 0
    G = 1  # 0 if the parameter takes no part in this step
    M = 2
    V = 3
    STEP = 4  # float32, the number of steps taken
    NUMEL = 5
    GROUP = 6
    REPLICAS = 7  # how many ranks hold the same elements
    M_SCALE = 8  # of an 8-bit m: float32, one per quantisation block
    V_SCALE = 9  # of an 8-bit v: uint32, one per quantisation block
    REMAINDER = 10  # with exact rounding: int16, the low bits of each float32
    NOISE_KEY = 11
    OFFSET = 12  # index of the row's first element in the whole parameter
    D = 13  # of a rule with given directions: in the type of the computation, in the order of x


class GroupColumn(IntEnum):
    """The columns of the table of parameter groups."""

    LR = 0
    BETA1 = 1
    BETA2 = 2
    EPS = 3
    WEIGHT_DECAY = 4
    STEP_CAP = 5  # 0: none


class Input(IntEnum):
    """The scalar inputs of a step."""

    LOSS = 0
    LOSS_FLOOR = 1
    GRAD_SCALE = 2  # gradients come multiplied by this; 1 without AMP
    FOUND_INF = 3  # non-zero: AMP found an overflow
    MAX_GRAD_NORM = 4  # infinity: no clipping
    AIM = 5  # 1 - loss_target: the part of the loss above its floor that a step counts


class Sum(IntEnum):
    """The sums over a bucket, each already weighted by its groups' values."""

    WEIGHTED = 0  # Q: sum of a_j g^2 / D
    ALIGNMENT = 1  # W: sum of c_j lambda_j g x
    NORM = 2  # sum of g^2


class Count(IntEnum):
    """The integers of a report."""

    REASON = 0  # of the current step, over the buckets applied so far
    SKIPPED = 1  # number of steps with a reason
    LAST_REASON = 2  # of the last such step


class Size(IntEnum):
    """The floating-point numbers of a report; gamma of each group follows from STEP_SIZES on."""

    SHRINK = 0
    SQUARED_NORM = 1  # of the gradients before clipping; NaN where no pass computes it
    STEP_SIZES = 2


# Codes


class Reason(IntEnum):
    """Why a step left everything, or some elements, as they were; the largest is reported."""

    NONE = 0
    AMP_OVERFLOW = 1
    LOSS_NOT_FINITE = 2
    LOSS_BELOW_FLOOR = 3
    GRADIENT_NOT_FINITE = 4
    ELEMENTS_KEPT = 5


class Flag(IntEnum):
    """The choices of a rule, which rules.py explains, as bits of the number that C++ and CUDA get."""

    MOMENTUM = 0
    COORDINATE = 1
    RMS = 2
    REGULARISED = 3
    ADAMW_DECAY = 4
    DIRECTED = 5
    NESTEROV = 6


class DType(IntEnum):
    """Element types of columns; int8 and uint8 are the quantised m and v."""

    FLOAT64 = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    INT8 = 4
    UINT8 = 5


class Rounding(IntEnum):
    """How parameters of 16 bits are stored."""

    NEAREST = 0
    STOCHASTIC = 1
    EXACT = 2  # the bits that rounding removes are stored beside the parameter


class Guard(IntEnum):
    """What a signature finds when it compares a step's tensors with those of the plan."""

    SAME = 0  # every tensor is where it was
    MOVED = 1  # gradients appeared, disappeared, or are stored elsewhere
    UNUSUAL = 2  # a gradient must be checked: other type, device or memory order, sparse, lazy
    STALE = 3  # something other than a gradient was replaced or moved: a new plan is needed
    GROWN = 4  # the same, but parameters without a row have gradients; only C++ finds it


EMPTY_ADDRESS = 1  # of a gradient without elements, for which torch returns 0
UNUSUAL_ADDRESS = -1  # of a gradient that must be checked


# Quantisation and noise


class Word(int):
    """An unsigned number of 32 bits, which C++ computes with modulo 2^32."""


QUANT_BLOCK = 64  # consecutive elements of an 8-bit column that share a scale
LEAST_SHIFT, MOST_SHIFT = Word(14), Word(20)  # log2 of the step between the patterns of an 8-bit v
LARGEST_V = Word(0x7F000000)  # float32 pattern of the largest v that 8 bits can represent

WINDOW = 64  # steps whose noise is spread evenly over the interval
ELEMENT_STRIDE, STEP_STRIDE = (
    Word(0x93F96EC5),
    Word(0x9E379E37),
)  # of noise, to the next element or step
GOLDEN = Word(0x9E3779B1)
MIX1, MIX2 = Word(0x7FEB352D), Word(0x846CA68B)

# The smallest magnitudes that storing takes to infinity; types without one hold every float32
FLOAT32_LIMIT = float.fromhex("0x1.ffffffp127")
BFLOAT16_LIMIT = float.fromhex("0x1.ffp127")
FLOAT16_LIMIT = 65520.0
INT8_LIMIT = float.fromhex("0x1.fc0002p127")  # after 127 times the largest scale
STOCHASTIC_BFLOAT16_LIMIT = float.fromhex("0x1.fe0002p127")
STOCHASTIC_FLOAT16_LIMIT = float.fromhex("0x1.ffc002p15")


def checksum(names: Mapping[str, object]) -> int:
    """A number that changes with the numbers of this module, whose `vars` are `names`.

    The extension carries that of the layout it was built from.
    """
    lines = []
    for name, value in names.items():
        if isinstance(value, type) and issubclass(value, IntEnum):
            lines += [f"{name}.{member.name} {int(member)}" for member in value]
        elif isinstance(value, (int, float)):
            lines.append(f"{name} {value!r}")
    return zlib.crc32("\n".join(lines).encode())


SOURCE_SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".py")


def sources_checksum(folder: Path) -> int:
    """A number that changes with the files of csrc; compiled modules carry that of their sources."""
    number = 0
    for path in sorted(p for p in folder.rglob("*") if p.suffix in SOURCE_SUFFIXES and p.is_file()):
        number = zlib.crc32(path.relative_to(folder).as_posix().encode(), number)
        number = zlib.crc32(path.read_bytes().replace(b"\r\n", b"\n"), number)
    return number

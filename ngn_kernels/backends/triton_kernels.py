"""The two Triton kernels, with the names and the order of math of rule.h and reference.py.

    reduce  one partial sum per chunk; the block that completes the last chunk of the step adds them
    apply   rho from the sums at its head; then x, m and v in place; the last block counts the step

A block works on one chunk. Where tensors lie, how long they are, hyper-parameters and step counts
all come from tables on the device, so only a new rule or a new element type compiles anything.

What a whole chunk shares is computed in float64 and pinned to float32; elements are float32.
Names in here: `i_` index, `n_` count, `o` offsets, `p_` address, `b_` a block of values,
UPPERCASE compile-time constants.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

from .. import plan
from ..rules import Reason

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

X, G, M, V = tl.constexpr(plan.X), tl.constexpr(plan.G), tl.constexpr(plan.M), tl.constexpr(plan.V)
STEP, NUMEL, GROUP = tl.constexpr(plan.STEP), tl.constexpr(plan.NUMEL), tl.constexpr(plan.GROUP)
HEIGHT, GRAD_SCALE = tl.constexpr(plan.HEIGHT), tl.constexpr(plan.GRAD_SCALE)
FOUND_INF, SHRINK = tl.constexpr(plan.FOUND_INF), tl.constexpr(plan.SHRINK)
MAX_GRAD_NORM = tl.constexpr(plan.MAX_GRAD_NORM)
REASON, SKIPPED = tl.constexpr(plan.REASON), tl.constexpr(plan.SKIPPED)
LAST_REASON = tl.constexpr(plan.LAST_REASON)

NONE, AMP_OVERFLOW = tl.constexpr(int(Reason.NONE)), tl.constexpr(int(Reason.AMP_OVERFLOW))
LOSS_NOT_FINITE = tl.constexpr(int(Reason.LOSS_NOT_FINITE))
LOSS_BELOW_FLOOR = tl.constexpr(int(Reason.LOSS_BELOW_FLOOR))
GRADIENT_NOT_FINITE = tl.constexpr(int(Reason.GRADIENT_NOT_FINITE))
ELEMENTS_KEPT = tl.constexpr(int(Reason.ELEMENTS_KEPT))

INFINITY = tl.constexpr(float("inf"))
BFLOAT16_LIMIT = tl.constexpr(float.fromhex("0x1.ffp127"))
FLOAT16_LIMIT = tl.constexpr(65520.0)


def device(function: Any) -> Any:
    """A function that kernels call."""
    # Triton's interpreter prepares its whole language anew at each call of a jit function; called
    # from a kernel, a plain function does the same in a fraction of the time.
    return function if INTERPRETED else triton.jit(function)


# An argument per line would hide the kernels behind their lists.
# fmt: off

@device
def clip_factor(norm_squared, max_grad_norm):
    """s = min(1, max_grad_norm / (norm + 1e-6))"""
    factor = max_grad_norm / (tl.sqrt(norm_squared) + 1e-6)
    return tl.where((max_grad_norm < INFINITY) & (factor < 1.0), factor, 1.0)


@device
def sum_buckets(sums, n_buckets):
    """Q, W and the squared norm over all buckets, in their order."""
    weighted = tl.load(sums)
    alignment = tl.load(sums + 1)
    norm = tl.load(sums + 2)
    for i_bucket in range(1, n_buckets):
        weighted += tl.load(sums + 3 * i_bucket)
        alignment += tl.load(sums + 3 * i_bucket + 1)
        norm += tl.load(sums + 3 * i_bucket + 2)
    return weighted, alignment, norm


@device
def shrink(sums, n_buckets, scalars, RMS: tl.constexpr):
    """rho = max(0, 2h - W) / (2h + Q), 1 where 0/0; the clip factor; why the step must not happen"""
    weighted, alignment, norm = sum_buckets(sums, n_buckets)
    h = tl.load(scalars + HEIGHT)
    max_grad_norm = tl.load(scalars + MAX_GRAD_NORM)
    clip = clip_factor(norm, max_grad_norm)
    # Without RMS the sum was taken over unclipped gradients.
    q = weighted if RMS else clip * clip * weighted
    denominator = 2 * h + q
    above = 2 * h - alignment
    rho = tl.where(denominator == 0, 1.0, tl.where(above > 0, above, 0.0) / denominator)

    total = weighted + alignment + tl.where(max_grad_norm < INFINITY, norm, 0.0)
    reason = tl.where(tl.abs(total) < INFINITY, NONE, GRADIENT_NOT_FINITE)
    reason = tl.where(h < 0, LOSS_BELOW_FLOOR, reason)
    reason = tl.where(tl.abs(h) < INFINITY, reason, LOSS_NOT_FINITE)
    reason = tl.where(tl.load(scalars + FOUND_INF) != 0, AMP_OVERFLOW, reason)
    return rho, clip, reason


@device
def effective_lr(lr, weight_decay, REGULARISED: tl.constexpr):
    """a_j: the lr, or the lr that regularised decay leaves of it"""
    return lr / (1 + weight_decay * lr) if REGULARISED else lr


@device
def moment_coefficients(groups, i_group, p_step):
    """beta2, 1 - beta2, eps, 1 / (1 - beta2^t)"""
    beta2 = tl.load(groups + 5 * i_group + 2)
    eps = tl.load(groups + 5 * i_group + 3)
    count = tl.load(p_step.to(tl.pointer_type(tl.float32))).to(tl.float64) + 1
    bias = 1 - tl.exp(count * tl.log(beta2))
    return beta2.to(tl.float32), (1 - beta2).to(tl.float32), eps.to(tl.float32), (1 / bias).to(tl.float32)


@device
def second_moment(b_v, b_g, k_v):
    """v <- beta2 v + (1 - beta2) g^2"""
    beta2, one_minus_beta2, eps, inverse_bias = k_v
    return beta2 * b_v + one_minus_beta2 * (b_g * b_g)


@device
def preconditioner(b_v, k_v):
    """D = eps + sqrt(v / (1 - beta2^t))"""
    beta2, one_minus_beta2, eps, inverse_bias = k_v
    return eps + tl.sqrt_rn(b_v * inverse_bias)


@device
def limit(TYPE: tl.constexpr):
    """The smallest magnitude that a storage type rounds to infinity."""
    if TYPE == tl.bfloat16:
        return BFLOAT16_LIMIT
    elif TYPE == tl.float16:
        return FLOAT16_LIMIT
    else:
        return INFINITY


@device
def locate(table, chunks, n_rows, chunk_size, i_chunk):
    """A chunk's row in the table, its first element, and how many elements it has."""
    row = table + tl.load(chunks + 2 * i_chunk)
    begin = tl.load(chunks + 2 * i_chunk + 1)
    n = tl.minimum(tl.load(row + NUMEL * n_rows) - begin, chunk_size).to(tl.int32)
    return row, begin, n


@device
def is_aligned(column, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    return tl.load(column) % (VECTOR * (TYPE.primitive_bitwidth // 8)) == 0


@device
def address(column, begin, TYPE: tl.constexpr):
    """Where element `begin` of a row lies."""
    return tl.load(column) + begin * (TYPE.primitive_bitwidth // 8)


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
def load(address, o, mask, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """A block of values as float32."""
    if TYPE == tl.bfloat16:
        # By integers, as in convert.h: Triton's interpreter truncates bfloat16.
        p = pointer(address, tl.uint16, VECTOR)
        return (tl.load(p + o, mask=mask, other=0).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(pointer(address, TYPE, VECTOR) + o, mask=mask, other=0.0).to(tl.float32)


@device
def store(address, o, b, mask, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """A block of float32 values, all finite in TYPE, rounded to nearest even."""
    if TYPE == tl.bfloat16:
        bits = b.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(pointer(address, tl.uint16, VECTOR) + o, rounded.to(tl.uint16), mask=mask)
    else:
        tl.store(pointer(address, TYPE, VECTOR) + o, b.to(TYPE), mask=mask)


@device
def reduce_span(
    row, n_rows, begin, n, gradient_scale, k_v, RMS: tl.constexpr, REGULARISED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """The sums of g^2 / D and g x over `n` elements of a row, VECTOR at a time."""
    p_x = address(row + X * n_rows, begin, X_TYPE)
    p_v = address(row + V * n_rows, begin, STATE_TYPE)
    p_g = address(row + G * n_rows, begin, G_TYPE)
    b_weighted = tl.full((BLOCK,), 0.0, tl.float32)
    b_alignment = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < n
        b_g = load(p_g, o, mask, G_TYPE, VECTOR) * gradient_scale
        if RMS:
            b_v = load(p_v, o, mask, STATE_TYPE, VECTOR)
            b_d = preconditioner(second_moment(b_v, b_g, k_v), k_v)
            b_weighted += tl.div_rn(b_g * b_g, b_d)
        else:
            b_weighted += b_g * b_g
        if REGULARISED:
            b_alignment += b_g * load(p_x, o, mask, X_TYPE, VECTOR)
    weighted = tl.sum(b_weighted.to(tl.float64))
    alignment = tl.sum(b_alignment.to(tl.float64)) if REGULARISED else weighted
    return weighted, alignment


@device
def sum_partials(partials, n, BLOCK: tl.constexpr):
    """In a fixed order: the same bits whichever block does it."""
    b_total = tl.full((BLOCK,), 0.0, tl.float64)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        # Other blocks wrote these: not from the first-level cache.
        b_total += tl.load(partials + o, mask=o < n, other=0.0, cache_modifier=".cg")
    return tl.sum(b_total)


@triton.jit(do_not_specialize=("n_rows", "n_chunks", "chunk_size", "n_buckets", "index", "first_chunk"))
def reduce(
    table, chunks, groups, scalars, sums, partials, ticket,
    n_rows, n_chunks, chunk_size, n_buckets, index, first_chunk,
    RMS: tl.constexpr, REGULARISED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """Chunks from `first_chunk` on, one per block; writes their partials and nothing else.

    The ticket counts the chunks of a step, not of a launch: rows may be reduced one by one.
    """
    i_block = tl.program_id(0)
    # Each pass walks the other way than the one before it, which left its last tensors in the cache.
    if RMS:
        i_block = tl.num_programs(0) - 1 - i_block
    i_chunk = (first_chunk + i_block).to(tl.int64)
    row, begin, n = locate(table, chunks, n_rows, chunk_size, i_chunk)
    n = tl.where(tl.load(row + G * n_rows) == 0, 0, n)
    i_group = tl.load(row + GROUP * n_rows)

    # A rule without RMS sums unclipped gradients: shrink() applies the clip factor to its sum.
    clip = 1.0
    k_v = (0.0, 0.0, 0.0, 0.0)
    if RMS:
        k_v = moment_coefficients(groups, i_group, tl.load(row + STEP * n_rows))
        _, _, norm = sum_buckets(sums, n_buckets)
        clip = clip_factor(norm, tl.load(scalars + MAX_GRAD_NORM))
    gradient_scale = (clip / tl.load(scalars + GRAD_SCALE)).to(tl.float32)

    vectors = is_aligned(row + G * n_rows, G_TYPE, VECTOR)
    if RMS:
        vectors &= is_aligned(row + V * n_rows, STATE_TYPE, VECTOR)
    if REGULARISED:
        vectors &= is_aligned(row + X * n_rows, X_TYPE, VECTOR)
    n_aligned = tl.where(vectors, n // VECTOR, 0) * VECTOR
    weighted, alignment = reduce_span(
        row, n_rows, begin, n_aligned, gradient_scale, k_v, RMS, REGULARISED,
        X_TYPE, G_TYPE, STATE_TYPE, VECTOR, BLOCK,
    )
    if n_aligned < n:
        # Half the block: in the same shape, the compiler would give it the layout of the vectors.
        rest = reduce_span(
            row, n_rows, begin + n_aligned, n - n_aligned, gradient_scale, k_v, RMS, REGULARISED,
            X_TYPE, G_TYPE, STATE_TYPE, 1, BLOCK // 2,
        )
        weighted += rest[0]
        alignment += rest[1]

    lr = tl.load(groups + 5 * i_group)
    weight_decay = tl.load(groups + 5 * i_group + 4)
    tl.store(partials + i_chunk, effective_lr(lr, weight_decay, REGULARISED) * weighted)
    if REGULARISED:
        tl.store(partials + n_chunks + i_chunk, lr * weight_decay * alignment)
    if not RMS:
        tl.store(partials + 2 * n_chunks + i_chunk, weighted)

    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == n_chunks - 1:
        tl.store(ticket, 0)
        ours = sums + 3 * index
        tl.store(ours, sum_partials(partials, n_chunks, BLOCK))
        if REGULARISED:
            tl.store(ours + 1, sum_partials(partials + n_chunks, n_chunks, BLOCK))
        else:
            tl.store(ours + 1, 0.0)
        if not RMS:
            tl.store(ours + 2, sum_partials(partials + 2 * n_chunks, n_chunks, BLOCK))


@device
def apply_span(
    row, n_rows, begin, n, k, k_v,
    MOMENTUM: tl.constexpr, COORDINATE: tl.constexpr, RMS: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """Update `n` elements of a row, VECTOR at a time; 1 if any of them kept its old values."""
    gradient_scale, step, lr, two_h, numerator, decay, beta1 = k
    p_x = address(row + X * n_rows, begin, X_TYPE)
    p_m = address(row + M * n_rows, begin, STATE_TYPE)
    p_v = address(row + V * n_rows, begin, STATE_TYPE)
    p_g = address(row + G * n_rows, begin, G_TYPE)
    b_kept = tl.full((BLOCK // VECTOR,), 0, tl.int32)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < n
        b_g = load(p_g, o, mask, G_TYPE, VECTOR) * gradient_scale
        if RMS:
            b_v = load(p_v, o, mask, STATE_TYPE, VECTOR)
            b_v_new = second_moment(b_v, b_g, k_v)
            b_d = preconditioner(b_v_new, k_v)
        if COORDINATE:
            b_denominator = (two_h * b_d if RMS else two_h) + lr * (b_g * b_g)
            b_m_new = tl.where(b_denominator == 0, 0.0, tl.div_rn(numerator * b_g, b_denominator))
        else:
            b_m_new = tl.div_rn(step * b_g, b_d) if RMS else step * b_g
        b_x = load(p_x, o, mask, X_TYPE, VECTOR)
        b_m_new += decay * b_x
        if MOMENTUM:
            b_m = load(p_m, o, mask, STATE_TYPE, VECTOR)
            b_m_new += beta1 * b_m
        b_x_new = b_x - b_m_new

        # An element that would not be finite in its storage type keeps its old values.
        b_finite = tl.abs(b_x_new) < limit(X_TYPE)
        if MOMENTUM:
            b_finite &= tl.abs(b_m_new) < limit(STATE_TYPE)
        if RMS:
            b_finite &= b_v_new < limit(STATE_TYPE)
        store(p_x, o, tl.where(b_finite, b_x_new, b_x), mask, X_TYPE, VECTOR)
        if MOMENTUM:
            store(p_m, o, tl.where(b_finite, b_m_new, b_m), mask, STATE_TYPE, VECTOR)
        if RMS:
            store(p_v, o, tl.where(b_finite, b_v_new, b_v), mask, STATE_TYPE, VECTOR)
        # Past the end are zeros, which stay finite. Joined within a thread, which saves registers.
        b_bad = tl.reshape(tl.where(b_finite, 0, 1), (BLOCK // VECTOR, VECTOR))
        b_kept |= tl.max(b_bad, axis=1)
    return tl.max(b_kept)


@device
def advance_steps(table, n_rows, reason, BLOCK: tl.constexpr = 128):
    """t <- t + 1 for every row that took part, if the step did happen."""
    for first in range(0, tl.where(reason == NONE, n_rows, 0), BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < n_rows
        b_g = tl.load(table + G * n_rows + o, mask=mask, other=0)
        b_step = tl.load(table + STEP * n_rows + o, mask=mask, other=0).to(tl.pointer_type(tl.float32))
        mask &= b_g != 0
        tl.store(b_step, tl.load(b_step, mask=mask, other=0.0) + 1, mask=mask)


@device
def count_step(table, report, n_rows, reason, last):
    """What the last block does: the step counts and the report."""
    advance_steps(table, n_rows, reason)
    code = tl.maximum(tl.atomic_max(report + REASON, reason.to(tl.int64), sem="relaxed"), reason)
    counted = (last != 0) & (code != NONE)
    tl.store(report + SKIPPED, tl.load(report + SKIPPED) + 1, mask=counted)
    tl.store(report + LAST_REASON, code, mask=counted)
    tl.store(report + REASON, 0, mask=counted)


@triton.jit(do_not_specialize=("n_rows", "n_chunks", "chunk_size", "n_buckets", "last"))
def apply(
    table, chunks, groups, scalars, sums, report, ticket,
    n_rows, n_chunks, chunk_size, n_buckets, last,
    MOMENTUM: tl.constexpr, COORDINATE: tl.constexpr, RMS: tl.constexpr, REGULARISED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """One chunk per block, unless the sums forbid the step; `last` marks the step's last bucket."""
    i_block = tl.program_id(0)
    if COORDINATE or not RMS:
        i_block = tl.num_programs(0) - 1 - i_block
    i_chunk = i_block.to(tl.int64)
    row, begin, n = locate(table, chunks, n_rows, chunk_size, i_chunk)
    i_group = tl.load(row + GROUP * n_rows)
    k_v = (0.0, 0.0, 0.0, 0.0)
    if RMS:
        k_v = moment_coefficients(groups, i_group, tl.load(row + STEP * n_rows))

    rho, clip, reason = shrink(sums, n_buckets, scalars, RMS)
    tl.store(scalars + SHRINK, rho, mask=(reason == NONE) & (i_chunk == 0))
    n = tl.where((reason == NONE) & (tl.load(row + G * n_rows) != 0), n, 0)

    lr = tl.load(groups + 5 * i_group)
    beta1 = tl.load(groups + 5 * i_group + 1)
    weight_decay = tl.load(groups + 5 * i_group + 4)
    two_h = 2 * tl.load(scalars + HEIGHT)
    a = effective_lr(lr, weight_decay, REGULARISED)
    gradient_scale = clip / tl.load(scalars + GRAD_SCALE)
    step = (1 - beta1) * a * rho
    numerator = (1 - beta1) * two_h * lr
    decay = weight_decay * a
    k = (
        gradient_scale.to(tl.float32), step.to(tl.float32), lr.to(tl.float32), two_h.to(tl.float32),
        numerator.to(tl.float32), decay.to(tl.float32), beta1.to(tl.float32),
    )

    vectors = is_aligned(row + X * n_rows, X_TYPE, VECTOR) & is_aligned(row + G * n_rows, G_TYPE, VECTOR)
    if MOMENTUM:
        vectors &= is_aligned(row + M * n_rows, STATE_TYPE, VECTOR)
    if RMS:
        vectors &= is_aligned(row + V * n_rows, STATE_TYPE, VECTOR)
    n_aligned = tl.where(vectors, n // VECTOR, 0) * VECTOR
    n_rest = n - n_aligned
    kept = apply_span(
        row, n_rows, begin, n_aligned, k, k_v, MOMENTUM, COORDINATE, RMS,
        X_TYPE, G_TYPE, STATE_TYPE, VECTOR, BLOCK,
    )
    if n_rest > 0:
        # Looked up anew rather than kept in registers all along; half the block as in reduce.
        rest_row, rest_begin, n_all = locate(table, chunks, n_rows, chunk_size, i_chunk)
        kept |= apply_span(
            rest_row, n_rows, rest_begin + (n_all - n_rest), n_rest, k, k_v, MOMENTUM, COORDINATE, RMS,
            X_TYPE, G_TYPE, STATE_TYPE, 1, BLOCK // 2,
        )
    tl.atomic_max(report + REASON, tl.full((), ELEMENTS_KEPT, tl.int64), mask=kept != 0, sem="relaxed")

    # All threads have read the step count of their row before the last block advances it.
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == n_chunks - 1:
        tl.store(ticket, 0)
        count_step(table, report, n_rows, reason, last)

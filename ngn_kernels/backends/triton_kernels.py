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

from ..rules import Reason
from ..tables import Column, Count, GroupColumn, Input, Size, Sum
from .triton import THREADS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

X, G, M, V = (tl.constexpr(int(c)) for c in (Column.X, Column.G, Column.M, Column.V))
STEP, NUMEL = tl.constexpr(int(Column.STEP)), tl.constexpr(int(Column.NUMEL))
GROUP, COPIES = tl.constexpr(int(Column.GROUP)), tl.constexpr(int(Column.COPIES))
NOISE_KEY, FIRST = tl.constexpr(int(Column.NOISE_KEY)), tl.constexpr(int(Column.FIRST))
REMAINDER = tl.constexpr(int(Column.REMAINDER))
M_SCALE, V_SCALE = tl.constexpr(int(Column.M_SCALE)), tl.constexpr(int(Column.V_SCALE))
LR, BETA1 = tl.constexpr(int(GroupColumn.LR)), tl.constexpr(int(GroupColumn.BETA1))
BETA2, EPS = tl.constexpr(int(GroupColumn.BETA2)), tl.constexpr(int(GroupColumn.EPS))
WEIGHT_DECAY = tl.constexpr(int(GroupColumn.WEIGHT_DECAY))
GROUP_COLUMNS = tl.constexpr(len(GroupColumn))
LOSS, LOSS_FLOOR = tl.constexpr(int(Input.LOSS)), tl.constexpr(int(Input.LOSS_FLOOR))
GRAD_SCALE, FOUND_INF = tl.constexpr(int(Input.GRAD_SCALE)), tl.constexpr(int(Input.FOUND_INF))
MAX_GRAD_NORM = tl.constexpr(int(Input.MAX_GRAD_NORM))
WEIGHTED, ALIGNMENT = tl.constexpr(int(Sum.WEIGHTED)), tl.constexpr(int(Sum.ALIGNMENT))
NORM, SUMS = tl.constexpr(int(Sum.NORM)), tl.constexpr(len(Sum))
REASON, SKIPPED = tl.constexpr(int(Count.REASON)), tl.constexpr(int(Count.SKIPPED))
LAST_REASON = tl.constexpr(int(Count.LAST_REASON))
SHRINK, STEP_SIZES = tl.constexpr(int(Size.SHRINK)), tl.constexpr(int(Size.STEP_SIZES))

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
    weighted = tl.load(sums + WEIGHTED)
    alignment = tl.load(sums + ALIGNMENT)
    norm = tl.load(sums + NORM)
    for i_bucket in range(1, n_buckets):
        weighted += tl.load(sums + SUMS * i_bucket + WEIGHTED)
        alignment += tl.load(sums + SUMS * i_bucket + ALIGNMENT)
        norm += tl.load(sums + SUMS * i_bucket + NORM)
    return weighted, alignment, norm


@device
def height(inputs):
    """h: how far the loss is above its floor"""
    return tl.load(inputs + LOSS) - tl.load(inputs + LOSS_FLOOR)


@device
def shrink(sums, n_buckets, inputs, RMS: tl.constexpr):
    """rho = max(0, 2h - W) / (2h + Q), 1 where 0/0; the clip factor; why the step must not happen"""
    weighted, alignment, norm = sum_buckets(sums, n_buckets)
    h = height(inputs)
    max_grad_norm = tl.load(inputs + MAX_GRAD_NORM)
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
    reason = tl.where(tl.load(inputs + FOUND_INF) != 0, AMP_OVERFLOW, reason)
    return rho, clip, reason


@device
def effective_lr(lr, weight_decay, REGULARISED: tl.constexpr):
    """a_j: the lr, or the lr that regularised decay leaves of it"""
    return lr / (1 + weight_decay * lr) if REGULARISED else lr


@device
def moment_coefficients(groups, i_group, p_step):
    """beta2, 1 - beta2, eps, 1 / (1 - beta2^t)"""
    group = groups + GROUP_COLUMNS * i_group
    beta2 = tl.load(group + BETA2)
    eps = tl.load(group + EPS)
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
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """The sums of g^2 / D and g x over `n` elements of a row, VECTOR at a time."""
    p_x = address(row + X * n_rows, begin, X_TYPE)
    p_v = address(row + V * n_rows, begin, V_TYPE)
    p_g = address(row + G * n_rows, begin, G_TYPE)
    b_weighted = tl.full((BLOCK,), 0.0, tl.float32)
    b_alignment = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < n
        b_g = load(p_g, o, mask, G_TYPE, VECTOR) * gradient_scale
        if RMS:
            b_v = load(p_v, o, mask, V_TYPE, VECTOR)
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


@triton.jit(do_not_specialize=("n_rows", "n_chunks", "chunk_size", "n_buckets", "index"))
def reduce(
    table, chunks, groups, inputs, sums, partials, ticket,
    n_rows, n_chunks, chunk_size, n_buckets, index,
    RMS: tl.constexpr, REGULARISED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """One chunk per block; writes their partials, then the bucket's sums, and nothing else."""
    i_block = tl.program_id(0)
    # Each pass walks the other way than the one before it, which left its last tensors in the cache.
    if RMS:
        i_block = tl.num_programs(0) - 1 - i_block
    i_chunk = i_block.to(tl.int64)
    row, begin, n = locate(table, chunks, n_rows, chunk_size, i_chunk)
    n = tl.where(tl.load(row + G * n_rows) == 0, 0, n)
    i_group = tl.load(row + GROUP * n_rows)

    # A rule without RMS sums unclipped gradients: shrink() applies the clip factor to its sum.
    clip = 1.0
    k_v = (0.0, 0.0, 0.0, 0.0)
    if RMS:
        k_v = moment_coefficients(groups, i_group, tl.load(row + STEP * n_rows))
        _, _, norm = sum_buckets(sums, n_buckets)
        clip = clip_factor(norm, tl.load(inputs + MAX_GRAD_NORM))
    gradient_scale = (clip / tl.load(inputs + GRAD_SCALE)).to(tl.float32)

    vectors = is_aligned(row + G * n_rows, G_TYPE, VECTOR)
    if RMS:
        vectors &= is_aligned(row + V * n_rows, V_TYPE, VECTOR)
    if REGULARISED:
        vectors &= is_aligned(row + X * n_rows, X_TYPE, VECTOR)
    n_aligned = tl.where(vectors, n // VECTOR, 0) * VECTOR
    weighted, alignment = reduce_span(
        row, n_rows, begin, n_aligned, gradient_scale, k_v, RMS, REGULARISED,
        X_TYPE, G_TYPE, V_TYPE, VECTOR, BLOCK,
    )
    if n_aligned < n:
        # Half the block: in the same shape, the compiler would give it the layout of the vectors.
        rest = reduce_span(
            row, n_rows, begin + n_aligned, n - n_aligned, gradient_scale, k_v, RMS, REGULARISED,
            X_TYPE, G_TYPE, V_TYPE, 1, BLOCK // 2,
        )
        weighted += rest[0]
        alignment += rest[1]

    # Other ranks that hold the same elements bring their part of these sums.
    copies = tl.load(row + COPIES * n_rows).to(tl.float64)
    weighted /= copies
    alignment /= copies
    group = groups + GROUP_COLUMNS * i_group
    lr = tl.load(group + LR)
    weight_decay = tl.load(group + WEIGHT_DECAY)
    ours = partials + i_chunk
    tl.store(ours + WEIGHTED * n_chunks, effective_lr(lr, weight_decay, REGULARISED) * weighted)
    if REGULARISED:
        tl.store(ours + ALIGNMENT * n_chunks, lr * weight_decay * alignment)
    if not RMS:
        tl.store(ours + NORM * n_chunks, weighted)

    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == n_chunks - 1:
        tl.store(ticket, 0)
        total = sums + SUMS * index
        tl.store(total + WEIGHTED, sum_partials(partials + WEIGHTED * n_chunks, n_chunks, BLOCK))
        if REGULARISED:
            tl.store(total + ALIGNMENT, sum_partials(partials + ALIGNMENT * n_chunks, n_chunks, BLOCK))
        else:
            tl.store(total + ALIGNMENT, 0.0)
        if not RMS:
            tl.store(total + NORM, sum_partials(partials + NORM * n_chunks, n_chunks, BLOCK))


@device
def apply_span(
    row, n_rows, begin, n, k, k_v,
    MOMENTUM: tl.constexpr, COORDINATE: tl.constexpr, RMS: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """Update `n` elements of a row, VECTOR at a time; 1 if any of them kept its old values."""
    gradient_scale, step, flatness, curvature, decay, beta1 = k
    p_x = address(row + X * n_rows, begin, X_TYPE)
    p_m = address(row + M * n_rows, begin, M_TYPE)
    p_v = address(row + V * n_rows, begin, V_TYPE)
    p_g = address(row + G * n_rows, begin, G_TYPE)
    b_kept = tl.full((BLOCK // VECTOR,), 0, tl.int32)
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < n
        b_g = load(p_g, o, mask, G_TYPE, VECTOR) * gradient_scale
        if RMS:
            b_v = load(p_v, o, mask, V_TYPE, VECTOR)
            b_v_new = second_moment(b_v, b_g, k_v)
            b_d = preconditioner(b_v_new, k_v)
        if COORDINATE:
            b_divisor = (flatness * b_d if RMS else flatness) + curvature * (b_g * b_g)
            b_m_new = tl.where(b_divisor == 0, 0.0, tl.div_rn(step * b_g, b_divisor))
        else:
            b_m_new = tl.div_rn(step * b_g, b_d) if RMS else step * b_g
        b_x = load(p_x, o, mask, X_TYPE, VECTOR)
        b_m_new += decay * b_x
        if MOMENTUM:
            b_m = load(p_m, o, mask, M_TYPE, VECTOR)
            b_m_new += beta1 * b_m
        b_x_new = b_x - b_m_new

        # An element that would not be finite in its storage type keeps its old values.
        b_finite = tl.abs(b_x_new) < limit(X_TYPE)
        if MOMENTUM:
            b_finite &= tl.abs(b_m_new) < limit(M_TYPE)
        if RMS:
            b_finite &= b_v_new < limit(V_TYPE)
        store(p_x, o, tl.where(b_finite, b_x_new, b_x), mask, X_TYPE, VECTOR)
        if MOMENTUM:
            store(p_m, o, tl.where(b_finite, b_m_new, b_m), mask, M_TYPE, VECTOR)
        if RMS:
            store(p_v, o, tl.where(b_finite, b_v_new, b_v), mask, V_TYPE, VECTOR)
        # Past the end are zeros, which stay finite. Joined within a thread, which saves registers.
        b_bad = tl.reshape(tl.where(b_finite, 0, 1), (BLOCK // VECTOR, VECTOR))
        b_kept |= tl.max(b_bad, axis=1)
    return tl.max(b_kept)


@device
def advance_steps(table, n_rows, reason, BLOCK: tl.constexpr = THREADS):
    """t <- t + 1 for every row that took part, if the step did happen."""
    # A row per thread: in a smaller block, idle threads would read counts that others write.
    for first in range(0, tl.where(reason == NONE, n_rows, 0), BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < n_rows
        b_g = tl.load(table + G * n_rows + o, mask=mask, other=0)
        b_step = tl.load(table + STEP * n_rows + o, mask=mask, other=0).to(tl.pointer_type(tl.float32))
        mask &= b_g != 0
        tl.store(b_step, tl.load(b_step, mask=mask, other=0.0) + 1, mask=mask)


@device
def tell_sizes(groups, sizes, n_groups, rho, reason, REGULARISED: tl.constexpr, BLOCK: tl.constexpr = 128):
    """rho, and gamma of each group, if the step did happen."""
    tl.store(sizes + SHRINK, rho, mask=reason == NONE)
    for first in range(0, tl.where(reason == NONE, n_groups, 0), BLOCK):
        o = first + tl.arange(0, BLOCK)
        mask = o < n_groups
        b_lr = tl.load(groups + GROUP_COLUMNS * o + LR, mask=mask, other=0.0)
        b_weight_decay = tl.load(groups + GROUP_COLUMNS * o + WEIGHT_DECAY, mask=mask, other=0.0)
        b_a = effective_lr(b_lr, b_weight_decay, REGULARISED)
        tl.store(sizes + STEP_SIZES + o, b_a * rho, mask=mask)


@device
def count_step(counts, reason, last):
    """Once for all buckets, if any of them had a reason."""
    code = tl.maximum(tl.atomic_max(counts + REASON, reason.to(tl.int64), sem="relaxed"), reason)
    counted = (last != 0) & (code != NONE)
    # All threads would load the count, and one would store it: an atomic is of one thread alone.
    tl.atomic_add(counts + SKIPPED, tl.full((), 1, tl.int64), mask=counted, sem="relaxed")
    tl.store(counts + LAST_REASON, code, mask=counted)
    tl.store(counts + REASON, 0, mask=counted)


@triton.jit(do_not_specialize=("n_rows", "n_chunks", "chunk_size", "n_buckets", "n_groups", "last"))
def apply(
    table, chunks, groups, inputs, sums, counts, sizes, ticket,
    n_rows, n_chunks, chunk_size, n_buckets, n_groups, last,
    MOMENTUM: tl.constexpr, COORDINATE: tl.constexpr, RMS: tl.constexpr, REGULARISED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
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

    rho, clip, reason = shrink(sums, n_buckets, inputs, RMS)
    n = tl.where((reason == NONE) & (tl.load(row + G * n_rows) != 0), n, 0)

    group = groups + GROUP_COLUMNS * i_group
    lr = tl.load(group + LR)
    beta1 = tl.load(group + BETA1)
    weight_decay = tl.load(group + WEIGHT_DECAY)
    a = effective_lr(lr, weight_decay, REGULARISED)
    gradient_scale = clip / tl.load(inputs + GRAD_SCALE)
    gamma = a * rho
    flatness, curvature = 1.0, 0.0
    if COORDINATE:
        # Divided by the larger of the two, neither overflows; both are 0 where c and h are.
        two_h = 2 * height(inputs)
        gamma = tl.minimum(lr, two_h)
        larger = tl.maximum(lr, two_h)
        flatness = tl.where(larger == 0, 0.0, two_h / larger).to(tl.float32)
        curvature = tl.where(larger == 0, 0.0, lr / larger).to(tl.float32)
    step = (1 - beta1) * gamma
    decay = weight_decay * a
    k = (
        gradient_scale.to(tl.float32), step.to(tl.float32), flatness, curvature,
        decay.to(tl.float32), beta1.to(tl.float32),
    )

    vectors = is_aligned(row + X * n_rows, X_TYPE, VECTOR) & is_aligned(row + G * n_rows, G_TYPE, VECTOR)
    if MOMENTUM:
        vectors &= is_aligned(row + M * n_rows, M_TYPE, VECTOR)
    if RMS:
        vectors &= is_aligned(row + V * n_rows, V_TYPE, VECTOR)
    n_aligned = tl.where(vectors, n // VECTOR, 0) * VECTOR
    n_rest = n - n_aligned
    kept = apply_span(
        row, n_rows, begin, n_aligned, k, k_v, MOMENTUM, COORDINATE, RMS,
        X_TYPE, G_TYPE, M_TYPE, V_TYPE, VECTOR, BLOCK,
    )
    if n_rest > 0:
        # Looked up anew rather than kept in registers all along; half the block as in reduce.
        rest_row, rest_begin, n_all = locate(table, chunks, n_rows, chunk_size, i_chunk)
        kept |= apply_span(
            rest_row, n_rows, rest_begin + (n_all - n_rest), n_rest, k, k_v, MOMENTUM, COORDINATE, RMS,
            X_TYPE, G_TYPE, M_TYPE, V_TYPE, 1, BLOCK // 2,
        )
    tl.atomic_max(counts + REASON, tl.full((), ELEMENTS_KEPT, tl.int64), mask=kept != 0, sem="relaxed")

    # All threads have read the step count of their row before the last block advances it.
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == n_chunks - 1:
        tl.store(ticket, 0)
        advance_steps(table, n_rows, reason)
        if not COORDINATE:  # which have no rho to tell
            tell_sizes(groups, sizes, n_groups, rho, reason, REGULARISED)
        count_step(counts, reason, last)

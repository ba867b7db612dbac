"""The two Triton kernels, with the functions of rule.h and reference.py by the same names.

    reduce  one partial sum per chunk; the block that completes the last chunk of the step adds them
    apply   rho from the sums at its start; then x, m and v in place; the last block counts the step

A block works on one chunk. Addresses, sizes, hyper-parameters and step counts all come from tables
on the device, so that only a new rule or a new element type compiles anything.

What a whole chunk shares is computed in float64 and pinned to float32; elements are float32.
Names: `i_` index, `n_` count, `o` offsets, `p_` address, `b_` a block of values, UPPERCASE
compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .columns import (
    column_at,
    device,
    is_aligned,
    limit,
    load,
    noise,
    noise_words,
    other_noise,
    store,
)
from .layout_constants import (
    AIM,
    ALIGNMENT,
    AMP_OVERFLOW,
    BETA1,
    BETA2,
    ELEMENTS_KEPT,
    EPS,
    EXACT,
    FOUND_INF,
    GRAD_SCALE,
    GRADIENT_NOT_FINITE,
    GROUP,
    GROUP_COLUMNS,
    INFINITY,
    LAST_REASON,
    LOSS,
    LOSS_BELOW_FLOOR,
    LOSS_FLOOR,
    LOSS_NOT_FINITE,
    LR,
    M_SCALE,
    MAX_GRAD_NORM,
    NOISE_KEY,
    NONE,
    NORM,
    NUMEL,
    OFFSET,
    QUANT_BLOCK,
    REASON,
    REMAINDER,
    REPLICAS,
    SHRINK,
    SKIPPED,
    SQUARED_NORM,
    STEP,
    STEP_CAP,
    STEP_SIZES,
    STOCHASTIC,
    SUMS,
    V_SCALE,
    WEIGHT_DECAY,
    WEIGHTED,
    D,
    G,
    M,
    V,
    X,
)

# An argument per line would hide the kernels behind their lists.
# fmt: off

@device
def clip_factor(norm_squared, max_grad_norm):
    """s = min(1, max_grad_norm / (norm + 1e-6))"""
    factor = max_grad_norm / (tl.sqrt(norm_squared) + 1e-6)
    return tl.where((max_grad_norm < INFINITY) & (factor < 1.0), factor, 1.0)


@device
def sum_buckets(totals, n_buckets):
    """Q, W and the squared norm over all buckets, in their order."""
    weighted = tl.load(totals + WEIGHTED)
    alignment = tl.load(totals + ALIGNMENT)
    norm = tl.load(totals + NORM)
    for i_bucket in range(1, n_buckets):
        weighted += tl.load(totals + SUMS * i_bucket + WEIGHTED)
        alignment += tl.load(totals + SUMS * i_bucket + ALIGNMENT)
        norm += tl.load(totals + SUMS * i_bucket + NORM)
    return weighted, alignment, norm


@device
def aimed_loss(inputs):
    """h = (1 - loss_target) (f - loss_floor): what a step aims to remove of the loss"""
    return tl.load(inputs + AIM) * (tl.load(inputs + LOSS) - tl.load(inputs + LOSS_FLOOR))


@device
def shrink(total, inputs, SUMS_CLIPPED: tl.constexpr):
    """rho = max(0, 2h - W) / (2h + Q), 1 where 0/0; the clip factor; why the step must not happen"""
    weighted, alignment, norm = total
    h = aimed_loss(inputs)
    max_grad_norm = tl.load(inputs + MAX_GRAD_NORM)
    clip = clip_factor(norm, max_grad_norm)
    q = weighted if SUMS_CLIPPED else clip * clip * weighted
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
def largest_step(lr, step_cap):
    """c: the step size that rho is computed at"""
    return tl.where(step_cap > 0, step_cap, lr)


@device
def schedule(lr, step_cap):
    """lr / c: what a schedule leaves of the whole step"""
    return tl.where(step_cap > 0, lr / step_cap, 1.0)


@device
def effective_step(c, weight_decay, REGULARISED: tl.constexpr):
    """a: c; with regularised decay c / (1 + lambda c)"""
    return c / (1 + weight_decay * c) if REGULARISED else c


@device
def moment_coefficients(group, p_step):
    """beta2, 1 - beta2, eps, 1 / (1 - beta2^t)"""
    beta2 = tl.load(group + BETA2)
    eps = tl.load(group + EPS)
    count = tl.load(p_step.to(tl.pointer_type(tl.float32))).to(tl.float64) + 1
    bias = 1 - tl.exp(count * tl.log(beta2))
    return beta2.to(tl.float32), (1 - beta2).to(tl.float32), eps.to(tl.float32), (1 / bias).to(tl.float32)


@device
def coefficients(
    inputs, group, clip, rho,
    COORDINATE: tl.constexpr, ADAMW_DECAY: tl.constexpr, REGULARISED: tl.constexpr,
):
    """s / grad_scale, beta1, step, flatness, curvature, decay"""
    lr = tl.load(group + LR)
    step_cap = tl.load(group + STEP_CAP)
    beta1 = tl.load(group + BETA1)
    weight_decay = tl.load(group + WEIGHT_DECAY)
    c, left = largest_step(lr, step_cap), schedule(lr, step_cap)
    a = effective_step(c, weight_decay, REGULARISED)
    gradient_scale = clip / tl.load(inputs + GRAD_SCALE)
    gamma = a * rho
    flatness, curvature = 1.0, 0.0
    if COORDINATE:
        # Divided by the larger of the two, neither overflows; both are 0 where c and h are.
        two_h = 2 * aimed_loss(inputs)
        gamma = tl.minimum(c, two_h)
        larger = tl.maximum(c, two_h)
        flatness = tl.where(larger == 0, 0.0, two_h / larger).to(tl.float32)
        curvature = tl.where(larger == 0, 0.0, c / larger).to(tl.float32)
    step = (1 - beta1) * (left * gamma)
    decay = weight_decay * (left * (gamma if ADAMW_DECAY and not COORDINATE else a))
    return (
        gradient_scale.to(tl.float32), beta1.to(tl.float32), step.to(tl.float32), flatness, curvature,
        decay.to(tl.float32),
    )


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
def contribute(b_v, b_g, k_v, RMS: tl.constexpr):
    """The elements' parts of the sum of g^2 / D."""
    if RMS:
        return tl.div_rn(b_g * b_g, preconditioner(second_moment(b_v, b_g, k_v), k_v))
    else:
        return b_g * b_g


@device
def contribute_along(b_g, b_d):
    """The same of a rule with given directions."""
    return b_g * b_d


@device
def draft(b_v, b_g, k, k_v, COORDINATE: tl.constexpr, RMS: tl.constexpr):
    """The first half of an update: the new v, and gamma g / D, 0 where 0/0."""
    gradient_scale, beta1, step, flatness, curvature, decay = k
    b_displacement = step * b_g
    b_divisor = 1.0
    if RMS:
        b_v = second_moment(b_v, b_g, k_v)
        b_divisor = preconditioner(b_v, k_v)
    if COORDINATE:
        b_divisor = flatness * b_divisor + curvature * (b_g * b_g)
        b_displacement = tl.where(b_divisor == 0, 0.0, tl.div_rn(b_displacement, b_divisor))
    elif RMS:
        b_displacement = tl.div_rn(b_displacement, b_divisor)
    return b_v, b_displacement


@device
def update(
    b_x, b_m, b_displacement, k,
    MOMENTUM: tl.constexpr, ADAMW_DECAY: tl.constexpr, NESTEROV: tl.constexpr,
):
    """The second half: the new x and m."""
    gradient_scale, beta1, step, flatness, curvature, decay = k
    if MOMENTUM and ADAMW_DECAY:
        b_m_new = b_displacement + beta1 * b_m
        b_displacement = b_m_new + decay * b_x
        if NESTEROV:
            b_displacement += beta1 * (b_m_new - b_m)
        return b_x - b_displacement, b_m_new
    b_displacement += decay * b_x
    if MOMENTUM:
        b_displacement += beta1 * b_m
    return b_x - b_displacement, b_displacement


@device
def fits(
    b_x, b_m, b_v, MOMENTUM: tl.constexpr, RMS: tl.constexpr,
    X_TYPE: tl.constexpr, M_TYPE: tl.constexpr, V_TYPE: tl.constexpr, ROUNDING: tl.constexpr,
):
    """Which elements are finite in their storage types; the others must keep their old values."""
    b_fits = tl.abs(b_x) < limit(X_TYPE, ROUNDING)
    if MOMENTUM:
        b_fits &= tl.abs(b_m) < limit(M_TYPE)
    if RMS:
        b_fits &= b_v < limit(V_TYPE, STOCHASTIC)
    return b_fits


@device
def locate(table, chunks, n_rows, chunk_size, i_chunk):
    """A chunk's row in the table, its first element, and how many elements it has."""
    row = table + tl.load(chunks + 2 * i_chunk)
    begin = tl.load(chunks + 2 * i_chunk + 1)
    n = tl.minimum(tl.load(row + NUMEL * n_rows) - begin, chunk_size).to(tl.int32)
    return row, begin, n


@device
def noise_of_row(row, n_rows, begin):
    """What the noise of a row's elements from `begin` on shares."""
    p_step = tl.load(row + STEP * n_rows).to(tl.pointer_type(tl.float32))
    index = tl.load(row + OFFSET * n_rows) + begin
    return noise_words(tl.load(row + NOISE_KEY * n_rows), tl.load(p_step).to(tl.int32) + 1, index)


@device
def reduce_span(
    row, n_rows, begin, n, gradient_scale, k_v,
    RMS: tl.constexpr, REGULARISED: tl.constexpr, DIRECTED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, V_TYPE: tl.constexpr, ROUNDING: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """The sums of g^2 / D, or g d, and g x over `n` elements of a row, VECTOR at a time."""
    p_x = column_at(row + X * n_rows, row + REMAINDER * n_rows, begin, X_TYPE, ROUNDING)
    p_v = column_at(row + V * n_rows, row + V_SCALE * n_rows, begin, V_TYPE)
    p_g = column_at(row + G * n_rows, 0, begin, G_TYPE)
    p_d = column_at(row + D * n_rows, 0, begin, tl.float32)
    b_weighted = tl.full((BLOCK,), 0.0, tl.float32)
    b_alignment = tl.full((BLOCK,), 0.0, tl.float32)
    for i in range(0, n, BLOCK):
        b_g = load(p_g, i, n, G_TYPE, VECTOR, BLOCK) * gradient_scale
        if DIRECTED:
            b_weighted += contribute_along(b_g, load(p_d, i, n, tl.float32, VECTOR, BLOCK))
        else:
            b_v = load(p_v, i, n, V_TYPE, VECTOR, BLOCK) if RMS else b_g
            b_weighted += contribute(b_v, b_g, k_v, RMS)
        if REGULARISED:  # x is loaded late, which saves registers
            b_alignment += b_g * load(p_x, i, n, X_TYPE, VECTOR, BLOCK, ROUNDING)
    weighted = tl.sum(b_weighted.to(tl.float64))
    alignment = tl.sum(b_alignment.to(tl.float64)) if REGULARISED else weighted
    return weighted, alignment


@device
def sum_partials(partials, n, BLOCK: tl.constexpr):
    """In a fixed order, which gives the same bits whichever block does it."""
    b_total = tl.full((BLOCK,), 0.0, tl.float64)
    for i in range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        # Other blocks wrote these: not from the first-level cache.
        b_total += tl.load(partials + o, mask=o < n, other=0.0, cache_modifier=".cg")
    return tl.sum(b_total)


@triton.jit(do_not_specialize=("n_rows", "n_chunks", "chunk_size", "n_buckets", "index"))
def reduce(
    table, chunks, groups, inputs, totals, sums, partials, ticket,
    n_rows, n_chunks, chunk_size, n_buckets, index,
    RMS: tl.constexpr, REGULARISED: tl.constexpr, DIRECTED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, V_TYPE: tl.constexpr, ROUNDING: tl.constexpr,
    QUANTISED: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """One chunk per block; writes their partials, then the bucket's sums, and nothing else."""
    i_block = tl.program_id(0)
    SUMS_CLIPPED: tl.constexpr = RMS or DIRECTED
    # Each pass goes in the opposite order of the one before, whose last tensors are in the cache.
    if SUMS_CLIPPED:
        i_block = tl.num_programs(0) - 1 - i_block
    i_chunk = i_block.to(tl.int64)
    row, begin, n = locate(table, chunks, n_rows, chunk_size, i_chunk)
    n = tl.where(tl.load(row + G * n_rows) == 0, 0, n)
    group = groups + GROUP_COLUMNS * tl.load(row + GROUP * n_rows)

    # To a sum over unclipped gradients shrink() applies the clip factor.
    clip = 1.0
    k_v = (0.0, 0.0, 0.0, 0.0)
    if RMS:
        k_v = moment_coefficients(group, tl.load(row + STEP * n_rows))
    if SUMS_CLIPPED:
        _, _, norm = sum_buckets(totals, n_buckets)
        clip = clip_factor(norm, tl.load(inputs + MAX_GRAD_NORM))
    gradient_scale = (clip / tl.load(inputs + GRAD_SCALE)).to(tl.float32)

    vectors = is_aligned(row + G * n_rows, G_TYPE, VECTOR)
    if RMS:
        vectors &= is_aligned(row + V * n_rows, V_TYPE, VECTOR)
    if DIRECTED:
        vectors &= is_aligned(row + D * n_rows, tl.float32, VECTOR)
    if REGULARISED:
        vectors &= is_aligned(row + X * n_rows, X_TYPE, VECTOR)
        if ROUNDING == EXACT:
            vectors &= is_aligned(row + REMAINDER * n_rows, tl.int16, VECTOR)
    WHOLE: tl.constexpr = QUANT_BLOCK if QUANTISED else VECTOR
    n_aligned = tl.where(vectors, n // WHOLE, 0) * WHOLE
    weighted, alignment = reduce_span(
        row, n_rows, begin, n_aligned, gradient_scale, k_v, RMS, REGULARISED, DIRECTED,
        X_TYPE, G_TYPE, V_TYPE, ROUNDING, VECTOR, BLOCK,
    )
    if n_aligned < n:
        # Half a block: in the same shape, the compiler would give it the layout of the vectors.
        tail = reduce_span(
            row, n_rows, begin + n_aligned, n - n_aligned, gradient_scale, k_v, RMS, REGULARISED, DIRECTED,
            X_TYPE, G_TYPE, V_TYPE, ROUNDING, 1, BLOCK // 2,
        )
        weighted += tail[0]
        alignment += tail[1]

    # Each rank that holds the same elements contributes its part of these sums.
    replicas = tl.load(row + REPLICAS * n_rows).to(tl.float64)
    weighted /= replicas
    alignment /= replicas
    c = largest_step(tl.load(group + LR), tl.load(group + STEP_CAP))
    weight_decay = tl.load(group + WEIGHT_DECAY)
    ours = partials + i_chunk
    tl.store(ours + WEIGHTED * n_chunks, effective_step(c, weight_decay, REGULARISED) * weighted)
    if REGULARISED:
        tl.store(ours + ALIGNMENT * n_chunks, c * weight_decay * alignment)
    if not SUMS_CLIPPED:
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
        if not SUMS_CLIPPED:
            tl.store(total + NORM, sum_partials(partials + NORM * n_chunks, n_chunks, BLOCK))


@device
def apply_span(
    row, n_rows, begin, n, k, k_v,
    MOMENTUM: tl.constexpr, COORDINATE: tl.constexpr, ADAMW_DECAY: tl.constexpr,
    NESTEROV: tl.constexpr, RMS: tl.constexpr, DIRECTED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
    ROUNDING: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """Update `n` elements of a row, VECTOR at a time; 1 if any of them keeps its old values."""
    gradient_scale, beta1, step, flatness, curvature, decay = k
    p_x = column_at(row + X * n_rows, row + REMAINDER * n_rows, begin, X_TYPE, ROUNDING)
    p_m = column_at(row + M * n_rows, row + M_SCALE * n_rows, begin, M_TYPE)
    p_v = column_at(row + V * n_rows, row + V_SCALE * n_rows, begin, V_TYPE)
    p_g = column_at(row + (D if DIRECTED else G) * n_rows, 0, begin, G_TYPE)
    RANDOM: tl.constexpr = M_TYPE == tl.int8 or V_TYPE != tl.float32 or ROUNDING == STOCHASTIC
    words = noise_of_row(row, n_rows, begin) if RANDOM else 0
    b_kept = tl.full((BLOCK // VECTOR,), 0, tl.int32)
    for i in range(0, n, BLOCK):
        b_g = load(p_g, i, n, G_TYPE, VECTOR, BLOCK)
        if not DIRECTED:
            b_g *= gradient_scale
        b_m, b_v = 0.0, 0.0
        if RMS:
            b_v = load(p_v, i, n, V_TYPE, VECTOR, BLOCK)
        b_v_new, b_displacement = draft(b_v, b_g, k, k_v, COORDINATE, RMS)
        if MOMENTUM:
            b_m = load(p_m, i, n, M_TYPE, VECTOR, BLOCK)
        b_x = load(p_x, i, n, X_TYPE, VECTOR, BLOCK, ROUNDING)
        b_x_new, b_m_new = update(b_x, b_m, b_displacement, k, MOMENTUM, ADAMW_DECAY, NESTEROV)
        b_fits = fits(b_x_new, b_m_new, b_v_new, MOMENTUM, RMS, X_TYPE, M_TYPE, V_TYPE, ROUNDING)
        b_random = noise(words, i + tl.arange(0, BLOCK)) if RANDOM else 0
        b_other = other_noise(b_random) if ROUNDING == STOCHASTIC else 0
        b_x_kept = tl.where(b_fits, b_x_new, b_x)
        store(p_x, i, n, b_x_kept, b_other, X_TYPE, VECTOR, BLOCK, ROUNDING)
        if MOMENTUM:
            b_m_kept = tl.where(b_fits, b_m_new, b_m)
            store(p_m, i, n, b_m_kept, b_random, M_TYPE, VECTOR, BLOCK)
        if RMS:
            b_v_kept = tl.where(b_fits, b_v_new, b_v)
            store(p_v, i, n, b_v_kept, b_random, V_TYPE, VECTOR, BLOCK, STOCHASTIC)
        # Past the end are zeros, which stay finite. Combined within a thread, which saves registers.
        b_bad = tl.reshape(tl.where(b_fits, 0, 1), (BLOCK // VECTOR, VECTOR))
        b_kept |= tl.max(b_bad, axis=1)
    return tl.max(b_kept)


@device
def advance_steps(table, n_rows, reason, BLOCK: tl.constexpr):
    """t <- t + 1 for every row that takes part, unless the step was skipped."""
    # A row per thread: in a smaller block, idle threads would load counts that others store.
    for i in range(0, tl.where(reason == NONE, n_rows, 0), BLOCK):
        o = i + tl.arange(0, BLOCK)
        mask = o < n_rows
        b_g = tl.load(table + G * n_rows + o, mask=mask, other=0)
        b_step = tl.load(table + STEP * n_rows + o, mask=mask, other=0).to(tl.pointer_type(tl.float32))
        mask &= b_g != 0
        tl.store(b_step, tl.load(b_step, mask=mask, other=0.0) + 1, mask=mask)


@device
def write_telemetry(
    groups, inputs, sizes, norm, n_groups, rho, reason,
    SUMS_CLIPPED: tl.constexpr, COORDINATE: tl.constexpr, REGULARISED: tl.constexpr,
    BLOCK: tl.constexpr = 128,
):
    """The norm, rho, and gamma of each group, unless the step was skipped."""
    if SUMS_CLIPPED or COORDINATE:  # whose passes sum g^2 for clipping alone
        norm = tl.where(tl.load(inputs + MAX_GRAD_NORM) < INFINITY, norm, float("nan"))
    tl.store(sizes + SQUARED_NORM, norm, mask=reason == NONE)
    if not COORDINATE:  # coordinate rules have no rho
        write_step_sizes(groups, sizes, n_groups, rho, reason, REGULARISED, BLOCK)


@device
def write_step_sizes(
    groups, sizes, n_groups, rho, reason, REGULARISED: tl.constexpr, BLOCK: tl.constexpr
):
    tl.store(sizes + SHRINK, rho, mask=reason == NONE)
    for i in range(0, tl.where(reason == NONE, n_groups, 0), BLOCK):
        o = i + tl.arange(0, BLOCK)
        mask = o < n_groups
        b_lr = tl.load(groups + GROUP_COLUMNS * o + LR, mask=mask, other=0.0)
        b_step_cap = tl.load(groups + GROUP_COLUMNS * o + STEP_CAP, mask=mask, other=0.0)
        b_weight_decay = tl.load(groups + GROUP_COLUMNS * o + WEIGHT_DECAY, mask=mask, other=0.0)
        b_a = effective_step(largest_step(b_lr, b_step_cap), b_weight_decay, REGULARISED)
        tl.store(sizes + STEP_SIZES + o, schedule(b_lr, b_step_cap) * b_a * rho, mask=mask)


@device
def count_step(counts, reason, last):
    """Count a skipped step once for all buckets."""
    code = tl.maximum(tl.atomic_max(counts + REASON, reason.to(tl.int64), sem="relaxed"), reason)
    counted = (last != 0) & (code != NONE)
    # All threads would load the count and one would store it; an atomic runs in one thread only.
    tl.atomic_add(counts + SKIPPED, tl.full((), 1, tl.int64), mask=counted, sem="relaxed")
    tl.store(counts + LAST_REASON, code, mask=counted)
    tl.store(counts + REASON, 0, mask=counted)


@triton.jit(do_not_specialize=("n_rows", "n_chunks", "chunk_size", "n_buckets", "n_groups", "last"))
def apply(
    table, chunks, groups, inputs, totals, counts, sizes, ticket,
    n_rows, n_chunks, chunk_size, n_buckets, n_groups, last,
    MOMENTUM: tl.constexpr, COORDINATE: tl.constexpr, ADAMW_DECAY: tl.constexpr,
    NESTEROV: tl.constexpr, RMS: tl.constexpr, REGULARISED: tl.constexpr, DIRECTED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
    ROUNDING: tl.constexpr, QUANTISED: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    """One chunk per block, unless the sums forbid the step; `last` marks the step's last bucket.

    With given directions, column G says which rows take part, and D what they move along.
    """
    i_block = tl.program_id(0)
    SUMS_CLIPPED: tl.constexpr = RMS or DIRECTED
    if COORDINATE or not SUMS_CLIPPED:
        i_block = tl.num_programs(0) - 1 - i_block
    i_chunk = i_block.to(tl.int64)
    row, begin, n = locate(table, chunks, n_rows, chunk_size, i_chunk)
    group = groups + GROUP_COLUMNS * tl.load(row + GROUP * n_rows)
    k_v = (0.0, 0.0, 0.0, 0.0)
    if RMS:
        k_v = moment_coefficients(group, tl.load(row + STEP * n_rows))

    total = sum_buckets(totals, n_buckets)
    rho, clip, reason = shrink(total, inputs, SUMS_CLIPPED)
    n = tl.where((reason == NONE) & (tl.load(row + G * n_rows) != 0), n, 0)

    k = coefficients(inputs, group, clip, rho, COORDINATE, ADAMW_DECAY, REGULARISED)

    vectors = is_aligned(row + X * n_rows, X_TYPE, VECTOR)
    vectors &= is_aligned(row + (D if DIRECTED else G) * n_rows, G_TYPE, VECTOR)
    if ROUNDING == EXACT:
        vectors &= is_aligned(row + REMAINDER * n_rows, tl.int16, VECTOR)
    if MOMENTUM:
        vectors &= is_aligned(row + M * n_rows, M_TYPE, VECTOR)
    if RMS:
        vectors &= is_aligned(row + V * n_rows, V_TYPE, VECTOR)
    WHOLE: tl.constexpr = QUANT_BLOCK if QUANTISED else VECTOR
    n_aligned = tl.where(vectors, n // WHOLE, 0) * WHOLE
    n_tail = n - n_aligned
    kept = apply_span(
        row, n_rows, begin, n_aligned, k, k_v,
        MOMENTUM, COORDINATE, ADAMW_DECAY, NESTEROV, RMS, DIRECTED,
        X_TYPE, G_TYPE, M_TYPE, V_TYPE, ROUNDING, VECTOR, BLOCK,
    )
    if n_tail > 0:
        # Loaded again rather than kept in registers; a part of the block as in reduce.
        TAIL: tl.constexpr = BLOCK // (4 if QUANTISED else 2)
        tail_row, tail_begin, n_all = locate(table, chunks, n_rows, chunk_size, i_chunk)
        kept |= apply_span(
            tail_row, n_rows, tail_begin + (n_all - n_tail), n_tail, k, k_v,
            MOMENTUM, COORDINATE, ADAMW_DECAY, NESTEROV, RMS, DIRECTED,
            X_TYPE, G_TYPE, M_TYPE, V_TYPE, ROUNDING, 1, TAIL,
        )
    tl.atomic_max(counts + REASON, tl.full((), ELEMENTS_KEPT, tl.int64), mask=kept != 0, sem="relaxed")

    # All threads have read the step count of their row before the last block advances it.
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == n_chunks - 1:
        tl.store(ticket, 0)
        total = sum_buckets(totals, n_buckets)
        if QUANTISED:  # again, rather than kept in registers
            rho, clip, reason = shrink(total, inputs, SUMS_CLIPPED)
        advance_steps(table, n_rows, reason, BLOCK // VECTOR)
        write_telemetry(
            groups, inputs, sizes, total[2], n_groups, rho, reason, SUMS_CLIPPED, COORDINATE, REGULARISED
        )
        count_step(counts, reason, last)

// The passes over a bucket. Compiled once per instruction set (NGN_ISA).
#include "cpu/engine.h"

#include <atomic>
#include <cstdint>
#include <cstring>

#include "cpu/chunks.h"
#include "cpu/dispatch.h"
#include "cpu/float_loop.h"
#include "cpu/quant_loop.h"
#include "math/rule.h"
#if defined(__AVX2__)
#include "cpu/features.h"
#endif

#define NGN_STRING_(a) #a
#define NGN_STRING(a) NGN_STRING_(a)
#define NGN_CONCAT_(a, b) a##b
#define NGN_CONCAT(a, b) NGN_CONCAT_(a, b)

namespace ngn {
namespace {

template <LoopKind KIND>
using Loop = std::conditional_t<KIND == LoopKind::quant_blocks, QuantLoop,
                                FloatLoop<std::conditional_t<KIND == LoopKind::float64, double, float>>>;

double sum_lanes(const double* lanes) {
  double total = 0;
  for (int j = 0; j < LANES; ++j) total += lanes[j];
  return total;
}

// In order.
Sums sum_all(const Sums* sums, int64_t count) {
  Sums total = {};
  for (int64_t i = 0; i < count; ++i) {
    total.weighted += sums[i].weighted;
    total.alignment += sums[i].alignment;
    total.norm += sums[i].norm;
  }
  return total;
}

Sums sum_buckets(const Bucket& bucket) { return sum_all(bucket.totals, bucket.bucket_count); }

template <bool RMS, bool REGULARISED, bool DIRECTED, LoopKind KIND>
void reduce_chunks(const Bucket& bucket, const Rule& rule, double clip, int threads) {
  using T = typename Loop<KIND>::Type;
  for_each_chunk(bucket, threads, false, [&] {
    return [&, cache = CoefficientCache<T>(bucket, rule, clip, 1.0)](int64_t i) mutable {
      const Chunk chunk = bucket.chunks[i];
      const TensorRow row = row_of(bucket, chunk.row);
      bucket.partials[i] = {};
      if (!row.g) return;
      const Coefficients<T>& k = cache.of(row);
      double weighted[LANES] = {}, alignment[LANES] = {};
      Loop<KIND>::template reduce<RMS, REGULARISED, DIRECTED>(bucket, row, chunk.begin, end_of(chunk, row), k, weighted,
                                                              alignment);
      const Group& group = bucket.groups[row.group];
      const double replicas = static_cast<double>(row.replicas);
      const double sum = k.unit * sum_lanes(weighted) / replicas;
      bucket.partials[i] = {effective_step(rule, group) * sum,
                            largest_step(group) * group.weight_decay * sum_lanes(alignment) / replicas, RMS || DIRECTED ? 0.0 : sum};
    };
  });
}

void reduce(const Bucket& bucket, const Rule& rule, int threads) {
  // To a sum over unclipped gradients shrink() applies the clip factor.
  const double clip = sums_clipped(rule) ? clip_factor(sum_buckets(bucket).norm, bucket.inputs->max_grad_norm) : 1.0;
  dispatch_reduce(rule, [&](auto rms, auto regularised, auto directed) {
    dispatch_kernel(bucket, [&](auto kind) {
      reduce_chunks<rms.value, regularised.value, directed.value, kind.value>(bucket, rule, clip, threads);
    });
  });
  const Sums total = sum_all(bucket.partials, bucket.chunk_count);
  Sums& sums = bucket.sums[bucket.index];
  sums.weighted = total.weighted;
  sums.alignment = total.alignment;
  if (!sums_clipped(rule)) sums.norm = total.norm;
}

// What an update moves along: the gradient, unscaled and clipped, or the given direction as it is.
template <typename T>
Gradient<T> gradient_of(const Bucket& bucket, const Rule& rule, const TensorRow& row, const Coefficients<T>& k) {
  if (rule.directed) return {row.d, sizeof(T) == 8 ? DType::float64 : DType::float32, T(1)};
  return {row.g, bucket.g_type, k.gradient_scale};
}

// True if any element kept its old value.
template <bool MOMENTUM, bool COORDINATE, bool RMS, LoopKind KIND>
bool apply_chunks(const Bucket& bucket, const Rule& rule, const Shrink& shrink, int threads) {
  using T = typename Loop<KIND>::Type;
  std::atomic<bool> kept{false};
  for_each_chunk(bucket, threads, true, [&] {
    return [&, cache = CoefficientCache<T>(bucket, rule, shrink.clip, shrink.rho)](int64_t i) mutable {
      const Chunk chunk = bucket.chunks[i];
      const TensorRow row = row_of(bucket, chunk.row);
      if (!row.g) return;
      const Coefficients<T>& k = cache.of(row);
      const bool kept_here = dispatch_decay<MOMENTUM>(rule, k.decay != 0, [&](auto decay) {
        return Loop<KIND>::template apply<MOMENTUM, COORDINATE, RMS, decay.value>(
            bucket, row, gradient_of<T>(bucket, rule, row, k), chunk.begin, end_of(chunk, row), k);
      });
      if (kept_here) kept.store(true, std::memory_order_relaxed);
    };
  });
  return kept.load();
}

void apply(const Bucket& bucket, const Rule& rule, int threads, bool last) {
  const Sums sums = sum_buckets(bucket);
  const Shrink shrink = ngn::shrink(rule, sums, *bucket.inputs);
  Reason reason = shrink.reason;
  if (reason == Reason::none) {
    const bool kept = dispatch_apply(rule, [&](auto momentum, auto coordinate, auto rms) {
      return dispatch_kernel(bucket, [&](auto kind) {
        return apply_chunks<momentum.value, coordinate.value, rms.value, kind.value>(bucket, rule, shrink, threads);
      });
    });
    if (kept) reason = Reason::elements_kept;
    for (int64_t i = 0; i < bucket.rows; ++i) {
      const TensorRow row = row_of(bucket, i);
      if (row.g) *row.step += 1;
    }
    bucket.sizes[SHRINK] = shrink.rho;
    bucket.sizes[SQUARED_NORM] = ngn::knows_norm(rule, *bucket.inputs) ? sums.norm : NAN;
    for (int64_t j = 0; j < bucket.group_count; ++j) {
      const Group& group = bucket.groups[j];
      bucket.sizes[STEP_SIZES + j] = schedule(group) * effective_step(rule, group) * shrink.rho;
    }
  }
  Counts& counts = *bucket.counts;
  const int64_t code = static_cast<int64_t>(reason);
  if (code > counts.reason) counts.reason = code;
  if (last && counts.reason != 0) {
    counts.skipped += 1;
    counts.last_reason = counts.reason;
    counts.reason = 0;
  }
}

// Numbers to a column's format as a step stores them, and back.
void encode(const float* values, int64_t numel, int64_t noise_key, int64_t step_count, int64_t offset,
            EncodedColumn column) {
  QuantColumn to(column.data, column.type, column.scales, column.rounding);
  const QuantColumn from(values, DType::float32, nullptr, Rounding::nearest);
  for (int64_t i = 0; i < numel; i += QUANT_BLOCK) {
    const int64_t n = numel - i < QUANT_BLOCK ? numel - i : QUANT_BLOCK;
    Tail tail[2];
    const QuantBlock<Floats> value = from.tail(i, n, tail[0]).load(0);
    const QuantColumn part = to.tail(i, n, tail[1]);
    part.store(0, value, part.scale_of(value), random_of(Noise(noise_key, step_count, offset), i));
    to.put_back(i, n, tail[1]);
  }
}

void decode(EncodedColumn column, int64_t numel, float* values) {
  const QuantColumn from(column.data, column.type, column.scales, column.rounding);
  for (int64_t i = 0; i < numel; i += QUANT_BLOCK) {
    const int64_t n = numel - i < QUANT_BLOCK ? numel - i : QUANT_BLOCK;
    Tail tail;
    float value[QUANT_BLOCK];
    from.tail(i, n, tail).copy_to(value);
    std::memcpy(values + i, value, static_cast<size_t>(n) * sizeof(float));
  }
}

bool runs_here() {
#if defined(__AVX512F__)
  return has_features(FMA | AVX, AVX2 | AVX512F | AVX512DQ | AVX512BW | AVX512VL, AVX512_REGISTERS);
#elif defined(__AVX2__)
  return has_features(FMA | AVX, AVX2, AVX_REGISTERS);
#else
  return true;
#endif
}

}  // namespace

const Engine NGN_CONCAT(engine_, NGN_ISA) = {NGN_STRING(NGN_ISA), runs_here, reduce, apply, encode, decode};

}  // namespace ngn

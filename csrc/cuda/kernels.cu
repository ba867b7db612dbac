// The two kernels, on the element math of rule.h:
//   reduce  one partial sum per chunk; the block that completes the last chunk of the step adds them
//   apply   rho from the sums at its start; then x, m and v in place; the last block counts the step
//
// A block works on one chunk. Addresses, sizes, hyper-parameters and step counts all come from tables on the device.
// What a whole chunk shares is computed in float64 by one thread; elements are float32.
#define NGN_ISA cuda

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/columns.cuh"
#include "cuda/launch.h"
#include "math/rule.h"

namespace ngn {
inline namespace NGN_ISA {

constexpr int WARPS = THREADS / WARP;

// What the threads of a block share.
struct Work {
  TensorRow row;
  int64_t begin;      // of the chunk
  int32_t n;          // its elements; 0 if they take no part
  int32_t n_aligned;  // of them, those that vectors reach
  Coefficients<float> k;
  Noise noise;  // of the row
};

__device__ inline Sums sum_buckets(const Bucket& bucket) {
  Sums total = bucket.totals[0];
#pragma unroll 1
  for (int64_t i = 1; i < bucket.bucket_count; ++i) {
    total.weighted += bucket.totals[i].weighted;
    total.alignment += bucket.totals[i].alignment;
    total.norm += bucket.totals[i].norm;
  }
  return total;
}

template <Storage STORAGE>
constexpr int VECTOR = STORAGE == Storage::half ? 8 : 4;

// The type of a column of the state: known to the compiler where it decides about registers.
template <Storage STORAGE>
__device__ inline DType state_type(DType type) {
  return STORAGE == Storage::narrow ? type : DType::float32;
}

__device__ inline bool is_aligned(const void* column, DType type, int vector) {
  return reinterpret_cast<uint64_t>(column) % static_cast<uint64_t>(size_of(type) * vector) == 0;
}

__device__ inline float limit_of(DType type, bool stochastic) {
  return stochastic ? stochastic_limit<float>(type) : overflow_limit<float>(type);
}

// The part of the work that both kernels begin with. A thread of its own does it.
template <bool UPDATES, bool MOMENTUM, bool RMS, bool REGULARISED, Storage STORAGE>
__device__ inline void locate(const Launch& launch, int64_t i_chunk, Work& work) {
  const Bucket& bucket = launch.bucket;
  const Chunk chunk = bucket.chunks[i_chunk];
  TensorRow row = row_of(bucket, chunk.row);
  const int64_t left = row.numel - chunk.begin;
  const int32_t n = row.g ? static_cast<int32_t>(left < launch.chunk_size ? left : launch.chunk_size) : 0;
  if (UPDATES && launch.rule.directed) row.g = row.d;
  constexpr bool READS_X = UPDATES || REGULARISED;
  constexpr int vector = VECTOR<STORAGE>;
  bool vectors = is_aligned(row.g, bucket.g_type, vector);
  if (!UPDATES && launch.rule.directed) vectors &= is_aligned(row.d, DType::float32, vector);
  if (READS_X) vectors &= is_aligned(row.x, bucket.x_type, vector);
  if (MOMENTUM) vectors &= is_aligned(row.m, state_type<STORAGE>(bucket.m_type), vector);
  if (RMS) vectors &= is_aligned(row.v, state_type<STORAGE>(bucket.v_type), vector);
  if (STORAGE == Storage::narrow && READS_X && bucket.rounding == Rounding::exact) {
    vectors &= is_aligned(row.remainder, DType::bfloat16, vector);
  }
  constexpr int whole = STORAGE == Storage::narrow ? static_cast<int>(QUANT_BLOCK) : vector;
  work.row = row;
  work.begin = chunk.begin;
  work.n = n;
  work.n_aligned = vectors ? n / whole * whole : 0;
}

__device__ inline Column column_at(const void* data, const void* scales, DType type, int64_t begin) {
  return {static_cast<char*>(const_cast<void*>(data)) + begin * size_of(type),
          static_cast<uint32_t*>(const_cast<void*>(scales)) + begin / QUANT_BLOCK, type};
}

// With exact rounding, the float32 of which x is the upper and the remainder the lower half.
template <class Layout>
__device__ inline Floats<Layout> join(const Floats<Layout>& near, const Words<Layout>& remainders) {
  Floats<Layout> x;
  NGN_EACH(j) {
    const int32_t low = static_cast<int16_t>(part_of<Layout, 16>(remainders, j));
    x[j] = bit_cast<float>(bit_cast<uint32_t>(near[j]) + static_cast<uint32_t>(low));
  }
  return x;
}

// The sums over `n` elements of a row, those of each thread.
template <bool RMS, bool REGULARISED, bool DIRECTED, Storage STORAGE, class Layout>
__device__ inline void reduce_span(const Launch& launch, const Work& work, int64_t begin, int n, double& weighted,
                                   double& alignment) {
  const Bucket& bucket = launch.bucket;
  const Coefficients<float> k = work.k;
  const bool exact = STORAGE == Storage::narrow && bucket.rounding == Rounding::exact;
  const Column x = column_at(work.row.x, nullptr, bucket.x_type, begin);
  const Column g = column_at(work.row.g, nullptr, bucket.g_type, begin);
  const Column d = column_at(work.row.d, nullptr, DType::float32, begin);
  const Column v = column_at(work.row.v, work.row.v_scale, state_type<STORAGE>(bucket.v_type), begin);
  const char* remainder = reinterpret_cast<const char*>(work.row.remainder) + begin * 2;
  Floats<Layout> sum = {}, product = {};
#pragma unroll 1
  for (int i = 0; i < n; i += Layout::SPAN) {
    const int o = i + Layout::first();
    const Loaded<Layout> g_loaded = load<Layout>(g, o, n);
    Loaded<Layout> v_loaded, x_loaded, d_loaded;
    Words<Layout> remainders = {};
    if constexpr (RMS) v_loaded = load<Layout>(v, o, n);
    if constexpr (DIRECTED) d_loaded = load<Layout>(d, o, n);
    if constexpr (REGULARISED) {
      x_loaded = load<Layout>(x, o, n);
      if (exact) load_words<Layout, 2>(remainder, o, n, remainders);
    }
    const Floats<Layout> g_value = decode(g_loaded, g.type);
    Floats<Layout> v_value = {}, x_value = {}, d_value = {};
    if constexpr (RMS) v_value = decode(v_loaded, v.type);
    if constexpr (DIRECTED) d_value = decode(d_loaded, d.type);
    if constexpr (REGULARISED) {
      x_value = decode(x_loaded, x.type);
      if (exact) x_value = join(x_value, remainders);
    }
    NGN_EACH(j) {
      const float gradient = k.gradient_scale * g_value[j];
      if constexpr (DIRECTED) {
        contribute_along(gradient, d_value[j], sum[j]);
      } else {
        contribute<RMS, REGULARISED>(x_value[j], v_value[j], gradient, k, sum[j], product[j]);
      }
    }
  }
  NGN_EACH(j) {
    weighted += static_cast<double>(sum[j]);
    if constexpr (REGULARISED) alignment += static_cast<double>(product[j]);
  }
}

// The sum over all threads of a block, in a fixed order; thread 0 has it. Between two sums through the same
// `of_warps` there must be a barrier.
__device__ inline double sum_threads(double value, double* of_warps) {
#pragma unroll
  for (int lanes = WARP / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(EVERY_LANE, value, lanes);
  if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = value;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < WARPS; ++i) total += of_warps[i];
  }
  return total;
}

__device__ inline double count_of(const TensorRow& row) { return static_cast<double>(*of_device(row.step)) + 1; }

// Whether this block completes the last chunk: what the others wrote can be read then. Called by one thread.
__device__ inline bool take_ticket(const Launch& launch) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(launch.ticket) : "memory");
  if (before != static_cast<uint32_t>(launch.bucket.chunk_count - 1)) return false;
  *launch.ticket = 0;
  return true;
}

template <bool RMS, bool REGULARISED, bool DIRECTED, Storage STORAGE>
__device__ inline void reduce(const Launch& launch) {
  __shared__ Work work;
  __shared__ double of_warps[2][WARPS];
  __shared__ bool is_last;
  const Bucket& bucket = launch.bucket;
  constexpr Rule rule = {false, false, RMS, REGULARISED, false, DIRECTED};
  constexpr bool CLIPPED = RMS || DIRECTED;  // sums_clipped(rule)
  // Each pass goes in the opposite order of the one before, whose last tensors are in the cache.
  const int64_t i_chunk = CLIPPED ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  if (threadIdx.x == 0) {
    locate<false, false, RMS, REGULARISED, STORAGE>(launch, i_chunk, work);
    // To a sum over unclipped gradients shrink() applies the clip factor.
    const double clip = CLIPPED ? clip_factor(sum_buckets(bucket).norm, bucket.inputs->max_grad_norm) : 1.0;
    work.k = coefficients<float>(rule, bucket.groups[work.row.group], count_of(work.row), *bucket.inputs, clip, 1.0, 0, 0, 0);
  }
  __syncthreads();
  double weighted = 0, alignment = 0;
  using Vectors = Together<VECTOR<STORAGE>>;
  reduce_span<RMS, REGULARISED, DIRECTED, STORAGE, Vectors>(launch, work, work.begin, work.n_aligned, weighted, alignment);
  const int n_tail = work.n - work.n_aligned;
  if (n_tail > 0) {
    reduce_span<RMS, REGULARISED, DIRECTED, STORAGE, Apart>(launch, work, work.begin + work.n_aligned, n_tail, weighted, alignment);
  }
  weighted = sum_threads(weighted, of_warps[0]);
  if (REGULARISED) alignment = sum_threads(alignment, of_warps[1]);
  if (threadIdx.x == 0) {
    // Each rank that holds the same elements contributes its part of these sums.
    const Group& group = bucket.groups[work.row.group];
    const double replicas = static_cast<double>(work.row.replicas), sum = work.k.unit * weighted / replicas;
    bucket.partials[i_chunk] = {effective_step(rule, group) * sum,
                                largest_step(group) * group.weight_decay * alignment / replicas, CLIPPED ? 0.0 : sum};
    is_last = take_ticket(launch);
  }
  __syncthreads();
  if (!is_last) return;
  Sums total = {};
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < bucket.chunk_count; i += THREADS) {
    total.weighted += bucket.partials[i].weighted;
    if (REGULARISED) total.alignment += bucket.partials[i].alignment;
    if (!CLIPPED) total.norm += bucket.partials[i].norm;
  }
  total.weighted = sum_threads(total.weighted, of_warps[0]);
  if (REGULARISED) total.alignment = sum_threads(total.alignment, of_warps[1]);
  if (!CLIPPED) total.norm = sum_threads(total.norm, of_warps[1]);
  if (threadIdx.x == 0) {
    Sums& sums = bucket.sums[bucket.index];
    sums.weighted = total.weighted;
    sums.alignment = total.alignment;
    if (!CLIPPED) sums.norm = total.norm;
  }
}

// A value that the block shares, read where it is used: registers are scarce where all formats are.
template <bool NARROW, typename T>
__device__ inline T shared(const T& value) {
  return NARROW ? *const_cast<const volatile T*>(&value) : value;
}

// Update `n` elements of a row; whether any of a thread's keeps its old values.
template <bool MOMENTUM, bool COORDINATE, bool RMS, Storage STORAGE, class Layout>
__device__ inline bool apply_span(const Launch& launch, const Work& work, int64_t begin, int n) {
  constexpr bool NARROW = STORAGE == Storage::narrow;
  const Bucket& bucket = launch.bucket;
  const Coefficients<float> k = work.k;
  const bool exact = NARROW && bucket.rounding == Rounding::exact;
  const bool stochastic = NARROW && bucket.rounding == Rounding::stochastic;
  const bool apart = launch.rule.adamw_decay, ahead = launch.rule.nesterov;
  bool kept = false;
#pragma unroll 1
  for (int i = 0; i < n; i += Layout::SPAN) {
    const Column x = column_at(shared<NARROW>(work.row.x), nullptr, bucket.x_type, begin);
    const Column g = column_at(shared<NARROW>(work.row.g), nullptr, bucket.g_type, begin);
    const Column m = column_at(shared<NARROW>(work.row.m), shared<NARROW>(work.row.m_scale), state_type<STORAGE>(bucket.m_type), begin);
    const Column v = column_at(shared<NARROW>(work.row.v), shared<NARROW>(work.row.v_scale), state_type<STORAGE>(bucket.v_type), begin);
    char* const remainder = reinterpret_cast<char*>(shared<NARROW>(work.row.remainder)) + begin * 2;
    const int o = i + Layout::first();
    const Loaded<Layout> g_loaded = load<Layout>(g, o, n);
    Loaded<Layout> v_loaded, m_loaded;
    if constexpr (RMS) v_loaded = load<Layout>(v, o, n);
    if constexpr (MOMENTUM) m_loaded = load<Layout>(m, o, n);
    const Loaded<Layout> x_loaded = load<Layout>(x, o, n);
    Words<Layout> remainders = {}, random = {}, others = {};
    if (exact) load_words<Layout, 2>(remainder, o, n, remainders);

    const Floats<Layout> g_value = decode(g_loaded, g.type);
    Floats<Layout> v_value = {}, m_value = {}, x_value = decode(x_loaded, x.type);
    if constexpr (RMS) v_value = decode(v_loaded, v.type);
    if constexpr (MOMENTUM) m_value = decode(m_loaded, m.type);
    if (exact) x_value = join(x_value, remainders);
    NGN_EACH(j) {
      const Element<float> old = {x_value[j], m_value[j], v_value[j]};
      Element<float> element = old;
      const float gradient = k.gradient_scale * g_value[j];
      const Draft<float> half = draft<COORDINATE, RMS>(old.v, gradient, k);
      if (MOMENTUM && ahead) {
        update<MOMENTUM, Decay::apart_and_ahead>(element, half, gradient, k);
      } else if (MOMENTUM && apart) {
        update<MOMENTUM, Decay::apart>(element, half, gradient, k);
      } else {
        update<MOMENTUM, Decay::in_displacement>(element, half, gradient, k);
      }
      const auto headroom = headroom_of<MOMENTUM, RMS, NARROW>(element, k);
      keep(old, headroom, element);
      kept |= headroom < 0;
      x_value[j] = element.x;
      m_value[j] = element.m;
      v_value[j] = element.v;
    }
    if constexpr (NARROW) {
      NGN_EACH(j) {
        random[j] = work.noise.of_element(begin + o + j * Layout::STRIDE);
        others[j] = random[j] * GOLDEN;
      }
    }
    if (exact) {
      Words<Layout> near = {}, low = {};
      NGN_EACH(j) {
        // Ties go away from zero.
        const uint32_t bits = bit_cast<uint32_t>(x_value[j]);
        put_part<Layout, 16>(near, j, (bits + 0x8000) >> 16);
        put_part<Layout, 16>(low, j, bits & 0xffff);
      }
      store_words<Layout, 2>(x.at, o, n, near);
      store_words<Layout, 2>(remainder, o, n, low);
    } else {
      store<Layout>(x, o, n, x_value, stochastic, others);
    }
    if constexpr (MOMENTUM) store<Layout>(m, o, n, m_value, false, random);
    if constexpr (RMS) store<Layout>(v, o, n, v_value, true, random);
  }
  return kept;
}

// t <- t + 1 for every row that takes part.
__device__ inline void advance_steps(const Bucket& bucket) {
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < bucket.rows; i += THREADS) {
    const TensorRow row = row_of(bucket, i);
    if (row.g) *of_device(row.step) += 1;
  }
}

// The norm, rho, and gamma of each group.
__device__ inline void write_telemetry(const Bucket& bucket, const Rule& rule, const Sums& total, double rho) {
  if (threadIdx.x == 0) {
    bucket.sizes[SQUARED_NORM] = knows_norm(rule, *bucket.inputs) ? total.norm : static_cast<double>(NAN);
    if (!rule.coordinate) bucket.sizes[SHRINK] = rho;
  }
  if (rule.coordinate) return;  // they have no rho
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < bucket.group_count; i += THREADS) {
    const Group& group = bucket.groups[i];
    bucket.sizes[STEP_SIZES + i] = schedule(group) * effective_step(rule, group) * rho;
  }
}

// Count a skipped step once for all buckets.
__device__ inline void count_step(Counts& counts, Reason reason, bool last) {
  const int64_t code = Larger{}(counts.reason, static_cast<int64_t>(reason));
  counts.reason = code;
  if (!last || code == static_cast<int64_t>(Reason::none)) return;
  counts.skipped += 1;
  counts.last_reason = code;
  counts.reason = 0;
}

// The rule, with what the kernel was compiled for as constants.
template <bool MOMENTUM, bool COORDINATE, bool RMS>
__device__ inline Rule compiled(Rule rule) {
  rule.momentum = MOMENTUM;
  rule.coordinate = COORDINATE;
  rule.rms = RMS;
  return rule;
}

template <bool MOMENTUM, bool COORDINATE, bool RMS, Storage STORAGE>
__device__ inline void apply(const Launch& launch) {
  __shared__ Work work;
  __shared__ bool is_last;
  __shared__ Sums total;
  __shared__ Shrink step;
  const Bucket& bucket = launch.bucket;
  const Rule rule = compiled<MOMENTUM, COORDINATE, RMS>(launch.rule);
  const int64_t i_chunk = COORDINATE || !sums_clipped(rule) ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  if (threadIdx.x == 0) {
    locate<true, MOMENTUM, RMS, false, STORAGE>(launch, i_chunk, work);
    total = sum_buckets(bucket);
    step = shrink(rule, total, *bucket.inputs);
    const bool goes = step.reason == Reason::none;
    work.n = goes ? work.n : 0;
    work.n_aligned = goes ? work.n_aligned : 0;
    const double count = count_of(work.row);
    work.noise = Noise(work.row.noise_key, static_cast<int64_t>(count), work.row.offset);
    work.k = coefficients<float>(rule, bucket.groups[work.row.group], count, *bucket.inputs, step.clip, step.rho,
                                 limit_of(bucket.x_type, STORAGE == Storage::narrow && bucket.rounding == Rounding::stochastic),
                                 limit_of(state_type<STORAGE>(bucket.m_type), false),
                                 limit_of(state_type<STORAGE>(bucket.v_type), true));
    if (launch.rule.directed) work.k.gradient_scale = 1;
  }
  __syncthreads();
  using Vectors = Together<VECTOR<STORAGE>>;
  bool kept = apply_span<MOMENTUM, COORDINATE, RMS, STORAGE, Vectors>(launch, work, work.begin, work.n_aligned);
  const int n_tail = work.n - work.n_aligned;
  if (n_tail > 0) {
    kept |= apply_span<MOMENTUM, COORDINATE, RMS, STORAGE, Apart>(launch, work, work.begin + work.n_aligned, n_tail);
  }
  // Step counts and sums are thread 0's alone: it has read them before it takes the ticket.
  const bool any_kept = __syncthreads_or(kept);
  if (threadIdx.x == 0) {
    if (any_kept) {
      atomicMax(reinterpret_cast<long long*>(&bucket.counts->reason), static_cast<long long>(Reason::elements_kept));
    }
    is_last = take_ticket(launch);
  }
  __syncthreads();
  if (!is_last) return;
  if (step.reason == Reason::none) {
    advance_steps(bucket);
    write_telemetry(bucket, rule, total, step.rho);
  }
  if (threadIdx.x == 0) count_step(*bucket.counts, step.reason, launch.last);
}

}  // namespace NGN_ISA
}  // namespace ngn

// Registers for half of the warps of a multiprocessor of 2,048 threads, or for three eighths with all formats of v.
#define NGN_KERNEL(name, RMS, STORAGE)                                                              \
  extern "C" __global__ void __launch_bounds__(ngn::THREADS, RMS && STORAGE == ngn::Storage::narrow ? 3 : 4) \
      ngn_##name(const __grid_constant__ ngn::Launch launch)
#define NGN_REDUCE(name, RMS, REGULARISED, DIRECTED, STORAGE) \
  NGN_KERNEL(name, RMS, ngn::Storage::STORAGE) { ngn::reduce<RMS, REGULARISED, DIRECTED, ngn::Storage::STORAGE>(launch); }
#define NGN_APPLY(name, MOMENTUM, COORDINATE, RMS, STORAGE) \
  NGN_KERNEL(name, RMS, ngn::Storage::STORAGE) { ngn::apply<MOMENTUM, COORDINATE, RMS, ngn::Storage::STORAGE>(launch); }
NGN_REDUCE_KERNELS(NGN_REDUCE)
NGN_APPLY_KERNELS(NGN_APPLY)

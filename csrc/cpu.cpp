// Loops over chunks, blocks and lanes. Compiled once per instruction set (NGN_ISA). A fixed number of
// lanes and a fixed order of sums make the results the same bits for any number of threads.
#include <atomic>
#include <cstdint>
#include <vector>

#include "convert.h"
#include "engine.h"
#include "formats.h"
#include "rule.h"
#include "rule_switch.h"
#include "vec.h"

#define NGN_CONCAT_(a, b) a##b
#define NGN_CONCAT(a, b) NGN_CONCAT_(a, b)

namespace ngn {
namespace {

constexpr int64_t BLOCK = 512;  // staged or summed at once; four columns of it stay in the L1 cache
constexpr int AHEAD = 6;        // vectors between a draft and its update
constexpr int LANES = 16;       // partial sums side by side, so that they vectorise without reordering

// One column of a row as the compute type, multiplied by a factor: in place where its memory holds just
// that, or through a stage, a block at a time. A column that the rule lacks is null and never asked.
template <typename T>
class Column {
 public:
  Column(const void* data, DType type, T factor = 1)
      : data_(static_cast<char*>(const_cast<void*>(data))), type_(type), factor_(factor),
        in_place_(type == (sizeof(T) == 8 ? DType::float64 : DType::float32) && factor == 1 &&
                  reinterpret_cast<uintptr_t>(data) % alignof(T) == 0) {}

  bool in_place() const { return in_place_; }

  T* in(int64_t begin, int64_t n) {
    char* address = data_ + begin * size_of(type_);
    if (in_place_) return reinterpret_cast<T*>(address);
    with_type(type_, [&](auto element) {
      using E = decltype(element);
      for (int64_t i = 0; i < n; ++i) {
        E value;
        std::memcpy(&value, address + i * sizeof(E), sizeof(E));
        stage_[i] = factor_ * static_cast<T>(widen(value));
      }
    });
    return stage_;
  }

  // Write back what was changed where in() pointed to.
  void out(int64_t begin, int64_t n) {
    if (in_place_) return;
    char* address = data_ + begin * size_of(type_);
    with_type(type_, [&](auto element) {
      using E = decltype(element);
      for (int64_t i = 0; i < n; ++i) {
        E value;
        narrow(stage_[i], value);
        std::memcpy(address + i * sizeof(E), &value, sizeof(E));
      }
    });
  }

 protected:
  char* data_;
  DType type_;
  T factor_;
  bool in_place_;
  alignas(64) T stage_[BLOCK];
};

// The same with the formats that take more than a cast; `beside` are scales or remainders.
class NarrowColumn : public Column<float> {
 public:
  NarrowColumn(void* data, DType type, void* beside, Rounding rounding)
      : Column<float>(data, type), beside_(beside), rounding_(rounding) {}

  float* in(int64_t begin, int64_t n) {
    if (in_place_) return reinterpret_cast<float*>(data_) + begin;
    char* address = data_ + begin * size_of(type_);
    switch (type_) {
      case DType::int8:
        decode_m(reinterpret_cast<int8_t*>(address), scales<float>(begin), n, stage_);
        return stage_;
      case DType::uint8:
        decode_v(reinterpret_cast<uint8_t*>(address), scales<uint32_t>(begin), n, stage_);
        return stage_;
      case DType::bfloat16:
        if (rounding_ == Rounding::exact) {
          join_bfloat16(reinterpret_cast<uint16_t*>(address), static_cast<int16_t*>(beside_) + begin, n, stage_);
        } else {
          decode_bfloat16(reinterpret_cast<uint16_t*>(address), n, stage_);
        }
        return stage_;
      default: return Column<float>::in(begin, n);
    }
  }

  void out(int64_t begin, int64_t n, const uint32_t* noise) {
    if (in_place_) return;
    char* address = data_ + begin * size_of(type_);
    auto* halves = reinterpret_cast<uint16_t*>(address);
    for (int64_t i = n; i % QUANTUM != 0; ++i) stage_[i] = 0;
    if (type_ == DType::int8) {
      encode_m(stage_, noise, n, reinterpret_cast<int8_t*>(address), scales<float>(begin));
    } else if (type_ == DType::uint8) {
      encode_v(stage_, noise, n, reinterpret_cast<uint8_t*>(address), scales<uint32_t>(begin));
    } else if (type_ == DType::bfloat16 && rounding_ == Rounding::exact) {
      split_bfloat16(stage_, n, halves, static_cast<int16_t*>(beside_) + begin);
    } else if (type_ == DType::bfloat16 && rounding_ == Rounding::stochastic) {
      stochastic_bfloat16(stage_, noise, n, halves);
    } else if (type_ == DType::float16 && rounding_ == Rounding::stochastic) {
      stochastic_float16(stage_, noise, n, halves);
    } else if (type_ == DType::bfloat16) {
      nearest_bfloat16(stage_, n, halves);
    } else {
      Column<float>::out(begin, n);
    }
  }

 private:
  template <typename Scale>
  Scale* scales(int64_t begin) const {
    return static_cast<Scale*>(beside_) + begin / QUANTUM;
  }

  void* beside_;
  Rounding rounding_;
};

template <bool NARROW, typename T>
auto column_of(void* data, DType type, void* beside, Rounding rounding = Rounding::nearest) {
  if constexpr (NARROW) {
    return NarrowColumn(data, type, beside, rounding);
  } else {
    return Column<T>(data, type);
  }
}

// Ask for the lines of LANES elements a page ahead: the processor by itself stops at the end of a page.
template <typename T>
void prefetch_lanes(const T* from) {
  constexpr uintptr_t page = 4096, line = 64;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from) + page;
  for (uintptr_t at = 0; at < LANES * sizeof(T); at += line) __builtin_prefetch(reinterpret_cast<void*>(begin + at));
}

// Full groups of LANES as vectors, the rest as scalars, through the same element function.
template <bool RMS, bool REGULARISED, typename T>
void reduce_block(const T* x, const T* v, const T* g, int64_t n, const Coefficients<T> k,
                  double* weighted, double* alignment) {
  constexpr int width = VectorOf<T>::lanes, vectors = LANES / width;
  Vec<T> weighted_vector[vectors] = {}, alignment_vector[vectors] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    if constexpr (!RMS) prefetch_lanes(g + i);  // with a root and a quotient there is time enough
    for (int j = 0; j < vectors; ++j) {
      const int64_t at = i + j * width;
      contribute<RMS, REGULARISED>(REGULARISED ? load(x + at) : Vec<T>{}, RMS ? load(v + at) : Vec<T>{},
                                   load(g + at), k, weighted_vector[j], alignment_vector[j]);
    }
  }
  T weighted_lane[LANES], alignment_lane[LANES];
  std::memcpy(weighted_lane, weighted_vector, sizeof(weighted_lane));
  std::memcpy(alignment_lane, alignment_vector, sizeof(alignment_lane));
  for (int j = 0; i < n; ++i, ++j) {
    contribute<RMS, REGULARISED>(REGULARISED ? x[i] : T(0), RMS ? v[i] : T(0), g[i], k,
                                 weighted_lane[j], alignment_lane[j]);
  }
  for (int j = 0; j < LANES; ++j) {
    weighted[j] += weighted_lane[j];
    alignment[j] += alignment_lane[j];
  }
}

// True if any element kept its old value.
template <bool MOMENTUM, bool COORDINATE, bool RMS, bool DECAY, bool NARROW, typename T>
bool update_block(T* x, T* m, T* v, const T* g, int64_t n, const Coefficients<T> k) {
  constexpr int width = VectorOf<T>::lanes;
  bool kept = false;
  // As a branch that is hardly ever taken, keeping old values costs next to nothing.
  const auto updated = [&](auto element, const auto& draft, auto gradient) {
    const auto old = element;
    const auto room = update<MOMENTUM, RMS, DECAY, NARROW>(element, draft, gradient, k);
    if (__builtin_expect(any_negative(room), 0)) {
      keep(old, room, element);
      kept = true;
    }
    return element;
  };
  const auto draft_at = [&](int64_t i) { return draft<COORDINATE, RMS>(RMS ? load(v + i) : Vec<T>{}, load(g + i), k); };
  const auto update_at = [&](int64_t i, const Draft<Vec<T>>& draft) {
    const Element<Vec<T>> old = {load(x + i), MOMENTUM ? load(m + i) : Vec<T>{}, RMS ? load(v + i) : Vec<T>{}};
    const Element<Vec<T>> element = updated(old, draft, load(g + i));
    store(x + i, element.x);
    if constexpr (MOMENTUM) store(m + i, element.m);
    if constexpr (RMS) store(v + i, element.v);
  };
  int64_t i = 0;
  // The root of v and the quotient after it take long: with drafts made ahead, other vectors' are under way
  // at the same time, more of them than the processor finds by itself.
  constexpr int64_t span = AHEAD * width;
  if (RMS && n >= span) {
    Draft<Vec<T>> ahead[AHEAD];
    for (int j = 0; j < AHEAD; ++j) ahead[j] = draft_at(j * width);
    for (; i + 2 * span <= n; i += span) {
#pragma GCC unroll AHEAD
      for (int j = 0; j < AHEAD; ++j) {
        update_at(i + j * width, ahead[j]);
        ahead[j] = draft_at(i + span + j * width);
      }
    }
#pragma GCC unroll AHEAD
    for (int j = 0; j < AHEAD; ++j) update_at(i + j * width, ahead[j]);
    i += span;
  }
  for (; i + width <= n; i += width) update_at(i, draft_at(i));
  for (; i < n; ++i) {
    const Element<T> old = {x[i], MOMENTUM ? m[i] : T(0), RMS ? v[i] : T(0)};
    const Element<T> element = updated(old, draft<COORDINATE, RMS>(old.v, g[i], k), g[i]);
    x[i] = element.x;
    if constexpr (MOMENTUM) m[i] = element.m;
    if constexpr (RMS) v[i] = element.v;
  }
  return kept;
}

bool is_narrow(const Bucket& bucket) {
  return size_of(bucket.m_type) < 4 || size_of(bucket.v_type) < 4 || bucket.rounding != Rounding::nearest;
}

bool computes_in_double(const Bucket& bucket) {
  return bucket.x_type == DType::float64 || bucket.g_type == DType::float64 ||
         bucket.m_type == DType::float64 || bucket.v_type == DType::float64;
}

double sum_lanes(const double* lanes) {
  double total = 0;
  for (int j = 0; j < LANES; ++j) total += lanes[j];
  return total;
}

Sums sum_buckets(const Bucket& bucket) {
  Sums total = {};
  for (int64_t i = 0; i < bucket.bucket_count; ++i) {
    total.weighted += bucket.sums[i].weighted;
    total.alignment += bucket.sums[i].alignment;
    total.norm += bucket.sums[i].norm;
  }
  return total;
}

// Coefficients change only with the group and the step count, which neighbouring rows share.
template <typename T>
class CoefficientCache {
 public:
  CoefficientCache(const Bucket& bucket, const Rule& rule, double clip, double rho)
      : bucket_(bucket), rule_(rule), clip_(clip), rho_(rho) {}

  const Coefficients<T>& of(const TensorRow& row) {
    const double count = static_cast<double>(*row.step) + 1;
    if (row.group != group_ || count != count_) {
      group_ = row.group;
      count_ = count;
      k_ = coefficients<T>(rule_, bucket_.groups[group_], count, *bucket_.inputs, clip_, rho_,
                           x_limit(), overflow_limit<T>(bucket_.m_type),
                           stochastic_limit<T>(bucket_.v_type));
    }
    return k_;
  }

 private:
  T x_limit() const {
    return bucket_.rounding == Rounding::stochastic ? stochastic_limit<T>(bucket_.x_type)
                                                    : overflow_limit<T>(bucket_.x_type);
  }

  const Bucket& bucket_;
  const Rule& rule_;
  double clip_, rho_;
  int64_t group_ = -1;
  double count_ = 0;
  Coefficients<T> k_;
};

// Every thread has its part of the chunks, the same one in every pass, so that its data stay in the
// caches near it; whoever is done helps with the other parts, a few neighbouring chunks at a time.
template <typename Work>
void for_each_chunk(int64_t count, int threads, bool reverse, Work&& make_worker) {
  struct alignas(64) Part {
    std::atomic<int64_t> next{0};
    int64_t begin, end;
  };
  struct Shared {
    std::vector<Part> parts;
    int64_t batch;
    bool reverse;
    Work* make_worker;
  };
  const int team = static_cast<int>(count < threads ? count : threads);
  if (team < 1) return;
  Shared shared{std::vector<Part>(static_cast<size_t>(team)), 1 + count / (16 * team), reverse, &make_worker};
  for (int t = 0; t < team; ++t) {
    shared.parts[t].begin = count * t / team;
    shared.parts[t].end = count * (t + 1) / team;
  }
  run_team(
      [](void* data) {
        Shared& shared = *static_cast<Shared*>(data);
        auto worker = (*shared.make_worker)();
        const size_t team = shared.parts.size(), own = static_cast<size_t>(thread_slot()) % team;
        for (size_t t = 0; t < team; ++t) {
          Part& part = shared.parts[(own + t) % team];
          const int64_t count = part.end - part.begin;
          for (;;) {
            const int64_t done = part.next.fetch_add(shared.batch, std::memory_order_relaxed);
            if (done >= count) break;
            const int64_t n = count - done < shared.batch ? count - done : shared.batch;
            const int64_t first = shared.reverse ? part.end - done - n : part.begin + done;
            for (int64_t i = first; i < first + n; ++i) worker(i);
          }
        }
      },
      &shared, team);
}

template <bool RMS, bool REGULARISED, bool NARROW, typename T>
void reduce_chunks(const Bucket& bucket, const Rule& rule, double clip, int threads) {
  for_each_chunk(bucket.chunk_count, threads, false, [&] {
    return [&, cache = CoefficientCache<T>(bucket, rule, clip, 1.0)](int64_t i) mutable {
      const Chunk chunk = bucket.chunks[i];
      const TensorRow row = row_of(bucket, chunk.row);
      bucket.partials[i] = {};
      if (!row.g) return;
      const Coefficients<T>& k = cache.of(row);
      auto x = column_of<NARROW, T>(row.x, bucket.x_type, row.remainder, bucket.rounding);
      auto v = column_of<NARROW, T>(row.v, bucket.v_type, row.v_scale);
      Column<T> g(row.g, bucket.g_type, k.gradient_scale);
      double weighted[LANES] = {}, alignment[LANES] = {};
      const int64_t end = chunk.begin + CHUNK < row.numel ? chunk.begin + CHUNK : row.numel;
      for (int64_t begin = chunk.begin; begin < end; begin += BLOCK) {
        const int64_t n = end - begin < BLOCK ? end - begin : BLOCK;
        reduce_block<RMS, REGULARISED, T>(REGULARISED ? x.in(begin, n) : nullptr,
                                          RMS ? v.in(begin, n) : nullptr, g.in(begin, n), n, k,
                                          weighted, alignment);
      }
      const Group& group = bucket.groups[row.group];
      const double copies = static_cast<double>(row.copies);
      const double sum = k.unit * sum_lanes(weighted) / copies;
      bucket.partials[i] = {effective_lr(rule, group) * sum,
                            group.lr * group.weight_decay * sum_lanes(alignment) / copies, RMS ? 0.0 : sum};
    };
  });
}

void reduce(const Bucket& bucket, const Rule& rule, int threads) {
  // A rule without RMS sums unclipped gradients: shrink() applies the clip factor to its sum.
  const double clip = rule.rms ? clip_factor(sum_buckets(bucket).norm, bucket.inputs->max_grad_norm) : 1.0;
  switch_reduce(rule, [&](auto rms, auto regularised) {
    if (is_narrow(bucket)) {
      reduce_chunks<rms.value, regularised.value, true, float>(bucket, rule, clip, threads);
    } else if (computes_in_double(bucket)) {
      reduce_chunks<rms.value, regularised.value, false, double>(bucket, rule, clip, threads);
    } else {
      reduce_chunks<rms.value, regularised.value, false, float>(bucket, rule, clip, threads);
    }
  });
  Sums total = {};
  for (int64_t i = 0; i < bucket.chunk_count; ++i) {
    total.weighted += bucket.partials[i].weighted;
    total.alignment += bucket.partials[i].alignment;
    total.norm += bucket.partials[i].norm;
  }
  Sums& sums = bucket.sums[bucket.index];
  sums.weighted = total.weighted;
  sums.alignment = total.alignment;
  if (!rule.rms) sums.norm = total.norm;
}

// True if any element kept its old value.
template <bool MOMENTUM, bool COORDINATE, bool RMS, bool NARROW, typename T>
bool apply_chunks(const Bucket& bucket, const Rule& rule, const Shrink& shrink, int threads) {
  std::atomic<bool> kept{false};
  for_each_chunk(bucket.chunk_count, threads, true, [&] {
    return [&, cache = CoefficientCache<T>(bucket, rule, shrink.clip, shrink.rho)](int64_t i) mutable {
      const Chunk chunk = bucket.chunks[i];
      const TensorRow row = row_of(bucket, chunk.row);
      if (!row.g) return;
      const Coefficients<T>& k = cache.of(row);
      auto x = column_of<NARROW, T>(row.x, bucket.x_type, row.remainder, bucket.rounding);
      auto m = column_of<NARROW, T>(row.m, bucket.m_type, row.m_scale);
      auto v = column_of<NARROW, T>(row.v, bucket.v_type, row.v_scale, Rounding::stochastic);
      Column<T> g(row.g, bucket.g_type, k.gradient_scale);
      const bool in_place = x.in_place() && (!MOMENTUM || m.in_place()) && (!RMS || v.in_place()) && g.in_place();
      const int64_t block = in_place && !NARROW ? CHUNK : BLOCK;
      bool kept_here = false;
      const int64_t end = chunk.begin + CHUNK < row.numel ? chunk.begin + CHUNK : row.numel;
      for (int64_t begin = chunk.begin; begin < end; begin += block) {
        const int64_t n = end - begin < block ? end - begin : block;
        kept_here |= with_flag(k.decay != 0, [&](auto decay) {
          return update_block<MOMENTUM, COORDINATE, RMS, decay.value, NARROW, T>(
              x.in(begin, n), MOMENTUM ? m.in(begin, n) : nullptr, RMS ? v.in(begin, n) : nullptr,
              g.in(begin, n), n, k);
        });
        if constexpr (NARROW) {
          alignas(64) uint32_t noise[BLOCK + WIDTH], x_noise[BLOCK];
          make_noise(row.first + begin, n, row.noise_key, static_cast<int64_t>(*row.step) + 1, noise);
          if (bucket.rounding == Rounding::stochastic) other_noise(noise, n, x_noise);
          x.out(begin, n, x_noise);
          if (MOMENTUM) m.out(begin, n, noise);
          if (RMS) v.out(begin, n, noise);
        } else {
          x.out(begin, n);
          if (MOMENTUM) m.out(begin, n);
          if (RMS) v.out(begin, n);
        }
      }
      if (kept_here) kept.store(true, std::memory_order_relaxed);
    };
  });
  return kept.load();
}

void apply(const Bucket& bucket, const Rule& rule, int threads, bool last) {
  const Shrink shrink = ngn::shrink(rule, sum_buckets(bucket), *bucket.inputs);
  Reason reason = shrink.reason;
  if (reason == Reason::none) {
    const bool kept = switch_apply(rule, [&](auto momentum, auto coordinate, auto rms) {
      constexpr bool MOMENTUM = momentum.value, COORDINATE = coordinate.value, RMS = rms.value;
      if (is_narrow(bucket)) return apply_chunks<MOMENTUM, COORDINATE, RMS, true, float>(bucket, rule, shrink, threads);
      if (computes_in_double(bucket)) {
        return apply_chunks<MOMENTUM, COORDINATE, RMS, false, double>(bucket, rule, shrink, threads);
      }
      return apply_chunks<MOMENTUM, COORDINATE, RMS, false, float>(bucket, rule, shrink, threads);
    });
    if (kept) reason = Reason::elements_kept;
    for (int64_t i = 0; i < bucket.rows; ++i) {
      const TensorRow row = row_of(bucket, i);
      if (row.g) *row.step += 1;
    }
    bucket.sizes[0] = shrink.rho;
    for (int64_t j = 0; j < bucket.group_count; ++j) {
      bucket.sizes[1 + j] = effective_lr(rule, bucket.groups[j]) * shrink.rho;
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

// One column of numbers through a format, a block at a time, as apply() and reduce() do it.
void encode(const float* values, int64_t numel, int64_t noise_key, int64_t step_count, int64_t first,
            Encoded column) {
  NarrowColumn to(column.data, column.type, column.scales, column.rounding);
  for (int64_t begin = 0; begin < numel; begin += BLOCK) {
    const int64_t n = numel - begin < BLOCK ? numel - begin : BLOCK;
    alignas(64) uint32_t noise[BLOCK + WIDTH];
    make_noise(first + begin, n, noise_key, step_count, noise);
    std::memcpy(to.in(begin, n), values + begin, static_cast<size_t>(n) * sizeof(float));
    to.out(begin, n, noise);
  }
}

void decode(Encoded column, int64_t numel, float* values) {
  NarrowColumn from(column.data, column.type, column.scales, column.rounding);
  for (int64_t begin = 0; begin < numel; begin += BLOCK) {
    const int64_t n = numel - begin < BLOCK ? numel - begin : BLOCK;
    std::memcpy(values + begin, from.in(begin, n), static_cast<size_t>(n) * sizeof(float));
  }
}

bool runs_here() {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

#define NGN_STRING_(a) #a
#define NGN_STRING(a) NGN_STRING_(a)

}  // namespace

const Engine NGN_CONCAT(engine_, NGN_ISA) = {NGN_STRING(NGN_ISA), runs_here, reduce, apply, encode, decode};

}  // namespace ngn

// Loops over chunks, blocks and lanes. Compiled once per instruction set (NGN_ISA). A fixed number of
// lanes and a fixed order of sums make the results the same bits for any number of threads.
#include <atomic>
#include <cstdint>
#include <vector>

#include "convert.h"
#include "engine.h"
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

 private:
  char* data_;
  DType type_;
  T factor_;
  bool in_place_;
  alignas(64) T stage_[BLOCK];
};

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
template <bool MOMENTUM, bool COORDINATE, bool RMS, bool DECAY, typename T>
bool update_block(T* x, T* m, T* v, const T* g, int64_t n, const Coefficients<T> k) {
  constexpr int width = VectorOf<T>::lanes;
  bool kept = false;
  // As a branch that is hardly ever taken, keeping old values costs next to nothing.
  const auto updated = [&](auto element, const auto& draft, auto gradient) {
    const auto old = element;
    const auto room = update<MOMENTUM, RMS, DECAY>(element, draft, gradient, k);
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

bool computes_in_double(const Bucket& bucket) {
  return bucket.x_type == DType::float64 || bucket.g_type == DType::float64 ||
         bucket.state_type == DType::float64;
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
      k_ = coefficients<T>(rule_, bucket_.groups[group_], count, bucket_.scalars->height,
                           bucket_.scalars->grad_scale, clip_, rho_,
                           overflow_limit<T>(bucket_.x_type), overflow_limit<T>(bucket_.state_type));
    }
    return k_;
  }

 private:
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

template <bool RMS, bool REGULARISED, typename T>
void reduce_chunks(const Bucket& bucket, const Rule& rule, double clip, int threads) {
  for_each_chunk(bucket.chunk_count, threads, false, [&] {
    return [&, cache = CoefficientCache<T>(bucket, rule, clip, 1.0)](int64_t i) mutable {
      const Chunk chunk = bucket.chunks[i];
      const TensorRow row = bucket.row(chunk.row);
      bucket.partials[i] = {};
      if (!row.g) return;
      const Coefficients<T>& k = cache.of(row);
      Column<T> x(row.x, bucket.x_type), v(row.v, bucket.state_type), g(row.g, bucket.g_type, k.gradient_scale);
      double weighted[LANES] = {}, alignment[LANES] = {};
      const int64_t end = chunk.begin + CHUNK < row.numel ? chunk.begin + CHUNK : row.numel;
      for (int64_t begin = chunk.begin; begin < end; begin += BLOCK) {
        const int64_t n = end - begin < BLOCK ? end - begin : BLOCK;
        reduce_block<RMS, REGULARISED, T>(REGULARISED ? x.in(begin, n) : nullptr,
                                          RMS ? v.in(begin, n) : nullptr, g.in(begin, n), n, k,
                                          weighted, alignment);
      }
      const Group& group = bucket.groups[row.group];
      const double sum = k.unit * sum_lanes(weighted);
      bucket.partials[i] = {effective_lr(rule, group) * sum,
                            group.lr * group.weight_decay * sum_lanes(alignment), RMS ? 0.0 : sum};
    };
  });
}

void reduce(const Bucket& bucket, const Rule& rule, int threads) {
  // A rule without RMS sums unclipped gradients: shrink() applies the clip factor to its sum.
  const double clip = rule.rms ? clip_factor(sum_buckets(bucket).norm, bucket.scalars->max_grad_norm) : 1.0;
  const bool wide = computes_in_double(bucket);
  switch_reduce(rule, [&](auto rms, auto regularised) {
    if (wide) {
      reduce_chunks<rms.value, regularised.value, double>(bucket, rule, clip, threads);
    } else {
      reduce_chunks<rms.value, regularised.value, float>(bucket, rule, clip, threads);
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
template <bool MOMENTUM, bool COORDINATE, bool RMS, typename T>
bool apply_chunks(const Bucket& bucket, const Rule& rule, const Shrink& shrink, int threads) {
  std::atomic<bool> kept{false};
  for_each_chunk(bucket.chunk_count, threads, true, [&] {
    return [&, cache = CoefficientCache<T>(bucket, rule, shrink.clip, shrink.rho)](int64_t i) mutable {
      const Chunk chunk = bucket.chunks[i];
      const TensorRow row = bucket.row(chunk.row);
      if (!row.g) return;
      const Coefficients<T>& k = cache.of(row);
      Column<T> x(row.x, bucket.x_type), m(row.m, bucket.state_type), v(row.v, bucket.state_type);
      Column<T> g(row.g, bucket.g_type, k.gradient_scale);
      const bool in_place = x.in_place() && (!MOMENTUM || m.in_place()) && (!RMS || v.in_place()) && g.in_place();
      const int64_t block = in_place ? CHUNK : BLOCK;
      bool kept_here = false;
      const int64_t end = chunk.begin + CHUNK < row.numel ? chunk.begin + CHUNK : row.numel;
      for (int64_t begin = chunk.begin; begin < end; begin += block) {
        const int64_t n = end - begin < block ? end - begin : block;
        kept_here |= with_flag(k.decay != 0, [&](auto decay) {
          return update_block<MOMENTUM, COORDINATE, RMS, decay.value, T>(
              x.in(begin, n), MOMENTUM ? m.in(begin, n) : nullptr, RMS ? v.in(begin, n) : nullptr,
              g.in(begin, n), n, k);
        });
        x.out(begin, n);
        if (MOMENTUM) m.out(begin, n);
        if (RMS) v.out(begin, n);
      }
      if (kept_here) kept.store(true, std::memory_order_relaxed);
    };
  });
  return kept.load();
}

void apply(const Bucket& bucket, const Rule& rule, int threads, bool last) {
  const Shrink shrink = ngn::shrink(rule, sum_buckets(bucket), *bucket.scalars);
  Reason reason = shrink.reason;
  if (reason == Reason::none) {
    const bool wide = computes_in_double(bucket);
    const bool kept = switch_apply(rule, [&](auto momentum, auto coordinate, auto rms) {
      return wide ? apply_chunks<momentum.value, coordinate.value, rms.value, double>(bucket, rule, shrink, threads)
                  : apply_chunks<momentum.value, coordinate.value, rms.value, float>(bucket, rule, shrink, threads);
    });
    if (kept) reason = Reason::elements_kept;
    for (int64_t i = 0; i < bucket.rows; ++i) {
      const TensorRow row = bucket.row(i);
      if (row.g) *row.step += 1;
    }
    bucket.scalars->shrink = shrink.rho;
  }
  Report& report = *bucket.report;
  const int64_t code = static_cast<int64_t>(reason);
  if (code > report.reason) report.reason = code;
  if (last && report.reason != 0) {
    report.skipped += 1;
    report.last_reason = report.reason;
    report.reason = 0;
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

const Engine NGN_CONCAT(engine_, NGN_ISA) = {NGN_STRING(NGN_ISA), runs_here, reduce, apply};

}  // namespace ngn

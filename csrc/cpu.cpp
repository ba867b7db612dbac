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
constexpr int64_t PREFETCH = 1024;  // elements between asking for memory and its use
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

  Plain<T> in(int64_t begin, int64_t n) {
    char* address = data_ + begin * size_of(type_);
    if (in_place_) return {reinterpret_cast<T*>(address)};
    with_type(type_, [&](auto element) {
      using E = decltype(element);
      for (int64_t i = 0; i < n; ++i) {
        E value;
        std::memcpy(&value, address + i * sizeof(E), sizeof(E));
        stage_[i] = factor_ * static_cast<T>(widen(value));
      }
    });
    return {stage_};
  }

  // Write back what was changed where in() pointed to.
  void out(int64_t begin, int64_t n, const Noise&) {
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

// A column of codes through a stage.
template <typename Format>
class Staged {
 public:
  explicit Staged(Coded<Format> column, bool parameter = false) : column_(column), parameter_(parameter) {}

  bool in_place() const { return false; }

  Plain<float> in(int64_t begin, int64_t n) {
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) store(stage_ + i, column_.load(begin + i));
    for (; i < n; ++i) stage_[i] = column_[begin + i];
    return {stage_};
  }

  void out(int64_t begin, int64_t n, Noise& noise) {
    for (int64_t i = n; i % QUANTUM != 0; ++i) stage_[i] = 0;
    for (int64_t i = 0; i < n; i += QUANTUM) {
      Quantum<Words> random = {};
      if constexpr (Format::random) random = parameter_ ? other_noise(noise.of(begin + i)) : noise.of(begin + i);
      Quantum<Floats> values;
      std::memcpy(&values, stage_ + i, sizeof(values));
      column_.store(begin + i, n - i < QUANTUM ? n - i : QUANTUM, values, column_.scale(values), random);
    }
  }

 private:
  Coded<Format> column_;
  bool parameter_;  // whose noise is not that of m and v
  alignas(64) float stage_[BLOCK];
};

// f(column), in the format that the bucket says. Columns go by reference: some hold a stage.

template <bool NARROW, typename T, typename F>
auto with_x(const Bucket& bucket, const TensorRow& row, F&& f) {
  if constexpr (NARROW) {
    auto* codes = static_cast<uint16_t*>(row.x);
    const auto parameter = [&](auto format) {
      using Format = decltype(format);
      Staged<Format> column({codes, reinterpret_cast<typename Format::Beside*>(row.remainder)}, true);
      return f(column);
    };
    const bool random = bucket.rounding == Rounding::stochastic;
    if (bucket.x_type == DType::float16 && random) return parameter(Float16<Rounding::stochastic>{});
    if (bucket.x_type == DType::bfloat16 && random) return parameter(Bfloat16<Rounding::stochastic>{});
    if (bucket.rounding == Rounding::exact) return parameter(Bfloat16<Rounding::exact>{});
    if (bucket.x_type == DType::bfloat16) return parameter(Bfloat16<Rounding::nearest>{});
  }
  Column<T> column(row.x, bucket.x_type);
  return f(column);
}

template <bool NARROW, typename T, typename F>
auto with_m(const Bucket& bucket, const TensorRow& row, F&& f) {
  if constexpr (NARROW) {
    Coded<Bfloat16<Rounding::nearest>> halves{static_cast<uint16_t*>(row.m), nullptr};
    Coded<Int8> bytes{static_cast<int8_t*>(row.m), row.m_scale};
    if (bucket.m_type == DType::bfloat16) return f(halves);
    if (bucket.m_type == DType::int8) return f(bytes);
  }
  Column<T> column(row.m, bucket.m_type);
  return f(column);
}

template <bool NARROW, typename T, typename F>
auto with_v(const Bucket& bucket, const TensorRow& row, F&& f) {
  if constexpr (NARROW) {
    Coded<Bfloat16<Rounding::stochastic>> halves{static_cast<uint16_t*>(row.v), nullptr};
    Coded<UInt8> bytes{static_cast<uint8_t*>(row.v), row.v_scale};
    if (bucket.v_type == DType::bfloat16) return f(halves);
    if (bucket.v_type == DType::uint8) return f(bytes);
  }
  Column<T> column(row.v, bucket.v_type);
  return f(column);
}

// f(m, v) of a rule with both. Each pair of formats is a loop of its own: where only one is narrow, which is
// unusual, that one goes through a stage.
template <typename T, typename F>
auto with_pair(Column<T>& m, Column<T>& v, F&& f) { return f(m, v); }
template <typename M, typename V, typename F>
auto with_pair(Coded<M>& m, Coded<V>& v, F&& f) { return f(m, v); }
template <typename M, typename T, typename F>
auto with_pair(Coded<M>& m, Column<T>& v, F&& f) {
  Staged<M> staged(m);
  return f(staged, v);
}
template <typename T, typename V, typename F>
auto with_pair(Column<T>& m, Coded<V>& v, F&& f) {
  Staged<V> staged(v);
  return f(m, staged);
}

template <bool MOMENTUM, bool RMS, bool NARROW, typename T, typename F>
auto with_state(const Bucket& bucket, const TensorRow& row, F&& f) {
  return with_m<NARROW && MOMENTUM, T>(bucket, row, [&](auto& m) {
    return with_v<NARROW && RMS, T>(bucket, row, [&](auto& v) {
      if constexpr (MOMENTUM && RMS) {
        return with_pair(m, v, f);
      } else {
        return f(m, v);
      }
    });
  });
}

// Ask for the lines of LANES elements a page ahead: the processor by itself stops at the end of a page.
template <typename T>
void prefetch_lanes(const T* from) {
  constexpr uintptr_t page = 4096, line = 64;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from) + page;
  for (uintptr_t at = 0; at < LANES * sizeof(T); at += line) __builtin_prefetch(reinterpret_cast<void*>(begin + at));
}

// Full groups of LANES as vectors, the rest as scalars, through the same element function.
template <bool RMS, bool REGULARISED, typename T, typename X, typename V, typename G>
void reduce_block(X x, V v, G g, int64_t n, const Coefficients<T> k, double* weighted, double* alignment) {
  constexpr int width = VectorOf<T>::lanes, vectors = LANES / width;
  Vec<T> weighted_vector[vectors] = {}, alignment_vector[vectors] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    if constexpr (!RMS) prefetch_lanes(&g.data[i]);  // with a root and a quotient there is time enough
    for (int j = 0; j < vectors; ++j) {
      const int64_t at = i + j * width;
      contribute<RMS, REGULARISED>(REGULARISED ? x.load(at) : Vec<T>{}, RMS ? v.load(at) : Vec<T>{}, g.load(at), k,
                                   weighted_vector[j], alignment_vector[j]);
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

// The same a quantum at a time, as columns of codes are stored, with all columns asked for ahead.
template <bool MOMENTUM, bool COORDINATE, bool RMS, bool DECAY, typename M, typename V>
__attribute__((noinline)) bool update_quanta(Plain<float> x, M m, V v, Plain<float> g, int64_t n,
                                             const Coefficients<float> k, Noise& noise, int64_t first) {
  const auto old_at = [&](int64_t i) {
    return Element<Floats>{x.load(i), MOMENTUM ? m.load(i) : Floats{}, RMS ? v.load(i) : Floats{}};
  };
  const auto draft_at = [&](int64_t i) { return draft<COORDINATE, RMS>(RMS ? v.load(i) : Floats{}, g.load(i), k); };
  bool kept = false;
  const int64_t whole = n - n % QUANTUM;
  Quantum<Floats> ahead_v = {}, divisor = {};
  const auto draft_quantum = [&](int64_t i, int j) {
    const Draft<Floats> made = draft_at(i + j * WIDTH);
    ahead_v[j] = made.v;
    divisor[j] = made.divisor;
  };
  if (whole > 0) {
    NGN_EACH_VECTOR(j) draft_quantum(0, j);
  }
  auto v_scale = v.scale(ahead_v);
  for (int64_t i = 0; i < whole; i += QUANTUM) {
    x.prefetch(i + PREFETCH);
    g.prefetch(i + PREFETCH);
    if constexpr (MOMENTUM) m.prefetch(i + PREFETCH);
    if constexpr (RMS) v.prefetch(i + PREFETCH);
    const int64_t next = i + QUANTUM < whole ? i + QUANTUM : i;
    Quantum<Floats> new_x, new_m, new_v;
    bool kept_here = false;
    NGN_EACH_VECTOR(j) {
      const int64_t at = i + j * WIDTH;
      Element<Floats> element = {x.load(at), MOMENTUM ? m.load(at) : Floats{}, Floats{}};
      const Draft<Floats> draft = {ahead_v[j], divisor[j]};
      const auto room = update<MOMENTUM, RMS, DECAY, true>(element, draft, g.load(at), k);
      if (__builtin_expect(any_negative(room), 0)) {
        keep(old_at(at), room, element);
        kept_here = true;
      }
      new_x[j] = element.x;
      new_m[j] = element.m;
      new_v[j] = element.v;
      draft_quantum(next, j);
    }
    if (__builtin_expect(kept_here, 0)) {
      kept = true;
      v_scale = v.scale(new_v);
    }
    const Quantum<Words> random = noise.of(first + i);
    x.store(i, QUANTUM, new_x, nullptr, random);
    if constexpr (MOMENTUM) m.store(i, QUANTUM, new_m, m.scale(new_m), random);
    if constexpr (RMS) v.store(i, QUANTUM, new_v, v_scale, random);
    v_scale = v.scale(ahead_v);
  }
  if (whole < n) {
    // A copy in which the last element is repeated has the same scale, and keeps an element only if that one does.
    const int64_t rest = n - whole;
    Quantum<Floats> copy[4] = {};
    const auto repeat = [&](auto column, bool present, Quantum<Floats>& to) {
      float values[QUANTUM];
      for (int64_t j = 0; present && j < QUANTUM; ++j) values[j] = column[whole + (j < rest ? j : rest - 1)];
      std::memcpy(&to, values, sizeof(to));
      return Plain<float>{reinterpret_cast<float*>(&to)};
    };
    kept |= update_quanta<MOMENTUM, COORDINATE, RMS, DECAY>(repeat(x, true, copy[0]), repeat(m, MOMENTUM, copy[1]),
                                                            repeat(v, RMS, copy[2]), repeat(g, true, copy[3]), QUANTUM,
                                                            k, noise, first);
    const Quantum<Words> random = noise.of(first + whole);
    x.store(whole, rest, copy[0], nullptr, random);
    if constexpr (MOMENTUM) m.store(whole, rest, copy[1], m.scale(copy[1]), random);
    if constexpr (RMS) v.store(whole, rest, copy[2], v.scale(copy[2]), random);
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
      Column<T> g(row.g, bucket.g_type, k.gradient_scale);
      double weighted[LANES] = {}, alignment[LANES] = {};
      const int64_t end = chunk.begin + CHUNK < row.numel ? chunk.begin + CHUNK : row.numel;
      with_x<REGULARISED && NARROW, T>(bucket, row, [&](auto& x) {
        with_v<RMS && NARROW, T>(bucket, row, [&](auto& v) {
          for (int64_t begin = chunk.begin; begin < end; begin += BLOCK) {
            const int64_t n = end - begin < BLOCK ? end - begin : BLOCK;
            const auto x_in = REGULARISED ? x.in(begin, n) : decltype(x.in(0, 0)){};
            const auto v_in = RMS ? v.in(begin, n) : decltype(v.in(0, 0)){};
            reduce_block<RMS, REGULARISED, T>(x_in, v_in, g.in(begin, n), n, k, weighted, alignment);
          }
        });
      });
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
      Column<T> g(row.g, bucket.g_type, k.gradient_scale);
      Noise noise(row.noise_key, static_cast<int64_t>(*row.step) + 1, row.first);
      const int64_t end = chunk.begin + CHUNK < row.numel ? chunk.begin + CHUNK : row.numel;
      bool kept_here = false;
      with_x<NARROW, T>(bucket, row, [&](auto& x) {
        with_state<MOMENTUM, RMS, NARROW, T>(bucket, row, [&](auto& m, auto& v) {
          const bool in_place = x.in_place() && (!MOMENTUM || m.in_place()) && (!RMS || v.in_place()) && g.in_place();
          const int64_t block = in_place ? CHUNK : BLOCK;
          for (int64_t begin = chunk.begin; begin < end; begin += block) {
            const int64_t n = end - begin < block ? end - begin : block;
            const auto x_in = x.in(begin, n);
            const auto m_in = MOMENTUM ? m.in(begin, n) : decltype(m.in(0, 0)){};
            const auto v_in = RMS ? v.in(begin, n) : decltype(v.in(0, 0)){};
            const auto g_in = g.in(begin, n);
            kept_here |= with_flag(k.decay != 0, [&](auto decay) {
              if constexpr (NARROW) {
                return update_quanta<MOMENTUM, COORDINATE, RMS, decay.value>(x_in, m_in, v_in, g_in, n, k, noise,
                                                                             begin);
              } else {
                return update_block<MOMENTUM, COORDINATE, RMS, decay.value, T>(x_in.data, m_in.data, v_in.data,
                                                                               g_in.data, n, k);
              }
            });
            x.out(begin, n, noise);
            if constexpr (MOMENTUM) m.out(begin, n, noise);
            if constexpr (RMS) v.out(begin, n, noise);
          }
        });
      });
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

template <typename F>
void with_encoded(const Encoded& column, F&& f) {
  const auto coded = [&](auto format) {
    using Column = Coded<decltype(format)>;
    f(Column{static_cast<typename Column::Code*>(column.data), static_cast<typename Column::Beside*>(column.scales)});
  };
  if (column.type == DType::int8) return coded(Int8{});
  if (column.type == DType::uint8) return coded(UInt8{});
  if (column.rounding == Rounding::stochastic) return coded(Bfloat16<Rounding::stochastic>{});
  return coded(Bfloat16<Rounding::nearest>{});
}

// One column of numbers through a format, as apply() and reduce() do it.
void encode(const float* values, int64_t numel, int64_t noise_key, int64_t step_count, int64_t first,
            Encoded column) {
  Noise noise(noise_key, step_count, first);
  with_encoded(column, [&](auto to) {
    for (int64_t i = 0; i < numel; i += QUANTUM) {
      const int64_t n = numel - i < QUANTUM ? numel - i : QUANTUM;
      Quantum<Floats> quantum = {};
      std::memcpy(&quantum, values + i, static_cast<size_t>(n) * sizeof(float));
      to.store(i, n, quantum, to.scale(quantum), noise.of(i));
    }
  });
}

void decode(Encoded column, int64_t numel, float* values) {
  with_encoded(column, [&](auto from) {
    for (int64_t i = 0; i < numel; ++i) values[i] = from[i];
  });
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

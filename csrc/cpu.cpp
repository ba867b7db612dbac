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

 private:
  char* data_;
  DType type_;
  T factor_;
  bool in_place_;
  alignas(64) T stage_[BLOCK];
};

// A row's last elements, fewer than a quantum, in a copy that is a whole one.
struct Tail {
  alignas(64) char codes[QUANTUM * sizeof(double)];
  alignas(64) char remainders[QUANTUM * sizeof(int16_t)];
};

// A column that is loaded and stored a quantum at a time, as float32. Its type is asked anew each time: a branch
// that always goes the same way costs little, and the loops need not be compiled for each set of types.
class QuantumColumn {
 public:
  // `beside` are scales or remainders.
  QuantumColumn(const void* data, DType type, void* beside, Rounding rounding)
      : data_(static_cast<char*>(const_cast<void*>(data))), beside_(static_cast<char*>(beside)), type_(type),
        rounding_(rounding) {}

  bool is_stochastic() const { return rounding_ == Rounding::stochastic; }

  NGN_INLINE Quantum<Floats> load(int64_t i) const {
    switch (type_) {
      case DType::float32: {
        Quantum<Floats> value;
        NGN_EACH_VECTOR(j) value[j] = ngn::load(at<float>(i) + j * WIDTH);
        return value;
      }
      case DType::bfloat16:
        if (rounding_ == Rounding::exact) return join_bfloat16(at<uint16_t>(i), remainder(i));
        return decode_bfloat16(at<uint16_t>(i));
      case DType::int8: return decode_m(at<int8_t>(i), *scale_at<float>(i));
      case DType::uint8: return decode_v(at<uint8_t>(i), *scale_at<uint32_t>(i));
      case DType::float16:
      case DType::float64: return load_elements(at<char>(i), type_);
    }
    __builtin_unreachable();
  }

  NGN_INLINE Quantum<Floats> load_scaled(int64_t i, float factor) const {
    Quantum<Floats> value = load(i);
    if (__builtin_expect(factor != 1, 0)) {
      NGN_EACH_VECTOR(j) value[j] *= factor;
    }
    return value;
  }

  // What the codes of a quantum depend on: it takes long enough to be worth asking for ahead of store().
  NGN_INLINE Scale scale_of(const Quantum<Floats>& value) const {
    switch (type_) {
      case DType::int8: return {exponent_of_m(value), true};
      case DType::uint8: return scale_of_v(value);
      case DType::float64:
      case DType::float32:
      case DType::bfloat16:
      case DType::float16: return {};
    }
    __builtin_unreachable();
  }

  NGN_INLINE void store(int64_t i, const Quantum<Floats>& value, Scale scale, const Quantum<Words>& noise) const {
    switch (type_) {
      case DType::float32:
        NGN_EACH_VECTOR(j) ngn::store(at<float>(i) + j * WIDTH, value[j]);
        return;
      case DType::bfloat16:
        switch (rounding_) {
          case Rounding::nearest: return nearest_bfloat16(value, at<uint16_t>(i));
          case Rounding::stochastic: return stochastic_bfloat16(value, noise, at<uint16_t>(i));
          case Rounding::exact: return split_bfloat16(value, at<uint16_t>(i), remainder(i));
        }
        __builtin_unreachable();
      case DType::int8:
        *scale_at<float>(i) = bit_cast<float>(scale.word << 23);
        return encode_m(value, scale.word, noise, at<int8_t>(i));
      case DType::uint8:
        *scale_at<uint32_t>(i) = scale.word;
        if (__builtin_expect(scale.plain, 1)) return encode_v<true>(value, scale.word, noise, at<uint8_t>(i));
        return encode_v<false>(value, scale.word, noise, at<uint8_t>(i));
      case DType::float16: return encode_float16(value, is_stochastic(), noise, at<char>(i));
      case DType::float64: return store_float64(value, at<char>(i));
    }
    __builtin_unreachable();
  }

  // The first quantum.
  void copy_to(float* to, float factor = 1) const {
    const Quantum<Floats> value = load_scaled(0, factor);
    NGN_EACH_VECTOR(j) ngn::store(to + j * WIDTH, value[j]);
  }

  // The n elements from i on as a quantum in which the last one is repeated: that changes no scale.
  QuantumColumn tail(int64_t i, int64_t n, Tail& copy) const {
    const auto fill = [n](char* to, const char* from, int64_t size) {
      std::memcpy(to, from, static_cast<size_t>(n * size));
      for (int64_t j = n; j < QUANTUM; ++j) std::memcpy(to + j * size, to + (n - 1) * size, static_cast<size_t>(size));
    };
    QuantumColumn column = *this;
    if (!data_) return column;
    fill(copy.codes, at<char>(i), size_);
    column.data_ = copy.codes;
    if (rounding_ == Rounding::exact) {
      fill(copy.remainders, reinterpret_cast<char*>(remainder(i)), sizeof(int16_t));
      column.beside_ = copy.remainders;
    } else if (beside_) {
      column.beside_ = reinterpret_cast<char*>(scale_at<float>(i));
    }
    return column;
  }

  void put_back(int64_t i, int64_t n, const Tail& copy) const {
    if (!data_) return;
    std::memcpy(at<char>(i), copy.codes, static_cast<size_t>(n * size_));
    if (rounding_ == Rounding::exact) std::memcpy(remainder(i), copy.remainders, static_cast<size_t>(n) * sizeof(int16_t));
  }

 private:
  template <typename Code>
  Code* at(int64_t i) const {
    return reinterpret_cast<Code*>(data_ + i * size_);
  }
  template <typename Word>
  Word* scale_at(int64_t i) const {
    return reinterpret_cast<Word*>(beside_) + i / QUANTUM;
  }
  int16_t* remainder(int64_t i) const { return reinterpret_cast<int16_t*>(beside_) + i; }

  char* data_;
  char* beside_;
  DType type_;
  Rounding rounding_;
  int64_t size_ = size_of(type_);
};

// Full groups of LANES as vectors, the rest as scalars, through the same element function.
template <bool RMS, bool REGULARISED, typename T>
void reduce_block(const T* x, const T* v, const T* g, int64_t n, const Coefficients<T> k,
                  double* weighted, double* alignment) {
  constexpr int width = VectorOf<T>::lanes, vectors = LANES / width;
  Vec<T> weighted_vector[vectors] = {}, alignment_vector[vectors] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
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

// The same a quantum at a time, whole ones from `begin` to `end`.
template <bool RMS, bool REGULARISED>
void reduce_quanta(const QuantumColumn& x, const QuantumColumn& v, const QuantumColumn& g, int64_t begin, int64_t end,
                   const Coefficients<float> k, double* weighted, double* alignment) {
  constexpr int vectors = LANES / WIDTH;
  Floats weighted_vector[vectors] = {}, alignment_vector[vectors] = {};
  for (int64_t i = begin; i < end; i += QUANTUM) {
    const Quantum<Floats> gradient = g.load_scaled(i, k.gradient_scale);
    Quantum<Floats> old_x = {}, old_v = {};
    if constexpr (REGULARISED) old_x = x.load(i);
    if constexpr (RMS) old_v = v.load(i);
    NGN_EACH_VECTOR(j) {
      contribute<RMS, REGULARISED>(old_x[j], old_v[j], gradient[j], k, weighted_vector[j % vectors],
                                   alignment_vector[j % vectors]);
    }
  }
  float lane[LANES];
  std::memcpy(lane, weighted_vector, sizeof(lane));
  for (int j = 0; j < LANES; ++j) weighted[j] += lane[j];
  std::memcpy(lane, alignment_vector, sizeof(lane));
  for (int j = 0; j < LANES; ++j) alignment[j] += lane[j];
}

// True if any element kept its old value.
template <bool MOMENTUM, bool COORDINATE, bool RMS, bool DECAY, typename T>
bool update_block(T* x, T* m, T* v, const T* g, int64_t n, const Coefficients<T> k) {
  constexpr int width = VectorOf<T>::lanes;
  bool kept = false;
  // As a branch that is hardly ever taken, keeping old values costs next to nothing.
  const auto updated = [&](auto element, const auto& draft, auto gradient) {
    const auto old = element;
    update<MOMENTUM, DECAY>(element, draft, gradient, k);
    const auto room = room_of<MOMENTUM, RMS, false>(element, k);
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

// One quantum in which elements may keep their old values. By itself, so that the loop has its registers.
template <bool MOMENTUM, bool COORDINATE, bool RMS, bool DECAY>
__attribute__((noinline)) bool update_with_care(QuantumColumn x, QuantumColumn m, QuantumColumn v, QuantumColumn g,
                                                int64_t i, Coefficients<float> k, Noise noise) {
  bool kept = false;
  const Quantum<Floats> none = {}, gradient = g.load_scaled(i, k.gradient_scale);
  Quantum<Floats> new_x = x.load(i), new_m = MOMENTUM ? m.load(i) : none, new_v = RMS ? v.load(i) : none;
  for (int j = 0; j < VECTORS; ++j) {
    const Element<Floats> old = {new_x[j], new_m[j], new_v[j]};
    Element<Floats> element = old;
    update<MOMENTUM, DECAY>(element, draft<COORDINATE, RMS>(old.v, gradient[j], k), gradient[j], k);
    const auto room = room_of<MOMENTUM, RMS, true>(element, k);
    kept = kept || any_negative(room);
    keep(old, room, element);
    new_x[j] = element.x;
    new_m[j] = element.m;
    new_v[j] = element.v;
  }
  const Quantum<Words> random = noise.of(i);
  x.store(i, new_x, {}, x.is_stochastic() ? other_noise(random) : random);
  if constexpr (RMS) v.store(i, new_v, v.scale_of(new_v), random);
  if constexpr (MOMENTUM) m.store(i, new_m, m.scale_of(new_m), random);
  return kept;
}

// Numbers whose squares add up to less can be stored as x and as m.
inline float small_squares(const Coefficients<float>& k) {
  const double limit = k.x_limit < k.m_limit ? k.x_limit : k.m_limit, largest = std::numeric_limits<float>::max();
  const double square = 0.99 * limit * limit;  // sums are rounded
  return static_cast<float>(square < largest ? square : largest);
}

// The same a quantum at a time, whole ones from `begin` to `end`.
template <bool MOMENTUM, bool COORDINATE, bool RMS, bool DECAY>
bool update_quanta(QuantumColumn x, QuantumColumn m, QuantumColumn v, const QuantumColumn g, int64_t begin, int64_t end,
                   const Coefficients<float> k, const Noise noise) {
  bool kept = false;
  const float small = small_squares(k);
  for (int64_t i = begin; i < end; i += QUANTUM) {
    const Quantum<Floats> gradient = g.load_scaled(i, k.gradient_scale);
    Quantum<Floats> new_x, new_m = {}, new_v = {}, divisor;
    Floats squares = {}, sum_of_v = {};
    Scale v_scale = {}, m_scale = {};
    if constexpr (RMS) new_v = v.load(i);
    NGN_EACH_VECTOR(j) {
      const Draft<Floats> made = draft<COORDINATE, RMS>(new_v[j], gradient[j], k);
      new_v[j] = made.v;
      divisor[j] = made.divisor;
      sum_of_v += made.v;
    }
    if constexpr (RMS) v_scale = v.scale_of(new_v);
    new_x = x.load(i);
    if constexpr (MOMENTUM) new_m = m.load(i);
    NGN_EACH_VECTOR(j) {
      Element<Floats> element = {new_x[j], new_m[j], new_v[j]};
      update<MOMENTUM, DECAY>(element, Draft<Floats>{new_v[j], divisor[j]}, gradient[j], k);
      new_x[j] = element.x;
      new_m[j] = element.m;
      squares = multiply_add(element.x, element.x, squares);
      if constexpr (MOMENTUM) squares = multiply_add(element.m, element.m, squares);
    }
    // Of positive numbers, no sum is less than one of its terms.
    if (__builtin_expect(any_negative(headroom(squares, small) | headroom(sum_of_v, k.v_limit)), 0)) {
      kept |= update_with_care<MOMENTUM, COORDINATE, RMS, DECAY>(x, m, v, g, i, k, noise);
      continue;
    }
    if constexpr (MOMENTUM) m_scale = m.scale_of(new_m);
    // Each store frees registers for the next.
    if (!x.is_stochastic()) x.store(i, new_x, {}, {});
    const Quantum<Words> random = noise.of(i);
    if (x.is_stochastic()) x.store(i, new_x, {}, other_noise(random));
    if constexpr (RMS) v.store(i, new_v, v_scale, random);
    if constexpr (MOMENTUM) m.store(i, new_m, m_scale, random);
  }
  return kept;
}

double sum_lanes(const double* lanes) {
  double total = 0;
  for (int j = 0; j < LANES; ++j) total += lanes[j];
  return total;
}

Sums sum_buckets(const Bucket& bucket) {
  Sums total = {};
  for (int64_t i = 0; i < bucket.bucket_count; ++i) {
    total.weighted += bucket.totals[i].weighted;
    total.alignment += bucket.totals[i].alignment;
    total.norm += bucket.totals[i].norm;
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

int64_t end_of(const Chunk& chunk, const TensorRow& row) {
  return chunk.begin + CHUNK < row.numel ? chunk.begin + CHUNK : row.numel;
}

int64_t elements_of(const Bucket& bucket, const Chunk& chunk) {
  return end_of(chunk, row_of(bucket, chunk.row)) - chunk.begin;
}

// Every thread has its part of the chunks, the same one in every pass, so that its data stay in the caches near it.
// Parts have about as many elements each: a thread that is done helps with the other parts, a few neighbouring
// chunks at a time, and what it writes there must come back from its caches.
template <typename Work>
void for_each_chunk(const Bucket& bucket, int threads, bool reverse, Work&& make_worker) {
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
  constexpr int64_t start = 256;  // what it costs to start a chunk, in elements
  const int64_t count = bucket.chunk_count;
  const int team = static_cast<int>(count < threads ? count : threads);
  if (team < 1) return;
  Shared shared{std::vector<Part>(static_cast<size_t>(team)), 1 + count / (16 * team), reverse, &make_worker};
  int64_t left = 0, chunk = 0;
  for (int64_t i = 0; team > 1 && i < count; ++i) left += start + elements_of(bucket, bucket.chunks[i]);
  for (int t = 0; t < team; ++t) {
    shared.parts[t].begin = chunk;
    const int64_t share = left / (team - t);
    for (int64_t taken = 0; taken < share && chunk < count; ++chunk) {
      const int64_t cost = start + elements_of(bucket, bucket.chunks[chunk]);
      taken += cost;
      left -= cost;
    }
    if (t == team - 1) chunk = count;
    shared.parts[t].end = chunk;
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

// A chunk's elements, loaded and stored as they are, or through a stage.
template <typename T>
struct Elements {
  using Type = T;

  template <bool RMS, bool REGULARISED>
  static void reduce(const Bucket& bucket, const TensorRow& row, int64_t begin, int64_t end, const Coefficients<T>& k,
                     double* weighted, double* alignment) {
    Column<T> x(row.x, bucket.x_type), v(row.v, bucket.v_type), g(row.g, bucket.g_type, k.gradient_scale);
    for (; begin < end; begin += BLOCK) {
      const int64_t n = end - begin < BLOCK ? end - begin : BLOCK;
      reduce_block<RMS, REGULARISED, T>(REGULARISED ? x.in(begin, n) : nullptr, RMS ? v.in(begin, n) : nullptr,
                                        g.in(begin, n), n, k, weighted, alignment);
    }
  }

  template <bool MOMENTUM, bool COORDINATE, bool RMS, bool DECAY>
  static bool apply(const Bucket& bucket, const TensorRow& row, int64_t begin, int64_t end, const Coefficients<T>& k) {
    Column<T> x(row.x, bucket.x_type), m(row.m, bucket.m_type), v(row.v, bucket.v_type);
    Column<T> g(row.g, bucket.g_type, k.gradient_scale);
    const bool in_place = x.in_place() && (!MOMENTUM || m.in_place()) && (!RMS || v.in_place()) && g.in_place();
    const int64_t block = in_place ? CHUNK : BLOCK;
    bool kept = false;
    for (; begin < end; begin += block) {
      const int64_t n = end - begin < block ? end - begin : block;
      kept |= update_block<MOMENTUM, COORDINATE, RMS, DECAY, T>(
          x.in(begin, n), MOMENTUM ? m.in(begin, n) : nullptr, RMS ? v.in(begin, n) : nullptr, g.in(begin, n), n, k);
      x.out(begin, n);
      if (MOMENTUM) m.out(begin, n);
      if (RMS) v.out(begin, n);
    }
    return kept;
  }
};

// The same by quanta: types that take more than a cast.
struct Quanta {
  using Type = float;

  template <bool RMS, bool REGULARISED>
  static void reduce(const Bucket& bucket, const TensorRow& row, int64_t begin, int64_t end,
                     const Coefficients<float>& k, double* weighted, double* alignment) {
    const Columns columns(bucket, row);
    const auto& [x, m, v, g] = columns;
    const int64_t rest = (end - begin) % QUANTUM, whole = end - rest;
    for (; begin < whole; begin += BLOCK) {
      reduce_quanta<RMS, REGULARISED>(x, v, g, begin, whole - begin < BLOCK ? whole : begin + BLOCK, k, weighted,
                                      alignment);
    }
    if (rest > 0) {
      Tail tail[3];
      float block[3][QUANTUM];
      if constexpr (REGULARISED) x.tail(whole, rest, tail[0]).copy_to(block[0]);
      if constexpr (RMS) v.tail(whole, rest, tail[1]).copy_to(block[1]);
      g.tail(whole, rest, tail[2]).copy_to(block[2], k.gradient_scale);
      reduce_block<RMS, REGULARISED, float>(block[0], block[1], block[2], rest, k, weighted, alignment);
    }
  }

  template <bool MOMENTUM, bool COORDINATE, bool RMS, bool DECAY>
  static bool apply(const Bucket& bucket, const TensorRow& row, int64_t begin, int64_t end,
                    const Coefficients<float>& k) {
    Columns columns(bucket, row);
    auto& [x, m, v, g] = columns;
    const int64_t count = static_cast<int64_t>(*row.step) + 1, rest = (end - begin) % QUANTUM, whole = end - rest;
    constexpr auto update = update_quanta<MOMENTUM, COORDINATE, RMS, DECAY>;
    bool kept = update(x, m, v, g, begin, whole, k, Noise(row.noise_key, count, row.first));
    if (rest > 0) {
      Tail tail[4];
      kept |= update(x.tail(whole, rest, tail[0]), m.tail(whole, rest, tail[1]), v.tail(whole, rest, tail[2]),
                     g.tail(whole, rest, tail[3]), 0, QUANTUM, k, Noise(row.noise_key, count, row.first + whole));
      x.put_back(whole, rest, tail[0]);
      if constexpr (MOMENTUM) m.put_back(whole, rest, tail[1]);
      if constexpr (RMS) v.put_back(whole, rest, tail[2]);
    }
    return kept;
  }

 private:
  struct Columns {
    Columns(const Bucket& bucket, const TensorRow& row)
        : x(row.x, bucket.x_type, row.remainder, bucket.rounding), m(row.m, bucket.m_type, row.m_scale, Rounding::nearest),
          v(row.v, bucket.v_type, row.v_scale, Rounding::stochastic),
          g(row.g, bucket.g_type, nullptr, Rounding::nearest) {}
    QuantumColumn x, m, v, g;
  };
};

// f(how chunks are worked on)
template <typename F>
auto with_way(const Bucket& bucket, F&& f) {
  const auto narrow = [](DType type) { return size_of(type) < 4; };
  const DType x = bucket.x_type, g = bucket.g_type, m = bucket.m_type, v = bucket.v_type;
  const bool wide = x == DType::float64 || g == DType::float64 || m == DType::float64 || v == DType::float64;
  const bool coded = narrow(m) || narrow(v) || bucket.rounding != Rounding::nearest;
  if (coded || (!wide && (narrow(x) || narrow(g)))) return f(Quanta{});
  return wide ? f(Elements<double>{}) : f(Elements<float>{});
}

template <bool RMS, bool REGULARISED, typename Way>
void reduce_chunks(const Bucket& bucket, const Rule& rule, double clip, int threads) {
  using T = typename Way::Type;
  for_each_chunk(bucket, threads, false, [&] {
    return [&, cache = CoefficientCache<T>(bucket, rule, clip, 1.0)](int64_t i) mutable {
      const Chunk chunk = bucket.chunks[i];
      const TensorRow row = row_of(bucket, chunk.row);
      bucket.partials[i] = {};
      if (!row.g) return;
      const Coefficients<T>& k = cache.of(row);
      double weighted[LANES] = {}, alignment[LANES] = {};
      Way::template reduce<RMS, REGULARISED>(bucket, row, chunk.begin, end_of(chunk, row), k, weighted, alignment);
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
    with_way(bucket, [&](auto way) {
      reduce_chunks<rms.value, regularised.value, decltype(way)>(bucket, rule, clip, threads);
    });
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
template <bool MOMENTUM, bool COORDINATE, bool RMS, typename Way>
bool apply_chunks(const Bucket& bucket, const Rule& rule, const Shrink& shrink, int threads) {
  using T = typename Way::Type;
  std::atomic<bool> kept{false};
  for_each_chunk(bucket, threads, true, [&] {
    return [&, cache = CoefficientCache<T>(bucket, rule, shrink.clip, shrink.rho)](int64_t i) mutable {
      const Chunk chunk = bucket.chunks[i];
      const TensorRow row = row_of(bucket, chunk.row);
      if (!row.g) return;
      const Coefficients<T>& k = cache.of(row);
      const bool kept_here = with_flag(k.decay != 0, [&](auto decay) {
        return Way::template apply<MOMENTUM, COORDINATE, RMS, decay.value>(bucket, row, chunk.begin, end_of(chunk, row), k);
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
      return with_way(bucket, [&](auto way) {
        return apply_chunks<momentum.value, coordinate.value, rms.value, decltype(way)>(bucket, rule, shrink, threads);
      });
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

// One column of numbers through a format, as apply() and reduce() do it.
void encode(const float* values, int64_t numel, int64_t noise_key, int64_t step_count, int64_t first, Encoded column) {
  QuantumColumn to(column.data, column.type, column.scales, column.rounding);
  const QuantumColumn from(values, DType::float32, nullptr, Rounding::nearest);
  for (int64_t i = 0; i < numel; i += QUANTUM) {
    const int64_t n = numel - i < QUANTUM ? numel - i : QUANTUM;
    Tail tail[2];
    const Quantum<Floats> value = from.tail(i, n, tail[0]).load(0);
    const QuantumColumn part = to.tail(i, n, tail[1]);
    part.store(0, value, part.scale_of(value), Noise(noise_key, step_count, first).of(i));
    to.put_back(i, n, tail[1]);
  }
}

void decode(Encoded column, int64_t numel, float* values) {
  const QuantumColumn from(column.data, column.type, column.scales, column.rounding);
  for (int64_t i = 0; i < numel; i += QUANTUM) {
    const int64_t n = numel - i < QUANTUM ? numel - i : QUANTUM;
    Tail tail;
    float value[QUANTUM];
    from.tail(i, n, tail).copy_to(value);
    std::memcpy(values + i, value, static_cast<size_t>(n) * sizeof(float));
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

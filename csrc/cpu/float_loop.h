// The loop over elements that are stored as float32 or float64, or staged as such. A fixed number of lanes and a fixed
// order of sums give the same bits for any number of threads.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/engine.h"
#include "cpu/vec.h"
#include "math/convert.h"
#include "math/rule.h"

namespace ngn {
inline namespace NGN_ISA {
namespace {

constexpr int64_t STAGE_SIZE = 512;  // elements staged or summed at once; four columns of it stay in the L1 cache
constexpr int DRAFTS_AHEAD = 6;      // vectors between a draft and its update
constexpr int LANES = 16;            // partial sums side by side, so that sums vectorise in a fixed order

// One column of a row in the type of the computation, multiplied by a factor: a pointer into its own memory where
// that holds the same numbers, or into a stage of STAGE_SIZE elements. A column that the rule lacks is null and unused.
template <typename T>
class FloatColumn {
 public:
  FloatColumn(const void* data, DType type, T factor = 1)
      : data_(static_cast<char*>(const_cast<void*>(data))), type_(type), factor_(factor),
        in_place_(type == (sizeof(T) == 8 ? DType::float64 : DType::float32) && factor == 1 &&
                  reinterpret_cast<uintptr_t>(data) % alignof(T) == 0) {}

  bool in_place() const { return in_place_; }

  T* in(int64_t begin, int64_t n) {
    char* address = data_ + begin * size_of(type_);
    if (in_place_) return reinterpret_cast<T*>(address);
    dispatch_type(type_, [&](auto element) {
      using E = decltype(element);
      for (int64_t i = 0; i < n; ++i) {
        E value;
        std::memcpy(&value, address + i * sizeof(E), sizeof(E));
        stage_[i] = factor_ * static_cast<T>(widen(value));
      }
    });
    return stage_;
  }

  // Store what was written to the result of in().
  void out(int64_t begin, int64_t n) {
    if (in_place_) return;
    char* address = data_ + begin * size_of(type_);
    dispatch_type(type_, [&](auto element) {
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
  alignas(64) T stage_[STAGE_SIZE];
};

// A column in the place of g, and what its elements are multiplied by.
template <typename T>
struct Gradient {
  const void* data;
  DType type;
  T factor;
};

// Full groups of LANES as vectors, the tail as scalars, through the same element function.
template <bool RMS, bool REGULARISED, bool DIRECTED, typename T>
void reduce_elements(const T* x, const T* v, const T* g, const T* d, int64_t n, const Coefficients<T>& shared, double* weighted,
                     double* alignment) {
  const Coefficients<T> k = shared;  // no store can change the copy; as an argument it would be copied through memory
  constexpr int width = VectorOf<T>::lanes, vectors = LANES / width;
  Vec<T> weighted_vector[vectors] = {}, alignment_vector[vectors] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int j = 0; j < vectors; ++j) {
      const int64_t at = i + j * width;
      if constexpr (DIRECTED) {
        contribute_along(load(g + at), load(d + at), weighted_vector[j]);
      } else {
        contribute<RMS, REGULARISED>(REGULARISED ? load(x + at) : Vec<T>{}, RMS ? load(v + at) : Vec<T>{},
                                     load(g + at), k, weighted_vector[j], alignment_vector[j]);
      }
    }
  }
  T weighted_lane[LANES], alignment_lane[LANES];
  std::memcpy(weighted_lane, weighted_vector, sizeof(weighted_lane));
  std::memcpy(alignment_lane, alignment_vector, sizeof(alignment_lane));
  for (int j = 0; i < n; ++i, ++j) {
    if constexpr (DIRECTED) {
      contribute_along(g[i], d[i], weighted_lane[j]);
    } else {
      contribute<RMS, REGULARISED>(REGULARISED ? x[i] : T(0), RMS ? v[i] : T(0), g[i], k, weighted_lane[j],
                                   alignment_lane[j]);
    }
  }
  for (int j = 0; j < LANES; ++j) {
    weighted[j] += weighted_lane[j];
    alignment[j] += alignment_lane[j];
  }
}

// True if any element kept its old value.
template <bool MOMENTUM, bool COORDINATE, bool RMS, Decay DECAY, typename T>
bool update_elements(T* x, T* m, T* v, const T* g, int64_t n, const Coefficients<T> k) {
  constexpr int width = VectorOf<T>::lanes;
  bool kept = false;
  // A branch that is almost never taken: keeping old values costs almost nothing.
  const auto updated = [&](auto element, const auto& draft, auto gradient) {
    const auto old = element;
    update<MOMENTUM, DECAY>(element, draft, gradient, k);
    const auto headroom = headroom_of<MOMENTUM, RMS, false>(element, k);
    if (__builtin_expect(any_negative(headroom), 0)) {
      keep(old, headroom, element);
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
  // The root of v and the division after it have long latencies: with drafts some vectors ahead, more of them are in
  // flight than the processor would find by itself.
  constexpr int64_t span = DRAFTS_AHEAD * width;
  if (RMS && n >= span) {
    Draft<Vec<T>> ahead[DRAFTS_AHEAD];
    for (int j = 0; j < DRAFTS_AHEAD; ++j) ahead[j] = draft_at(j * width);
    for (; i + 2 * span <= n; i += span) {
#pragma GCC unroll DRAFTS_AHEAD
      for (int j = 0; j < DRAFTS_AHEAD; ++j) {
        update_at(i + j * width, ahead[j]);
        ahead[j] = draft_at(i + span + j * width);
      }
    }
#pragma GCC unroll DRAFTS_AHEAD
    for (int j = 0; j < DRAFTS_AHEAD; ++j) update_at(i + j * width, ahead[j]);
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

// A chunk's elements in the type T, in place or through a stage.
template <typename T>
struct FloatLoop {
  using Type = T;

  template <bool RMS, bool REGULARISED, bool DIRECTED>
  static void reduce(const Bucket& bucket, const TensorRow& row, int64_t begin, int64_t end, const Coefficients<T>& k,
                     double* weighted, double* alignment) {
    FloatColumn<T> x(row.x, bucket.x_type), v(row.v, bucket.v_type), g(row.g, bucket.g_type, k.gradient_scale);
    const T* d = static_cast<const T*>(row.d);
    for (; begin < end; begin += STAGE_SIZE) {
      const int64_t n = end - begin < STAGE_SIZE ? end - begin : STAGE_SIZE;
      reduce_elements<RMS, REGULARISED, DIRECTED, T>(
          REGULARISED ? x.in(begin, n) : nullptr, RMS ? v.in(begin, n) : nullptr, g.in(begin, n),
          DIRECTED ? d + begin : nullptr, n, k, weighted, alignment);
    }
  }

  template <bool MOMENTUM, bool COORDINATE, bool RMS, Decay DECAY>
  static bool apply(const Bucket& bucket, const TensorRow& row, const Gradient<T>& gradient, int64_t begin, int64_t end,
                    const Coefficients<T>& k) {
    FloatColumn<T> x(row.x, bucket.x_type), m(row.m, bucket.m_type), v(row.v, bucket.v_type);
    FloatColumn<T> g(gradient.data, gradient.type, gradient.factor);
    const bool in_place = x.in_place() && (!MOMENTUM || m.in_place()) && (!RMS || v.in_place()) && g.in_place();
    const int64_t size = in_place ? CHUNK : STAGE_SIZE;
    bool kept = false;
    for (; begin < end; begin += size) {
      const int64_t n = end - begin < size ? end - begin : size;
      kept |= update_elements<MOMENTUM, COORDINATE, RMS, DECAY, T>(
          x.in(begin, n), MOMENTUM ? m.in(begin, n) : nullptr, RMS ? v.in(begin, n) : nullptr, g.in(begin, n), n, k);
      x.out(begin, n);
      if (MOMENTUM) m.out(begin, n);
      if (RMS) v.out(begin, n);
    }
    return kept;
  }
};

}  // namespace
}  // namespace NGN_ISA
}  // namespace ngn

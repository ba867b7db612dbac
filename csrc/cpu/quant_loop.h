// The loop over quantisation blocks: quantised m and v, 16-bit parameters and gradients, stochastic and exact rounding.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/float_loop.h"
#include "cpu/quant_block.h"
#include "math/rule.h"

namespace ngn {
inline namespace NGN_ISA {
namespace {

// A copy of a row's last elements, fewer than a quantisation block, filled up to a whole one.
struct Tail {
  alignas(64) char values[QUANT_BLOCK * sizeof(double)];
  alignas(64) char remainders[QUANT_BLOCK * sizeof(int16_t)];
};

// A column that is loaded and stored one quantisation block at a time, as float32. Each call branches on the type: a
// branch that always goes the same way costs little, and the loops are compiled once for all sets of types.
class QuantColumn {
 public:
  // `extra` are the scales of int8 and uint8, and the remainders of exact rounding. load_scaled() multiplies by `factor`.
  QuantColumn(const void* data, DType type, void* extra, Rounding rounding, float factor = 1)
      : data_(static_cast<char*>(const_cast<void*>(data))), extra_(static_cast<char*>(extra)), type_(type),
        rounding_(rounding), factor_(factor) {}

  bool is_stochastic() const { return rounding_ == Rounding::stochastic; }

  NGN_INLINE QuantBlock<Floats> load(int64_t i) const {
    switch (type_) {
      case DType::float32: {
        QuantBlock<Floats> value;
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

  NGN_INLINE QuantBlock<Floats> load_scaled(int64_t i) const {
    QuantBlock<Floats> value = load(i);
    if (__builtin_expect(factor_ != 1, 0)) {
      NGN_EACH_VECTOR(j) value[j] *= factor_;
    }
    return value;
  }

  // Of a block that will be stored. Computed ahead of store(), because it has a long latency.
  NGN_INLINE Scale scale_of(const QuantBlock<Floats>& value) const {
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

  NGN_INLINE void store(int64_t i, const QuantBlock<Floats>& value, Scale scale, const QuantBlock<Words>& random) const {
    switch (type_) {
      case DType::float32:
        NGN_EACH_VECTOR(j) ngn::store(at<float>(i) + j * WIDTH, value[j]);
        return;
      case DType::bfloat16:
        switch (rounding_) {
          case Rounding::nearest: return nearest_bfloat16(value, at<uint16_t>(i));
          case Rounding::stochastic: return stochastic_bfloat16(value, random, at<uint16_t>(i));
          case Rounding::exact: return split_bfloat16(value, at<uint16_t>(i), remainder(i));
        }
        __builtin_unreachable();
      case DType::int8:
        *scale_at<float>(i) = bit_cast<float>(scale.word << 23);
        return encode_m(value, scale.word, random, at<int8_t>(i));
      case DType::uint8:
        *scale_at<uint32_t>(i) = scale.word;
        if (__builtin_expect(scale.plain, 1)) return encode_v<true>(value, scale.word, random, at<uint8_t>(i));
        return encode_v<false>(value, scale.word, random, at<uint8_t>(i));
      case DType::float16: return encode_float16(value, is_stochastic(), random, at<char>(i));
      case DType::float64: return store_float64(value, at<char>(i));
    }
    __builtin_unreachable();
  }

  // The first block.
  void copy_to(float* to) const {
    const QuantBlock<Floats> value = load_scaled(0);
    NGN_EACH_VECTOR(j) ngn::store(to + j * WIDTH, value[j]);
  }

  // The n elements from i on as a whole block: the last one is repeated, which changes no scale.
  QuantColumn tail(int64_t i, int64_t n, Tail& copy) const {
    const auto fill = [n](char* to, const char* from, int64_t size) {
      std::memcpy(to, from, static_cast<size_t>(n * size));
      for (int64_t j = n; j < QUANT_BLOCK; ++j) std::memcpy(to + j * size, to + (n - 1) * size, static_cast<size_t>(size));
    };
    QuantColumn column = *this;
    if (!data_) return column;
    fill(copy.values, at<char>(i), size_);
    column.data_ = copy.values;
    if (rounding_ == Rounding::exact) {
      fill(copy.remainders, reinterpret_cast<char*>(remainder(i)), sizeof(int16_t));
      column.extra_ = copy.remainders;
    } else if (extra_) {
      column.extra_ = reinterpret_cast<char*>(scale_at<float>(i));
    }
    return column;
  }

  void put_back(int64_t i, int64_t n, const Tail& copy) const {
    if (!data_) return;
    std::memcpy(at<char>(i), copy.values, static_cast<size_t>(n * size_));
    if (rounding_ == Rounding::exact) std::memcpy(remainder(i), copy.remainders, static_cast<size_t>(n) * sizeof(int16_t));
  }

 private:
  template <typename E>
  E* at(int64_t i) const {
    return reinterpret_cast<E*>(data_ + i * size_);
  }
  template <typename S>
  S* scale_at(int64_t i) const {
    return reinterpret_cast<S*>(extra_) + i / QUANT_BLOCK;
  }
  int16_t* remainder(int64_t i) const { return reinterpret_cast<int16_t*>(extra_) + i; }

  char* data_;
  char* extra_;
  DType type_;
  Rounding rounding_;
  float factor_;
  int64_t size_ = size_of(type_);
};

// The sums over the whole blocks from `begin` to `end`.
template <bool RMS, bool REGULARISED, bool DIRECTED>
void reduce_blocks(const QuantColumn& x, const QuantColumn& v, const QuantColumn& g, const float* d, int64_t begin,
                   int64_t end, const Coefficients<float> k, double* weighted, double* alignment) {
  constexpr int vectors = LANES / WIDTH;
  Floats weighted_vector[vectors] = {}, alignment_vector[vectors] = {};
  for (int64_t i = begin; i < end; i += QUANT_BLOCK) {
    const QuantBlock<Floats> gradient = g.load_scaled(i);
    QuantBlock<Floats> old_x = {}, old_v = {};
    if constexpr (REGULARISED) old_x = x.load(i);
    if constexpr (RMS) old_v = v.load(i);
    NGN_EACH_VECTOR(j) {
      if constexpr (DIRECTED) {
        contribute_along(gradient[j], ngn::load(d + i + j * WIDTH), weighted_vector[j % vectors]);
      } else {
        contribute<RMS, REGULARISED>(old_x[j], old_v[j], gradient[j], k, weighted_vector[j % vectors],
                                     alignment_vector[j % vectors]);
      }
    }
  }
  float lane[LANES];
  std::memcpy(lane, weighted_vector, sizeof(lane));
  for (int j = 0; j < LANES; ++j) weighted[j] += lane[j];
  std::memcpy(lane, alignment_vector, sizeof(lane));
  for (int j = 0; j < LANES; ++j) alignment[j] += lane[j];
}

// Updates one block in which elements may have to keep their old values. Not inlined, to leave the registers to the
// loop. True if any element kept its old value.
template <bool MOMENTUM, bool COORDINATE, bool RMS, Decay DECAY>
__attribute__((noinline)) bool update_or_keep(QuantColumn x, QuantColumn m, QuantColumn v, QuantColumn g,
                                              int64_t i, Coefficients<float> k, Noise noise) {
  bool kept = false;
  const QuantBlock<Floats> none = {}, gradient = g.load_scaled(i);
  QuantBlock<Floats> new_x = x.load(i), new_m = MOMENTUM ? m.load(i) : none, new_v = RMS ? v.load(i) : none;
  for (int j = 0; j < VECTORS; ++j) {
    const Element<Floats> old = {new_x[j], new_m[j], new_v[j]};
    Element<Floats> element = old;
    update<MOMENTUM, DECAY>(element, draft<COORDINATE, RMS>(old.v, gradient[j], k), gradient[j], k);
    const auto headroom = headroom_of<MOMENTUM, RMS, true>(element, k);
    kept = kept || any_negative(headroom);
    keep(old, headroom, element);
    new_x[j] = element.x;
    new_m[j] = element.m;
    new_v[j] = element.v;
  }
  const QuantBlock<Words> random = random_of(noise, i);
  x.store(i, new_x, {}, x.is_stochastic() ? other_noise(random) : random);
  if constexpr (RMS) v.store(i, new_v, v.scale_of(new_v), random);
  if constexpr (MOMENTUM) m.store(i, new_m, m.scale_of(new_m), random);
  return kept;
}

// If the squares of some numbers add up to less than this, all of them can be stored as x and as m.
inline float safe_sum_of_squares(const Coefficients<float>& k) {
  const double limit = k.x_limit < k.m_limit ? k.x_limit : k.m_limit, largest = std::numeric_limits<float>::max();
  const double square = 0.99 * limit * limit;  // for the rounding of the sum
  return static_cast<float>(square < largest ? square : largest);
}

// Updates the whole blocks from `begin` to `end`. True if any element kept its old value.
template <bool MOMENTUM, bool COORDINATE, bool RMS, Decay DECAY>
bool update_blocks(QuantColumn x, QuantColumn m, QuantColumn v, const QuantColumn g, int64_t begin, int64_t end,
                   const Coefficients<float> k, const Noise noise) {
  bool kept = false;
  const float safe = safe_sum_of_squares(k);
  for (int64_t i = begin; i < end; i += QUANT_BLOCK) {
    const QuantBlock<Floats> gradient = g.load_scaled(i);
    QuantBlock<Floats> new_x, new_m = {}, new_v = {}, divisor;
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
    // No term is larger than the sum of positive numbers.
    if (__builtin_expect(any_negative(headroom(squares, safe) | headroom(sum_of_v, k.v_limit)), 0)) {
      kept |= update_or_keep<MOMENTUM, COORDINATE, RMS, DECAY>(x, m, v, g, i, k, noise);
      continue;
    }
    if constexpr (MOMENTUM) m_scale = m.scale_of(new_m);
    // In this order each store frees registers for the next.
    if (!x.is_stochastic()) x.store(i, new_x, {}, {});
    const QuantBlock<Words> random = random_of(noise, i);
    if (x.is_stochastic()) x.store(i, new_x, {}, other_noise(random));
    if constexpr (RMS) v.store(i, new_v, v_scale, random);
    if constexpr (MOMENTUM) m.store(i, new_m, m_scale, random);
  }
  return kept;
}

// A chunk in blocks, for types whose storage is more than a cast; all is computed in float32.
struct QuantLoop {
  using Type = float;

  template <bool RMS, bool REGULARISED, bool DIRECTED>
  static void reduce(const Bucket& bucket, const TensorRow& row, int64_t begin, int64_t end,
                     const Coefficients<float>& k, double* weighted, double* alignment) {
    const Columns columns(bucket, row, {row.g, bucket.g_type, k.gradient_scale});
    const float* d = static_cast<const float*>(row.d);
    const auto& [x, m, v, g] = columns;
    const int64_t tail_size = (end - begin) % QUANT_BLOCK, whole = end - tail_size;
    for (; begin < whole; begin += STAGE_SIZE) {
      const int64_t stop = whole - begin < STAGE_SIZE ? whole : begin + STAGE_SIZE;
      reduce_blocks<RMS, REGULARISED, DIRECTED>(x, v, g, d, begin, stop, k, weighted, alignment);
    }
    if (tail_size > 0) {
      Tail tail[3];
      float block[3][QUANT_BLOCK];
      if constexpr (REGULARISED) x.tail(whole, tail_size, tail[0]).copy_to(block[0]);
      if constexpr (RMS) v.tail(whole, tail_size, tail[1]).copy_to(block[1]);
      g.tail(whole, tail_size, tail[2]).copy_to(block[2]);
      reduce_elements<RMS, REGULARISED, DIRECTED, float>(block[0], block[1], block[2], DIRECTED ? d + whole : nullptr,
                                                         tail_size, k, weighted, alignment);
    }
  }

  template <bool MOMENTUM, bool COORDINATE, bool RMS, Decay DECAY>
  static bool apply(const Bucket& bucket, const TensorRow& row, const Gradient<float>& gradient, int64_t begin,
                    int64_t end, const Coefficients<float>& k) {
    Columns columns(bucket, row, gradient);
    auto& [x, m, v, g] = columns;
    const int64_t count = static_cast<int64_t>(*row.step) + 1;
    const int64_t tail_size = (end - begin) % QUANT_BLOCK, whole = end - tail_size;
    constexpr auto update = update_blocks<MOMENTUM, COORDINATE, RMS, DECAY>;
    bool kept = update(x, m, v, g, begin, whole, k, Noise(row.noise_key, count, row.offset));
    if (tail_size > 0) {
      Tail tail[4];
      kept |= update(x.tail(whole, tail_size, tail[0]), m.tail(whole, tail_size, tail[1]),
                     v.tail(whole, tail_size, tail[2]), g.tail(whole, tail_size, tail[3]), 0, QUANT_BLOCK, k,
                     Noise(row.noise_key, count, row.offset + whole));
      x.put_back(whole, tail_size, tail[0]);
      if constexpr (MOMENTUM) m.put_back(whole, tail_size, tail[1]);
      if constexpr (RMS) v.put_back(whole, tail_size, tail[2]);
    }
    return kept;
  }

 private:
  struct Columns {
    Columns(const Bucket& bucket, const TensorRow& row, const Gradient<float>& gradient)
        : x(row.x, bucket.x_type, row.remainder, bucket.rounding),
          m(row.m, bucket.m_type, row.m_scale, Rounding::nearest),
          v(row.v, bucket.v_type, row.v_scale, Rounding::stochastic),
          g(gradient.data, gradient.type, nullptr, Rounding::nearest, gradient.factor) {}
    QuantColumn x, m, v, g;
  };
};

}  // namespace
}  // namespace NGN_ISA
}  // namespace ngn

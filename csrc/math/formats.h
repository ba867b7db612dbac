// The scalar arithmetic of the formats in ngn_kernels/formats.py, with the same names and the same bits: noise, the
// scale of an 8-bit v, stochastic rounding to float16.
#pragma once

#include <cstdint>

#include "math/arithmetic.h"
#include "math/convert.h"

namespace ngn {
inline namespace NGN_ISA {

struct Larger {
  template <typename V>
  NGN_HD V operator()(V a, V b) const { return a > b ? a : b; }
};
struct Smaller {
  template <typename V>
  NGN_HD V operator()(V a, V b) const { return a < b ? a : b; }
};

// A bijection of 32-bit numbers without visible structure.
NGN_HD inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * MIX1;
  x = (x ^ (x >> 15)) * MIX2;
  return x ^ (x >> 16);
}

// 32 random bits for each element of a parameter: a hash of its quantisation block, to which equal strides along the
// block and along the steps of a window are added.
class Noise {
 public:
  Noise() = default;
  NGN_HD Noise(int64_t key, int64_t step_count, int64_t offset) : offset_(offset) {
    start_ = mixed(static_cast<uint32_t>(key) + static_cast<uint32_t>(step_count / WINDOW) * GOLDEN);
    mask_ = mixed(static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32) ^ start_);
    turn_ = static_cast<uint32_t>(step_count % WINDOW) * STEP_STRIDE;
  }

  // The index of the row's element i in the whole parameter.
  NGN_HD int64_t index_of(int64_t i) const { return offset_ + i; }

  // Of any element of the row.
  NGN_HD NGN_INLINE uint32_t of_element(int64_t i) const {
    const uint64_t index = static_cast<uint64_t>(index_of(i));
    return of_block(static_cast<uint32_t>(index / QUANT_BLOCK)) + static_cast<uint32_t>(index % QUANT_BLOCK) * ELEMENT_STRIDE;
  }

  // Of the first element of a block; the next ones follow ELEMENT_STRIDE apart.
  NGN_HD NGN_INLINE uint32_t of_block(uint32_t block) const {
    uint32_t x = block * GOLDEN ^ start_;
    x = (x ^ (x >> 16)) * MIX1 + mask_;
    x = (x ^ (x >> 15)) * MIX2;
    return (x ^ (x >> 16)) + turn_;
  }

 private:
  int64_t offset_;
  uint32_t start_, mask_, turn_;
};

// The scale of an 8-bit v whose largest and least positive patterns are these: the pattern of the largest in steps
// of 2^shift, and shift in the lowest five bits.
NGN_HD NGN_INLINE uint32_t scale_between(uint32_t top, uint32_t bottom) {
  uint32_t shift = 24 - leading_zeros((top - bottom) | (1u << (LEAST_SHIFT + 7)));
  shift += ((top + (1u << shift) - 1) >> shift) - (bottom >> shift) > 254;
  shift = shift < MOST_SHIFT ? shift : MOST_SHIFT;
  return ((top + (1u << shift) - 1) >> shift) << 5 | shift;
}

// The pattern of an 8-bit v in steps of 2^shift, rounded at random. V is a word or a vector of them.
template <typename V>
NGN_HD NGN_INLINE V steps_of_v(V bits, V random, uint32_t shift) {
  const uint32_t one = 1u << shift;
  // Rounding up a little more often keeps the mean of 1 / sqrt(v), which the step depends on.
  const V low = bits & (one - 1), up = Smaller{}(low, one - low) >> (25 - shift);
  return (bits + up + (random >> (32 - shift))) >> shift;
}

// The exponent of the least power of two with |m| <= 127 times that, from the pattern of the largest |m|.
NGN_HD NGN_INLINE uint32_t exponent_of_m(uint32_t largest) {
  const uint32_t raised = (largest + 0x1ffff) >> 23;
  return raised > 7 ? raised - 6 : 1;
}

// One of the two neighbours, the nearer one more often, subnormal numbers included; finite up to 65504.
NGN_HD inline float16 stochastic_float16(float value, uint32_t noise) {
  const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff, random = noise >> 19;
  const uint32_t normal = (magnitude - 0x38000000 + random) >> 13;
  // Below 2^-14 in units of 2^-24: 1024 and a random fraction of 13 bits, of which the sum keeps the integer part.
  const float size = bit_cast<float>(magnitude), small = (size < 0x1p-14f ? size : 0x1p-14f) * 0x1p24f;
  const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(small + bit_cast<float>(random | 0x44800000))) - 1024;
  return {static_cast<uint16_t>((magnitude < 0x38800000 ? subnormal : normal) | ((bits >> 16) & 0x8000))};
}

}  // namespace NGN_ISA
}  // namespace ngn

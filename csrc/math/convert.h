// Element types to and from the type of the computation, with integer arithmetic that every compiler
// vectorises and that gives the same bits on every instruction set; and the limits of each type. GPUs have an
// instruction for float16, with those bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "math/tables.h"

namespace ngn {
inline namespace NGN_ISA {

struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

template <typename To, typename From>
NGN_HD inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

NGN_HD inline double widen(double value) { return value; }
NGN_HD inline float widen(float value) { return value; }
NGN_HD inline float widen(bfloat16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }
NGN_HD inline float widen(float16 value) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
  const uint32_t shifted = uint32_t(value.bits & 0x7fffu) << 13;
  const uint32_t normal = shifted + 0x38000000u, special = shifted | 0x7f800000u;
  // m 2^-24 of a subnormal as (1 + m 2^-10) 2^-14 - 2^-14: no operand is subnormal in float32.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(shifted | 0x38800000u) - 0x1p-14f);
  const uint32_t finite = shifted < 0x00800000u ? subnormal : normal;
  return bit_cast<float>((shifted >= 0x0f800000u ? special : finite) | sign);
#endif
}

NGN_HD inline void narrow(double value, double& to) { to = value; }
NGN_HD inline void narrow(double value, float& to) { to = static_cast<float>(value); }
NGN_HD inline void narrow(float value, double& to) { to = value; }
NGN_HD inline void narrow(float value, float& to) { to = value; }

// Round to nearest even; the caller has made sure that the result is finite.
NGN_HD inline void narrow(float value, bfloat16& to) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  to.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
NGN_HD inline void narrow(float value, float16& to) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(value));
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = bits & 0x80000000u;
  const uint32_t magnitude = bits ^ sign;
  // Below 2^-14 the result is subnormal: adding 0.5 lets the adder round at bit 2^-24.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  to.bits = static_cast<uint16_t>((magnitude < 0x38800000u ? subnormal : normal) | (sign >> 16));
#endif
}
NGN_HD inline void narrow(double value, bfloat16& to) { narrow(static_cast<float>(value), to); }
NGN_HD inline void narrow(double value, float16& to) { narrow(static_cast<float>(value), to); }

// The smallest magnitude that storing takes to infinity.
template <typename T>
NGN_HD inline T overflow_limit(DType type) {
  constexpr T infinity = static_cast<T>(INFINITY);
  switch (type) {
    case DType::float64: return infinity;
    case DType::float32: return sizeof(T) > 4 ? static_cast<T>(FLOAT32_LIMIT) : infinity;
    case DType::bfloat16: return static_cast<T>(BFLOAT16_LIMIT);
    case DType::float16: return static_cast<T>(FLOAT16_LIMIT);
    case DType::int8: return static_cast<T>(INT8_LIMIT);
    case DType::uint8: return infinity;
  }
  __builtin_unreachable();
}

// The same with stochastic rounding.
template <typename T>
NGN_HD inline T stochastic_limit(DType type) {
  switch (type) {
    case DType::bfloat16: return static_cast<T>(STOCHASTIC_BFLOAT16_LIMIT);
    case DType::float16: return static_cast<T>(STOCHASTIC_FLOAT16_LIMIT);
    case DType::float64:
    case DType::float32:
    case DType::int8:
    case DType::uint8: return overflow_limit<T>(type);
  }
  __builtin_unreachable();
}

NGN_HD inline int64_t size_of(DType type) {
  switch (type) {
    case DType::float64: return 8;
    case DType::float32: return 4;
    case DType::bfloat16:
    case DType::float16: return 2;
    case DType::int8:
    case DType::uint8: return 1;
  }
  __builtin_unreachable();
}

}  // namespace NGN_ISA
}  // namespace ngn

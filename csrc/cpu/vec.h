// Vectors of the current instruction set, by the compilers' vector extension: they have the operators of a
// scalar, so that rule.h's element functions serve both.
#pragma once

#include <cstdint>
#include <cstring>

#include "math/arithmetic.h"

namespace ngn {
inline namespace NGN_ISA {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int lanes = VECTOR_BYTES / sizeof(T);
};
template <typename T>
using Vec = typename VectorOf<T>::type;

template <typename T>
inline Vec<T> load(const T* from) {
  Vec<T> value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
inline void store(T* to, Vec<T> value) {
  std::memcpy(to, &value, sizeof(value));
}

// Whether any lane of a vector of integers, or a single integer, is below zero.
inline bool any_negative(int32_t value) { return value < 0; }
inline bool any_negative(int64_t value) { return value < 0; }
template <typename Integers>
inline bool any_negative(Integers values) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(values)) & (sizeof(values[0]) == 8 ? 0xaaaa : 0xffff);
#elif defined(__AVX__)
  return sizeof(values[0]) == 8 ? _mm256_movemask_pd(reinterpret_cast<__m256d>(values)) != 0
                                : _mm256_movemask_ps(reinterpret_cast<__m256>(values)) != 0;
#else
  auto sign = values[0];
  for (std::size_t i = 1; i < lanes_of<Integers>; ++i) sign |= values[i];
  return sign < 0;
#endif
}

}  // namespace NGN_ISA
}  // namespace ngn

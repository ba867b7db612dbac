// One vector of the instruction set at hand, by the compilers' vector extension: it takes the same
// operators as a scalar, so that rule.h's element functions serve both.
#pragma once

#include <cstring>

#include "tables.h"

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

}  // namespace NGN_ISA
}  // namespace ngn

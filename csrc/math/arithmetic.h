// Operations whose instructions depend on the target, under one name for scalars of host and device and for
// vectors of the compilers' vector extension. rule.h is written in terms of them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#if defined(__AVX__) && !defined(__CUDACC__)
#include <immintrin.h>
#define NGN_AVX
#endif

#include "math/tables.h"

#ifdef __CUDACC__
#define NGN_INLINE __forceinline__
#else
#define NGN_INLINE __attribute__((always_inline)) inline
#endif

namespace ngn {
// One inline namespace per instruction set: the linker must not swap one's functions for another's.
inline namespace NGN_ISA {

template <typename V>
constexpr std::size_t lanes_of = sizeof(V) / sizeof(std::decay_t<decltype(V{}[0])>);

// A V with the same value in every lane.
template <typename V, typename T>
NGN_HD inline V all(T value) {
  return value - V{};
}

// a b + c, rounded once where the instruction set has that; the baseline rounds twice on any machine, and so do
// the CUDA kernels, which have its bits.
#if defined(__FMA__) && !defined(__CUDACC__)
NGN_HD inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
NGN_HD inline double multiply_add(double a, double b, double c) { return std::fma(a, b, c); }
#if defined(NGN_AVX) && defined(__AVX512F__)
inline __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512d multiply_add(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
#elif defined(NGN_AVX)
inline __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256d multiply_add(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
#endif
#else
template <typename V>
NGN_HD inline V multiply_add(V a, V b, V c) {
  return a * b + c;
}
#endif

template <typename V>
NGN_HD inline V root(V value) {
  if constexpr (std::is_floating_point_v<V>) {
    return std::sqrt(value);
  } else {
    for (std::size_t i = 0; i < lanes_of<V>; ++i) value[i] = std::sqrt(value[i]);
    return value;
  }
}

// base^exponent for 0 <= base < 1.
NGN_HD inline double power(double base, double exponent) {
#ifdef __CUDA_ARCH__
  return exp(exponent * log(base));  // pow() would be ten times the code
#else
  return std::pow(base, exponent);
#endif
}

NGN_HD inline uint32_t leading_zeros(uint32_t value) {
#ifdef __CUDA_ARCH__
  return static_cast<uint32_t>(__clz(static_cast<int>(value)));
#else
  return static_cast<uint32_t>(__builtin_clz(value));
#endif
}

template <typename T>
constexpr T SMALLEST_NORMAL = std::numeric_limits<T>::min();

// v, or the smallest normal number if that is larger; not a number if v is not.
template <typename T, typename V>
NGN_HD inline V at_least_normal(V v) {
  constexpr T smallest = SMALLEST_NORMAL<T>;
#if defined(NGN_AVX) && defined(__AVX512F__)
  // The form without a mask makes GCC warn of a register that it leaves undefined.
  if constexpr (std::is_same_v<T, float> && sizeof(V) == 64) return _mm512_maskz_max_ps(0xffff, _mm512_set1_ps(smallest), v);
#elif defined(NGN_AVX)
  if constexpr (std::is_same_v<T, float> && sizeof(V) == 32) return _mm256_max_ps(_mm256_set1_ps(smallest), v);
#endif
  return all<V>(smallest) > v ? all<V>(smallest) : v;
}

// Where an estimate of 1 / sqrt(v) and a Newton step replace the square root, the divider is free for divisions.
#ifdef NGN_AVX
template <typename T>
constexpr bool estimates_root = std::is_same_v<T, float>;

#if defined(__AVX512F__)
inline __m512 root_estimate(__m512 v) { return _mm512_maskz_rsqrt14_ps(0xffff, v); }
inline float root_estimate(float v) { return _mm_cvtss_f32(_mm_rsqrt14_ss(_mm_setzero_ps(), _mm_set_ss(v))); }
#else
inline __m256 root_estimate(__m256 v) { return _mm256_rsqrt_ps(v); }
inline float root_estimate(float v) { return _mm_cvtss_f32(_mm_rsqrt_ss(_mm_set_ss(v))); }
#endif
#else
template <typename T>
constexpr bool estimates_root = false;
#endif

// base + 2 sqrt(v) for v >= 0. With an estimate: the root's relative error is at most about 4 * 2^-23, it
// is at least 2^-63, and not a number for an infinite v.
template <typename T, typename V>
NGN_HD inline V add_twice_root(V base, V v) {
  if constexpr (estimates_root<T>) {
    const V w = at_least_normal<T>(v);  // the estimate of 0 is infinite
    const V estimate = root_estimate(w);
    const V near = w * estimate;
    return multiply_add(near, multiply_add(-near, estimate, all<V>(T(3))), base);
  } else {
    return base + T(2) * root(v);
  }
}

}  // namespace NGN_ISA
}  // namespace ngn

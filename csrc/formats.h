// How m, v and 16-bit parameters are stored when they are narrower than float32: the functions of
// ngn_kernels/formats.py by the same names, with the same bits on every instruction set. They work on
// blocks of quanta of float32; the memory of floats and of noise has room for whole quanta.
#pragma once

#include <cstdint>
#include <cstring>

#include "convert.h"
#include "tables.h"
#include "vec.h"

namespace ngn {
inline namespace NGN_ISA {

constexpr uint32_t LEAST_SHIFT = 14, MOST_SHIFT = 20;  // of the steps of an 8-bit v
constexpr int WINDOW = 64;                             // steps whose noise is spread evenly

using Floats = Vec<float>;
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));
constexpr int WIDTH = VectorOf<float>::lanes;
constexpr int VECTORS = QUANTUM / WIDTH;

inline Words words_of(Floats value) { return bit_cast<Words>(value); }
inline Floats floats_of(Words bits) { return bit_cast<Floats>(bits); }
inline Words load_words(const uint32_t* from) {
  Words value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

struct Larger {
  template <typename V>
  V operator()(V a, V b) const { return a > b ? a : b; }
};
struct Smaller {
  template <typename V>
  V operator()(V a, V b) const { return a < b ? a : b; }
};

// The compilers' own conversions between bytes and words take many shuffles.
inline Words load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return bit_cast<Words>(_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return bit_cast<Words>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Words value;
  for (int j = 0; j < WIDTH; ++j) value[j] = from[j];
  return value;
#endif
}
inline Integers load_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  return bit_cast<Integers>(_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return bit_cast<Integers>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Integers value;
  for (int j = 0; j < WIDTH; ++j) value[j] = from[j];
  return value;
#endif
}
// Words that hold less than 256, as bytes.
inline void store_bytes(void* to, Words value) {
#if defined(__AVX512F__)
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, bit_cast<__m512i>(value)));
#elif defined(__AVX2__)
  const __m256i wide = bit_cast<__m256i>(value);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(static_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
#else
  for (int j = 0; j < WIDTH; ++j) static_cast<uint8_t*>(to)[j] = static_cast<uint8_t>(value[j]);
#endif
}
// Words that hold less than 65,536, as halves.
inline void store_halves(void* to, Words value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, bit_cast<__m512i>(value)));
#elif defined(__AVX2__)
  const __m256i wide = bit_cast<__m256i>(value);
  _mm_storeu_si128(static_cast<__m128i*>(to),
                   _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
#else
  for (int j = 0; j < WIDTH; ++j) {
    const uint16_t half = static_cast<uint16_t>(value[j]);
    std::memcpy(static_cast<char*>(to) + 2 * j, &half, sizeof(half));
  }
#endif
}
inline Words load_halves(const void* from) {
#if defined(__AVX512F__)
  return bit_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  return bit_cast<Words>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#else
  Words value;
  for (int j = 0; j < WIDTH; ++j) {
    uint16_t half;
    std::memcpy(&half, static_cast<const char*>(from) + 2 * j, sizeof(half));
    value[j] = half;
  }
  return value;
#endif
}

// All lanes to one.
template <typename Op>
inline uint32_t across(Words value, Op op) {
  uint32_t lane[WIDTH];
  std::memcpy(lane, &value, sizeof(lane));
  typedef uint32_t Four __attribute__((vector_size(16)));
  Four four;
  std::memcpy(&four, lane, sizeof(four));
  for (int j = 4; j < WIDTH; j += 4) {
    Four next;
    std::memcpy(&next, lane + j, sizeof(next));
    four = op(four, next);
  }
  const uint32_t a = op(four[0], four[1]), b = op(four[2], four[3]);
  return op(a, b);
}

// Noise

// A bijection of 32-bit numbers without visible structure.
inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// 32 random bits for each element from `begin` on, in whole vectors; the high word of begin + i must not change.
inline void make_noise_of_a_turn(int64_t begin, int64_t n, int64_t key, int64_t step_count, uint32_t* out) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32);
  const uint32_t first = mixed(mixed(low + static_cast<uint32_t>(step_count / WINDOW) * 0x9e3779b1u) ^
                               static_cast<uint32_t>(begin >> 32));
  const uint32_t second = mixed(high ^ first), turn = static_cast<uint32_t>(step_count % WINDOW) * 0x9e379e37u;
  Words product;
  for (int j = 0; j < WIDTH; ++j) product[j] = (static_cast<uint32_t>(begin) + j) * 0x9e3779b1u;
  for (int64_t i = 0; i < n; i += WIDTH, product += WIDTH * 0x9e3779b1u) {
    Words x = product ^ first;
    x = (x ^ (x >> 16)) * 0x7feb352du + second;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    x = (x ^ (x >> 16)) + turn;
    std::memcpy(out + i, &x, sizeof(x));
  }
}

// `out` has room for a vector more than n.
inline void make_noise(int64_t begin, int64_t n, int64_t key, int64_t step_count, uint32_t* out) {
  const int64_t left = (((begin >> 32) + 1) << 32) - begin;
  make_noise_of_a_turn(begin, n < left ? n : left, key, step_count, out);
  if (n > left) make_noise_of_a_turn(begin + left, n - left, key, step_count, out + left);
}

// Codes. f(quantum's first element, where its codes lie): the last quantum's in a copy that is whole.

template <typename Code, typename F>
inline void for_each_quantum(const Code* codes, int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + QUANTUM <= n; i += QUANTUM) f(i, codes + i);
  if (i < n) {
    Code whole[QUANTUM] = {};
    std::memcpy(whole, codes + i, static_cast<size_t>(n - i) * sizeof(Code));
    f(i, static_cast<const Code*>(whole));
  }
}

template <typename Code, typename F>
inline void fill_each_quantum(Code* codes, int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + QUANTUM <= n; i += QUANTUM) f(i, codes + i);
  if (i < n) {
    Code whole[QUANTUM];
    f(i, whole);
    std::memcpy(codes + i, whole, static_cast<size_t>(n - i) * sizeof(Code));
  }
}

inline void decode_m(const int8_t* codes, const float* scales, int64_t n, float* out) {
  for_each_quantum(codes, n, [&](int64_t i, const int8_t* from) {
    const float scale = scales[i / QUANTUM];
    for (int j = 0; j < VECTORS; ++j) {
      store(out + i + j * WIDTH, scale * __builtin_convertvector(load_bytes(from + j * WIDTH), Floats));
    }
  });
}

inline void decode_v(const uint8_t* codes, const uint32_t* scales, int64_t n, float* out) {
  for_each_quantum(codes, n, [&](int64_t i, const uint8_t* from) {
    const uint32_t scale = scales[i / QUANTUM], shift = scale & 31, highest = scale >> 5;
    for (int j = 0; j < VECTORS; ++j) {
      const Words code = load_bytes(from + j * WIDTH);
      store(out + i + j * WIDTH, floats_of(code == 0 ? Words{} : (code + highest - 255) << shift));
    }
  });
}

inline uint32_t exponent_of_m(const float* m) {
  Words most = {};
  for (int j = 0; j < VECTORS; ++j) most = Larger{}(most, words_of(load(m + j * WIDTH)) & 0x7fffffff);
  const uint32_t raised = (across(most, Larger{}) + 0x1ffff) >> 23;
  return raised > 7 ? raised - 6 : 1;
}

// `m` has zeros after its n elements, up to a whole quantum.
inline void encode_m(const float* m, const uint32_t* noise, int64_t n, int8_t* codes, float* scales) {
  for (int64_t i = 0; i < n; i += QUANTUM) {
    scales[i / QUANTUM] = bit_cast<float>(exponent_of_m(m + i) << 23);
  }
  fill_each_quantum(codes, n, [&](int64_t i, int8_t* to) {
    const float inverse = bit_cast<float>((254u << 23) - bit_cast<uint32_t>(scales[i / QUANTUM]));
    for (int j = 0; j < VECTORS; ++j) {
      // 128, and a random fraction of 16 bits: what the sum cuts off was rounded at random.
      const Floats fraction = floats_of((load_words(noise + i + j * WIDTH) & 0xffff) | 0x43000000);
      const Floats above = multiply_add(load(m + i + j * WIDTH), all<Floats>(inverse), fraction);
      store_bytes(to + j * WIDTH, bit_cast<Words>(__builtin_convertvector(above, Integers)) ^ 128);
    }
  });
}

inline uint32_t scale_of_v(const float* v) {
  Words most = {}, least = ~Words{};
  for (int j = 0; j < VECTORS; ++j) {
    const Words bits = words_of(load(v + j * WIDTH));
    most = Larger{}(most, bits);
    least = Smaller{}(least, bits - 1);  // 0 becomes the largest
  }
  const uint32_t top = across(most, Larger{});
  if (top == 0) return LEAST_SHIFT;
  const uint32_t bottom = across(least, Smaller{}) + 1;
  uint32_t shift = 24 - __builtin_clz((top - bottom) | (1u << (LEAST_SHIFT + 7)));
  shift += ((top + (1u << shift) - 1) >> shift) - (bottom >> shift) > 254;
  shift = shift < MOST_SHIFT ? shift : MOST_SHIFT;
  return ((top + (1u << shift) - 1) >> shift) << 5 | shift;
}

// `v` has zeros after its n elements; it may be changed.
inline void encode_v(float* v, const uint32_t* noise, int64_t n, uint8_t* codes, uint32_t* scales) {
  constexpr uint32_t largest = 0x7f000000;
  for (int64_t i = 0; i < n; i += QUANTUM) {
    uint32_t scale = scale_of_v(v + i);
    if (__builtin_expect((scale >> 5) > (largest >> (scale & 31)), 0)) {
      for (int j = 0; j < QUANTUM; ++j) v[i + j] = v[i + j] > 0x1p127f ? 0x1p127f : v[i + j];
      scale = scale_of_v(v + i);
    }
    scales[i / QUANTUM] = scale;
  }
  fill_each_quantum(codes, n, [&](int64_t i, uint8_t* to) {
    const uint32_t shift = scales[i / QUANTUM] & 31, highest = scales[i / QUANTUM] >> 5, one = 1u << shift;
    const int32_t lowest = highest > 254 ? 1 : 256 - static_cast<int32_t>(highest);  // code of a positive number
    for (int j = 0; j < VECTORS; ++j) {
      const Words bits = words_of(load(v + i + j * WIDTH)), rest = bits & (one - 1);
      // Rounding up a little more often keeps the mean of 1 / sqrt(v), which the step depends on.
      const Words up = Smaller{}(rest, one - rest) >> (25 - shift);
      const Words random = load_words(noise + i + j * WIDTH) >> (32 - shift);
      const Integers code = bit_cast<Integers>(((bits + up + random) >> shift) + 255 - highest);
      const Words kept = bit_cast<Words>(Larger{}(code, lowest - Integers{}));
      store_bytes(to + j * WIDTH, bits == 0 ? Words{} : kept);
    }
  });
}

inline void decode_bfloat16(const uint16_t* codes, int64_t n, float* out) {
  for_each_quantum(codes, n, [&](int64_t i, const uint16_t* from) {
    for (int j = 0; j < VECTORS; ++j) {
      store(out + i + j * WIDTH, floats_of(load_halves(from + j * WIDTH) << 16));
    }
  });
}

inline void nearest_bfloat16(const float* values, int64_t n, uint16_t* codes) {
  fill_each_quantum(codes, n, [&](int64_t i, uint16_t* to) {
    for (int j = 0; j < VECTORS; ++j) {
      const Words bits = words_of(load(values + i + j * WIDTH));
      store_halves(to + j * WIDTH, (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
  });
}

// A neighbour of each value, the nearer one more often; finite up to 0x1.fep127.
inline void stochastic_bfloat16(const float* values, const uint32_t* noise, int64_t n, uint16_t* codes) {
  fill_each_quantum(codes, n, [&](int64_t i, uint16_t* to) {
    for (int j = 0; j < VECTORS; ++j) {
      const Words random = load_words(noise + i + j * WIDTH) >> 16;
      store_halves(to + j * WIDTH, (words_of(load(values + i + j * WIDTH)) + random) >> 16);
    }
  });
}

// The same of float16, subnormal numbers included; finite up to 65504.
inline void stochastic_float16(const float* values, const uint32_t* noise, int64_t n, uint16_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bit_cast<uint32_t>(values[i]), magnitude = bits & 0x7fffffff, random = noise[i] >> 19;
    const uint32_t normal = (magnitude - 0x38000000 + random) >> 13;
    // Below 2^-14 in units of 2^-24: 1024, and a random fraction of 13 bits, cut off after the sum.
    const float size = bit_cast<float>(magnitude), small = (size < 0x1p-14f ? size : 0x1p-14f) * 0x1p24f;
    const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(small + bit_cast<float>(random | 0x44800000))) - 1024;
    codes[i] = static_cast<uint16_t>((magnitude < 0x38800000 ? subnormal : normal) | ((bits >> 16) & 0x8000));
  }
}

// The nearest bfloat16, ties away from zero, and the 16 bits that it lacks.
inline void split_bfloat16(const float* values, int64_t n, uint16_t* near, int16_t* remainder) {
  fill_each_quantum(near, n, [&](int64_t i, uint16_t* to) {
    for (int j = 0; j < VECTORS; ++j) {
      store_halves(to + j * WIDTH, (words_of(load(values + i + j * WIDTH)) + 0x8000) >> 16);
    }
  });
  fill_each_quantum(remainder, n, [&](int64_t i, int16_t* to) {
    for (int j = 0; j < VECTORS; ++j) {
      store_halves(to + j * WIDTH, words_of(load(values + i + j * WIDTH)) & 0xffff);
    }
  });
}

inline void join_bfloat16(const uint16_t* near, const int16_t* remainder, int64_t n, float* out) {
  decode_bfloat16(near, n, out);
  for_each_quantum(remainder, n, [&](int64_t i, const int16_t* from) {
    for (int j = 0; j < VECTORS; ++j) {
      const Words low = load_halves(from + j * WIDTH), extended = (low ^ 0x8000) - 0x8000;
      store(out + i + j * WIDTH, floats_of(words_of(load(out + i + j * WIDTH)) + extended));
    }
  });
}

// For parameters, so that they do not share v's noise.
inline void other_noise(const uint32_t* noise, int64_t n, uint32_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = noise[i] * 0x9e3779b1u;
}

}  // namespace NGN_ISA
}  // namespace ngn

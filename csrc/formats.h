// How m, v and 16-bit parameters are stored when they are narrower than float32: the functions of
// ngn_kernels/formats.py by the same names, with the same bits on every instruction set. They work on a
// quantum at a time, which AVX-512 holds in four registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "convert.h"
#include "tables.h"
#include "vec.h"

namespace ngn {
inline namespace NGN_ISA {

constexpr uint32_t LEAST_SHIFT = 14, MOST_SHIFT = 20;  // of the steps of an 8-bit v
constexpr uint32_t LARGEST_V = 0x7f000000;             // the pattern of the largest v that has a code
constexpr int WINDOW = 64;                             // steps whose noise is spread evenly

using Floats = Vec<float>;
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));
constexpr int WIDTH = VectorOf<float>::lanes;
constexpr int VECTORS = QUANTUM / WIDTH;

template <typename V>
struct Quantum {
  V vector[VECTORS];
  V& operator[](int j) { return vector[j]; }
  const V& operator[](int j) const { return vector[j]; }
};

// What hands a quantum over must be inlined, and its loops unrolled, or it goes through memory.
#define NGN_INLINE __attribute__((always_inline)) inline
#define NGN_EACH_VECTOR(j) _Pragma("GCC unroll 4") for (int j = 0; j < VECTORS; ++j)

NGN_INLINE Words words_of(Floats value) { return bit_cast<Words>(value); }
NGN_INLINE Floats floats_of(Words bits) { return bit_cast<Floats>(bits); }

NGN_INLINE Words magnitude(Floats value) { return words_of(value) & 0x7fffffff; }

struct Larger {
  template <typename V>
  V operator()(V a, V b) const { return a > b ? a : b; }
};
struct Smaller {
  template <typename V>
  V operator()(V a, V b) const { return a < b ? a : b; }
};

// Bytes and halves of memory to words and back: the compilers' own conversions take many shuffles.

NGN_INLINE Words load_bytes(const uint8_t* from) {
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
NGN_INLINE Integers load_bytes(const int8_t* from) {
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

// Words that hold less than 256, as bytes; each is combined with `flip` by exclusive or.
NGN_INLINE void store_bytes(void* to, const Quantum<Words>& value, uint8_t flip) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_maskz_packus_epi32(-1, bit_cast<__m512i>(value[0]), bit_cast<__m512i>(value[1]));
  const __m512i high = _mm512_maskz_packus_epi32(-1, bit_cast<__m512i>(value[2]), bit_cast<__m512i>(value[3]));
  // Packed within each 128 bits: fours of the four vectors in turns.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_maskz_packus_epi16(-1, low, high));
  _mm512_storeu_si512(to, _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(flip))));
#elif defined(__AVX2__)
  for (int j = 0; j < VECTORS; ++j) {
    const __m256i wide = bit_cast<__m256i>(value[j] ^ flip);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(static_cast<char*>(to) + j * WIDTH), _mm_packus_epi16(halves, halves));
  }
#else
  for (int j = 0; j < VECTORS; ++j) {
    for (int l = 0; l < WIDTH; ++l) static_cast<uint8_t*>(to)[j * WIDTH + l] = static_cast<uint8_t>(value[j][l] ^ flip);
  }
#endif
}

// A vector of halves, as the upper halves of words.
NGN_INLINE Words load_upper(const void* from) {
#if defined(__AVX512F__)
  return bit_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(from)))) << 16;
#elif defined(__AVX2__)
  return bit_cast<Words>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)))) << 16;
#else
  Words value;
  for (int j = 0; j < WIDTH; ++j) {
    uint16_t half;
    std::memcpy(&half, static_cast<const char*>(from) + 2 * j, sizeof(half));
    value[j] = uint32_t(half) << 16;
  }
  return value;
#endif
}
NGN_INLINE Words load_signed_halves(const void* from) {
#if defined(__AVX512F__)
  return bit_cast<Words>(_mm512_maskz_cvtepi16_epi32(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(from))));
#else
  return bit_cast<Words>(bit_cast<Integers>(load_upper(from)) >> 16);
#endif
}

#if defined(__AVX512F__)
// The upper, or the lower, halves of two vectors.
template <bool UPPER>
NGN_INLINE __m512i halves_of(Words first, Words second) {
  const __m512i even = _mm512_setr_epi32(0x00020000, 0x00060004, 0x000a0008, 0x000e000c, 0x00120010, 0x00160014,
                                         0x001a0018, 0x001e001c, 0x00220020, 0x00260024, 0x002a0028, 0x002e002c,
                                         0x00320030, 0x00360034, 0x003a0038, 0x003e003c);
  const __m512i place = UPPER ? _mm512_add_epi16(even, _mm512_set1_epi16(1)) : even;
  return _mm512_permutex2var_epi16(bit_cast<__m512i>(first), place, bit_cast<__m512i>(second));
}
#endif

// The upper, or the lower, halves of words.
template <bool UPPER>
NGN_INLINE void store_halves(void* to, const Quantum<Words>& value) {
#if defined(__AVX512F__)
  NGN_EACH_VECTOR(j) {
    if (j % 2 == 0) _mm512_storeu_si512(static_cast<char*>(to) + j * 32, halves_of<UPPER>(value[j], value[j + 1]));
  }
#else
  for (int j = 0; j < VECTORS; ++j) {
    char* at = static_cast<char*>(to) + j * WIDTH * 2;
    const Words half = UPPER ? value[j] >> 16 : value[j] & 0xffff;
#if defined(__AVX2__)
    const __m256i wide = bit_cast<__m256i>(half);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at),
                     _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
#else
    for (int l = 0; l < WIDTH; ++l) {
      const uint16_t one = static_cast<uint16_t>(half[l]);
      std::memcpy(at + 2 * l, &one, sizeof(one));
    }
#endif
  }
#endif
}

// The largest of all lanes.
NGN_INLINE uint32_t largest_lane(Words value) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m512i all = bit_cast<__m512i>(value);
  const __m256i eight = _mm256_max_epu32(_mm512_maskz_extracti64x4_epi64(0xf, all, 0), _mm512_maskz_extracti64x4_epi64(0xf, all, 1));
#else
  const __m256i eight = bit_cast<__m256i>(value);
#endif
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(four));
#else
  uint32_t most = value[0];
  for (int l = 1; l < WIDTH; ++l) most = Larger{}(most, value[l]);
  return most;
#endif
}

// Noise

// A bijection of 32-bit numbers without visible structure.
inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// 32 random bits for each element of a parameter, by its place there: a hash of its quantum, and from there
// equal strides along the quantum and along the steps of a window.
class Noise {
 public:
  Noise(int64_t key, int64_t step_count, int64_t first) : first_(first) {
    start_ = mixed(static_cast<uint32_t>(key) + static_cast<uint32_t>(step_count / WINDOW) * GOLDEN);
    more_ = mixed(static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32) ^ start_);
    turn_ = static_cast<uint32_t>(step_count % WINDOW) * STEP;
  }

  // Of the QUANTUM elements from i on.
  NGN_INLINE Quantum<Words> of(int64_t i) const {
    const int64_t place = first_ + i;
    const uint32_t skip = static_cast<uint32_t>(place & (QUANTUM - 1));
    const uint32_t quantum = static_cast<uint32_t>(static_cast<uint64_t>(place) / QUANTUM);
    const uint32_t base = hashed(quantum) + skip * STRIDE;
    Quantum<Words> noise;
    NGN_EACH_VECTOR(j) noise[j] = base + strides(j);
    if (__builtin_expect(skip != 0, 0)) {
      const uint32_t next = hashed(quantum + 1) + (skip - static_cast<uint32_t>(QUANTUM)) * STRIDE;
      NGN_EACH_VECTOR(j) noise[j] = lanes(j) + skip < QUANTUM ? noise[j] : next + strides(j);
    }
    return noise;
  }

 private:
  static constexpr uint32_t GOLDEN = 0x9e3779b1u, STRIDE = 0x93f96ec5u, STEP = 0x9e379e37u;

  static Words lanes(int j) {
    Words lane;
    for (int l = 0; l < WIDTH; ++l) lane[l] = static_cast<uint32_t>(j * WIDTH + l);
    return lane;
  }
  static Words strides(int j) { return lanes(j) * STRIDE; }

  NGN_INLINE uint32_t hashed(uint32_t quantum) const {
    uint32_t x = quantum * GOLDEN ^ start_;
    x = (x ^ (x >> 16)) * 0x7feb352du + more_;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return (x ^ (x >> 16)) + turn_;
  }

  int64_t first_;
  uint32_t start_, more_, turn_;
};

// For parameters, so that they do not share v's noise.
NGN_INLINE Quantum<Words> other_noise(const Quantum<Words>& noise) {
  Quantum<Words> other;
  NGN_EACH_VECTOR(j) other[j] = noise[j] * 0x9e3779b1u;
  return other;
}

// Codes

NGN_INLINE Quantum<Floats> decode_m(const int8_t* codes, float scale) {
  Quantum<Floats> m;
  NGN_EACH_VECTOR(j) m[j] = scale * __builtin_convertvector(load_bytes(codes + j * WIDTH), Floats);
  return m;
}

// The exponent of the least power of two with |m| <= 127 times that.
NGN_INLINE uint32_t exponent_of_m(const Quantum<Floats>& m) {
  Words most = {};
  NGN_EACH_VECTOR(j) most = Larger{}(most, magnitude(m[j]));
  const uint32_t raised = (largest_lane(most) + 0x1ffff) >> 23;
  return raised > 7 ? raised - 6 : 1;
}

NGN_INLINE void encode_m(const Quantum<Floats>& m, uint32_t exponent, const Quantum<Words>& noise, int8_t* codes) {
  const Floats inverse = all<Floats>(bit_cast<float>((254 - exponent) << 23));
  Quantum<Words> code;
  NGN_EACH_VECTOR(j) {
    // 128, and a random fraction of 16 bits: what the sum cuts off was rounded at random.
    const Floats above = multiply_add(m[j], inverse, floats_of((noise[j] & 0xffff) | 0x43000000));
    code[j] = bit_cast<Words>(__builtin_convertvector(above, Integers));
  }
  store_bytes(codes, code, 128);
}

NGN_INLINE Quantum<Floats> decode_v(const uint8_t* codes, uint32_t scale) {
  const uint32_t shift = scale & 31, below = (scale >> 5) - 255;
  Quantum<Floats> v;
  NGN_EACH_VECTOR(j) {
    const Words code = load_bytes(codes + j * WIDTH);
    v[j] = floats_of(code == 0 ? Words{} : (code + below) << shift);
  }
  return v;
}

NGN_INLINE uint32_t scale_between(uint32_t top, uint32_t bottom) {
  uint32_t shift = 24 - __builtin_clz((top - bottom) | (1u << (LEAST_SHIFT + 7)));
  shift += ((top + (1u << shift) - 1) >> shift) - (bottom >> shift) > 254;
  shift = shift < MOST_SHIFT ? shift : MOST_SHIFT;
  return ((top + (1u << shift) - 1) >> shift) << 5 | shift;
}

struct Scale {
  uint32_t word;
  bool plain;  // of v: no element is 0 or too large, and all are within reach of the largest
};

// Of a quantum with an element that is 0, or too large.
__attribute__((noinline)) inline uint32_t scale_of_odd_v(const float* v) {
  uint32_t top = 0, bottom = LARGEST_V;
  for (int i = 0; i < QUANTUM; ++i) {
    const uint32_t bits = Smaller{}(bit_cast<uint32_t>(v[i]), LARGEST_V);
    top = Larger{}(top, bits);
    bottom = Smaller{}(bottom, bits == 0 ? LARGEST_V : bits);
  }
  return top == 0 ? LEAST_SHIFT : scale_between(top, bottom);
}

NGN_INLINE Scale scale_of_v(const Quantum<Floats>& v) {
  Words most = {}, least = ~Words{};
  NGN_EACH_VECTOR(j) {
    most = Larger{}(most, words_of(v[j]));  // v is never negative
    least = Smaller{}(least, words_of(v[j]));
  }
  const uint32_t top = largest_lane(most), bottom = ~largest_lane(~least);
  if (__builtin_expect(bottom == 0 || top > LARGEST_V, 0)) {
    alignas(64) float values[QUANTUM];
    NGN_EACH_VECTOR(j) store(values + j * WIDTH, v[j]);
    return {scale_of_odd_v(values), false};
  }
  const uint32_t word = scale_between(top, bottom), shift = word & 31;
  return {word, (bottom >> shift) != 0 && (word >> 5) - (bottom >> shift) <= 254};
}

template <bool PLAIN>
NGN_INLINE void encode_v(const Quantum<Floats>& v, uint32_t scale, const Quantum<Words>& noise, uint8_t* codes) {
  const uint32_t shift = scale & 31, highest = scale >> 5, one = 1u << shift;
  const int32_t lowest = highest > 254 ? 1 : 256 - static_cast<int32_t>(highest);  // code of a positive number
  Quantum<Words> code;
  NGN_EACH_VECTOR(j) {
    Words bits = words_of(v[j]);
    if constexpr (!PLAIN) bits = Smaller{}(bits, LARGEST_V - Words{});
    // Rounding up a little more often keeps the mean of 1 / sqrt(v), which the step depends on.
    const Words rest = bits & (one - 1), up = Smaller{}(rest, one - rest) >> (25 - shift);
    code[j] = ((bits + up + (noise[j] >> (32 - shift))) >> shift) + (255 - highest);
    if constexpr (!PLAIN) {
      const Words kept = bit_cast<Words>(Larger{}(bit_cast<Integers>(code[j]), lowest - Integers{}));
      code[j] = bits == 0 ? Words{} : kept;
    }
  }
  store_bytes(codes, code, 0);
}

NGN_INLINE Quantum<Floats> decode_bfloat16(const uint16_t* codes) {
  Quantum<Floats> value;
  NGN_EACH_VECTOR(j) value[j] = floats_of(load_upper(codes + j * WIDTH));
  return value;
}

NGN_INLINE void nearest_bfloat16(const Quantum<Floats>& value, uint16_t* codes) {
#if defined(__AVX512F__)
  NGN_EACH_VECTOR(j) {
    if (j % 2 == 0) {
      const Words first = words_of(value[j]), second = words_of(value[j + 1]);
      const __m512i upper = halves_of<true>(first, second), lower = halves_of<false>(first, second);
      // (lower + 0x7ffe + 1 + whether upper is odd) / 2: its highest bit is the carry.
      const __m512i half = _mm512_or_si512(_mm512_and_si512(upper, _mm512_set1_epi16(1)), _mm512_set1_epi16(0x7ffe));
      const __m512i carry = _mm512_srli_epi16(_mm512_avg_epu16(lower, half), 15);
      _mm512_storeu_si512(codes + j * WIDTH, _mm512_add_epi16(upper, carry));
    }
  }
#else
  Quantum<Words> sum;
  NGN_EACH_VECTOR(j) {
    const Words bits = words_of(value[j]);
    sum[j] = (bits & 0x10000) == 0 ? bits + 0x7fff : bits + 0x8000;
  }
  store_halves<true>(codes, sum);
#endif
}

// A neighbour of each value, the nearer one more often; finite up to 0x1.fep127.
NGN_INLINE void stochastic_bfloat16(const Quantum<Floats>& value, const Quantum<Words>& noise, uint16_t* codes) {
  Quantum<Words> sum;
  NGN_EACH_VECTOR(j) sum[j] = words_of(value[j]) + (noise[j] >> 16);
  store_halves<true>(codes, sum);
}

// The nearest bfloat16, ties away from zero, and the 16 bits that it lacks.
NGN_INLINE void split_bfloat16(const Quantum<Floats>& value, uint16_t* near, int16_t* remainder) {
  Quantum<Words> bits, sum;
  NGN_EACH_VECTOR(j) {
    bits[j] = words_of(value[j]);
    sum[j] = bits[j] + 0x8000;
  }
  store_halves<true>(near, sum);
  store_halves<false>(remainder, bits);
}

NGN_INLINE Quantum<Floats> join_bfloat16(const uint16_t* near, const int16_t* remainder) {
  Quantum<Floats> value;
  NGN_EACH_VECTOR(j) {
    value[j] = floats_of(load_upper(near + j * WIDTH) + load_signed_halves(remainder + j * WIDTH));
  }
  return value;
}

// float16 and float64 go through memory, in functions of their own: their loops vectorise, but not in these types.

__attribute__((noinline)) inline void widen_elements(const void* from, DType type, float* to) {
  with_type(type, [&](auto element) {
    for (int i = 0; i < QUANTUM; ++i) {
      std::memcpy(&element, static_cast<const char*>(from) + i * sizeof(element), sizeof(element));
      to[i] = static_cast<float>(widen(element));
    }
  });
}

NGN_INLINE Quantum<Floats> load_elements(const void* from, DType type) {
  alignas(64) float value[QUANTUM];
  widen_elements(from, type, value);
  Quantum<Floats> quantum;
  NGN_EACH_VECTOR(j) quantum[j] = load(value + j * WIDTH);
  return quantum;
}

// A neighbour, subnormal numbers included; finite up to 65504.
inline float16 stochastic_float16(float value, uint32_t noise) {
  const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff, random = noise >> 19;
  const uint32_t normal = (magnitude - 0x38000000 + random) >> 13;
  // Below 2^-14 in units of 2^-24: 1024, and a random fraction of 13 bits, cut off after the sum.
  const float size = bit_cast<float>(magnitude), small = (size < 0x1p-14f ? size : 0x1p-14f) * 0x1p24f;
  const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(small + bit_cast<float>(random | 0x44800000))) - 1024;
  return {static_cast<uint16_t>((magnitude < 0x38800000 ? subnormal : normal) | ((bits >> 16) & 0x8000))};
}

__attribute__((noinline)) inline void narrow_to_float16(const float* value, const uint32_t* noise, bool stochastic, void* to) {
  float16 half[QUANTUM];
  for (int i = 0; stochastic && i < QUANTUM; ++i) half[i] = stochastic_float16(value[i], noise[i]);
  for (int i = 0; !stochastic && i < QUANTUM; ++i) narrow(value[i], half[i]);
  std::memcpy(to, half, sizeof(half));
}

NGN_INLINE void encode_float16(const Quantum<Floats>& quantum, bool stochastic, const Quantum<Words>& noise, void* to) {
  alignas(64) float value[QUANTUM];
  alignas(64) uint32_t random[QUANTUM];
  NGN_EACH_VECTOR(j) {
    const Floats floats = quantum[j];
    const Words words = noise[j];
    std::memcpy(value + j * WIDTH, &floats, sizeof(floats));
    std::memcpy(random + j * WIDTH, &words, sizeof(words));
  }
  narrow_to_float16(value, random, stochastic, to);
}

// What is the same in float32 stays as it is: elements that keep their old numbers keep all of their bits.
__attribute__((noinline)) inline void widen_to_float64(const float* value, void* to) {
  double wide[QUANTUM];
  std::memcpy(wide, to, sizeof(wide));
  for (int i = 0; i < QUANTUM; ++i) wide[i] = static_cast<float>(wide[i]) == value[i] ? wide[i] : value[i];
  std::memcpy(to, wide, sizeof(wide));
}

NGN_INLINE void store_float64(const Quantum<Floats>& quantum, void* to) {
  alignas(64) float value[QUANTUM];
  NGN_EACH_VECTOR(j) store(value + j * WIDTH, quantum[j]);
  widen_to_float64(value, to);
}

}  // namespace NGN_ISA
}  // namespace ngn

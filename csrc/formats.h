// How m, v and 16-bit parameters are stored when they are narrower than float32: the codes of
// ngn_kernels/formats.py, with the same bits on every instruction set. A column loads a vector at a time and
// stores a quantum at a time, since the elements of one may share a scale.
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

template <typename V>
struct Quantum {
  V vector[VECTORS];
  V& operator[](int j) { return vector[j]; }
  const V& operator[](int j) const { return vector[j]; }
};

// What hands a quantum over must be inlined, or it goes through memory.
#define NGN_INLINE __attribute__((always_inline)) inline

// With four vectors a quantum stays in registers; with more of them it lies on the stack anyway.
#define NGN_EACH_VECTOR(j) _Pragma("GCC unroll 4") for (int j = 0; j < VECTORS; ++j)

inline Words words_of(Floats value) { return bit_cast<Words>(value); }
inline Floats floats_of(Words bits) { return bit_cast<Floats>(bits); }

struct Larger {
  template <typename V>
  V operator()(V a, V b) const { return a > b ? a : b; }
};
struct Smaller {
  template <typename V>
  V operator()(V a, V b) const { return a < b ? a : b; }
};

// Bytes and halves of memory to words and back. The compilers' own conversions take many shuffles.

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
NGN_INLINE void store_bytes(void* to, const Quantum<Words>& value) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_maskz_packus_epi32(-1, bit_cast<__m512i>(value[0]), bit_cast<__m512i>(value[1]));
  const __m512i high = _mm512_maskz_packus_epi32(-1, bit_cast<__m512i>(value[2]), bit_cast<__m512i>(value[3]));
  // Packed within each 128 bits: fours of the four vectors in turns.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_maskz_packus_epi16(-1, low, high)));
#elif defined(__AVX2__)
  for (int j = 0; j < VECTORS; ++j) {
    const __m256i wide = bit_cast<__m256i>(value[j]);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(static_cast<char*>(to) + j * WIDTH), _mm_packus_epi16(halves, halves));
  }
#else
  for (int j = 0; j < VECTORS; ++j) {
    for (int l = 0; l < WIDTH; ++l) static_cast<uint8_t*>(to)[j * WIDTH + l] = static_cast<uint8_t>(value[j][l]);
  }
#endif
}

// A vector of halves, as the upper halves of words.
inline Words load_upper(const void* from) {
#if defined(__AVX512F__)
  const __m512i halves = _mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  const __m512i place = _mm512_setr_epi32(0, 1 << 16, 2 << 16, 3 << 16, 4 << 16, 5 << 16, 6 << 16, 7 << 16, 8 << 16,
                                          9 << 16, 10 << 16, 11 << 16, 12 << 16, 13 << 16, 14 << 16, 15 << 16);
  return bit_cast<Words>(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, place, halves));
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

// The upper halves of words.
NGN_INLINE void store_upper(void* to, const Quantum<Words>& value) {
#if defined(__AVX512F__)
  const __m512i odd = _mm512_setr_epi32(0x00030001, 0x00070005, 0x000b0009, 0x000f000d, 0x00130011, 0x00170015,
                                        0x001b0019, 0x001f001d, 0x00230021, 0x00270025, 0x002b0029, 0x002f002d,
                                        0x00330031, 0x00370035, 0x003b0039, 0x003f003d);
  NGN_EACH_VECTOR(j) {
    if (j % 2 == 0) {
      _mm512_storeu_si512(static_cast<char*>(to) + j * 32,
                          _mm512_permutex2var_epi16(bit_cast<__m512i>(value[j]), odd, bit_cast<__m512i>(value[j + 1])));
    }
  }
#else
  for (int j = 0; j < VECTORS; ++j) {
    char* at = static_cast<char*>(to) + j * WIDTH * 2;
#if defined(__AVX2__)
    const __m256i low = bit_cast<__m256i>(value[j] >> 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at),
                     _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
    for (int l = 0; l < WIDTH; ++l) {
      const uint16_t half = static_cast<uint16_t>(value[j][l] >> 16);
      std::memcpy(at + 2 * l, &half, sizeof(half));
    }
#endif
  }
#endif
}

// All lanes to one.
template <typename Op>
inline uint32_t across(Words value, Op op) {
#if defined(__AVX512F__)
  typedef uint32_t Eight __attribute__((vector_size(32)));
  const __m512i all = bit_cast<__m512i>(value);
  const Eight eight = op(bit_cast<Eight>(_mm512_castsi512_si256(all)),
                         bit_cast<Eight>(_mm512_maskz_extracti64x4_epi64(0xf, all, 1)));
#elif defined(__AVX2__)
  const Words eight = value;
#endif
  typedef uint32_t Four __attribute__((vector_size(16)));
#if defined(__AVX2__)
  const __m256i both = bit_cast<__m256i>(eight);
  Four four = op(bit_cast<Four>(_mm256_castsi256_si128(both)), bit_cast<Four>(_mm256_extracti128_si256(both, 1)));
#else
  Four four = value;
#endif
  four = op(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  four = op(four, __builtin_shufflevector(four, four, 1, 0, 3, 2));
  return four[0];
}

// Noise

// A bijection of 32-bit numbers without visible structure.
inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// 32 random bits for each element of a parameter, by its place there.
class Noise {
 public:
  Noise(int64_t key, int64_t step_count, int64_t first) : key_(key), step_count_(step_count), first_(first) {
    for (int l = 0; l < WIDTH; ++l) lane_[l] = static_cast<uint32_t>(l) * GOLDEN;
    turn_ = static_cast<uint32_t>(step_count % WINDOW) * 0x9e379e37u;
    seed(first >> 32);
  }

  // Of the quantum from element i on.
  NGN_INLINE Quantum<Words> of(int64_t i) {
    const int64_t place = first_ + i;
    if (__builtin_expect(place >> 32 != high_, 0)) seed(place >> 32);
    Quantum<Words> noise;
    const Words product = lane_ + static_cast<uint32_t>(place) * GOLDEN;
    NGN_EACH_VECTOR(j) noise[j] = hashed(product + static_cast<uint32_t>(j * WIDTH) * GOLDEN);
    if (__builtin_expect((place + QUANTUM - 1) >> 32 != high_, 0)) return crossing(place, noise);
    return noise;
  }

 private:
  static constexpr uint32_t GOLDEN = 0x9e3779b1u;

  void seed(int64_t high) {
    const uint32_t low = static_cast<uint32_t>(key_), upper = static_cast<uint32_t>(static_cast<uint64_t>(key_) >> 32);
    high_ = high;
    start_ = mixed(mixed(low + static_cast<uint32_t>(step_count_ / WINDOW) * GOLDEN) ^ static_cast<uint32_t>(high));
    more_ = mixed(upper ^ start_);
  }

  template <typename W>
  W hashed(W product) const {
    W x = product ^ start_;
    x = (x ^ (x >> 16)) * 0x7feb352du + more_;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return (x ^ (x >> 16)) + turn_;
  }

  // A quantum in which the upper word of the place changes.
  __attribute__((noinline)) Quantum<Words> crossing(int64_t place, Quantum<Words> noise) {
    seed(high_ + 1);
    for (int j = 0; j < QUANTUM; ++j) {
      if ((place + j) >> 32 == high_) noise[j / WIDTH][j % WIDTH] = hashed(static_cast<uint32_t>(place + j) * GOLDEN);
    }
    return noise;
  }

  int64_t key_, step_count_, first_, high_;
  uint32_t start_, more_, turn_;
  Words lane_;
};

// For parameters, so that they do not share v's noise.
inline Quantum<Words> other_noise(Quantum<Words> noise) {
  NGN_EACH_VECTOR(j) noise[j] = noise[j] * 0x9e3779b1u;
  return noise;
}

// Formats. `beside` is a scale, shared by the quantum, or the rest of an element; `span` is of how many
// elements, and 0 if there is nothing.
//   load    a vector, or a single number
//   scale   what the codes of a quantum depend on; it takes long enough to be worth computing ahead of them
//   encode  a whole quantum

template <Rounding ROUNDING>
struct Bfloat16 {
  using Code = uint16_t;
  using Beside = int16_t;  // the 16 bits that the nearest bfloat16 lacks, of exact rounding
  static constexpr int64_t span = ROUNDING == Rounding::exact ? 1 : 0;
  static constexpr bool random = ROUNDING == Rounding::stochastic;
  static std::nullptr_t scale(const Quantum<Floats>&) { return nullptr; }

  static Floats load(const Code* codes, const Beside* rest) {
    const Words near = load_upper(codes);
    if constexpr (ROUNDING != Rounding::exact) return floats_of(near);
    return floats_of(near + bit_cast<Words>(bit_cast<Integers>(load_upper(rest)) >> 16));
  }
  static float load_one(const Code* code, const Beside* rest) {
    uint32_t bits = uint32_t(*code) << 16;
    if constexpr (ROUNDING == Rounding::exact) bits += static_cast<uint32_t>(int32_t(*rest));
    return bit_cast<float>(bits);
  }

  // At random: a neighbour of each value, the nearer one more often; finite up to 0x1.fep127.
  // Exact: the nearest one, ties away from zero.
  NGN_INLINE static void encode(const Quantum<Floats>& values, std::nullptr_t, const Quantum<Words>& noise, Code* codes,
                                Beside* rest) {
    Quantum<Words> sum, low;
    NGN_EACH_VECTOR(j) {
      const Words bits = words_of(values[j]);
      if constexpr (ROUNDING == Rounding::nearest) sum[j] = bits + 0x7fff + ((bits >> 16) & 1);
      if constexpr (ROUNDING == Rounding::stochastic) sum[j] = bits + (noise[j] >> 16);
      if constexpr (ROUNDING == Rounding::exact) sum[j] = bits + 0x8000;
      low[j] = bits << 16;
    }
    store_upper(codes, sum);
    if constexpr (ROUNDING == Rounding::exact) store_upper(rest, low);
  }
};

// m
struct Int8 {
  using Code = int8_t;
  using Beside = float;
  static constexpr int64_t span = QUANTUM;
  static constexpr bool random = true;

  static Floats load(const Code* codes, const Beside* scale) {
    return *scale * __builtin_convertvector(load_bytes(codes), Floats);
  }
  static float load_one(const Code* code, const Beside* scale) { return *scale * static_cast<float>(*code); }

  // The exponent of the least power of two with |m| <= 127 times that.
  NGN_INLINE static uint32_t scale(const Quantum<Floats>& m) {
    Words most = {};
    NGN_EACH_VECTOR(j) most = Larger{}(most, words_of(m[j]) & 0x7fffffff);
    const uint32_t raised = (across(most, Larger{}) + 0x1ffff) >> 23;
    return raised > 7 ? raised - 6 : 1;
  }

  NGN_INLINE static void encode(const Quantum<Floats>& m, uint32_t exponent, const Quantum<Words>& noise, Code* codes,
                                Beside* scale) {
    *scale = bit_cast<float>(exponent << 23);
    const Floats inverse = all<Floats>(bit_cast<float>((254 - exponent) << 23));
    Quantum<Words> code;
    NGN_EACH_VECTOR(j) {
      // 128, and a random fraction of 16 bits: what the sum cuts off was rounded at random.
      const Floats above = multiply_add(m[j], inverse, floats_of((noise[j] & 0xffff) | 0x43000000));
      code[j] = bit_cast<Words>(__builtin_convertvector(above, Integers)) ^ 128;
    }
    store_bytes(codes, code);
  }
};

// v
struct UInt8 {
  using Code = uint8_t;
  using Beside = uint32_t;  // the highest code's place, and the shift of a step
  static constexpr int64_t span = QUANTUM;
  static constexpr bool random = true;

  static Floats load(const Code* codes, const Beside* scale) { return floats_of(pattern(load_bytes(codes), *scale)); }
  static float load_one(const Code* code, const Beside* scale) {
    return bit_cast<float>(pattern(uint32_t(*code), *scale));
  }

  NGN_INLINE static uint32_t scale(const Quantum<Floats>& v) {
    Words most = {}, least = ~Words{};
    NGN_EACH_VECTOR(j) {
      most = Larger{}(most, words_of(v[j]));
      least = Smaller{}(least, words_of(v[j]) - 1);  // 0 becomes the largest
    }
    const uint32_t top = Smaller{}(across(most, Larger{}), LARGEST);
    if (top == 0) return LEAST_SHIFT;
    const uint32_t bottom = Smaller{}(across(least, Smaller{}) + 1, LARGEST);
    uint32_t shift = 24 - __builtin_clz((top - bottom) | (1u << (LEAST_SHIFT + 7)));
    shift += ((top + (1u << shift) - 1) >> shift) - (bottom >> shift) > 254;
    shift = Smaller{}(shift, MOST_SHIFT);
    return ((top + (1u << shift) - 1) >> shift) << 5 | shift;
  }

  NGN_INLINE static void encode(const Quantum<Floats>& v, uint32_t scale, const Quantum<Words>& noise, Code* codes,
                                Beside* beside) {
    *beside = scale;
    const uint32_t shift = scale & 31, highest = scale >> 5, one = 1u << shift;
    const int32_t lowest = highest > 254 ? 1 : 256 - static_cast<int32_t>(highest);  // code of a positive number
    Quantum<Words> code;
    NGN_EACH_VECTOR(j) {
      const Words bits = words_of(v[j]), rest = bits & (one - 1);
      // Rounding up a little more often keeps the mean of 1 / sqrt(v), which the step depends on.
      const Words up = Smaller{}(rest, one - rest) >> (25 - shift), random = noise[j] >> (32 - shift);
      const Integers place = bit_cast<Integers>(((bits + up + random) >> shift) + 255 - highest);
      const Words kept = bit_cast<Words>(Larger{}(place, lowest - Integers{}));
      code[j] = bits == 0 ? Words{} : Smaller{}(kept, 255 - Words{});
    }
    store_bytes(codes, code);
  }

 private:
  static constexpr uint32_t LARGEST = 0x7f000000;  // the pattern of the largest number that has a code

  template <typename W>
  static W pattern(W code, uint32_t scale) {
    return code == 0 ? W{} : (code + (scale >> 5) - 255) << (scale & 31);
  }
};

template <Rounding ROUNDING>
struct Float16 {
  using Code = uint16_t;
  using Beside = char;
  static constexpr int64_t span = 0;
  static constexpr bool random = ROUNDING == Rounding::stochastic;
  static std::nullptr_t scale(const Quantum<Floats>&) { return nullptr; }

  static Floats load(const Code* codes, const Beside*) {
    Floats values;
    for (int j = 0; j < WIDTH; ++j) values[j] = widen(float16{codes[j]});
    return values;
  }
  static float load_one(const Code* code, const Beside*) { return widen(float16{*code}); }

  NGN_INLINE static void encode(const Quantum<Floats>& values, std::nullptr_t, const Quantum<Words>& noise, Code* codes,
                                Beside*) {
    for (int i = 0; i < QUANTUM; ++i) {
      const float value = values[i / WIDTH][i % WIDTH];
      if constexpr (ROUNDING == Rounding::stochastic) {
        codes[i] = neighbour(value, noise[i / WIDTH][i % WIDTH] >> 19);
      } else {
        float16 near;
        narrow(value, near);
        codes[i] = near.bits;
      }
    }
  }

 private:
  // One of two, subnormal numbers included, by 13 random bits; finite up to 65504.
  static uint16_t neighbour(float value, uint32_t random) {
    const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - 0x38000000 + random) >> 13;
    // Below 2^-14 in units of 2^-24: 1024, and a random fraction, cut off after the sum.
    const float size = bit_cast<float>(magnitude), small = (size < 0x1p-14f ? size : 0x1p-14f) * 0x1p24f;
    const float sum = small + bit_cast<float>(random | 0x44800000);
    const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(sum)) - 1024;
    return static_cast<uint16_t>((magnitude < 0x38800000 ? subnormal : normal) | ((bits >> 16) & 0x8000));
  }
};

// Columns: numbers in memory, in one format. The last quantum of one may be there only in part.

template <typename Code>
inline void prefetch_quantum(const Code* from) {
  const char* const begin = reinterpret_cast<const char*>(from);
  for (std::size_t at = 0; at < QUANTUM * sizeof(Code); at += 64) __builtin_prefetch(begin + at, 1);
}

template <typename T>
struct Plain {
  T* data;

  Vec<T> load(int64_t i) const { return ngn::load(data + i); }
  void prefetch(int64_t i) const { prefetch_quantum(data + i); }
  T operator[](int64_t i) const { return data[i]; }
  // The first n of a quantum.
  static std::nullptr_t scale(const Quantum<Vec<T>>&) { return nullptr; }
  NGN_INLINE void store(int64_t i, int64_t n, const Quantum<Vec<T>>& values, std::nullptr_t,
                        const Quantum<Words>&) const {
    if (n < QUANTUM) {
      std::memcpy(data + i, &values, static_cast<size_t>(n) * sizeof(T));
    } else {
      NGN_EACH_VECTOR(j) ngn::store(data + i + j * WIDTH, values[j]);
    }
  }
};

template <typename Format>
struct Coded {
  using Code = typename Format::Code;
  using Beside = typename Format::Beside;
  Code* codes;
  Beside* beside;

  Floats load(int64_t i) const { return Format::load(codes + i, beside + place(i)); }
  void prefetch(int64_t i) const { prefetch_quantum(codes + i); }
  float operator[](int64_t i) const { return Format::load_one(codes + i, beside + place(i)); }
  NGN_INLINE static auto scale(const Quantum<Floats>& values) { return Format::scale(values); }
  template <typename Scale>
  NGN_INLINE void store(int64_t i, int64_t n, const Quantum<Floats>& values, Scale scale,
                        const Quantum<Words>& noise) const {
    if (n == QUANTUM) return Format::encode(values, scale, noise, codes + i, beside + place(i));
    Code whole[QUANTUM];
    Beside whole_beside[QUANTUM];
    Format::encode(values, scale, noise, whole, whole_beside);
    std::memcpy(codes + i, whole, static_cast<size_t>(n) * sizeof(Code));
    if constexpr (Format::span > 0) {
      std::memcpy(beside + place(i), whole_beside, static_cast<size_t>(Format::span > 1 ? 1 : n) * sizeof(Beside));
    }
  }

  // A column of codes needs no stage.
  bool in_place() const { return true; }
  Coded in(int64_t begin, int64_t) const { return {codes + begin, beside + place(begin)}; }
  void out(int64_t, int64_t, const Noise&) const {}

 private:
  static int64_t place(int64_t i) {
    if constexpr (Format::span > 0) return i / Format::span;
    return 0;
  }
};

}  // namespace NGN_ISA
}  // namespace ngn

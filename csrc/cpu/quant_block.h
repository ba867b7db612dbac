// The functions of ngn_kernels/formats.py by the same names, with the same bits on every instruction set, for one
// quantisation block at a time, which AVX-512 holds in four registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/vec.h"
#include "math/formats.h"

namespace ngn {
inline namespace NGN_ISA {

using Floats = Vec<float>;
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));
constexpr int WIDTH = VectorOf<float>::lanes;
constexpr int VECTORS = QUANT_BLOCK / WIDTH;

template <typename V>
struct QuantBlock {
  V vector[VECTORS];
  V& operator[](int j) { return vector[j]; }
  const V& operator[](int j) const { return vector[j]; }
};

// Functions that take or return a block must be inlined, and their loops unrolled, or the block goes through memory.
#define NGN_EACH_VECTOR(j) _Pragma("GCC unroll 4") for (int j = 0; j < VECTORS; ++j)

NGN_INLINE Words words_of(Floats value) { return bit_cast<Words>(value); }
NGN_INLINE Floats floats_of(Words bits) { return bit_cast<Floats>(bits); }

NGN_INLINE Words magnitude(Floats value) { return words_of(value) & 0x7fffffff; }

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
NGN_INLINE void store_bytes(void* to, const QuantBlock<Words>& value, uint8_t flip) {
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
NGN_INLINE void store_halves(void* to, const QuantBlock<Words>& value) {
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

NGN_INLINE Words lanes(int j) {
  Words lane;
  for (int l = 0; l < WIDTH; ++l) lane[l] = static_cast<uint32_t>(j * WIDTH + l);
  return lane;
}

// Of the QUANT_BLOCK elements from i on.
NGN_INLINE QuantBlock<Words> random_of(const Noise& noise, int64_t i) {
  const int64_t index = noise.index_of(i);
  const uint32_t skip = static_cast<uint32_t>(index & (QUANT_BLOCK - 1));
  const uint32_t block = static_cast<uint32_t>(static_cast<uint64_t>(index) / QUANT_BLOCK);
  const uint32_t base = noise.of_block(block) + skip * ELEMENT_STRIDE;
  QuantBlock<Words> random;
  NGN_EACH_VECTOR(j) random[j] = base + lanes(j) * ELEMENT_STRIDE;
  if (__builtin_expect(skip != 0, 0)) {
    const uint32_t next = noise.of_block(block + 1) + (skip - static_cast<uint32_t>(QUANT_BLOCK)) * ELEMENT_STRIDE;
    NGN_EACH_VECTOR(j) random[j] = lanes(j) + skip < QUANT_BLOCK ? random[j] : next + lanes(j) * ELEMENT_STRIDE;
  }
  return random;
}

// For parameters, so that they do not share v's noise.
NGN_INLINE QuantBlock<Words> other_noise(const QuantBlock<Words>& random) {
  QuantBlock<Words> other;
  NGN_EACH_VECTOR(j) other[j] = random[j] * GOLDEN;
  return other;
}

// 8-bit m and v

NGN_INLINE QuantBlock<Floats> decode_m(const int8_t* from, float scale) {
  QuantBlock<Floats> m;
  NGN_EACH_VECTOR(j) m[j] = scale * __builtin_convertvector(load_bytes(from + j * WIDTH), Floats);
  return m;
}

NGN_INLINE uint32_t exponent_of_m(const QuantBlock<Floats>& m) {
  Words most = {};
  NGN_EACH_VECTOR(j) most = Larger{}(most, magnitude(m[j]));
  return exponent_of_m(largest_lane(most));
}

NGN_INLINE void encode_m(const QuantBlock<Floats>& m, uint32_t exponent, const QuantBlock<Words>& random, int8_t* to) {
  const Floats inverse = all<Floats>(bit_cast<float>((254 - exponent) << 23));
  QuantBlock<Words> byte;
  NGN_EACH_VECTOR(j) {
    // 128 and a random fraction of 16 bits: truncating the sum rounds stochastically.
    const Floats above = multiply_add(m[j], inverse, floats_of((random[j] & 0xffff) | 0x43000000));
    byte[j] = bit_cast<Words>(__builtin_convertvector(above, Integers));
  }
  store_bytes(to, byte, 128);
}

NGN_INLINE QuantBlock<Floats> decode_v(const uint8_t* from, uint32_t scale) {
  const uint32_t shift = scale & 31, below = (scale >> 5) - 255;
  QuantBlock<Floats> v;
  NGN_EACH_VECTOR(j) {
    const Words byte = load_bytes(from + j * WIDTH);
    v[j] = floats_of(byte == 0 ? Words{} : (byte + below) << shift);
  }
  return v;
}

struct Scale {
  uint32_t word;
  bool plain;  // of v: no element is 0 or above LARGEST_V, and the least is in the range of 8 bits
};

// Of a block with an element that is 0 or above LARGEST_V.
__attribute__((noinline)) inline uint32_t scale_of_odd_v(const float* v) {
  uint32_t top = 0, bottom = LARGEST_V;
  for (int i = 0; i < QUANT_BLOCK; ++i) {
    const uint32_t bits = Smaller{}(bit_cast<uint32_t>(v[i]), LARGEST_V);
    top = Larger{}(top, bits);
    bottom = Smaller{}(bottom, bits == 0 ? LARGEST_V : bits);
  }
  return top == 0 ? LEAST_SHIFT : scale_between(top, bottom);
}

NGN_INLINE Scale scale_of_v(const QuantBlock<Floats>& v) {
  Words most = {}, least = ~Words{};
  NGN_EACH_VECTOR(j) {
    most = Larger{}(most, words_of(v[j]));  // v is never negative
    least = Smaller{}(least, words_of(v[j]));
  }
  const uint32_t top = largest_lane(most), bottom = ~largest_lane(~least);
  if (__builtin_expect(bottom == 0 || top > LARGEST_V, 0)) {
    alignas(64) float values[QUANT_BLOCK];
    NGN_EACH_VECTOR(j) store(values + j * WIDTH, v[j]);
    return {scale_of_odd_v(values), false};
  }
  const uint32_t word = scale_between(top, bottom), shift = word & 31;
  return {word, (bottom >> shift) != 0 && (word >> 5) - (bottom >> shift) <= 254};
}

template <bool PLAIN>
NGN_INLINE void encode_v(const QuantBlock<Floats>& v, uint32_t scale, const QuantBlock<Words>& random, uint8_t* to) {
  const uint32_t shift = scale & 31, highest = scale >> 5;
  const int32_t lowest = highest > 254 ? 1 : 256 - static_cast<int32_t>(highest);  // byte of a positive number
  QuantBlock<Words> byte;
  NGN_EACH_VECTOR(j) {
    Words bits = words_of(v[j]);
    if constexpr (!PLAIN) bits = Smaller{}(bits, LARGEST_V - Words{});
    byte[j] = steps_of_v(bits, random[j], shift) + (255 - highest);
    if constexpr (!PLAIN) {
      const Words positive = bit_cast<Words>(Larger{}(bit_cast<Integers>(byte[j]), lowest - Integers{}));
      byte[j] = bits == 0 ? Words{} : positive;
    }
  }
  store_bytes(to, byte, 0);
}

NGN_INLINE QuantBlock<Floats> decode_bfloat16(const uint16_t* from) {
  QuantBlock<Floats> value;
  NGN_EACH_VECTOR(j) value[j] = floats_of(load_upper(from + j * WIDTH));
  return value;
}

NGN_INLINE void nearest_bfloat16(const QuantBlock<Floats>& value, uint16_t* to) {
#if defined(__AVX512F__)
  NGN_EACH_VECTOR(j) {
    if (j % 2 == 0) {
      const Words first = words_of(value[j]), second = words_of(value[j + 1]);
      const __m512i upper = halves_of<true>(first, second), lower = halves_of<false>(first, second);
      // (lower + 0x7ffe + 1 + whether upper is odd) / 2: its highest bit is the carry.
      const __m512i half = _mm512_or_si512(_mm512_and_si512(upper, _mm512_set1_epi16(1)), _mm512_set1_epi16(0x7ffe));
      const __m512i carry = _mm512_srli_epi16(_mm512_avg_epu16(lower, half), 15);
      _mm512_storeu_si512(to + j * WIDTH, _mm512_add_epi16(upper, carry));
    }
  }
#else
  QuantBlock<Words> sum;
  NGN_EACH_VECTOR(j) {
    const Words bits = words_of(value[j]);
    sum[j] = (bits & 0x10000) == 0 ? bits + 0x7fff : bits + 0x8000;
  }
  store_halves<true>(to, sum);
#endif
}

// A neighbour of each value, the nearer one more often; finite up to 0x1.fep127.
NGN_INLINE void stochastic_bfloat16(const QuantBlock<Floats>& value, const QuantBlock<Words>& random, uint16_t* to) {
  QuantBlock<Words> sum;
  NGN_EACH_VECTOR(j) sum[j] = words_of(value[j]) + (random[j] >> 16);
  store_halves<true>(to, sum);
}

// The nearest bfloat16, ties away from zero, and the low 16 bits of the float32.
NGN_INLINE void split_bfloat16(const QuantBlock<Floats>& value, uint16_t* near, int16_t* remainder) {
  QuantBlock<Words> bits, sum;
  NGN_EACH_VECTOR(j) {
    bits[j] = words_of(value[j]);
    sum[j] = bits[j] + 0x8000;
  }
  store_halves<true>(near, sum);
  store_halves<false>(remainder, bits);
}

NGN_INLINE QuantBlock<Floats> join_bfloat16(const uint16_t* near, const int16_t* remainder) {
  QuantBlock<Floats> value;
  NGN_EACH_VECTOR(j) {
    value[j] = floats_of(load_upper(near + j * WIDTH) + load_signed_halves(remainder + j * WIDTH));
  }
  return value;
}

// float16 and float64 go through memory, in functions of their own: their loops vectorise, but not in these types.

__attribute__((noinline)) inline void widen_elements(const void* from, DType type, float* to) {
  dispatch_type(type, [&](auto element) {
    for (int i = 0; i < QUANT_BLOCK; ++i) {
      std::memcpy(&element, static_cast<const char*>(from) + i * sizeof(element), sizeof(element));
      to[i] = static_cast<float>(widen(element));
    }
  });
}

NGN_INLINE QuantBlock<Floats> load_elements(const void* from, DType type) {
  alignas(64) float value[QUANT_BLOCK];
  widen_elements(from, type, value);
  QuantBlock<Floats> block;
  NGN_EACH_VECTOR(j) block[j] = load(value + j * WIDTH);
  return block;
}

__attribute__((noinline)) inline void narrow_to_float16(const float* value, const uint32_t* random, bool stochastic, void* to) {
  float16 half[QUANT_BLOCK];
  for (int i = 0; stochastic && i < QUANT_BLOCK; ++i) half[i] = stochastic_float16(value[i], random[i]);
  for (int i = 0; !stochastic && i < QUANT_BLOCK; ++i) narrow(value[i], half[i]);
  std::memcpy(to, half, sizeof(half));
}

NGN_INLINE void encode_float16(const QuantBlock<Floats>& block, bool stochastic, const QuantBlock<Words>& random,
                               void* to) {
  alignas(64) float value[QUANT_BLOCK];
  alignas(64) uint32_t word[QUANT_BLOCK];
  NGN_EACH_VECTOR(j) {
    const Floats floats = block[j];
    const Words words = random[j];
    std::memcpy(value + j * WIDTH, &floats, sizeof(floats));
    std::memcpy(word + j * WIDTH, &words, sizeof(words));
  }
  narrow_to_float16(value, word, stochastic, to);
}

// A float64 that rounds to the same float32 is left alone: an element that keeps its old value keeps all its bits.
__attribute__((noinline)) inline void widen_to_float64(const float* value, void* to) {
  double wide[QUANT_BLOCK];
  std::memcpy(wide, to, sizeof(wide));
  for (int i = 0; i < QUANT_BLOCK; ++i) wide[i] = static_cast<float>(wide[i]) == value[i] ? wide[i] : value[i];
  std::memcpy(to, wide, sizeof(wide));
}

NGN_INLINE void store_float64(const QuantBlock<Floats>& block, void* to) {
  alignas(64) float value[QUANT_BLOCK];
  NGN_EACH_VECTOR(j) store(value + j * WIDTH, block[j]);
  widen_to_float64(value, to);
}

}  // namespace NGN_ISA
}  // namespace ngn

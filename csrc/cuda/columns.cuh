// How the kernels load and store a column: the functions of ngn_kernels/formats.py for the few elements that a thread
// has of a span, in all its formats.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "math/convert.h"
#include "math/formats.h"

namespace ngn {
inline namespace NGN_ISA {

constexpr uint32_t EVERY_LANE = 0xffffffff;
constexpr int WARP = 32;

// Which elements of a span a thread has, and how many lanes have the elements of a quantisation block.

// COUNT neighbours, for aligned rows: a vector of each column.
template <int VECTOR>
struct Together {
  static constexpr int COUNT = VECTOR, STRIDE = 1, SHARERS = QUANT_BLOCK / VECTOR;
  static constexpr int SPAN = THREADS * VECTOR;
  static __device__ int first() { return static_cast<int>(threadIdx.x) * VECTOR; }
};

// Two that lie a warp apart, so that a warp reads neighbours at any address, and a quantisation block is a warp's.
struct Apart {
  static constexpr int COUNT = 2, STRIDE = WARP, SHARERS = WARP;
  static constexpr int SPAN = THREADS * COUNT;
  static __device__ int first() {
    const int thread = static_cast<int>(threadIdx.x);
    return thread / WARP * (WARP * COUNT) + thread % WARP;
  }
};

template <class Layout>
struct Floats {
  float value[Layout::COUNT];
  __device__ float& operator[](int j) { return value[j]; }
  __device__ float operator[](int j) const { return value[j]; }
};

// As they are stored: neighbours packed, others one in each word.
template <class Layout>
struct Words {
  uint32_t word[Layout::COUNT];
  __device__ uint32_t& operator[](int j) { return word[j]; }
  __device__ uint32_t operator[](int j) const { return word[j]; }
};

#define NGN_EACH(j) _Pragma("unroll") for (int j = 0; j < Layout::COUNT; ++j)

// Memory of tensors is the device's: without this, every access would first find out which memory it goes to.
template <typename T>
__device__ inline T* of_device(T* address) {
  __builtin_assume(__isGlobal(address));
  return address;
}

template <int BYTES>
struct VectorOf;
template <> struct VectorOf<4> { using Type = uint32_t; };
template <> struct VectorOf<8> { using Type = uint2; };
template <> struct VectorOf<16> { using Type = uint4; };

// The elements of a size from element o on, of which those below n are there; others are zero.
template <class Layout, int BYTES>
__device__ inline void load_words(const char* column, int o, int n, Words<Layout>& words) {
  if constexpr (Layout::STRIDE == 1) {
    constexpr int size = BYTES * Layout::COUNT;
    static_assert(size <= 16, "a vector has 128 bits");
    if (o < n) {
      const auto all = *of_device(reinterpret_cast<const typename VectorOf<size>::Type*>(column + static_cast<int64_t>(o) * BYTES));
      std::memcpy(words.word, &all, size);
    }
  } else {
    using Word = std::conditional_t<BYTES == 4, uint32_t, std::conditional_t<BYTES == 2, uint16_t, uint8_t>>;
    NGN_EACH(j) {
      const int at = o + j * Layout::STRIDE;
      if (at < n) words[j] = of_device(reinterpret_cast<const Word*>(column))[at];
    }
  }
}

template <class Layout>
__device__ inline Words<Layout> load_words(const char* column, DType type, int o, int n) {
  Words<Layout> words = {};
  if (type == DType::float32) {
    if constexpr (Layout::COUNT <= 4) load_words<Layout, 4>(column, o, n, words);
  } else if (type == DType::int8 || type == DType::uint8) {
    if constexpr (Layout::COUNT <= 4) load_words<Layout, 1>(column, o, n, words);
  } else {
    load_words<Layout, 2>(column, o, n, words);
  }
  return words;
}

template <class Layout, int BYTES>
__device__ inline void store_words(char* column, int o, int n, const Words<Layout>& words) {
  if constexpr (Layout::STRIDE == 1) {
    constexpr int size = BYTES * Layout::COUNT;
    typename VectorOf<size>::Type all;
    std::memcpy(&all, words.word, size);
    if (o < n) *of_device(reinterpret_cast<typename VectorOf<size>::Type*>(column + static_cast<int64_t>(o) * BYTES)) = all;
  } else {
    using Word = std::conditional_t<BYTES == 4, uint32_t, std::conditional_t<BYTES == 2, uint16_t, uint8_t>>;
    NGN_EACH(j) {
      const int at = o + j * Layout::STRIDE;
      if (at < n) of_device(reinterpret_cast<Word*>(column))[at] = static_cast<Word>(words[j]);
    }
  }
}

// Element j of those of 8 or 16 bits.
template <class Layout, int BITS>
__device__ inline uint32_t part_of(const Words<Layout>& words, int j) {
  if constexpr (Layout::STRIDE == 1) {
    constexpr int each = 32 / BITS;
    return (words[j / each] >> (j % each * BITS)) & ((1u << BITS) - 1);
  } else {
    return words[j];
  }
}

template <class Layout, int BITS>
__device__ inline void put_part(Words<Layout>& words, int j, uint32_t part) {
  if constexpr (Layout::STRIDE == 1) {
    constexpr int each = 32 / BITS;
    words[j / each] |= part << (j % each * BITS);
  } else {
    words[j] = part;
  }
}

// The largest over the lanes that share a quantisation block, for each of them.
template <class Layout>
__device__ inline uint32_t largest_in_block(uint32_t most) {
#pragma unroll
  for (int lanes = Layout::SHARERS / 2; lanes > 0; lanes /= 2) {
    most = Larger{}(most, __shfl_xor_sync(EVERY_LANE, most, lanes));
  }
  return most;
}

// Whether a lane is the one that loads and stores the scale of its block: no other may read what it writes.
template <class Layout>
__device__ inline bool owns_scale() { return threadIdx.x % Layout::SHARERS == 0; }

// A column of a row from a span's first element on.
struct Column {
  char* at;
  uint32_t* scales;  // of an 8-bit column
  DType type;
};

// What is loaded of a column, before it is decoded, so that the loads of all columns are on their way together.
template <class Layout>
struct Loaded {
  Words<Layout> words;
  uint32_t scale;
};

template <class Layout>
__device__ inline Loaded<Layout> load(const Column& column, int o, int n) {
  Loaded<Layout> loaded = {load_words<Layout>(column.at, column.type, o, n), 0};
  if (column.type == DType::int8 || column.type == DType::uint8) {
    if (owns_scale<Layout>() && o < n) loaded.scale = of_device(column.scales)[o / static_cast<int>(QUANT_BLOCK)];
    loaded.scale = __shfl_sync(EVERY_LANE, loaded.scale, 0, Layout::SHARERS);
  }
  return loaded;
}

template <class Layout>
__device__ inline Floats<Layout> decode(const Loaded<Layout>& loaded, DType type) {
  Floats<Layout> to = {};
  const Words<Layout>& words = loaded.words;
  if (type == DType::float32) {
    NGN_EACH(j) to[j] = bit_cast<float>(words[j]);
  } else if (type == DType::bfloat16) {
    NGN_EACH(j) to[j] = widen(bfloat16{static_cast<uint16_t>(part_of<Layout, 16>(words, j))});
  } else if (type == DType::float16) {
    NGN_EACH(j) to[j] = widen(float16{static_cast<uint16_t>(part_of<Layout, 16>(words, j))});
  } else if (type == DType::int8) {
    const float scale = bit_cast<float>(loaded.scale);
    NGN_EACH(j) to[j] = scale * static_cast<float>(static_cast<int8_t>(part_of<Layout, 8>(words, j)));
  } else {
    const uint32_t shift = loaded.scale & 31, below = (loaded.scale >> 5) - 255;
    NGN_EACH(j) {
      const uint32_t byte = part_of<Layout, 8>(words, j);
      to[j] = bit_cast<float>(byte == 0 ? 0 : (byte + below) << shift);
    }
  }
  return to;
}

template <class Layout>
__device__ inline uint32_t encode_m(const Floats<Layout>& m, const Words<Layout>& random, Words<Layout>& words) {
  uint32_t most = 0;
  NGN_EACH(j) most = Larger{}(most, bit_cast<uint32_t>(m[j]) & 0x7fffffff);
  const uint32_t exponent = exponent_of_m(largest_in_block<Layout>(most));
  const float inverse = bit_cast<float>((254 - exponent) << 23);
  NGN_EACH(j) {
    // 128 and a random fraction of 16 bits: truncating the sum rounds stochastically.
    const float above = multiply_add(m[j], inverse, bit_cast<float>((random[j] & 0xffff) | 0x43000000));
    put_part<Layout, 8>(words, j, (static_cast<uint32_t>(static_cast<int32_t>(above)) - 128) & 0xff);
  }
  return exponent << 23;
}

template <class Layout>
__device__ inline uint32_t encode_v(const Floats<Layout>& v, const Words<Layout>& random, Words<Layout>& words) {
  Words<Layout> bits;
  uint32_t most = 0, least = 0;  // over the positive ones: modulo 2^32, the least number has the largest negative
  NGN_EACH(j) {
    bits[j] = Smaller{}(bit_cast<uint32_t>(v[j]), static_cast<uint32_t>(LARGEST_V));
    most = Larger{}(most, bits[j]);
    least = Larger{}(least, 0 - bits[j]);
  }
  most = largest_in_block<Layout>(most);
  least = 0 - largest_in_block<Layout>(least);
  const uint32_t scale = scale_between(most, least), shift = scale & 31;
  const int32_t highest = static_cast<int32_t>(scale >> 5), lowest = Larger{}(256 - highest, 1);
  NGN_EACH(j) {
    const int32_t byte = static_cast<int32_t>(steps_of_v(bits[j], random[j], shift)) + 255 - highest;
    put_part<Layout, 8>(words, j, bits[j] == 0 ? 0 : static_cast<uint32_t>(Larger{}(byte, lowest)));
  }
  return scale;
}

// Store values that are all below the column's limit.
template <class Layout>
__device__ inline void store(const Column& column, int o, int n, const Floats<Layout>& value, bool stochastic,
                             const Words<Layout>& random) {
  Words<Layout> words = {};
  if (column.type == DType::float32) {
    NGN_EACH(j) words[j] = bit_cast<uint32_t>(value[j]);
    if constexpr (Layout::COUNT <= 4) store_words<Layout, 4>(column.at, o, n, words);
  } else if (column.type == DType::int8 || column.type == DType::uint8) {
    if constexpr (Layout::COUNT <= 4) {
      const uint32_t scale = column.type == DType::int8 ? encode_m(value, random, words) : encode_v(value, random, words);
      store_words<Layout, 1>(column.at, o, n, words);
      if (owns_scale<Layout>() && o < n) of_device(column.scales)[o / static_cast<int>(QUANT_BLOCK)] = scale;
    }
  } else {
    NGN_EACH(j) {
      uint32_t half;
      if (column.type == DType::bfloat16) {
        bfloat16 near;
        narrow(value[j], near);
        half = stochastic ? (bit_cast<uint32_t>(value[j]) + (random[j] >> 16)) >> 16 : near.bits;
      } else {
        float16 near;
        narrow(value[j], near);
        half = stochastic ? stochastic_float16(value[j], random[j]).bits : near.bits;
      }
      put_part<Layout, 16>(words, j, half);
    }
    store_words<Layout, 2>(column.at, o, n, words);
  }
}

}  // namespace NGN_ISA
}  // namespace ngn

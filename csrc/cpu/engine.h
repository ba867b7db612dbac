// What engine.cpp offers to the bindings: one Engine per instruction set; their results differ by rounding.
#pragma once

#include "math/tables.h"

namespace ngn {

constexpr int64_t CHUNK = 16384;  // elements; a multiple of every block and vector size

// A column in a format that is narrower than float32.
struct EncodedColumn {
  void* data;
  void* scales;
  DType type;
  Rounding rounding;
};

struct Engine {
  const char* name;
  bool (*runs_here)();
  void (*reduce)(const Bucket&, const Rule&, int threads);
  void (*apply)(const Bucket&, const Rule&, int threads, bool last);
  void (*encode)(const float* values, int64_t numel, int64_t noise_key, int64_t step_count, int64_t offset,
                 EncodedColumn column);
  void (*decode)(EncodedColumn column, int64_t numel, float* values);
};

extern const Engine engine_baseline;
extern const Engine engine_avx2;  // this and the next in x86 builds (NGN_X86) only
extern const Engine engine_avx512;

}  // namespace ngn

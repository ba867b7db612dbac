// What cpu.cpp offers to the bindings: one Engine per instruction set; results differ by rounding.
#pragma once

#include "tables.h"

namespace ngn {

constexpr int64_t CHUNK = 16384;  // elements; a multiple of every block and vector size

// A column in a format that is narrower than float32.
struct Encoded {
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
  void (*encode)(const float* values, int64_t numel, int64_t noise_key, int64_t step_count, int64_t first,
                 Encoded column);
  void (*decode)(Encoded column, int64_t numel, float* values);
};

extern const Engine engine_baseline;
extern const Engine engine_avx2;  // these two in x86 builds (NGN_X86) only
extern const Engine engine_avx512;

// Starts a team of threads that all run work(data): OpenMP's, when the process has one loaded.
using TeamLauncher = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
extern TeamLauncher team_launcher;

void run_team(void (*work)(void*), void* data, int threads);

// A small number that stays the same for a thread as long as it lives.
int thread_slot();

}  // namespace ngn

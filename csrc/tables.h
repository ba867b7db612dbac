// Plain structs that cross layers: Python's tables, the engine and a device kernel read the same bytes.
// ngn_kernels/tables.py has the same columns by the same names; a test compares them.
#pragma once

#include <cstdint>

#ifndef NGN_ISA
#define NGN_ISA baseline
#endif

namespace ngn {

// int8 and uint8 are the codes of an 8-bit m and v.
enum class DType : int { float64 = 0, float32 = 1, bfloat16 = 2, float16 = 3, int8 = 4, uint8 = 5 };

// How parameters of 16 bits are stored.
enum class Rounding : int { nearest = 0, stochastic = 1, exact = 2 };

constexpr int64_t QUANTUM = 64;  // elements of an 8-bit column that share a scale

// Why a step was left undone, in whole or in part; the order is ngn_kernels.rules.Reason.
enum class Reason : int64_t {
  none = 0,
  amp_overflow = 1,
  loss_not_finite = 2,
  loss_below_floor = 3,
  gradient_not_finite = 4,
  elements_kept = 5,
};

struct Rule {
  bool momentum, coordinate, rms, regularised;
};

// One parameter. A null gradient means that it takes no part in this step.
struct TensorRow {
  void* x;
  const void* g;
  void* m;
  void* v;
  float* step;
  int64_t numel;
  int64_t group;
  int64_t copies;  // on how many ranks the same elements lie: each brings that part of their sums
  float* m_scale;     // of an 8-bit m, one for each QUANTUM
  uint32_t* v_scale;  // the same of v
  int16_t* remainder;  // what a bfloat16 parameter lacks of its float32, with exact rounding
  int64_t noise_key;
  int64_t first;  // the place of element 0 in the whole parameter, of which a part may lie here
};

constexpr int COLUMNS = sizeof(TensorRow) / sizeof(int64_t);

// Elements [begin, begin + CHUNK) of a row, cut at the row's end.
struct Chunk {
  int64_t row;
  int64_t begin;
};

struct Group {
  double lr, beta1, beta2, eps, weight_decay;
};

// What a step is told.
struct Inputs {
  double loss;
  double loss_floor;
  double grad_scale;     // gradients come multiplied by this; 1 without AMP
  double found_inf;      // non-zero: AMP saw an overflow
  double max_grad_norm;  // infinity: no clipping
};

// Sums of one bucket, each already weighted by its group.
struct Sums {
  double weighted;   // Q: sum of a_j g^2 / D
  double alignment;  // W: sum of c_j lambda_j g x
  double norm;       // sum of g^2
};

// What a step tells.
struct Counts {
  int64_t reason;       // of the step under way, over the buckets applied so far
  int64_t skipped;      // number of steps with a reason
  int64_t last_reason;  // of the last such step
};

// All tensors of one device and one set of element types, as columns: only `g` moves between steps.
struct Bucket {
  const int64_t* columns[COLUMNS];  // in the order of TensorRow
  int64_t rows;
  const Chunk* chunks;
  int64_t chunk_count;
  const Group* groups;
  int64_t group_count;
  const Inputs* inputs;
  Sums* sums;           // of this process, by bucket: reduce() writes its own row
  const Sums* totals;   // of all ranks, to be added up: what a step uses; in a process alone the same memory as sums
  int64_t bucket_count;
  int64_t index;        // which of the sums is ours
  Sums* partials;       // one slot per chunk
  Counts* counts;
  double* sizes;        // of the last step that was applied: rho, then gamma of each group
  DType x_type, g_type, m_type, v_type;
  Rounding rounding;
};

inline namespace NGN_ISA {

inline TensorRow row_of(const Bucket& bucket, int64_t i) {
  const int64_t* const* c = bucket.columns;
  return {reinterpret_cast<void*>(c[0][i]), reinterpret_cast<const void*>(c[1][i]),
          reinterpret_cast<void*>(c[2][i]), reinterpret_cast<void*>(c[3][i]),
          reinterpret_cast<float*>(c[4][i]), c[5][i], c[6][i], c[7][i],
          reinterpret_cast<float*>(c[8][i]), reinterpret_cast<uint32_t*>(c[9][i]),
          reinterpret_cast<int16_t*>(c[10][i]), c[11][i], c[12][i]};
}

}  // namespace NGN_ISA
}  // namespace ngn

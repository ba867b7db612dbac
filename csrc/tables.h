// Plain structs that cross layers: Python's tables, the engine and a device kernel read the same bytes.
#pragma once

#include <cstdint>

#ifndef NGN_ISA
#define NGN_ISA baseline
#endif

namespace ngn {

enum class DType : int { float64 = 0, float32 = 1, bfloat16 = 2, float16 = 3 };

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
};

// Elements [begin, begin + CHUNK) of a row, cut at the row's end.
struct Chunk {
  int64_t row;
  int64_t begin;
};

struct Group {
  double lr, beta1, beta2, eps, weight_decay;
};

// What one step is told (the first four) and what it tells.
struct StepScalars {
  double height;         // h = loss - loss_floor
  double grad_scale;     // gradients come multiplied by this; 1 without AMP
  double found_inf;      // non-zero: AMP saw an overflow
  double max_grad_norm;  // infinity: no clipping
  double shrink;         // out: rho of the last step that was applied
};

// Sums of one bucket, each already weighted by its group.
struct Sums {
  double weighted;   // Q: sum of a_j g^2 / D
  double alignment;  // W: sum of c_j lambda_j g x
  double norm;       // sum of g^2
};

struct Report {
  int64_t reason;       // of the step under way, over the buckets applied so far
  int64_t skipped;      // number of steps with a reason
  int64_t last_reason;  // of the last such step
};

// All tensors of one device and one set of element types, as columns: only `g` moves between steps.
struct Bucket {
  const int64_t* columns[7];  // x g m v step numel group
  int64_t rows;
  const Chunk* chunks;
  int64_t chunk_count;
  const Group* groups;
  StepScalars* scalars;
  Sums* sums;           // of all buckets
  int64_t bucket_count;
  int64_t index;        // which of the sums is ours
  Sums* partials;       // one slot per chunk
  Report* report;
  DType x_type, g_type, state_type;

  TensorRow row(int64_t i) const {
    return {reinterpret_cast<void*>(columns[0][i]), reinterpret_cast<const void*>(columns[1][i]),
            reinterpret_cast<void*>(columns[2][i]), reinterpret_cast<void*>(columns[3][i]),
            reinterpret_cast<float*>(columns[4][i]), columns[5][i], columns[6][i]};
  }
};

}  // namespace ngn

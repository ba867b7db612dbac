// The tables of a bucket, as plain structs: Python, the engines and GPUs read the same bytes. Structs and codes
// that Python shares come from layout.h, which the build makes of ngn_kernels/layout.py.
#pragma once

#include <cstdint>
#include <cstring>

#include "layout.h"

#ifndef NGN_ISA
#define NGN_ISA baseline
#endif
#ifdef __CUDACC__
#define NGN_HD __host__ __device__
#else
#define NGN_HD
#endif

namespace ngn {

constexpr int COLUMNS = sizeof(TensorRow) / sizeof(int64_t);

// Elements [begin, begin + CHUNK) of a row, cut at the row's end.
struct Chunk {
  int64_t row;
  int64_t begin;
};

// All tensors of one device and one set of element types, as columns: only `g` changes between steps.
struct Bucket {
  const int64_t* columns[COLUMNS];  // in the order of TensorRow
  int64_t rows;
  const Chunk* chunks;
  int64_t chunk_count;
  const Group* groups;
  int64_t group_count;
  const Inputs* inputs;
  Sums* sums;          // of this process, by bucket: reduce() writes its own row
  const Sums* totals;  // of all ranks, by bucket: a step adds them up; without other ranks the same memory as sums
  int64_t bucket_count;
  int64_t index;       // of this bucket's row in sums
  Sums* partials;      // one per chunk
  Counts* counts;
  double* sizes;       // of the last step that was applied, by Size
  DType x_type, g_type, m_type, v_type;
  Rounding rounding;
};

inline namespace NGN_ISA {

NGN_HD inline TensorRow row_of(const Bucket& bucket, int64_t i) {
  static_assert(sizeof(TensorRow) == COLUMNS * sizeof(int64_t), "every field is one number of the table");
  int64_t numbers[COLUMNS];
  for (int c = 0; c < COLUMNS; ++c) numbers[c] = bucket.columns[c][i];
  TensorRow row;
  std::memcpy(&row, numbers, sizeof(row));
  return row;
}

}  // namespace NGN_ISA
}  // namespace ngn

// What the kernels and their launcher agree on: the argument of every kernel, and which kernels there are.
#pragma once

#include <cstdint>

#include "math/tables.h"

namespace ngn {

constexpr int THREADS = 256;  // of a block, which works on one chunk

// What the columns are stored as, as far as that changes the code; within a storage, types are looked up at run time.
enum class Storage {
  single,  // m and v in float32; x and g in any type, rounded to nearest
  half,    // x and g alone, in 16 bits, rounded to nearest
  narrow,  // any format
};

// The one argument of a kernel. The tables are those of Bucket, in the memory of the device.
struct Launch {
  Bucket bucket;
  Rule rule;           // with given directions, a sum is over g d, and an update reads d in the place of g
  bool last;           // the step's last bucket
  int64_t chunk_size;  // elements
  uint32_t* ticket;    // chunks that are done
};

// Every sum: name, RMS, REGULARISED, DIRECTED, storage.
#define NGN_REDUCE_KERNELS(kernel)                         \
  kernel(reduce_norm, false, false, false, single)         \
  kernel(reduce_norm_half, false, false, false, half)      \
  kernel(reduce_rms, true, false, false, single)           \
  kernel(reduce_rms_narrow, true, false, false, narrow)    \
  kernel(reduce_aligned, true, true, false, single)        \
  kernel(reduce_aligned_narrow, true, true, false, narrow) \
  kernel(reduce_directed, false, false, true, single)
// Every update: name, MOMENTUM, COORDINATE, RMS, storage. Regularised decay plays no part in its loop, and a given
// direction takes the gradient's place there.
#define NGN_APPLY_KERNELS_OF(kernel, name, MOMENTUM, COORDINATE, RMS) \
  kernel(name, MOMENTUM, COORDINATE, RMS, single)                     \
  kernel(name##_narrow, MOMENTUM, COORDINATE, RMS, narrow)
#define NGN_APPLY_KERNELS(kernel)                                              \
  kernel(apply_plain_half, false, false, false, half)                          \
  kernel(apply_coordinate_half, false, true, false, half)                      \
  NGN_APPLY_KERNELS_OF(kernel, apply_plain, false, false, false)               \
  NGN_APPLY_KERNELS_OF(kernel, apply_momentum, true, false, false)             \
  NGN_APPLY_KERNELS_OF(kernel, apply_coordinate, false, true, false)           \
  NGN_APPLY_KERNELS_OF(kernel, apply_coordinate_rms, false, true, true)        \
  NGN_APPLY_KERNELS_OF(kernel, apply_rms, false, false, true)                  \
  NGN_APPLY_KERNELS_OF(kernel, apply_momentum_rms, true, false, true)          \
  NGN_APPLY_KERNELS_OF(kernel, apply_momentum_coordinate_rms, true, true, true)

}  // namespace ngn

// Work on a bucket's chunks: which thread works on which chunk, and what neighbouring chunks share.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/engine.h"
#include "cpu/threads.h"
#include "math/convert.h"
#include "math/rule.h"

namespace ngn {
inline namespace NGN_ISA {
namespace {

int64_t end_of(const Chunk& chunk, const TensorRow& row) {
  return chunk.begin + CHUNK < row.numel ? chunk.begin + CHUNK : row.numel;
}

int64_t elements_of(const Bucket& bucket, const Chunk& chunk) {
  return end_of(chunk, row_of(bucket, chunk.row)) - chunk.begin;
}

// Calls make_worker() on each thread, and the worker it returns with the index of each chunk. Every thread has its
// own part of the chunks, the same one in every pass, so that its data stay in its caches. Parts have about the same
// number of elements. A thread that has finished its part takes a few neighbouring chunks of the others' at a time.
template <typename Work>
void for_each_chunk(const Bucket& bucket, int threads, bool reverse, Work&& make_worker) {
  struct alignas(64) Part {
    std::atomic<int64_t> next{0};
    int64_t begin, end;
  };
  struct Shared {
    std::vector<Part> parts;
    int64_t batch;
    bool reverse;
    Work* make_worker;
  };
  constexpr int64_t start = 256;  // the cost of starting a chunk, in elements
  const int64_t count = bucket.chunk_count;
  const int team = static_cast<int>(count < threads ? count : threads);
  if (team < 1) return;
  Shared shared{std::vector<Part>(static_cast<size_t>(team)), 1 + count / (16 * team), reverse, &make_worker};
  int64_t remaining = 0, chunk = 0;
  for (int64_t i = 0; team > 1 && i < count; ++i) remaining += start + elements_of(bucket, bucket.chunks[i]);
  for (int t = 0; t < team; ++t) {
    shared.parts[t].begin = chunk;
    const int64_t share = remaining / (team - t);
    for (int64_t taken = 0; taken < share && chunk < count; ++chunk) {
      const int64_t cost = start + elements_of(bucket, bucket.chunks[chunk]);
      taken += cost;
      remaining -= cost;
    }
    if (t == team - 1) chunk = count;
    shared.parts[t].end = chunk;
  }
  run_team(
      [](void* data) {
        Shared& shared = *static_cast<Shared*>(data);
        auto worker = (*shared.make_worker)();
        const size_t team = shared.parts.size(), own = static_cast<size_t>(thread_slot()) % team;
        for (size_t t = 0; t < team; ++t) {
          Part& part = shared.parts[(own + t) % team];
          const int64_t count = part.end - part.begin;
          for (;;) {
            const int64_t done = part.next.fetch_add(shared.batch, std::memory_order_relaxed);
            if (done >= count) break;
            const int64_t n = count - done < shared.batch ? count - done : shared.batch;
            const int64_t begin = shared.reverse ? part.end - done - n : part.begin + done;
            for (int64_t i = begin; i < begin + n; ++i) worker(i);
          }
        }
      },
      &shared, team);
}

// Coefficients change with the group and the step count only, which neighbouring rows often share.
template <typename T>
class CoefficientCache {
 public:
  CoefficientCache(const Bucket& bucket, const Rule& rule, double clip, double rho)
      : bucket_(bucket), rule_(rule), clip_(clip), rho_(rho) {}

  const Coefficients<T>& of(const TensorRow& row) {
    const double count = static_cast<double>(*row.step) + 1;
    if (row.group != group_ || count != count_) {
      group_ = row.group;
      count_ = count;
      k_ = coefficients<T>(rule_, bucket_.groups[group_], count, *bucket_.inputs, clip_, rho_,
                           x_limit(), overflow_limit<T>(bucket_.m_type),
                           stochastic_limit<T>(bucket_.v_type));
    }
    return k_;
  }

 private:
  T x_limit() const {
    return bucket_.rounding == Rounding::stochastic ? stochastic_limit<T>(bucket_.x_type)
                                                    : overflow_limit<T>(bucket_.x_type);
  }

  const Bucket& bucket_;
  const Rule& rule_;
  double clip_, rho_;
  int64_t group_ = -1;
  double count_ = 0;
  Coefficients<T> k_;
};

}  // namespace
}  // namespace NGN_ISA
}  // namespace ngn

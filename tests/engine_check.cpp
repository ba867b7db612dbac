// Runs the engine's baseline over every rule and element type and prints a hash of all results.
// Two machines that print the same lines computed the same bits.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/engine.h"

namespace {

using namespace ngn;

struct Random {
  uint64_t state = 88172645463325252ull;
  double next() {  // in (-1, 1)
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<double>(static_cast<int64_t>(state)) * 0x1p-63;
  }
};

std::vector<char> random_values(DType type, int64_t n, double scale, bool positive, Random& random) {
  std::vector<char> bytes(static_cast<size_t>(n * size_of(type)));
  dispatch_type(type, [&](auto element) {
    using E = decltype(element);
    for (int64_t i = 0; i < n; ++i) {
      const double value = scale * random.next();
      E stored;
      narrow(positive ? value * value : value, stored);
      std::memcpy(bytes.data() + static_cast<size_t>(i) * sizeof(E), &stored, sizeof(E));
    }
  });
  return bytes;
}

uint64_t hash(const std::vector<char>& bytes, uint64_t h) {
  for (const char byte : bytes) h = (h ^ static_cast<unsigned char>(byte)) * 1099511628211ull;
  return h;
}

void run(const Rule& rule, DType x_type, DType g_type, DType state_type, int threads) {
  Random random;
  const int64_t sizes[] = {1, 17, CHUNK, CHUNK + 5, 3 * CHUNK - 1};
  constexpr int64_t rows = 5;
  std::vector<std::vector<char>> x, g, m, v;
  std::vector<float> steps(rows, 0);
  std::vector<int64_t> table(COLUMNS * rows);
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < rows; ++i) {
    x.push_back(random_values(x_type, sizes[i], 1.0, false, random));
    g.push_back(random_values(g_type, sizes[i], 0.1, false, random));
    m.push_back(random_values(state_type, sizes[i], 1e-3, false, random));
    v.push_back(random_values(state_type, sizes[i], 0.1, true, random));
    const int64_t row[COLUMNS] = {reinterpret_cast<int64_t>(x[i].data()), reinterpret_cast<int64_t>(g[i].data()),
                           reinterpret_cast<int64_t>(m[i].data()), reinterpret_cast<int64_t>(v[i].data()),
                           reinterpret_cast<int64_t>(&steps[i]), sizes[i], i % 2, 1};
    for (int c = 0; c < COLUMNS; ++c) table[c * rows + i] = row[c];
    for (int64_t begin = 0; begin < sizes[i]; begin += CHUNK) chunks.push_back({i, begin});
  }
  Group groups[] = {{0.1, 0.9, 0.999, 1e-8, 0.01, 0}, {0.01, 0.8, 0.99, 1e-6, 0.1, 0.5}};
  const Inputs inputs = {0.9, 0.2, 2.0, 0, 5.0, 0.5};
  Sums sums = {};
  Counts counts = {};
  double step_sizes[STEP_SIZES + 2] = {};
  std::vector<Sums> partials(chunks.size());
  Bucket bucket = {};
  for (int c = 0; c < COLUMNS; ++c) bucket.columns[c] = table.data() + c * rows;
  bucket.rows = rows;
  bucket.chunks = chunks.data();
  bucket.chunk_count = static_cast<int64_t>(chunks.size());
  bucket.groups = groups;
  bucket.group_count = 2;
  bucket.inputs = &inputs;
  bucket.sums = &sums;
  bucket.totals = &sums;
  bucket.bucket_count = 1;
  bucket.partials = partials.data();
  bucket.counts = &counts;
  bucket.sizes = step_sizes;
  bucket.x_type = x_type;
  bucket.g_type = g_type;
  bucket.m_type = state_type;
  bucket.v_type = state_type;

  engine_baseline.reduce(bucket, Rule{}, threads);
  if (!rule.coordinate) engine_baseline.reduce(bucket, rule, threads);
  engine_baseline.apply(bucket, rule, threads, true);
  uint64_t h = 14695981039346656037ull;
  for (int64_t i = 0; i < rows; ++i) h = hash(v[i], hash(m[i], hash(x[i], h)));
  std::printf("%d%d%d%d%d %d%d%d threads %d rho %a skipped %lld hash %016llx\n", rule.momentum, rule.coordinate,
              rule.rms, rule.regularised, rule.adamw_decay, static_cast<int>(x_type), static_cast<int>(g_type),
              static_cast<int>(state_type), threads, step_sizes[0], static_cast<long long>(counts.skipped),
              static_cast<unsigned long long>(h));
}

}  // namespace

// Arguments: numbers of threads, 1 and 2 by default.
int main(int argc, char** argv) {
  std::vector<int> teams;
  for (int i = 1; i < argc; ++i) teams.push_back(std::atoi(argv[i]));
  if (teams.empty()) teams = {1, 2};
  for (int flags = 0; flags < 1 << FLAG_COUNT; ++flags) {
    const Rule rule = rule_of(flags);
    if (rule.directed || (rule.nesterov && !rule.adamw_decay)) continue;
    if (rule.regularised && (rule.coordinate || !rule.rms)) continue;
    if (rule.adamw_decay && rule.regularised) continue;
    for (const int threads : teams) {
      run(rule, DType::float64, DType::float64, DType::float64, threads);
      run(rule, DType::float32, DType::float32, DType::float32, threads);
      run(rule, DType::bfloat16, DType::float32, DType::float32, threads);
      run(rule, DType::float16, DType::float16, DType::float32, threads);
    }
  }
}

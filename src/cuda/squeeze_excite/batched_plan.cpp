#include "cuda/squeeze_excite/batched_plan.h"

#include <algorithm>

#include "common/divide.h"

namespace fusewise::cuda {

BatchedImages batched_images(std::int64_t n, std::int64_t c, int multiprocessors) {
  // Every SM has the same number of blocks, as nearly as rows of at least 256 bytes allow.
  constexpr std::int64_t kLeastColumns = 16;
  constexpr std::int64_t kStart = 4;  // what a block costs beside its columns, in columns
  const std::int64_t columns = c / 8, together = kBatchedImageBlocks * multiprocessors;
  const std::int64_t least = divide_up(columns, kBatchedImageThreads);
  std::int64_t best = least, best_cost = 0;
  for (std::int64_t blocks = least; blocks < least + 64; ++blocks) {
    const std::int64_t mine = divide_up(columns, blocks);
    if (blocks > least && mine < kLeastColumns) break;
    const std::int64_t cost = divide_up(n * divide_up(columns, mine), together) * (mine + kStart);
    if (best_cost == 0 || cost < best_cost) best = blocks, best_cost = cost;
  }
  BatchedImages result{};
  result.columns = static_cast<int>(divide_up(columns, best));
  result.blocks = static_cast<int>(divide_up(columns, result.columns));
  return result;
}

namespace {

constexpr double kMemory = 3.6e6, kCache = 5.5e6;  // bytes per microsecond

/// The two passes over images at the given rate: sums, then scaling with what is left in L2.
double passes(const BatchedProblem& p, std::int64_t l2_cache, double memory) {
  const double image = 2.0 * p.n * p.c * p.hw;
  const double cached = std::min(image, 0.6 * static_cast<double>(l2_cache));
  const double sums = (p.backward ? 2 : 1) * image;
  return (sums + image + image - cached) / memory +
         cached / (kCache * std::min(1.0, memory / kMemory));
}

double products(const BatchedProblem& p) { return static_cast<double>(p.n) * p.c * p.r; }

}  // namespace

double expected_batched_time(const BatchedProblem& p, std::int64_t l2_cache, int multiprocessors) {
  // Of a kernel without any work, among those of a call: measured for one sample, and fitted to the
  // blocks of the model zoo for more, forward and backward.
  const double kernel = p.n == 1 ? 2.2 : p.backward ? 3.6 : 3.3;
  const BatchedImages images = batched_images(p.n, p.c, multiprocessors);
  // A few SMs cannot saturate the memory.
  const double busy = std::min<double>(multiprocessors, p.n * images.blocks);
  const double memory = std::min(kMemory, 41e3 * busy);
  // Half-precision weights are TF32 numbers. A float32 is the sum of two.
  const double terms = p.weight_bytes == 2 ? 2 : 3;
  const double multiplications = (2 * terms + (p.backward ? 2 * 3 : 0)) * products(p);
  const double weights = (p.backward ? 4.0 : 2.0) * p.c * p.r * p.weight_bytes;
  return 4 * kernel + passes(p, l2_cache, memory) + multiplications / (0.5e6 * multiprocessors) +
         weights / kMemory;
}

double expected_two_pass_time(const BatchedProblem& p, std::int64_t l2_cache) {
  const double weights = 2 * products(p) * p.weight_bytes;
  return 8 + passes(p, l2_cache, kMemory) + weights / 3e6 + (p.backward ? products(p) / 1.5e6 : 0);
}

}  // namespace fusewise::cuda

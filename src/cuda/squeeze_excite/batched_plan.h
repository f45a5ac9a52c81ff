#pragma once

// How the batched kernels divide their work among blocks, and how long they are expected to take.
// Plain C++: tested without a GPU.

#include <cstdint>

namespace fusewise::cuda {

inline constexpr int kBatchedImageThreads = 256;
inline constexpr int kBatchedImageBlocks = 3;  ///< per SM, with registers for 8 loads in flight
inline constexpr int kBatchedDepth = 32;       ///< depth of a stage of a GEMM
inline constexpr int kBatchedMostSlices = 8;   ///< the largest portable cluster

struct BatchedProblem {
  std::int64_t n, c, hw, r;
  int weight_bytes;
  bool backward;
};

/// How the passes over images are divided. A block has a range of channels of a sample.
struct BatchedImages {
  int columns;  ///< vectors of 8 channels per block; the last block of a sample may have fewer
  int blocks;   ///< per sample
};

BatchedImages batched_images(std::int64_t n, std::int64_t c, int multiprocessors);

/// How a GEMM is divided. A cluster of `slices` blocks computes a square tile of the result. Each
/// of them has a slice of the depth.
struct BatchedTiles {
  int tile;    ///< 32 or 64
  int slices;  ///< a power of two
};

/// For `tiles_of(side)` tiles of that side.
template <typename TilesOf>
BatchedTiles batched_tiles(std::int64_t depth, int multiprocessors, bool clusters,
                           TilesOf tiles_of) {
  BatchedTiles result{32, 1};
  if (tiles_of(64) >= 2 * multiprocessors) result.tile = 64;
  const std::int64_t tiles = tiles_of(result.tile);
  // A slice has at least two stages.
  while (clusters && result.slices < kBatchedMostSlices &&
         tiles * result.slices < 2 * multiprocessors &&
         depth >= 4 * kBatchedDepth * result.slices) {
    result.slices *= 2;
  }
  return result;
}

/// Approximate times in microseconds, on a GPU with the memory of an H200.
double expected_batched_time(const BatchedProblem& problem, std::int64_t l2_cache,
                             int multiprocessors);
/// Of two_pass, where every sample reads all weights.
double expected_two_pass_time(const BatchedProblem& problem, std::int64_t l2_cache);

}  // namespace fusewise::cuda

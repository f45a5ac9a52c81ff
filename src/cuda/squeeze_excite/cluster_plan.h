#pragma once

// How the cluster kernels cut a sample into slices that fit registers and shared memory. Plain C++:
// tested without a GPU.

#include <compare>
#include <cstdint>
#include <optional>

namespace fusewise::cuda {

struct ClusterProblem {
  std::int64_t n, c, hw, r;
  int element_bytes;
  int weight_bytes;
  bool planar;
  bool backward;
  friend auto operator<=>(const ClusterProblem&, const ClusterProblem&) = default;
};

/// How a sample is cut: a cluster has channel_slices * pixel_slices blocks.
struct ClusterCut {
  int channel_slices, pixel_slices, threads;
  constexpr int blocks() const { return channel_slices * pixel_slices; }
};

inline constexpr int kClusterMostThreads = 512;
inline constexpr int kClusterMostBlocks = 16;
inline constexpr int kClusterBarrierFloats = 8;  // room for four barriers of 8 bytes
/// Vectors of the held image that a thread keeps in registers; the others are in shared memory.
inline constexpr int cluster_registers(bool backward) { return backward ? 12 : 16; }

/// What a GPU offers, with one block of 512 threads on a multiprocessor, and with two of 256.
struct ClusterLimits {
  int shared_memory[2];                     ///< bytes for a block
  int clusters[2][kClusterMostBlocks + 1];  ///< that run at once, by their size
};

struct ClusterPlan {
  ClusterCut cut;
  int multiprocessors;              ///< of the GPU
  int clusters;                     ///< samples in work at once
  int late_from, late_nanoseconds;  ///< clusters from here on start late
  int channels;                     ///< of a slice; the last may have fewer
  int pixels;                       ///< of a slice; the last may have fewer
  int strands;                      ///< threads that share a channel's pixels; NCHW: a power of two
  int shared_vectors;               ///< of a thread, in shared memory
  int w1_stride;                    ///< elements from row to row of the slice of W1
  int channel_lanes;  ///< lanes that share a channel, or a hidden unit, in the small sums
  int hidden_lanes;
  int rows_of_channels, row_stride, row_floats;  ///< of partial sums
  int shared_bytes;
};

/// Everything that follows from a cut; nothing where it does not fit.
std::optional<ClusterPlan> cluster_plan_with(const ClusterProblem& problem, ClusterCut cut,
                                             const ClusterLimits& limits);

/// The plan that is expected to be the fastest; nothing where none fits.
std::optional<ClusterPlan> cluster_plan(const ClusterProblem& problem, const ClusterLimits& limits);

/// Microseconds, roughly: fitted to every plan for 33 problems on an H200.
double expected_time(const ClusterProblem& problem, const ClusterPlan& plan);

}  // namespace fusewise::cuda

#pragma once

// How the cluster kernels split a sample into slices that fit registers and shared memory. Plain
// C++: tested without a GPU.

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

/// How a sample is split. A cluster has channel_slices * pixel_slices blocks.
struct ClusterCut {
  int channel_slices, pixel_slices, threads;
  constexpr int blocks() const { return channel_slices * pixel_slices; }
};

inline constexpr int kClusterMostThreads = 512;
inline constexpr int kClusterMostBlocks = 16;
inline constexpr int kClusterBarrierFloats = 8;  // room for four barriers of 8 bytes
/// Vectors of the held image that a thread has in registers. The others are in shared memory.
inline constexpr int cluster_registers(bool backward) { return backward ? 12 : 16; }

/// Limits of a GPU with one block of 512 threads per SM, and with two of 256.
struct ClusterLimits {
  int shared_memory[2];                     ///< bytes per block
  int clusters[2][kClusterMostBlocks + 1];  ///< that run at once, by cluster size
};

struct ClusterPlan {
  ClusterCut cut;
  int multiprocessors;              ///< of the GPU
  int clusters;                     ///< samples processed at once
  int late_from, late_nanoseconds;  ///< clusters from this index on start late
  int channels;                     ///< of a slice; the last may have fewer
  int pixels;                       ///< of a slice; the last may have fewer
  int strands;                      ///< threads that share a channel's pixels; NCHW: a power of two
  int shared_vectors;               ///< per thread, in shared memory
  int w1_stride;                    ///< row stride of the slice of W1, in elements
  int channel_lanes;  ///< lanes that share a channel, or a hidden unit, in the small sums
  int hidden_lanes;
  int rows_of_channels, row_stride, row_floats;  ///< of partial sums
  int shared_bytes;
};

/// The plan that follows from a cut, or nothing if it does not fit.
std::optional<ClusterPlan> cluster_plan_with(const ClusterProblem& problem, ClusterCut cut,
                                             const ClusterLimits& limits);

/// The plan that is expected to be the fastest, or nothing if none fits.
std::optional<ClusterPlan> cluster_plan(const ClusterProblem& problem, const ClusterLimits& limits);

/// Approximate time in microseconds, fitted to every plan for 33 problems on an H200.
double expected_time(const ClusterProblem& problem, const ClusterPlan& plan);

}  // namespace fusewise::cuda

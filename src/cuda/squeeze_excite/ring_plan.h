#pragma once

// How the ring kernel cuts a problem into slices and shared memory. Plain C++: tested without a
// GPU.

#include <cstdint>
#include <optional>

namespace fusewise::cuda {

inline constexpr int kRingThreads = 256;
inline constexpr int kRingWarps = kRingThreads / 32;
inline constexpr int kRingMaxStages = 8;
inline constexpr int kRingBarrierBytes = 128;

/// How one sample is cut into slices, one for each block of a group.
enum class Split {
  channels_last_by_channel,  ///< NHWC, a slice is a range of channels of every pixel
  channels_last_by_pixel,    ///< NHWC, a slice is a range of pixels with all channels
  planar_by_channel,         ///< NCHW, a slice is a range of whole channel planes
};

struct RingProblem {
  std::int64_t n, c, hw, r;
  int element_bytes;
  int weight_bytes;
  bool planar;
  friend bool operator==(const RingProblem&, const RingProblem&) = default;
};

struct RingPlan {
  Split split;
  int slices;      ///< blocks that share a sample, one on each multiprocessor
  int groups;      ///< samples in work at once
  int steps;       ///< samples that a group works on, one after another
  int per_slice;   ///< channels, or pixels, of a slice; the last may have fewer
  int channels;    ///< the most channels that a block deals with
  int stages;      ///< tiles in shared memory
  bool staggered;  ///< every other group starts late
  int tile_bytes;
  int weight_bytes;    ///< of one matrix
  int row_floats;      ///< partial sums of the reduction
  int scratch_floats;  ///< partial sums of the small products
  int shared_bytes;
};

/// Everything that follows from a choice of split and slices; nothing where it does not fit.
std::optional<RingPlan> ring_plan_with(const RingProblem& problem, Split split, int slices,
                                       int multiprocessors, int shared_memory);

/// The plan that is expected to be the fastest; nothing where none fits.
std::optional<RingPlan> ring_plan(const RingProblem& problem, int multiprocessors,
                                  int shared_memory);

}  // namespace fusewise::cuda

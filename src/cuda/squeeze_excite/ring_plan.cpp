#include "cuda/squeeze_excite/ring_plan.h"

#include <algorithm>

namespace fusewise::cuda {
namespace {

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t align_up(std::int64_t bytes) { return divide_up(bytes, 128) * 128; }

/// Microseconds, roughly, fitted to a sweep over all plans on an H200: each step costs its bytes at
/// a multiprocessor's share of the bandwidth, and the latency of summing, telling and opening.
double expected_time(const RingPlan& plan) {
  constexpr double kBytesPerMicrosecond = 32e3;
  const bool by_pixel = plan.split == Split::channels_last_by_pixel;
  const double latency = by_pixel ? 8 + plan.channels / 48.0 : 8;
  return plan.steps * (latency + 2 * plan.tile_bytes / kBytesPerMicrosecond);
}

}  // namespace

std::optional<RingPlan> ring_plan_with(const RingProblem& problem, Split split, int slices,
                                       int multiprocessors, int shared_memory) {
  const std::int64_t vector = 16 / problem.element_bytes;
  const bool by_pixel = split == Split::channels_last_by_pixel;
  const bool planar = split == Split::planar_by_channel;

  // A slice, and its weights, start and end on 16 bytes, as asynchronous copies want it.
  const std::int64_t unit =
      by_pixel ? 1 : std::max<std::int64_t>(vector, 16 / problem.weight_bytes);
  const std::int64_t extent = by_pixel ? problem.hw : problem.c;
  const std::int64_t per_slice = divide_up(divide_up(extent, unit), slices) * unit;
  slices = static_cast<int>(divide_up(extent, per_slice));
  if (slices > multiprocessors) return std::nullopt;
  const std::int64_t channels = by_pixel ? problem.c : per_slice;
  const std::int64_t pixels = by_pixel ? per_slice : problem.hw;
  // Channels-last: a thread keeps the sums of one vector of channels.
  if (!planar && channels / vector > kRingThreads) return std::nullopt;

  const std::int64_t tile = align_up(channels * pixels * problem.element_bytes);
  const std::int64_t weights = align_up(problem.r * channels * problem.weight_bytes);
  const std::int64_t rows = planar ? channels + kRingWarps : kRingThreads * vector;
  // A multiple of four floats, so that what lies behind can be read four at a time.
  const std::int64_t scratch =
      divide_up(std::max<std::int64_t>({kRingThreads, channels, problem.r}), 4) * 4;
  const std::int64_t fixed = kRingBarrierBytes + 2 * weights +
                             align_up(4 * (rows + scratch + 3 * channels + 2 * problem.r));
  if (fixed + tile > shared_memory) return std::nullopt;

  RingPlan plan{};
  plan.split = split;
  plan.slices = slices;
  plan.groups = static_cast<int>(std::min<std::int64_t>(problem.n, multiprocessors / slices));
  plan.steps = static_cast<int>(divide_up(problem.n, plan.groups));
  plan.per_slice = static_cast<int>(per_slice);
  plan.channels = static_cast<int>(channels);
  plan.stages = static_cast<int>(
      std::min<std::int64_t>({kRingMaxStages, (shared_memory - fixed) / tile, plan.steps}));
  // Measured: a late start pays for long waits or many steps, and costs a little otherwise.
  plan.staggered = plan.groups > 1 && (plan.steps > 2 || (by_pixel && plan.steps > 1));
  plan.tile_bytes = static_cast<int>(tile);
  plan.weight_bytes = static_cast<int>(weights);
  plan.row_floats = static_cast<int>(rows);
  plan.scratch_floats = static_cast<int>(scratch);
  plan.shared_bytes = static_cast<int>(fixed + plan.stages * tile);
  return plan;
}

std::optional<RingPlan> ring_plan(const RingProblem& problem, int multiprocessors,
                                  int shared_memory) {
  std::optional<RingPlan> best;
  const auto consider = [&](Split split, std::int64_t most) {
    // Of all numbers of slices that leave room for as many groups, the largest is the best: its
    // tiles are the smallest. With more groups than samples, the chip would stay empty.
    const std::int64_t last = std::min<std::int64_t>(most, multiprocessors);
    std::int64_t slices = std::min(std::max<std::int64_t>(multiprocessors / problem.n, 1), last);
    while (slices <= last) {
      const std::int64_t largest = std::min(multiprocessors / (multiprocessors / slices), last);
      const auto plan =
          ring_plan_with(problem, split, static_cast<int>(largest), multiprocessors, shared_memory);
      if (plan && (!best || expected_time(*plan) < expected_time(*best))) best = plan;
      slices = largest + 1;
    }
  };
  if (problem.planar) {
    consider(Split::planar_by_channel, problem.c);
  } else {
    // Rows of under 64 bytes waste the memory's bursts.
    const std::int64_t row = problem.c * problem.element_bytes;
    consider(Split::channels_last_by_channel, std::max<std::int64_t>(row / 64, 1));
    consider(Split::channels_last_by_pixel, problem.hw);
  }
  return best;
}

}  // namespace fusewise::cuda

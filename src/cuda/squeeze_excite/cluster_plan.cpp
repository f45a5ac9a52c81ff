#include "cuda/squeeze_excite/cluster_plan.h"

#include <algorithm>

#include "common/divide.h"

namespace fusewise::cuda {
namespace {

std::int64_t align_up(std::int64_t a, std::int64_t b) { return divide_up(a, b) * b; }

/// A power of two, as large as the threads allow.
int lanes_for(std::int64_t width, int threads) {
  int lanes = 1;
  while (lanes < 8 && 2 * lanes * width <= threads) lanes *= 2;
  return lanes;
}

}  // namespace

std::optional<ClusterPlan> cluster_plan_with(const ClusterProblem& problem, ClusterCut cut,
                                             const ClusterLimits& limits) {
  const bool alone = cut.threads == kClusterMostThreads;
  const int shared_memory = limits.shared_memory[alone ? 0 : 1];
  const std::int64_t vector = 16 / problem.element_bytes;
  // Slices and their weights start and end on 16-byte boundaries.
  const std::int64_t weight_vector = 16 / problem.weight_bytes;
  const std::int64_t channel_unit =
      problem.planar ? weight_vector : std::max(vector, weight_vector);
  const std::int64_t pixel_unit = problem.planar ? vector : 1;
  const std::int64_t channels =
      divide_up(divide_up(problem.c, channel_unit), cut.channel_slices) * channel_unit;
  const std::int64_t pixels =
      divide_up(divide_up(problem.hw, pixel_unit), cut.pixel_slices) * pixel_unit;
  if (divide_up(problem.c, channels) != cut.channel_slices) return std::nullopt;
  if (divide_up(problem.hw, pixels) != cut.pixel_slices) return std::nullopt;

  ClusterPlan plan{};
  plan.cut = cut;
  plan.channels = static_cast<int>(channels);
  plan.pixels = static_cast<int>(pixels);
  if (channels / std::min(vector, weight_vector) > cut.threads || problem.r > cut.threads) {
    return std::nullopt;
  }
  plan.channel_lanes = lanes_for(channels, cut.threads);
  plan.hidden_lanes = lanes_for(problem.r, cut.threads);
  // Lanes that share a sum read neighbouring rows. Choose a stride that puts these in different
  // banks.
  const std::int64_t apart = 32 / plan.channel_lanes;
  plan.row_stride = static_cast<int>(
      plan.channel_lanes == 1 ? channels : align_up(channels + 32 - apart, 32) - 32 + apart);
  std::int64_t most, rows;  // vectors of a thread; partial sums of a channel
  if (problem.planar) {
    if (problem.hw % vector != 0 || channels * 4 > cut.threads) return std::nullopt;
    plan.strands = 4;
    while (plan.strands * 2 * channels <= cut.threads) plan.strands *= 2;
    most = divide_up(pixels / vector, plan.strands);
    rows = divide_up(plan.strands, 32);
  } else {
    plan.strands = static_cast<int>(cut.threads / (channels / vector));
    most = divide_up(pixels, plan.strands);
    rows = plan.strands;
  }
  // The partial sums of backward's GEMMs are stored there too.
  if (problem.backward) {
    rows = std::max(rows, std::min(cut.threads / (channels / weight_vector), problem.r));
  }
  plan.rows_of_channels = static_cast<int>(rows);
  plan.row_floats = static_cast<int>(align_up(
      std::max<std::int64_t>(rows * plan.row_stride, problem.backward ? 2 * cut.threads : 0), 4));
  plan.shared_vectors =
      static_cast<int>(std::max<std::int64_t>(most - cluster_registers(problem.backward), 0));

  const std::int64_t held = std::int64_t{16} * plan.shared_vectors * cut.threads;
  const std::int64_t boxes =
      2 * (cut.pixel_slices > 1 ? cut.pixel_slices * channels : 0) +
      2 * (cut.channel_slices > 1 ? align_up(cut.channel_slices * problem.r, 2) : 0);
  const std::int64_t floats =
      kClusterBarrierFloats + plan.row_floats + boxes + 4 * channels + 3 * align_up(problem.r, 4);
  // Lanes that share a sum read neighbouring vectors, and the next lanes read another row. Choose a
  // stride that keeps eight lanes in different banks.
  std::int64_t stride = channels / weight_vector;
  if (plan.hidden_lanes < 8) {
    while (stride % (2 * plan.hidden_lanes) != plan.hidden_lanes) ++stride;
  }
  plan.w1_stride = static_cast<int>(stride * weight_vector);
  const std::int64_t bytes =
      held + 4 * floats + problem.r * (plan.w1_stride + channels) * problem.weight_bytes;
  if (bytes > shared_memory) return std::nullopt;
  plan.shared_bytes = static_cast<int>(bytes);

  plan.clusters = static_cast<int>(
      std::min<std::int64_t>(problem.n, limits.clusters[alone ? 0 : 1][cut.blocks()]));
  if (plan.clusters == 0) return std::nullopt;
  plan.multiprocessors = limits.clusters[0][1];
  plan.late_from = plan.clusters;
  if (plan.clusters > 1) {
    // Half of the clusters start late, so that some move data while others compute. The delay is a
    // fraction of the time to move the data, or of a step if there are several. The fraction was
    // measured on an H200.
    const std::int64_t steps = divide_up(problem.n, plan.clusters);
    const double passes = problem.backward ? 3 : 2;
    const double bytes = passes * plan.clusters * problem.c * problem.hw * problem.element_bytes;
    const double moving = bytes / 4000;  // nanoseconds, at 4 TB/s
    const double late = steps == 1  ? (problem.backward ? 0.15 : 0.22) * moving
                        : steps < 4 ? 0.25 * (moving + 5000)
                                    : (problem.backward ? 0.5 : 0.25) * (moving + 5000);
    plan.late_from = (plan.clusters + 1) / 2;
    // With few steps, the clusters that have one step less can all start late.
    const int rest = static_cast<int>(problem.n % plan.clusters);
    if (steps < 4 && rest > 0) plan.late_from = std::min(plan.late_from, rest);
    plan.late_nanoseconds = static_cast<int>(late);
  }
  return plan;
}

double expected_time(const ClusterProblem& problem, const ClusterPlan& plan) {
  struct Cost {
    double moving, short_rows, two_together;                          // of the time at 4 TB/s
    double step, product, pixel_exchange, channel_exchange, weights;  // microseconds
  };
  constexpr Cost kForward{0.94, 0.12, 0.2, 3.6, 0.057, 0.5, 0.4, 0.82};
  constexpr Cost kBackward{1.05, 0.07, 0.05, 6.2, 0.1, 0.5, 0.7, 0.45};
  const Cost& cost = problem.backward ? kBackward : kForward;

  const ClusterCut& cut = plan.cut;
  const double passes = problem.backward ? 3 : 2;
  // As if every slice were as large as the first.
  const double sample = passes * cut.channel_slices * plan.channels * cut.pixel_slices *
                        plan.pixels * problem.element_bytes;
  const auto move = [&](double clusters) {
    // A few SMs cannot saturate the memory.
    const double multiprocessors = std::min<double>(plan.multiprocessors, clusters * cut.blocks());
    return clusters * sample / std::min(4e6, 41e3 * multiprocessors);
  };
  const std::int64_t full = problem.n / plan.clusters, rest = problem.n % plan.clusters;
  const double steps = static_cast<double>(full + (rest > 0 ? 1 : 0));
  const double moving = full * move(plan.clusters) + (rest > 0 ? move(rest) : 0);
  // Contiguous bytes that neighbouring threads read.
  const double row =
      std::min(256, problem.planar ? 16 * plan.strands : plan.channels * problem.element_bytes);
  const double short_rows = (problem.planar ? 4 : 1) * cost.short_rows * (1 - row / 256);
  const bool two_together = cut.threads < kClusterMostThreads && steps > 1;
  const double product = 1.0 * problem.r * plan.channels / cut.threads;
  const double weights =
      2.0 * problem.r * plan.channels * problem.weight_bytes * plan.clusters * cut.blocks() / 4e6;
  return moving * (cost.moving + short_rows + (two_together ? cost.two_together : 0)) +
         steps * (cost.step + cost.product * product +
                  (cut.pixel_slices > 1 ? cost.pixel_exchange : 0) +
                  (cut.channel_slices > 1 ? cost.channel_exchange : 0)) +
         cost.weights * weights;
}

std::optional<ClusterPlan> cluster_plan(const ClusterProblem& problem,
                                        const ClusterLimits& limits) {
  std::optional<ClusterPlan> best;
  double best_time = 0;
  for (const int threads : {kClusterMostThreads / 2, kClusterMostThreads}) {
    for (int channel_slices = 1; channel_slices <= kClusterMostBlocks; ++channel_slices) {
      // Rows of under 64 bytes waste memory bursts.
      const std::int64_t row = problem.c * problem.element_bytes / channel_slices;
      if (!problem.planar && channel_slices > 1 && row < 64) break;
      for (int pixel_slices = 1; channel_slices * pixel_slices <= kClusterMostBlocks;
           ++pixel_slices) {
        const auto plan =
            cluster_plan_with(problem, {channel_slices, pixel_slices, threads}, limits);
        if (!plan) continue;
        const double time = expected_time(problem, *plan);
        if (best && time >= best_time) continue;
        best = plan;
        best_time = time;
      }
    }
  }
  return best;
}

}  // namespace fusewise::cuda

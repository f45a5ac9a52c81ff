// How the cluster kernels cut problems up: every plan must fit the GPU it is for. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "cuda/squeeze_excite/cluster_plan.h"

namespace fusewise::cuda {
namespace {

struct Block {
  std::int64_t c, r, side;
};

/// The blocks of EfficientNet-B4.
constexpr Block kBlocks[] = {{48, 12, 190}, {24, 6, 190},  {144, 6, 95},   {192, 8, 95},
                             {192, 8, 48},  {336, 14, 48}, {336, 14, 24},  {672, 28, 24},
                             {960, 40, 24}, {960, 40, 12}, {1632, 68, 12}, {2688, 112, 12}};

/// As an H200 answered.
constexpr ClusterLimits kH200{
    {232448, 115712},
    {{0, 132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7},
     {0, 264, 132, 79, 62, 47, 39, 32, 30, 23, 21, 16, 16, 14, 14, 14, 14}}};
/// Less memory, and no large clusters.
constexpr ClusterLimits kSmall{{101376, 50176}, {{0, 20, 10, 6, 5}, {0, 40, 20, 12, 10}}};

std::string name_of(const ClusterProblem& p) {
  std::ostringstream text;
  text << "N, C, HW, R = " << p.n << ", " << p.c << ", " << p.hw << ", " << p.r << "; elements of "
       << p.element_bytes << " bytes, weights of " << p.weight_bytes
       << (p.planar ? ", planar" : ", channels-last") << (p.backward ? ", backward" : ", forward");
  return text.str();
}

/// body(problem, limits) for everything that the kernels may be asked for.
template <typename Body>
void each_problem(Body body) {
  for (const Block& block : kBlocks) {
    for (const std::int64_t n : {1, 2, 7, 32, 133, 1000}) {
      for (const int element_bytes : {2, 4}) {
        for (const int weight_bytes : {element_bytes, 4}) {
          for (const bool planar : {false, true}) {
            for (const bool backward : {false, true}) {
              const ClusterProblem problem{n,       block.c,       block.side * block.side,
                                           block.r, element_bytes, weight_bytes,
                                           planar,  backward};
              SCOPED_TRACE(name_of(problem));
              body(problem, kH200);
              body(problem, kSmall);
              if (::testing::Test::HasFailure()) return;  // one trace is enough
            }
          }
        }
      }
    }
  }
}

template <typename Body>
void each_cut(Body body) {
  for (const int threads : {256, 512}) {
    for (int channels = 1; channels <= kClusterMostBlocks; ++channels) {
      for (int pixels = 1; channels * pixels <= kClusterMostBlocks; ++pixels) {
        body(ClusterCut{channels, pixels, threads});
      }
    }
  }
}

void expect_fits(const ClusterPlan& plan, const ClusterProblem& p, const ClusterLimits& limits) {
  const ClusterCut& cut = plan.cut;
  const int which = cut.threads == kClusterMostThreads ? 0 : 1;
  EXPECT_LE(plan.shared_bytes, limits.shared_memory[which]);
  EXPECT_GE(plan.clusters, 1);
  EXPECT_LE(plan.clusters, p.n);
  EXPECT_LE(plan.clusters, limits.clusters[which][cut.blocks()]);
  EXPECT_GE(plan.late_from, 1) << "the first cluster never starts late";
  EXPECT_LE(plan.late_from, plan.clusters);

  // Slices cover a sample, and none is empty.
  EXPECT_GE(std::int64_t{cut.channel_slices} * plan.channels, p.c);
  EXPECT_LT((cut.channel_slices - std::int64_t{1}) * plan.channels, p.c);
  EXPECT_GE(std::int64_t{cut.pixel_slices} * plan.pixels, p.hw);
  EXPECT_LT((cut.pixel_slices - std::int64_t{1}) * plan.pixels, p.hw);

  // What is copied or read 16 bytes at a time starts on 16 bytes.
  const std::int64_t vector = 16 / p.element_bytes, weight_vector = 16 / p.weight_bytes;
  EXPECT_EQ(plan.channels % weight_vector, 0);
  EXPECT_EQ(plan.w1_stride % weight_vector, 0);
  EXPECT_GE(plan.w1_stride, plan.channels);
  EXPECT_EQ(plan.row_stride % 4, 0);
  EXPECT_GE(plan.row_stride, plan.channels);
  EXPECT_EQ(plan.row_floats % 4, 0);
  EXPECT_EQ((p.planar ? plan.pixels : plan.channels) % vector, 0);

  // The threads cover a slice, and hold it.
  const std::int64_t registers = cluster_registers(p.backward);
  if (p.planar) {
    EXPECT_LE(plan.strands * plan.channels, cut.threads);
    EXPECT_GE((registers + plan.shared_vectors) * plan.strands * vector, plan.pixels);
  } else {
    EXPECT_LE(plan.strands * (plan.channels / vector), cut.threads);
    EXPECT_GE((registers + plan.shared_vectors) * plan.strands, plan.pixels);
  }

  // There is room for what the kernel puts there.
  const std::int64_t sums = p.planar ? (plan.strands + 31) / 32 : plan.strands;
  EXPECT_GE(plan.rows_of_channels, sums);
  EXPECT_GE(plan.row_floats, std::int64_t{plan.rows_of_channels} * plan.row_stride);
  if (p.backward) {
    EXPECT_GE(plan.row_floats, 2 * cut.threads);
  }
  EXPECT_LE(plan.channels / weight_vector, cut.threads);
  EXPECT_LE(p.r, cut.threads);
  for (const int lanes : {plan.channel_lanes, plan.hidden_lanes}) {
    EXPECT_TRUE(lanes == 1 || lanes == 2 || lanes == 4 || lanes == 8);
  }
  const std::int64_t boxes = 2 * (cut.pixel_slices > 1 ? cut.pixel_slices * plan.channels : 0) +
                             2 * (cut.channel_slices > 1 ? cut.channel_slices * p.r : 0);
  EXPECT_GE(plan.shared_bytes, 16 * plan.shared_vectors * cut.threads +
                                   4 * (kClusterBarrierFloats + plan.row_floats + boxes +
                                        4 * plan.channels + 3 * p.r) +
                                   p.r * (plan.w1_stride + plan.channels) * p.weight_bytes);
}

TEST(ClusterPlan, EveryPlanThatCanBeAskedForFits) {
  int plans = 0;
  each_problem([&](const ClusterProblem& problem, const ClusterLimits& limits) {
    each_cut([&](const ClusterCut& cut) {
      const auto plan = cluster_plan_with(problem, cut, limits);
      if (!plan) return;
      ++plans;
      expect_fits(*plan, problem, limits);
    });
  });
  EXPECT_GT(plans, 10000);
}

TEST(ClusterPlan, TheChosenOneFitsAndNoneIsExpectedToBeFaster) {
  each_problem([](const ClusterProblem& problem, const ClusterLimits& limits) {
    const auto chosen = cluster_plan(problem, limits);
    if (!chosen) return;
    expect_fits(*chosen, problem, limits);
    const double time = expected_time(problem, *chosen);
    EXPECT_GT(time, 0);
    each_cut([&](const ClusterCut& cut) {
      const bool short_rows = !problem.planar && cut.channel_slices > 1 &&
                              problem.c * problem.element_bytes / cut.channel_slices < 64;
      const auto other = cluster_plan_with(problem, cut, limits);
      if (other && !short_rows) {
        EXPECT_GE(expected_time(problem, *other), time);
      }
    });
  });
}

TEST(ClusterPlan, RefusesWhatDoesNotFit) {
  // A sample of 64 MB; more hidden units than threads; no cluster of that size.
  EXPECT_FALSE(cluster_plan({2, 64, 1 << 19, 4, 2, 2, false, false}, kH200));
  EXPECT_FALSE(cluster_plan({2, 8, 1 << 20, 2, 4, 4, true, false}, kH200));
  EXPECT_FALSE(cluster_plan({2, 8, 16, 1 << 20, 4, 4, false, true}, kH200));
  EXPECT_FALSE(cluster_plan_with({2, 64, 4096, 4, 2, 2, false, false}, {1, 8, 512}, kSmall));
  EXPECT_TRUE(cluster_plan_with({2, 64, 4096, 4, 2, 2, false, false}, {1, 4, 512}, kSmall));
}

TEST(ClusterPlan, RefusesSlicesThatWouldBeEmpty) {
  // Five vectors of channels: three slices have 2, 2 and 1, four would have 2, 2, 1 and none.
  const ClusterProblem problem{2, 40, 64, 4, 2, 2, false, false};
  EXPECT_TRUE(cluster_plan_with(problem, {3, 1, 256}, kH200));
  EXPECT_FALSE(cluster_plan_with(problem, {4, 1, 256}, kH200));
  EXPECT_FALSE(cluster_plan_with({2, 40, 3, 4, 2, 2, false, false}, {1, 4, 256}, kH200));
}

TEST(ClusterPlan, TinyProblems) {
  for (const bool planar : {false, true}) {
    for (const bool backward : {false, true}) {
      for (const std::int64_t hw : {8, 16}) {
        const ClusterProblem problem{1, 8, hw, 1, 2, 2, planar, backward};
        SCOPED_TRACE(name_of(problem));
        const auto plan = cluster_plan(problem, kH200);
        ASSERT_TRUE(plan);
        expect_fits(*plan, problem, kH200);
      }
    }
  }
}

TEST(ClusterPlan, AnH200TakesEveryBlockOfEfficientNet) {
  for (const Block& block : kBlocks) {
    for (const std::int64_t n : {1, 32, 256}) {
      for (const bool backward : {false, true}) {
        const ClusterProblem problem{n,     block.c, block.side * block.side, block.r, 2, 2,
                                     false, backward};
        EXPECT_TRUE(cluster_plan(problem, kH200)) << name_of(problem);
      }
    }
  }
}

}  // namespace
}  // namespace fusewise::cuda

// How the ring kernel cuts problems up: every plan must fit the GPU it is for. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "cuda/squeeze_excite/ring_plan.h"

namespace fusewise::cuda {
namespace {

struct Block {
  std::int64_t c, r, side;
};

/// The blocks of EfficientNet-B4.
constexpr Block kBlocks[] = {{48, 12, 190}, {24, 6, 190},  {144, 6, 95},   {192, 8, 95},
                             {192, 8, 48},  {336, 14, 48}, {336, 14, 24},  {672, 28, 24},
                             {960, 40, 24}, {960, 40, 12}, {1632, 68, 12}, {2688, 112, 12}};

constexpr Split kSplits[] = {Split::channels_last_by_channel, Split::channels_last_by_pixel,
                             Split::planar_by_channel};

struct Gpu {
  int multiprocessors, shared_memory;
};
constexpr Gpu kH200{132, 232448};

std::string name_of(const RingProblem& p, const Gpu& gpu) {
  std::ostringstream text;
  text << "N, C, HW, R = " << p.n << ", " << p.c << ", " << p.hw << ", " << p.r << "; elements of "
       << p.element_bytes << " bytes, weights of " << p.weight_bytes
       << (p.planar ? ", planar; " : ", channels-last; ") << gpu.multiprocessors
       << " multiprocessors with " << gpu.shared_memory << " bytes";
  return text.str();
}

/// body(problem, gpu) for everything that the kernel may be asked for.
template <typename Body>
void each_problem(Body body) {
  for (const Block& block : kBlocks) {
    for (const std::int64_t n : {1, 2, 7, 32, 133, 1000}) {
      for (const int element_bytes : {2, 4}) {
        for (const int weight_bytes : {2, 4}) {
          for (const bool planar : {false, true}) {
            for (const int multiprocessors : {132, 114, 20}) {
              for (const int shared_memory : {232448, 101376}) {
                const RingProblem problem{n,       block.c,       block.side * block.side,
                                          block.r, element_bytes, weight_bytes,
                                          planar};
                const Gpu gpu{multiprocessors, shared_memory};
                SCOPED_TRACE(name_of(problem, gpu));
                body(problem, gpu);
                if (::testing::Test::HasFailure()) return;  // one trace is enough
              }
            }
          }
        }
      }
    }
  }
}

/// What of shared memory does not depend on the number of tiles.
int fixed_bytes(const RingPlan& plan) { return plan.shared_bytes - plan.stages * plan.tile_bytes; }

void expect_fits(const RingPlan& plan, const RingProblem& p, const Gpu& gpu) {
  EXPECT_LE(plan.shared_bytes, gpu.shared_memory);
  EXPECT_GE(plan.stages, 1);
  EXPECT_LE(plan.stages, kRingMaxStages);
  EXPECT_LE(plan.stages, plan.steps);

  // Blocks: all of them at once, and each with work.
  EXPECT_GE(plan.slices, 1);
  EXPECT_GE(plan.groups, 1);
  EXPECT_LE(plan.slices * plan.groups, gpu.multiprocessors);
  EXPECT_LE(plan.groups, p.n);
  EXPECT_GE(std::int64_t{plan.steps} * plan.groups, p.n);
  EXPECT_LT((plan.steps - std::int64_t{1}) * plan.groups, p.n);
  if (plan.staggered) {
    EXPECT_GT(plan.groups, 1);
  }

  // Slices cover a sample, and none is empty.
  const bool by_pixel = plan.split == Split::channels_last_by_pixel;
  const bool planar = plan.split == Split::planar_by_channel;
  const std::int64_t extent = by_pixel ? p.hw : p.c;
  EXPECT_GE(std::int64_t{plan.slices} * plan.per_slice, extent);
  EXPECT_LT((plan.slices - std::int64_t{1}) * plan.per_slice, extent);
  EXPECT_EQ(plan.channels, by_pixel ? p.c : plan.per_slice);

  // What is copied or read 16 bytes at a time starts on 16 bytes.
  EXPECT_EQ(plan.channels * p.element_bytes % 16, 0);
  EXPECT_EQ(plan.channels * p.weight_bytes % 16, 0);
  EXPECT_EQ(plan.tile_bytes % 128, 0);
  EXPECT_EQ(plan.weight_bytes % 16, 0);
  EXPECT_EQ(plan.row_floats % 4, 0);
  EXPECT_EQ(plan.scratch_floats % 4, 0);
  EXPECT_EQ(plan.channels % 4, 0);
  // The barriers lie behind the tiles and the weights.
  EXPECT_EQ((plan.stages * plan.tile_bytes + 2 * plan.weight_bytes) % 8, 0);
  EXPECT_LE((kRingMaxStages + 1) * 8, kRingBarrierBytes);

  // There is room for what the kernel puts there.
  const std::int64_t pixels = by_pixel ? plan.per_slice : p.hw;
  EXPECT_GE(plan.tile_bytes, plan.channels * pixels * p.element_bytes);
  EXPECT_GE(plan.weight_bytes, p.r * plan.channels * p.weight_bytes);
  EXPECT_GE(plan.scratch_floats, kRingThreads);
  EXPECT_GE(plan.scratch_floats, plan.channels);
  EXPECT_GE(plan.scratch_floats, p.r);
  const std::int64_t vector = 16 / p.element_bytes;
  if (planar) {
    EXPECT_GE(plan.row_floats, std::max(plan.channels, kRingWarps));
  } else {
    EXPECT_LE(plan.channels / vector, kRingThreads);
    EXPECT_GE(plan.row_floats, kRingThreads * vector);
  }
  EXPECT_GE(fixed_bytes(plan),
            2 * plan.weight_bytes + kRingBarrierBytes +
                4 * (plan.row_floats + plan.scratch_floats + 3 * plan.channels + 2 * p.r));
}

TEST(RingPlan, EveryPlanFits) {
  int plans = 0;
  each_problem([&](const RingProblem& problem, const Gpu& gpu) {
    const auto plan = ring_plan(problem, gpu.multiprocessors, gpu.shared_memory);
    if (!plan) return;
    ++plans;
    EXPECT_EQ(plan->split == Split::planar_by_channel, problem.planar);
    expect_fits(*plan, problem, gpu);
  });
  EXPECT_GT(plans, 1000);
}

TEST(RingPlan, EveryPlanThatCanBeAskedForFits) {
  each_problem([](const RingProblem& problem, const Gpu& gpu) {
    for (const Split split : kSplits) {
      if ((split == Split::planar_by_channel) != problem.planar) continue;
      for (const int slices : {1, 2, 3, 5, 8, 13, 20, 66, 114, 132}) {
        const auto plan =
            ring_plan_with(problem, split, slices, gpu.multiprocessors, gpu.shared_memory);
        if (!plan) continue;
        SCOPED_TRACE(slices);
        EXPECT_EQ(plan->split, split);
        EXPECT_LE(plan->slices, slices);
        expect_fits(*plan, problem, gpu);
      }
    }
  });
}

TEST(RingPlan, RefusesWhatDoesNotFitInSharedMemory) {
  each_problem([](const RingProblem& problem, const Gpu& gpu) {
    const auto plan = ring_plan(problem, gpu.multiprocessors, gpu.shared_memory);
    if (!plan) return;
    const int least = fixed_bytes(*plan) + plan->tile_bytes;
    const auto with = [&](int shared_memory) {
      return ring_plan_with(problem, plan->split, plan->slices, gpu.multiprocessors, shared_memory);
    };
    EXPECT_FALSE(with(0));
    EXPECT_FALSE(with(least - 1));
    const auto tight = with(least);
    ASSERT_TRUE(tight);
    EXPECT_EQ(tight->stages, 1);
    EXPECT_EQ(tight->shared_bytes, least);
    const auto same = with(gpu.shared_memory);
    ASSERT_TRUE(same);
    EXPECT_EQ(same->stages, plan->stages);
  });
}

TEST(RingPlan, RefusesMoreSlicesThanMultiprocessors) {
  const RingProblem problem{2, 336, 576, 14, 2, 2, false};
  EXPECT_TRUE(ring_plan_with(problem, Split::channels_last_by_pixel, 20, 20, 232448));
  EXPECT_FALSE(ring_plan_with(problem, Split::channels_last_by_pixel, 21, 20, 232448));
  EXPECT_TRUE(ring_plan_with(problem, Split::channels_last_by_channel, 14, 20, 232448));
  EXPECT_FALSE(ring_plan_with(problem, Split::channels_last_by_channel, 42, 20, 232448));
}

TEST(RingPlan, RefusesMoreChannelsThanThreads) {
  // 2688 channels of float32 are 672 vectors: by pixel each would want a thread.
  const RingProblem problem{2, 2688, 144, 4, 4, 4, false};
  EXPECT_FALSE(ring_plan_with(problem, Split::channels_last_by_pixel, 132, 132, 232448));
  EXPECT_FALSE(ring_plan_with(problem, Split::channels_last_by_channel, 2, 132, 232448));
  EXPECT_TRUE(ring_plan_with(problem, Split::channels_last_by_channel, 16, 132, 232448));
}

TEST(RingPlan, RefusesWhatNoPlanFits) {
  // A plane alone is larger than shared memory; so is a channel's share of the weights.
  EXPECT_FALSE(ring_plan({2, 8, 1 << 20, 2, 4, 4, true}, 132, 232448));
  EXPECT_FALSE(ring_plan({2, 8, 16, 1 << 20, 4, 4, false}, 132, 232448));
  EXPECT_FALSE(ring_plan({2, 8, 16, 1 << 20, 4, 4, true}, 132, 232448));
  EXPECT_FALSE(ring_plan({1, 1 << 23, 1 << 29, 4, 2, 2, false}, 132, 232448));
  EXPECT_FALSE(ring_plan({1, 1 << 23, 1 << 29, 4, 2, 2, true}, 132, 232448));
}

TEST(RingPlan, TinyProblems) {
  for (const bool planar : {false, true}) {
    for (const std::int64_t hw : {1, 2, 7}) {
      for (const std::int64_t n : {1, 3, 1 << 20}) {
        const RingProblem problem{n, 8, hw, 1, 2, 2, planar};
        SCOPED_TRACE(name_of(problem, kH200));
        const auto plan = ring_plan(problem, kH200.multiprocessors, kH200.shared_memory);
        ASSERT_TRUE(plan);
        expect_fits(*plan, problem, kH200);
      }
    }
  }
}

TEST(RingPlan, AnH200TakesEveryBlockOfEfficientNet) {
  for (const Block& block : kBlocks) {
    for (const std::int64_t n : {1, 2, 7, 32, 133, 1000}) {
      const RingProblem problem{n, block.c, block.side * block.side, block.r, 2, 2, false};
      EXPECT_TRUE(ring_plan(problem, kH200.multiprocessors, kH200.shared_memory))
          << name_of(problem, kH200);
    }
  }
}

TEST(RingPlan, AnH200SplitsLargeImagesByPixelAndManyChannelsByChannel) {
  const auto split_of = [](const Block& block, std::int64_t n, bool planar) {
    const RingProblem problem{n, block.c, block.side * block.side, block.r, 2, 2, planar};
    return ring_plan(problem, kH200.multiprocessors, kH200.shared_memory).value().split;
  };
  EXPECT_EQ(split_of({48, 12, 190}, 32, false), Split::channels_last_by_pixel);
  EXPECT_EQ(split_of({24, 6, 190}, 32, false), Split::channels_last_by_pixel);
  EXPECT_EQ(split_of({672, 28, 24}, 32, false), Split::channels_last_by_channel);
  EXPECT_EQ(split_of({2688, 112, 12}, 32, false), Split::channels_last_by_channel);
  EXPECT_EQ(split_of({672, 28, 24}, 32, true), Split::planar_by_channel);
}

}  // namespace
}  // namespace fusewise::cuda

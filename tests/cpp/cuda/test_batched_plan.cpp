// How the batched kernels of Squeeze-and-Excitation divide their work. Needs no GPU.

#include <gtest/gtest.h>

#include "cuda/squeeze_excite/batched_plan.h"

namespace fusewise::cuda {
namespace {

TEST(BatchedPlan, EveryColumnHasOneBlock) {
  for (const std::int64_t n : {1, 7, 64, 256, 100000}) {
    for (std::int64_t c = 8; c < 9000; c += 8) {
      const BatchedImages cut = batched_images(n, c, 132);
      ASSERT_GE(cut.columns, 1);
      ASSERT_LE(cut.columns, kBatchedImageThreads);
      ASSERT_GE(cut.blocks * cut.columns, c / 8);
      ASSERT_LT((cut.blocks - 1) * cut.columns, c / 8);
    }
  }
}

TEST(BatchedPlan, SlicesHaveTwoStagesAndFitACluster) {
  for (const std::int64_t depth : {1, 31, 32, 127, 128, 255, 256, 960, 3712, 100000}) {
    for (const std::int64_t tiles : {1, 4, 33, 100, 1000, 100000}) {
      const auto tiles_of = [&](int side) { return side == 64 ? tiles / 4 : tiles; };
      const BatchedTiles cut = batched_tiles(depth, 132, true, tiles_of);
      EXPECT_EQ(cut.tile, tiles / 4 >= 264 ? 64 : 32);
      EXPECT_LE(cut.slices, kBatchedMostSlices);
      EXPECT_EQ(cut.slices & (cut.slices - 1), 0);
      EXPECT_TRUE(cut.slices == 1 || depth >= 2 * kBatchedDepth * cut.slices);
      EXPECT_EQ(batched_tiles(depth, 132, false, tiles_of).slices, 1);
    }
  }
}

TEST(BatchedPlan, TimesGrowWithTheProblem) {
  for (const bool backward : {false, true}) {
    const auto time = [&](std::int64_t n, std::int64_t c, std::int64_t hw, std::int64_t r) {
      return expected_batched_time({n, c, hw, r, 4, backward}, 60 << 20, 132);
    };
    const double small = time(64, 960, 49, 240);
    EXPECT_LT(small, time(256, 960, 49, 240));
    EXPECT_LT(small, time(64, 1920, 49, 240));
    EXPECT_LT(small, time(64, 960, 196, 240));
    EXPECT_LT(small, time(64, 960, 49, 480));
    // Every sample's own products cost two_pass more.
    EXPECT_LT(small, expected_two_pass_time({64, 960, 49, 240, 4, backward}, 60 << 20));
  }
}

}  // namespace
}  // namespace fusewise::cuda

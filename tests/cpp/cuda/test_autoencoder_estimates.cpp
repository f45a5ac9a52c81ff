// The choice between fused kernels and products, where measurements leave no doubt. Needs no GPU.

#include <gtest/gtest.h>

#include "cuda/autoencoder/estimates.h"

namespace fusewise::cuda::autoencoder {
namespace {

enum Kind { kExact, kTf32, kHalf };

template <typename Call>
Call call(const AutoencoderSizes& sizes, Kind kind) {
  Call made;
  made.sizes = sizes;
  made.dtype = kind == kHalf ? DType::bf16 : DType::f32;
  made.tf32 = kind == kTf32;
  return made;
}

bool forward(const AutoencoderSizes& sizes, Kind kind) {
  return products_are_faster(call<AutoencoderForwardArguments>(sizes, kind));
}
bool backward(const AutoencoderSizes& sizes, Kind kind, bool known = false) {
  return products_are_faster(call<AutoencoderBackwardArguments>(sizes, kind), known);
}

TEST(AutoencoderSizes, ThoseThatDoNotFitAnIntAreDeclined) {
  constexpr std::int64_t kMost = std::int64_t{1} << 28;
  EXPECT_EQ(indices_decline({64, 5, 32, 64}), "");
  EXPECT_EQ(indices_decline({kMost, kMost, kMost, kMost}), "");
  // The last one would be 5 frames again.
  for (const std::int64_t size : {kMost + 1, std::int64_t{1} << 31, (std::int64_t{1} << 32) + 5}) {
    EXPECT_NE(indices_decline({size, 5, 32, 64}), "") << size;
    EXPECT_NE(indices_decline({64, size, 32, 64}), "") << size;
    EXPECT_NE(indices_decline({64, 5, size, 64}), "") << size;
    EXPECT_NE(indices_decline({64, 5, 32, size}), "") << size;
  }
}

TEST(AutoencoderEstimates, ProductsAreFasterForLargeSizes) {
  for (const Kind kind : {kExact, kTf32, kHalf}) {
    for (const std::int64_t rows : {1, 512, 4096, 16384, 65536}) {
      EXPECT_TRUE(forward({rows, 128, 8, 64, 128}, kind)) << rows << ", " << kind;
      EXPECT_TRUE(backward({rows, 128, 8, 64, 128}, kind)) << rows << ", " << kind;
    }
    EXPECT_TRUE(forward({65536, 128, 5, 32, 64}, kind)) << kind;
    EXPECT_TRUE(backward({65536, 128, 5, 32, 64}, kind)) << kind;
    EXPECT_TRUE(backward({4096, 80, 5, 32, 64}, kind)) << kind;
    EXPECT_TRUE(backward({512, 64, 16, 32, 64}, kind, true)) << kind;
  }
}

TEST(AutoencoderEstimates, FusedKernelsAreFasterForSmallSizes) {
  for (const Kind kind : {kExact, kTf32, kHalf}) {
    for (const std::int64_t rows : {1, 512, 4096, 16384, 65536}) {
      EXPECT_FALSE(forward({rows, 40, 5, 16, 32}, kind)) << rows << ", " << kind;
    }
    EXPECT_FALSE(backward({16384, 40, 5, 16, 32}, kind)) << kind;
    EXPECT_FALSE(backward({65536, 40, 5, 16, 32}, kind)) << kind;
    EXPECT_FALSE(backward({16384, 64, 16, 32, 64}, kind, true)) << kind;
  }
  EXPECT_FALSE(forward({16384, 80, 5, 32, 64}, kHalf));
}

TEST(AutoencoderEstimates, WarpgroupsAreFasterForManyRows) {
  for (const bool of_score : {false, true}) {
    for (const std::int64_t rows : {0, 1, 512, 4096, 8192}) {
      EXPECT_FALSE(warpgroups_are_faster(rows, 132, of_score)) << rows;
    }
    // One large tile for each multiprocessor; then one of them has a second one.
    EXPECT_TRUE(warpgroups_are_faster(128 * 132, 132, of_score));
    EXPECT_FALSE(warpgroups_are_faster(128 * 132 + 1, 132, of_score));
    for (const std::int64_t rows : {24000, 40000, 65536, 1 << 30}) {
      EXPECT_TRUE(warpgroups_are_faster(rows, 132, of_score)) << rows;
    }
    EXPECT_TRUE(warpgroups_are_faster(128 * 78, 78, of_score));
  }
}

}  // namespace
}  // namespace fusewise::cuda::autoencoder

// Which of the autoencoder's kernels takes a call, and why the others do not. Needs no GPU.

#include <gtest/gtest.h>

#include <vector>

#include "autoencoder_choices.h"
#include "cuda/autoencoder/selection.h"

namespace fusewise::testing {
namespace {

using cuda::indices_decline;
using Forward = cuda::AutoencoderForwardArguments;
using Backward = cuda::AutoencoderBackwardArguments;
namespace kernels = cuda::autoencoder;

constexpr cuda::AutoencoderSizes kDefault{40, 64, 5, 32, 64};
constexpr const char* kAll = "dy projection dx gradients";

std::vector<std::string> split(const std::string& text) {
  std::istringstream words(text);
  std::vector<std::string> found;
  for (std::string word; words >> word;) found.push_back(word);
  return found;
}

template <typename Call>
std::string chosen(const std::string& gpu, const cuda::AutoencoderSizes& sizes,
                   const std::string& kind, const std::string& tensors) {
  return kernels::choose(limits_of_gpu(gpu), make_call<Call>(sizes, kind, Words(tensors))).name;
}

/// At the first and the last number of rows of every range.
template <typename Call>
void expect_ranges(const ChoiceCase& each, const std::string& kind) {
  const auto expect = [&](std::int64_t rows, const std::string& name) {
    const cuda::AutoencoderSizes sizes{rows, 64, each.frames, 32, 64};
    EXPECT_EQ(chosen<Call>(each.gpu, sizes, kind, each.tensors), name)
        << each.gpu << ", " << kind << ", " << each.tensors << ", " << rows << " rows, "
        << each.frames << " frames";
  };
  std::istringstream ranges(each.chosen);
  std::int64_t first = 0;
  for (std::string range; std::getline(ranges, range, ',');) {
    const std::vector<std::string> words = split(range);
    expect(first, words[0]);
    const bool last = words.size() == 1;
    const std::int64_t end = last ? std::int64_t{1} << 30 : std::stoll(words[1]);
    expect(end, words[0]);
    first = end + 1;
  }
}

template <typename Call, std::size_t kCount>
void expect_all(const ChoiceCase (&cases)[kCount]) {
  for (const ChoiceCase& each : cases) {
    for (const std::string& kind : split(each.kinds)) expect_ranges<Call>(each, kind);
  }
}

TEST(AutoencoderSelection, ForwardChoosesTheListedKernels) { expect_all<Forward>(kForwardChoices); }
TEST(AutoencoderSelection, BackwardChoosesTheListedKernels) {
  expect_all<Backward>(kBackwardChoices);
}

TEST(AutoencoderSelection, OtherSizesHaveKernelsForFewRowsAndForMany) {
  for (const char* kind : {"f32", "tf32", "bf16", "f64"}) {
    for (const int rows : {1, 264, 265, 528, 529, 100000}) {
      for (const cuda::AutoencoderSizes& sizes : {cuda::AutoencoderSizes{rows, 63, 5, 32, 64},
                                                  {rows, 80, 5, 32, 64},
                                                  {rows, 64, 5, 33, 64},
                                                  {rows, 64, 5, 32, 65},
                                                  {rows, 7, 2, 48, 2}}) {
        const int most = std::string("f64") == kind ? 0 : std::string("bf16") == kind ? 264 : 528;
        EXPECT_EQ(chosen<Forward>("H200", sizes, kind, "out projection"),
                  rows <= most ? "any_size" : "general");
        EXPECT_EQ(chosen<Backward>("H200", sizes, kind, kAll), "general");
      }
    }
  }
  // The parameters do not fit into shared memory.
  EXPECT_EQ(chosen<Forward>("H200", {1, 128, 8, 64, 128}, "f32", "out projection"), "general");
}

template <typename Call, std::size_t kCount>
std::string reason(const kernels::Kernel<Call> (&list)[kCount], const std::string& name,
                   const cuda::AutoencoderSizes& sizes, const std::string& kind,
                   const std::string& tensors, const std::string& gpu = "H200",
                   bool yields = false) {
  for (const auto& each : list) {
    if (name != each.name) continue;
    return (yields ? each.yields : each.declines)(limits_of_gpu(gpu),
                                                  make_call<Call>(sizes, kind, Words(tensors)));
  }
  return "there is no " + name;
}

std::string forward_declines(const std::string& name, const cuda::AutoencoderSizes& sizes,
                             const std::string& kind, const std::string& tensors,
                             const std::string& gpu = "H200") {
  return reason(kernels::kForwardKernels, name, sizes, kind, tensors, gpu);
}
std::string backward_declines(const std::string& name, const cuda::AutoencoderSizes& sizes,
                              const std::string& kind, const std::string& tensors,
                              const std::string& gpu = "H200") {
  return reason(kernels::kBackwardKernels, name, sizes, kind, tensors, gpu);
}

TEST(AutoencoderSelection, TheDefaultModelCanBeForcedOnEveryKernel) {
  // However many rows there are.
  for (const std::int64_t rows : {1, 100000}) {
    cuda::AutoencoderSizes sizes = kDefault;
    sizes.rows = rows;
    for (const auto& each : kernels::kForwardKernels) {
      EXPECT_EQ(forward_declines(each.name, sizes, "bf16", "out projection"), "") << each.name;
    }
    for (const auto& each : kernels::kBackwardKernels) {
      EXPECT_EQ(backward_declines(each.name, sizes, "bf16", kAll), "") << each.name;
    }
  }
}

TEST(AutoencoderSelection, ReasonsToDeclineHaveTheNumbers) {
  const std::string sizes = "it is for n_mels 64, latent 32 and slice_latent 64, not 40, 16 and 32";
  const std::string x =
      "x's rows must start at multiples of 16 bytes, but the first starts 8 bytes after one and "
      "the rows are 640 bytes apart";
  const cuda::AutoencoderSizes other{40, 40, 5, 16, 32}, six{40, 64, 6, 32, 64};
  for (const char* name : {"few_rows", "many_rows", "block16"}) {
    EXPECT_EQ(forward_declines(name, other, "f32", "out"), sizes) << name;
  }
  for (const char* name : {"wgmma", "block16", "warps"}) {
    EXPECT_EQ(backward_declines(name, other, "tf32", kAll), sizes) << name;
  }
  EXPECT_EQ(forward_declines("few_rows", six, "f32", "out"), "it is for 5 frames, not 6");
  EXPECT_EQ(backward_declines("block16", six, "f32", kAll), "it is for 5 frames, not 6");
  EXPECT_EQ(forward_declines("many_rows", kDefault, "bf16", "out x+8"), x);
  EXPECT_EQ(forward_declines("block16", kDefault, "bf16", "out x+8"), "");
  EXPECT_EQ(backward_declines("block16", kDefault, "bf16", "dy dx gradients x+8"), x);
  EXPECT_EQ(forward_declines("few_rows", kDefault, "f32", "out weights+4"),
            "encoder_weight's rows must start at multiples of 16 bytes, but the first starts 4 "
            "bytes after one and the rows are 256 bytes apart");
  EXPECT_EQ(forward_declines("any_size", other, "f64", "out"), "it has no float64 kernels");
  EXPECT_EQ(forward_declines("any_size", {528, 64, 18, 32, 64}, "f32", "out"), "");
  EXPECT_EQ(forward_declines("any_size", {528, 64, 19, 32, 64}, "f32", "out"),
            "it needs 234780 bytes of shared memory, and a block has 232448");
  EXPECT_EQ(backward_declines("block16", kDefault, "f32", kAll, "L40S"),
            "it needs 226944 bytes of shared memory, and a block has 101376");
  EXPECT_EQ(backward_declines("wgmma", kDefault, "bf16", kAll, "A100"),
            "it is built for sm_90a, and this GPU is sm_80");
  EXPECT_EQ(backward_declines("wgmma", kDefault, "f32", kAll),
            "it computes float32 in TF32, which is not allowed here");
  EXPECT_EQ(backward_declines("wgmma", kDefault, "bf16", "dz projection dx gradients"),
            "it does not take the latent's gradient");
  EXPECT_EQ(backward_declines("wgmma", kDefault, "bf16", "dy dx gradients"),
            "it needs the projection, which forward did not save");
}

/// Only 'general' takes sizes whose products exceed 32 bits.
TEST(AutoencoderSelection, LargeSizesAreDeclinedBeforeTheyAreMultiplied) {
  constexpr int kMost = 1 << 28;
  for (const auto& each : kernels::kForwardKernels) {
    const bool general = std::string("general") == each.name;
    for (const cuda::AutoencoderSizes& sizes : {cuda::AutoencoderSizes{40, kMost, 5, 32, 64},
                                                {40, 64, kMost, 32, 64},
                                                {40, 64, 5, kMost, 64},
                                                {40, 64, 5, 32, kMost},
                                                {40, kMost, kMost, kMost, kMost}}) {
      EXPECT_EQ(forward_declines(each.name, sizes, "f32", "out").empty(), general) << each.name;
    }
  }
}

TEST(AutoencoderSelection, ReasonsToYieldHaveTheNumbers) {
  const auto forward = [](const std::string& name, const cuda::AutoencoderSizes& sizes,
                          const std::string& kind) {
    return reason(kernels::kForwardKernels, name, sizes, kind, "out", "H200", true);
  };
  EXPECT_EQ(forward("few_rows", {529, 64, 5, 32, 64}, "f32"),
            "tensor cores are faster for more than 528 rows");
  EXPECT_EQ(forward("any_size", {529, 40, 5, 32, 64}, "f32"),
            "'general' is faster for more than 528 rows");
  EXPECT_EQ(forward("any_size", {265, 40, 5, 32, 64}, "bf16"),
            "'general' is faster for more than 264 rows");
  EXPECT_EQ(forward("many_rows", {4224, 64, 5, 32, 64}, "f32"),
            "'block16' is faster for up to 4224 rows");
  EXPECT_EQ(
      reason(kernels::kBackwardKernels, "warps", {2112, 64, 9, 32, 64}, "bf16", kAll, "H200", true),
      "'general' is faster for more than 8 frames and up to 2112 rows");
  EXPECT_EQ(
      reason(kernels::kBackwardKernels, "wgmma", {4096, 64, 5, 32, 64}, "tf32", kAll, "H200", true),
      "'block16' is faster for 4096 rows: tiles of 16 rows spread over 132 multiprocessors "
      "more evenly than tiles of 128");
}

TEST(AutoencoderSelection, SizesThatDoNotFitAnIntAreDeclined) {
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

/// Of the forward kernel 'block16'.
struct ForwardPlanCase {
  const char* gpu;
  cuda::AutoencoderSizes sizes;
  int warps;
};
/// Of the backward kernel 'warps'.
struct BackwardPlanCase {
  const char* gpu;
  cuda::AutoencoderSizes sizes;
  const char* kind;
  const char* tensors;
  int warps;
  bool holds;
};

// clang-format off
constexpr ForwardPlanCase kForwardPlans[] = {
    {"H200", {2112, 64, 5, 32, 64}, 10},
    {"H200", {2113, 64, 5, 32, 64}, 5},
    {"H200", {4225, 64, 5, 32, 64}, 5},
    {"H200", {20000, 64, 5, 32, 64}, 5},
    {"H200", {65537, 64, 5, 32, 64}, 5},
    {"H200", {1, 64, 1, 32, 64}, 2},
    {"H200", {2113, 64, 1, 32, 64}, 1},
    {"H200", {1, 64, 11, 32, 64}, 12},
    {"A100", {2113, 64, 5, 32, 64}, 5},
    {"A100", {4225, 64, 5, 32, 64}, 5},
    {"A100", {20000, 64, 5, 32, 64}, 5},
    {"A100", {65537, 64, 5, 32, 64}, 5},
    {"A100", {1, 64, 1, 32, 64}, 2},
    {"A100", {2113, 64, 1, 32, 64}, 1},
};
constexpr BackwardPlanCase kBackwardPlans[] = {
    {"H200", {2113, 64, 6, 32, 64}, "f32", "dy projection dx gradients", 4, true},
    {"H200", {4225, 64, 6, 32, 64}, "f32", "dy projection dx gradients", 4, true},
    {"H200", {20000, 64, 6, 32, 64}, "f32", "dy projection dx gradients", 8, true},
    {"H200", {65537, 64, 6, 32, 64}, "f32", "dy projection dx gradients", 8, true},
    {"H200", {1, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, true},
    {"H200", {2113, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, true},
    {"H200", {4225, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, true},
    {"H200", {20000, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 8, true},
    {"H200", {65537, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 8, true},
    {"H200", {2113, 64, 6, 32, 64}, "f32", "dscore projection dx gradients", 4, false},
    {"H200", {4225, 64, 6, 32, 64}, "f32", "dscore projection dx gradients", 4, false},
    {"H200", {20000, 64, 6, 32, 64}, "f32", "dscore projection dx gradients", 8, false},
    {"H200", {65537, 64, 6, 32, 64}, "f32", "dscore projection dx gradients", 8, false},
    {"A100", {2113, 64, 6, 32, 64}, "f32", "dy projection dx gradients", 4, true},
    {"A100", {4225, 64, 6, 32, 64}, "f32", "dy projection dx gradients", 4, true},
    {"A100", {20000, 64, 6, 32, 64}, "f32", "dy projection dx gradients", 4, true},
    {"A100", {65537, 64, 6, 32, 64}, "f32", "dy projection dx gradients", 4, true},
    {"A100", {1, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, true},
    {"A100", {2113, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, true},
    {"A100", {4225, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, true},
    {"A100", {20000, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 8, true},
    {"A100", {65537, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 8, true},
    {"A100", {2113, 64, 6, 32, 64}, "f32", "dscore projection dx gradients", 4, false},
    {"A100", {4225, 64, 6, 32, 64}, "f32", "dscore projection dx gradients", 4, false},
    {"A100", {20000, 64, 6, 32, 64}, "f32", "dscore projection dx gradients", 4, false},
    {"A100", {65537, 64, 6, 32, 64}, "f32", "dscore projection dx gradients", 4, false},
    {"L40S", {1, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, false},
    {"L40S", {2113, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, false},
    {"L40S", {4225, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, false},
    {"L40S", {20000, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, false},
    {"L40S", {65537, 64, 6, 32, 64}, "bf16", "dy projection dx gradients", 4, false},
};
// clang-format on

TEST(AutoencoderSelection, ForwardHasTheRightNumberOfWarps) {
  for (const ForwardPlanCase& each : kForwardPlans) {
    EXPECT_EQ(kernels::block16_warps(limits_of_gpu(each.gpu), each.sizes), each.warps)
        << each.gpu << ", " << each.sizes.rows << ", " << each.sizes.frames;
  }
}

TEST(AutoencoderSelection, BackwardHasTheRightPlan) {
  for (const BackwardPlanCase& each : kBackwardPlans) {
    EXPECT_EQ(chosen<Backward>(each.gpu, each.sizes, each.kind, each.tensors), "warps");
    const auto call = make_call<Backward>(each.sizes, each.kind, Words(each.tensors));
    const kernels::BackwardPlan plan = kernels::backward_plan(limits_of_gpu(each.gpu), call);
    EXPECT_EQ(plan.warps, each.warps) << each.gpu << ", " << each.sizes.rows;
    EXPECT_EQ(plan.holds, each.holds) << each.gpu << ", " << each.sizes.rows;
  }
}

}  // namespace
}  // namespace fusewise::testing

#pragma once

// The kernel that is chosen for each number of rows. If a choice is meant to change, its line here
// changes too.

#include "autoencoder_choice_case.h"

namespace fusewise::testing {

/// Of the default model, but for its frames.
struct ChoiceCase {
  const char* gpu;
  int frames;
  const char* kinds;
  const char* tensors;
  /// Each name with its largest number of rows; the last one is for all larger numbers.
  const char* chosen;
};

// clang-format off
inline constexpr ChoiceCase kForwardChoices[] = {
    {"H200", 5, "f32", "out projection", "few_rows 528, block16 4224, many_rows"},
    {"H200", 5, "tf32", "out projection", "few_rows 528, block16 2112, many_rows"},
    {"H200", 5, "bf16 f16/f32", "out projection", "few_rows 528, many_rows"},
    {"H200", 5, "f64", "out projection", "general"},
    {"A100", 5, "f32", "out projection", "few_rows 432, block16 3456, many_rows"},
    {"L40S", 5, "f32 tf32", "out projection", "few_rows 568, general"},
    {"L40S", 5, "bf16", "out projection", "few_rows 568, many_rows"},
    // Other frames, up to what fits into shared memory.
    {"H200", 1, "f32", "out projection", "block16 4224, many_rows"},
    {"H200", 11, "tf32", "out projection", "block16 2112, many_rows"},
    {"H200", 12, "f32 tf32", "out projection", "many_rows"},
    {"H200", 13, "f32 tf32", "out projection", "any_size 528, general"},
    {"H200", 27, "bf16", "out projection", "many_rows"},
    {"H200", 430, "bf16", "out projection", "general"},
    {"L40S", 4, "f32 tf32", "out projection", "many_rows"},
    // Other results.
    {"H200", 5, "f32", "z", "few_rows 528, block16 4224, many_rows"},
    {"H200", 5, "tf32", "score", "few_rows 528, block16 2112, many_rows"},
    {"H200", 5, "bf16", "projection", "few_rows 528, many_rows"},
    // Addresses and row strides.
    {"H200", 5, "f32 tf32", "out x+8", "few_rows 528, general"},
    {"H200", 5, "bf16 f16/f32", "out x+8", "few_rows 528, block16"},
    {"H200", 5, "bf16 f16/f32", "out x+4", "few_rows 528, general"},
    {"H200", 5, "f32", "out stride+4", "few_rows 528, block16 4224, many_rows"},
    {"H200", 5, "bf16 f16/f32", "out stride+4", "few_rows 528, block16"},
    {"H200", 5, "f32 bf16", "out stride+2", "few_rows 528, general"},
    {"H200", 5, "f32 tf32", "out+8", "few_rows 528, general"},
    {"H200", 5, "bf16", "z+8", "few_rows 528, block16"},
    {"H200", 5, "f32 bf16", "out projection+8", "few_rows 528, general"},
    {"H200", 5, "f32", "out weights+8", "block16 4224, many_rows"},
    {"H200", 5, "bf16", "out weights+8", "few_rows 528, many_rows"},
    {"H200", 5, "f32", "score+4", "few_rows 528, block16 4224, many_rows"},
};

inline constexpr ChoiceCase kBackwardChoices[] = {
    {"H200", 5, "f32", "dy projection dx gradients", "block16"},
    {"H200", 5, "tf32 bf16 f16/f32", "dy projection dx gradients", "block16 10560, wgmma 16896, block16 19008, wgmma"},
    {"H200", 5, "bf16", "dscore projection dx gradients", "block16 12672, wgmma 16896, block16 23232, wgmma"},
    {"H200", 5, "f64", "dy projection dx gradients", "general"},
    {"A100", 5, "f32 tf32", "dy projection dx gradients", "warps"},
    {"A100", 5, "bf16 f16/f32", "dy projection dx gradients", "block16"},
    {"L40S", 5, "f32 tf32", "dy projection dx gradients", "general"},
    {"L40S", 5, "bf16", "dy projection dx gradients", "warps"},
    // Other frames.
    {"H200", 1, "f32 bf16", "dy projection dx gradients", "warps"},
    {"H200", 6, "f32", "dscore projection dx gradients", "warps"},
    {"H200", 7, "f32", "dscore projection dx gradients", "general 2112, warps"},
    {"H200", 8, "tf32 bf16", "dscore projection dx gradients", "warps"},
    {"H200", 9, "tf32 bf16", "dy projection dx gradients", "general 2112, warps"},
    {"H200", 430, "bf16", "dy projection dx gradients", "general 2112, warps"},
    {"H200", 500, "f32 bf16", "dy projection dx gradients", "general"},
    {"A100", 16, "f32", "dy projection dx gradients", "general 1728, warps"},
    // Other gradients.
    {"H200", 5, "bf16", "dz projection dx gradients", "block16"},
    {"H200", 5, "bf16", "dy dx gradients", "block16"},
    {"H200", 5, "bf16", "dy projection dx", "block16"},
    {"H200", 5, "tf32", "dy projection gradients", "block16 10560, wgmma 16896, block16 19008, wgmma"},
    {"H200", 5, "tf32", "dy projection dx decoder_bias", "block16 10560, wgmma 16896, block16 19008, wgmma"},
    // Addresses and row strides.
    {"H200", 5, "f32 tf32", "dy projection dx gradients x+8", "general"},
    {"H200", 5, "bf16 f16/f32", "dy projection dx gradients x+8", "warps"},
    {"H200", 5, "bf16 f16/f32", "dy projection dx gradients x+4", "general"},
    {"H200", 5, "f32", "dy projection dx gradients stride+4", "block16"},
    {"H200", 5, "bf16", "dy projection dx gradients stride+4", "warps"},
    {"H200", 5, "f32 bf16", "dy projection dx gradients stride+2", "general"},
    {"H200", 5, "bf16", "dy+8 projection dx gradients", "warps"},
    {"H200", 5, "f32", "dy projection dx+8 gradients", "general"},
    {"H200", 5, "f32 bf16", "dy projection+8 dx gradients", "general"},
    {"H200", 5, "bf16", "dz+8 projection dx gradients", "warps"},
    {"H200", 5, "f32", "dy projection dx gradients weights+4", "block16"},
    {"H200", 5, "f32", "dscore+4 projection dx gradients", "block16"},
};
// clang-format on

}  // namespace fusewise::testing

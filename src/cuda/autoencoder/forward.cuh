#pragma once

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda {

/// How the work is laid out.
struct AutoencoderForwardPlan {
  int warps;      ///< of a block
  bool together;  ///< all of them share 16 rows at a time; else each has its own
};

/// The whole model as one kernel, behind a small one that packs the weights; few rows of the
/// default model alone, by few_rows.cuh.
std::string autoencoder_fused_declines(const Context& context,
                                       const AutoencoderForwardArguments& call);
/// Whether general.cuh is: where the sizes are not those of the default model, which has kernels of
/// its own, and large.
bool autoencoder_products_are_faster(const Context& context,
                                     const AutoencoderForwardArguments& call);
void autoencoder_fused_run(const Context& context, const AutoencoderForwardArguments& call);
void autoencoder_fused_run(const Context& context, const AutoencoderForwardArguments& call,
                           AutoencoderForwardPlan plan);

}  // namespace fusewise::cuda

#pragma once

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda {

/// How the work is laid out.
struct AutoencoderForwardPlan {
  int warps;    ///< of a block
  int group;    ///< of them, those that share 16 rows: 1 or all
  bool staged;  ///< weights in shared memory
};

/// The whole model as one kernel, behind a small one that packs the weights.
std::string autoencoder_fused_declines(const Context& context,
                                       const AutoencoderForwardArguments& call);
void autoencoder_fused_run(const Context& context, const AutoencoderForwardArguments& call);
void autoencoder_fused_run(const Context& context, const AutoencoderForwardArguments& call,
                           AutoencoderForwardPlan plan);

}  // namespace fusewise::cuda

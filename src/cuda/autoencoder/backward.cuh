#pragma once

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda {

/// How the work is laid out: each warp of a block takes 16 rows at a time.
struct AutoencoderBackwardPlan {
  int warps;
  bool staged;  ///< weights in shared memory; only for n_mels 64, latent 32 and aligned rows
  bool holds;   ///< the encoder's sums, too; only where staged, and with 1, 2, 4 or 8 warps
};

/// Recomputes forward and goes back through it in one kernel, behind one that packs the weights;
/// two small ones behind it finish the parameters' gradients.
std::string autoencoder_fused_declines(const Context& context,
                                       const AutoencoderBackwardArguments& call);
/// Whether general.cuh is: where the sizes are not those of the default model, which has kernels of
/// its own, and large.
bool autoencoder_products_are_faster(const Context& context,
                                     const AutoencoderBackwardArguments& call);
void autoencoder_fused_run(const Context& context, const AutoencoderBackwardArguments& call);
void autoencoder_fused_run(const Context& context, const AutoencoderBackwardArguments& call,
                           AutoencoderBackwardPlan plan);

}  // namespace fusewise::cuda

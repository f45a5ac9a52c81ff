#pragma once

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda {

/// Whether the kernel of warpgroups takes this call: of those that backward_frames.cu takes, many
/// rows on Hopper, in TF32 or halves, with the gradient of the output or of the score coming in and
/// the projection kept; some gradient of a parameter is wanted.
bool autoencoder_groups_fit(const Context& context, const AutoencoderBackwardArguments& call);
void autoencoder_groups_run(const Context& context, const AutoencoderBackwardArguments& call);

}  // namespace fusewise::cuda

#pragma once

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda {

/// Whether the kernel of warpgroups takes this call: many rows of the default model on Hopper, in
/// TF32 or halves, that begin at multiples of 16 bytes, with one incoming gradient, of the output
/// or of the score, and the projection kept; some gradient of a parameter is wanted.
bool autoencoder_groups_fit(const Context& context, const AutoencoderBackwardArguments& call);
void autoencoder_groups_run(const Context& context, const AutoencoderBackwardArguments& call);

}  // namespace fusewise::cuda

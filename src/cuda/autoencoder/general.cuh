#pragma once

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda {

/// Takes every call on every GPU: any sizes, any type.
void autoencoder_general_run(const Context& context, const AutoencoderForwardArguments& call);
void autoencoder_general_run(const Context& context, const AutoencoderBackwardArguments& call);

}  // namespace fusewise::cuda

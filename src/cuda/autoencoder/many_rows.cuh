#pragma once

#include "cuda/autoencoder/arguments.cuh"
#include "cuda/autoencoder/pack.cuh"

namespace fusewise::cuda {

/// Many rows of the default model, 16 a warp, for which weights are packed in a layout of their
/// own. `warps`: of a block; chosen where it is 0.
bool autoencoder_takes_many_rows(const Context& context, const AutoencoderForwardArguments& call);
autoencoder::PackedLayout autoencoder_many_rows_layout(const AutoencoderForwardArguments& call);
void autoencoder_run_many_rows(const Context& context, const AutoencoderForwardArguments& call,
                               const autoencoder::PackedLayout& layout, const void* packed,
                               int warps);

}  // namespace fusewise::cuda

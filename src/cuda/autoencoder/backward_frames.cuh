#pragma once

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda {

/// Whether the kernel for the default model takes this call: 5 frames of 64 mels, latents of 32 and
/// 64, one kind of incoming gradient beside z's, and rows that begin at multiples of 16 bytes.
bool autoencoder_frames_fit(const Context& context, const AutoencoderBackwardArguments& call);
void autoencoder_frames_run(const Context& context, const AutoencoderBackwardArguments& call);

}  // namespace fusewise::cuda

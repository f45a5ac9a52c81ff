#pragma once

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda {

/// The default model for so few rows that no multiprocessor has many: one kernel, which takes the
/// parameters as they are.
bool autoencoder_takes_few_rows(const Context& context, const AutoencoderForwardArguments& call);
void autoencoder_run_few_rows(const Context& context, const AutoencoderForwardArguments& call);

}  // namespace fusewise::cuda

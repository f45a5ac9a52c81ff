#pragma once

// The first pass of forward and its end, for kernels that have their own second pass.

#include "cuda/batch_norm/channels.cuh"
#include "fusewise/context.h"

namespace fusewise::cuda {

/// The statistics of a forward call and their coefficients, for x with any strides.
template <typename T>
void general_coefficients(const Context& context, const TensorView& x, const TensorView& blanked,
                          const ForwardChannels& f, Coefficients<Accumulator<T>>* out);

/// x's own statistics and their coefficients, for x that `two_pass_declines` does not decline.
void two_pass_coefficients(const Context& context, const TensorView& x, const TensorView& blanked,
                           const ForwardChannels& f, Coefficients<float>* out);

}  // namespace fusewise::cuda

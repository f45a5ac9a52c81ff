#pragma once

#include "fusewise/context.h"

namespace fusewise::cuda {

/// Copies a tensor of up to three dimensions to another of the same shape and type, with any
/// strides.
void autoencoder_copy(const Context& context, const TensorView& from, const TensorView& to);

}  // namespace fusewise::cuda

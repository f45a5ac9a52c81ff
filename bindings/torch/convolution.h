#pragma once

// Torch's convolutions for the core's contexts: oneDNN's on the CPU, cuDNN's on CUDA. They follow
// torch's settings (TF32, cuDNN's benchmark and deterministic flags).

#include "call.h"
#include "fusewise/context.h"

namespace fusewise::binding {

/// Has no state. Defined once for the CPU library and once for the CUDA library.
Convolution& torch_convolution();

/// sum += term.
void add_to(const Tensor& sum, const Tensor& term);

}  // namespace fusewise::binding

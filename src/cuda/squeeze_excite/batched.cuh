#pragma once

// Squeeze-and-Excitation with GEMMs over all samples: pool, two GEMMs, scale.

#include <string>

#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {

std::string batched_declines(const SqueezeExciteForward& call);
std::string batched_declines(const SqueezeExciteBackward& call);
/// Why another implementation is expected to be faster.
std::string batched_yields(const Context& context, const SqueezeExciteForward& call);
std::string batched_yields(const Context& context, const SqueezeExciteBackward& call);
void batched_run(const Context& context, const SqueezeExciteForward& call);
void batched_run(const Context& context, const SqueezeExciteBackward& call);

/// Whether the GEMMs alone take a call with these images and weights, of any layout.
bool batched_products_take(const TensorView& x, const TensorView& w1);
/// The GEMMs of forward: from pooled [N, C] to gates [N, C].
void batched_products(const Context& context, const SqueezeExciteForward& call, float* pooled,
                      float* gates);
/// The GEMMs of backward: from dz2 [N, C] to the gradients of the weights and the offsets (dz1 W1)
/// / HW [N, C].
void batched_products(const Context& context, const SqueezeExciteBackward& call, float* dz2,
                      float* offsets);

}  // namespace fusewise::cuda

#pragma once

// The small layers between the two passes over images, for implementations that run them as kernels
// of their own.

#include "cuda/squeeze_excite/weight_gradients.cuh"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {

/// Sums over the pixels of every sample and channel, in chunks: data[(n * chunks + chunk) * stride
/// + c], in the accumulation type.
struct ImageSums {
  const void* data;
  long long chunks, stride;
};

/// From the sums of x to the gates [N, C]. Writes what the call saves but its gates.
void excite(const Context& context, const SqueezeExciteForward& call, const ImageSums& sums,
            void* gates);

/// From the sums of dy * x to dz2 and dz1, and, unless null, the offsets (dz1 W1) / HW [N, C].
void excite(const Context& context, const SqueezeExciteBackward& call, const ImageSums& sums,
            const WeightGradientVectors& vectors, void* offsets);

}  // namespace fusewise::cuda

#pragma once

#include <cstdint>

#include "cuda/li_conv/integrate.h"

namespace fusewise::cuda {

/// For each source: result = dy^T rows, the sum over all pixels, for half precision. Every address
/// is a multiple of 16 bytes, every number of channels a multiple of kIntegrationStep.
struct WeightGradients {
  struct Source {
    const void* rows;  ///< [rows, channels]
    void* result;      ///< [columns, channels]
    int channels;
  };
  Source source[kMostSources];
  int sources;
  const void* dy;  ///< [rows, columns]
  unsigned rows;
  int columns;
  StridedImage strided;
};

/// The same bits every time on the same GPU.
void weight_gradients(const Context& context, DType dtype, const WeightGradients& call);

}  // namespace fusewise::cuda

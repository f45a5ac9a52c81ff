#pragma once

#include <cstdint>

#include "fusewise/context.h"

namespace fusewise::cuda {

inline constexpr int kMostSources = 16;
inline constexpr int kIntegrationStep = 64;

/// The source that is an image of which every step-th pixel is read, in both directions.
struct StridedImage {
  int source = -1;  ///< -1: none
  unsigned pixels = 0, width = 0, step = 1;
  unsigned y_pixels = 1, y_width = 1;  ///< of an image of y
};

/// y = sum over sources of rows w^T, for half precision. Every address is a multiple of 16 bytes,
/// every number of channels a multiple of kIntegrationStep.
struct Integration {
  struct Source {
    const void* rows;     ///< [rows, channels]
    const void* weights;  ///< [columns, channels]
    int channels;
  };
  Source source[kMostSources];
  int sources;
  void* y;  ///< [rows, columns]
  unsigned rows;
  int columns;
  StridedImage strided;
};

void integrate(const Context& context, DType dtype, const Integration& call);

}  // namespace fusewise::cuda

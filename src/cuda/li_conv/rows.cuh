#pragma once

// Pixels as rows of 64 channels in shared memory, and where a strided image has them.

#include "cuda/li_conv/integrate.h"

namespace fusewise::cuda {

constexpr int kRowElements = kIntegrationStep;
constexpr int kChunk = 8, kChunks = kRowElements / kChunk;  // of 16 bytes

/// Rows of 128 bytes, whose chunks are permuted, so that eight rows of one chunk use all banks.
__device__ __forceinline__ int place_of(int row, int chunk) {
  return row * kRowElements + (chunk ^ (row & 7)) * kChunk;
}

/// The pixel of the strided image that belongs to a row of y.
__device__ __forceinline__ unsigned pixel_of(const StridedImage& image, unsigned row) {
  const unsigned sample = row / image.y_pixels, pixel = row % image.y_pixels;
  const unsigned p = pixel / image.y_width, q = pixel % image.y_width;
  return sample * image.pixels + (p * image.width + q) * image.step;
}

}  // namespace fusewise::cuda

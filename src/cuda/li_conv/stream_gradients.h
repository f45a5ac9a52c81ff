#pragma once

#include <cstddef>

#include "cuda/li_conv/integrate.h"

namespace fusewise::cuda {

/// The most channels of dy that a block can keep.
inline constexpr int kMostDepth = 128;

/// For each stream: g = du + dy mix, for half precision. Every address is a multiple of 16 bytes,
/// `columns` and `depth` are multiples of kIntegrationStep, and `depth` is at most kMostDepth.
struct StreamGradients {
  const void* mix[kMostSources];  ///< [depth, columns] of each stream
  int streams;
  const void* dy;  ///< [rows, depth]
  const void* du;  ///< [streams, rows, columns]; null: 0
  void* g;         ///< [streams, rows, columns]
  std::size_t rows;
  int depth, columns;
};

void stream_gradients(const Context& context, DType dtype, const StreamGradients& call);

}  // namespace fusewise::cuda

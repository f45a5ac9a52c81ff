#pragma once

// LayerNorm and the Linear behind it as one kernel, there and back, for any sizes up to
// kMostNormColumns: what the general path does between its large products.

#include "cuda/autoencoder/mma_registers.cuh"
#include "fusewise/context.h"

namespace fusewise::cuda::autoencoder {

/// Columns of a LayerNorm for which a warp has registers.
inline constexpr int kMostNormColumns = 128;

/// How the numbers are multiplied: float32 exactly, as TF32, or in half precision.
struct NormProducts {
  DType in;
  DType out;
  bool tf32;  ///< only for float32
};

/// Elements of a packed weight matrix, padded to blocks of 16 by 16.
inline std::int64_t packed_weights(std::int64_t outputs, std::int64_t inputs) {
  return (outputs + 15) / 16 * ((inputs + 15) / 16) * 256;
}

/// Rows of `frames` stretches each; `in` has `in_stride` elements from row to row, the others are
/// dense. Types are those of NormProducts, where nothing else is said. Null: not wanted.
struct NormLinear {
  std::int64_t rows;
  int frames, inputs, outputs;
  const void* in;  ///< [rows, frames, inputs]
  std::int64_t in_stride;
  const void* weights;  ///< packed, of `in`'s type
  const void* bias;     ///< [outputs], of `in`'s type
  void* normal;         ///< [rows, frames, inputs], of `in`'s type
  float* inverse;       ///< [rows, frames]: 1 / deviation
  void* before;         ///< [rows, frames, outputs], of `in`'s type: in front of the GELU
  void* after;          ///< [rows, frames, outputs], of `out`'s type: behind it
  float* exact_after;   ///< the same before rounding
  bool infinite;        ///< whether infinite results are seen, and must be what torch has
};
void norm_linear(const Context& context, const NormProducts& products, const NormLinear& call);

/// From the gradient of the Linear's result to that of what was normalised.
struct NormLinearBackward {
  std::int64_t rows;
  int frames, inputs, outputs;
  const void* d;        ///< [rows, frames, outputs], of `in`'s type
  const void* weights;  ///< the transposed matrix, packed
  const void* normal;   ///< [rows, frames, inputs], of `in`'s type
  const float* inverse;
  void* d_in;  ///< [rows, frames, inputs], of `out`'s type
  bool add;    ///< to what is in d_in
};
void norm_linear_backward(const Context& context, const NormProducts& products,
                          const NormLinearBackward& call);

}  // namespace fusewise::cuda::autoencoder

#pragma once

// LayerNorm and the following Linear in one kernel, forward and backward, for up to
// kMostNormColumns columns. The general path uses it between its large GEMMs.

#include "cuda/autoencoder/mma_registers.cuh"
#include "fusewise/context.h"

namespace fusewise::cuda::autoencoder {

/// Most columns of a LayerNorm for which a warp has enough registers.
inline constexpr int kMostNormColumns = 128;

/// How to multiply: float32 exactly, as TF32, or in half precision.
struct NormProducts {
  DType in;
  DType out;
  bool tf32;  ///< only for float32
};

/// Blocks of 16 columns that the kernels compute for so many inputs and outputs. The packed weights
/// are padded to them with zeros, so that no loop has to check.
__host__ __device__ constexpr int norm_input_blocks(int inputs) {
  return inputs <= 64 ? 4 : inputs <= 80 ? 5 : kMostNormColumns / 16;
}
__host__ __device__ constexpr int norm_output_blocks(int outputs) {
  return (outputs + 31) / 32 * 2;
}

/// Rows of `frames` segments each. `in` has a row stride of `in_stride` elements; the other tensors
/// are dense. Unless noted otherwise, types are those of NormProducts. Null results are not
/// computed.
struct NormLinear {
  std::int64_t rows;
  int frames, inputs, outputs;
  const void* in;  ///< [rows, frames, inputs]
  std::int64_t in_stride;
  const float *norm_weight, *norm_bias;  ///< [inputs], padded with zeros to whole blocks
  const void* weights;                   ///< packed, of `in`'s type
  const void* bias;                      ///< [outputs], of `in`'s type, padded likewise
  void* normal;        ///< [rows, frames, inputs], of `in`'s type: (in - mean) / deviation
  float* inverse;      ///< [rows, frames]: 1 / deviation
  void* before;        ///< [rows, frames, outputs], of `in`'s type: input of the GELU
  void* after;         ///< [rows, frames, outputs], of `out`'s type: output of the GELU
  float* exact_after;  ///< `after` before rounding
  bool infinite;       ///< infinite results are visible and must match torch's
};
void norm_linear(const Context& context, const NormProducts& products, const NormLinear& call);

/// From the gradient of the Linear's result to that of the LayerNorm's input.
struct NormLinearBackward {
  std::int64_t rows;
  int frames, inputs, outputs;
  const void* d;             ///< [rows, frames, outputs], of `in`'s type
  const void* weights;       ///< the transposed matrix, packed
  const float* norm_weight;  ///< [inputs], padded with zeros to whole blocks
  const void* normal;        ///< [rows, frames, inputs], of `in`'s type: (in - mean) / deviation
  const float* inverse;
  void* d_in;  ///< [rows, frames, inputs], of `out`'s type
  bool add;    ///< adds to d_in
};
void norm_linear_backward(const Context& context, const NormProducts& products,
                          const NormLinearBackward& call);

}  // namespace fusewise::cuda::autoencoder

#pragma once

// What general.cu computes from parameters alone: the operands of its GEMMs, and at the end the
// parameters' gradients from sums over the rows.

#include "cuda/autoencoder/norm_linear.cuh"
#include "cuda/autoencoder/plans.h"
#include "cuda/vector.cuh"

namespace fusewise::cuda::autoencoder {

/// Packed matrices are padded to whole blocks.
__host__ __device__ constexpr int padded_inputs(int size, bool packed) {
  return packed ? 16 * norm_input_blocks(size) : size;
}
__host__ __device__ constexpr int padded_outputs(int size, bool packed) {
  return packed ? 16 * norm_output_blocks(size) : size;
}

/// A LayerNorm's weight and bias.
template <typename A>
struct Affine {
  A *weight, *bias;
};

/// The operands of the GEMMs. With fp16 or bf16 some exist twice: values computed from parameters
/// alone, and the score, are rounded only once.
template <typename T, typename A = Accumulator<T>>
struct Prepared {
  Affine<A> norm, mid_norm;   ///< [M], [L]: padded like the inputs of the matrices
  T *encoder, *encoder_bias;  ///< [S, M], [S]
  A *mid, *mid_bias;          ///< [L, L], [L]
  bool packed;                ///< packed for norm_linear.cu; the same kernel computes `decode`
  bool tf32;                  ///< packed float32 matrices are rounded to TF32
  T* encoder_transposed;      ///< only if packed, and for backward
  A* mid_transposed;
  A* inverse_norm;          ///< [L], of the basis
  A* unit;                  ///< [L, F S]: the basis, each vector normalised
  A* decoder;               ///< [M, S]
  A *decode, *decode_bias;  ///< [L, F M], [F M]: unit times decoder
  T *unit_of_rows, *decode_of_rows, *decode_bias_of_rows;
};

/// The sums from which the parameters' gradients are computed. Biases have one sum per chunk of
/// rows.
template <typename A>
struct Sums {
  A *encode, *mid;  ///< [S, M], [L, L]: of d^T n
  A* unit;          ///< [L, F S]: gradient of the normalised basis
  A* decode;        ///< [L, F M]: of z^T dy
  A* decoder;       ///< [M, S]: gradient of the decoder's weights
  A* biases;        ///< [chunks, S + L + M]: of the encoder, the bottleneck, the decoder
  std::int64_t chunks;
};

/// Fills `to`. `decodes`: the decoder is needed.
template <typename T>
void prepare_parameters(const Context& context, const AutoencoderTensors<const void*>& parameters,
                        DType dtype, const AutoencoderSizes& sizes, const Prepared<T>& to,
                        bool decodes);

/// From sums.decode: adds to sums.unit, if `to_unit`, and computes sums.decoder, if `to_decoder`.
/// For small matrices, where it needs less time than two GEMMs.
void decoder_gradients(const Context& context, const AutoencoderSizes& sizes, const float* unit,
                       const float* decoder, const Sums<float>& sums, bool to_unit,
                       bool to_decoder);

/// Computes the wanted gradients, after all sums.
template <typename A>
void parameter_gradients(const Context& context, const AutoencoderBackwardArguments& call,
                         const A* inverse_norm, const Sums<A>& sums, bool decodes);

}  // namespace fusewise::cuda::autoencoder

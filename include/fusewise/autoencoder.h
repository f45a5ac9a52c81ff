#pragma once

#include <string_view>

#include "fusewise/context.h"
#include "fusewise/implementation.h"
#include "fusewise/tensor.h"

/// SpectralShapeAutoencoder, forward and backward: an autoencoder of log-mel frames, for finding
/// machine sounds that are not as usual.
///
///     s_f = GELU(encoder(norm(x_f)))               for every frame f      [S]
///     c   = s_1, ..., s_F one after another                               [F S]
///     B^  = each row of the basis / max(its length, 1e-12)                [L, F S]
///     z   = GELU(mid(mid_norm(B^ c)))                                     [L]
///     r   = B^^T z,   y_f = decoder(r_f)           for every frame f      [M]
///     score = mean over F M of (y - x)^2
///
/// encoder, mid and decoder are linear with bias; norm and mid_norm are layer norms (eps 1e-5,
/// biased variance) with weight and bias. GELU is the exact one.
///
/// Types: x is float32, float64, float16 or bfloat16; the weights share one type, x's own or
/// float32 beside half x. y and the latent have x's type, the score float32 (float64 for float64).
/// Everything between them is float32 (float64 for float64).
/// Layouts: x, y, the latent, the score and their gradients may have any strides. Weights and their
/// gradients are dense.
/// Memory: see tensor.h; no output may overlap an input or another output.
/// Errors: `Error`, before anything is written.
namespace fusewise {

/// M mel bands, F frames, L latent and S slice-latent values; all four follow from the shapes.
struct AutoencoderWeights {
  TensorView norm_weight;      ///< [M]
  TensorView norm_bias;        ///< [M]
  TensorView encoder_weight;   ///< [S, M]
  TensorView encoder_bias;     ///< [S]
  TensorView basis;            ///< [L, F S], as it is learned: not normalised
  TensorView mid_norm_weight;  ///< [L]
  TensorView mid_norm_bias;    ///< [L]
  TensorView mid_weight;       ///< [L, L]
  TensorView mid_bias;         ///< [L]
  TensorView decoder_weight;   ///< [M, S]
  TensorView decoder_bias;     ///< [M]
};

using AutoencoderWeight = TensorView AutoencoderWeights::*;

/// A weight by its name here and its name in a state dict or a .safetensors file, with its shape.
struct AutoencoderWeightName {
  AutoencoderWeight weight;
  const char* name;
  const char* state;
  const char* shape;
};

inline constexpr AutoencoderWeightName kAutoencoderWeights[] = {
    {&AutoencoderWeights::norm_weight, "norm_weight", "slice_encoder.0.weight", "M"},
    {&AutoencoderWeights::norm_bias, "norm_bias", "slice_encoder.0.bias", "M"},
    {&AutoencoderWeights::encoder_weight, "encoder_weight", "slice_encoder.1.weight", "S M"},
    {&AutoencoderWeights::encoder_bias, "encoder_bias", "slice_encoder.1.bias", "S"},
    {&AutoencoderWeights::basis, "basis", "global_basis", "L FS"},
    {&AutoencoderWeights::mid_norm_weight, "mid_norm_weight", "bottleneck_mlp.0.weight", "L"},
    {&AutoencoderWeights::mid_norm_bias, "mid_norm_bias", "bottleneck_mlp.0.bias", "L"},
    {&AutoencoderWeights::mid_weight, "mid_weight", "bottleneck_mlp.1.weight", "L L"},
    {&AutoencoderWeights::mid_bias, "mid_bias", "bottleneck_mlp.1.bias", "L"},
    {&AutoencoderWeights::decoder_weight, "decoder_weight", "slice_decoder.0.weight", "M S"},
    {&AutoencoderWeights::decoder_bias, "decoder_bias", "slice_decoder.0.bias", "M"},
};

struct AutoencoderSizes {
  std::int64_t n_mels = 0, frames = 0, latent = 0, slice_latent = 0;
};

/// The four sizes; throws Error where the weights do not fit each other, are not dense, are of
/// several types or not all on one device.
AutoencoderSizes autoencoder_sizes(const AutoencoderWeights& weights);

struct AutoencoderForward {
  TensorView x;                ///< in, [N, F M] or [N, F, M], N >= 0
  AutoencoderWeights weights;  ///< in
  /// Whether float32 data may be multiplied as TF32, where the device can.
  bool tf32 = false;

  /// out, exactly one of the three; what it does not need is not computed.
  TensorView y;       ///< the reconstruction, x's shape
  TensorView latent;  ///< z [N, L]
  TensorView score;   ///< [N]

  /// out, may be absent: B^ c [N, L], float32 (float64 for float64), dense. Backward is faster with
  /// it.
  TensorView projection;

  /// Forces one implementation by name; empty: the first that takes the call.
  std::string_view implementation = {};
};

/// Enqueues the forward on the context's stream (CUDA) or computes it (CPU).
void autoencoder(const Context& context, const AutoencoderForward& call);
/// What `autoencoder` would run, and why the others decline.
Candidates explain(const Context& context, const AutoencoderForward& call);

/// The gradients of x and the weights, from that of one output. What lies between x and that output
/// is computed again from x.
struct AutoencoderBackward {
  /// in, exactly one of the three
  TensorView dy;       ///< x's shape and type
  TensorView dlatent;  ///< [N, L], x's type
  TensorView dscore;   ///< [N], the score's type

  TensorView x;                ///< in, as in forward
  AutoencoderWeights weights;  ///< in
  TensorView projection;       ///< in, from forward; absent: computed again
  bool tf32 = false;

  /// out, each may be absent, and what is absent is not computed. Those of weights have the
  /// weights' type. What the output does not depend on gets zeros.
  TensorView dx;                 ///< x's shape and type
  AutoencoderWeights gradients;  ///< as the weights

  std::string_view implementation = {};
};

void autoencoder(const Context& context, const AutoencoderBackward& call);
Candidates explain(const Context& context, const AutoencoderBackward& call);

}  // namespace fusewise

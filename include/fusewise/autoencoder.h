#pragma once

#include <string_view>

#include "fusewise/context.h"
#include "fusewise/implementation.h"
#include "fusewise/tensor.h"

/// SpectralShapeAutoencoder, forward and backward: an autoencoder of log-mel frames, for detecting
/// anomalous machine sounds.
///
///     s_f = GELU(encoder(norm(x_f)))               for every frame f      [S]
///     c   = s_1, ..., s_F concatenated                                    [F S]
///     B^  = each row of the basis / max(its length, 1e-12)                [L, F S]
///     z   = GELU(mid(mid_norm(B^ c)))                                     [L]
///     r   = B^^T z,   y_f = decoder(r_f)           for every frame f      [M]
///     score = mean over F M of (y - x)^2
///
/// encoder, mid and decoder are linear with bias; norm and mid_norm are layer norms (eps 1e-5,
/// biased variance) with weight and bias. GELU is the exact one.
///
/// Types: x is float32, float64, float16 or bfloat16. The weights share one type: x's own, or
/// float32 if x is half precision. y and the latent have x's type, the score float32 (float64 for
/// float64). Everything between them is float32 (float64 for float64). Layouts: x, y, the latent,
/// the score and their gradients may have any strides. Weights and their gradients are dense.
/// Memory: see tensor.h; no output may overlap an input or another output.
/// Errors: `Error`, before anything is written.
namespace fusewise {

/// M mel bands, F frames, L latent and S slice-latent values. All four follow from the shapes.
struct AutoencoderWeights {
  TensorView norm_weight;      ///< [M]
  TensorView norm_bias;        ///< [M]
  TensorView encoder_weight;   ///< [S, M]
  TensorView encoder_bias;     ///< [S]
  TensorView basis;            ///< [L, F S], as learned: not normalised
  TensorView mid_norm_weight;  ///< [L]
  TensorView mid_norm_bias;    ///< [L]
  TensorView mid_weight;       ///< [L, L]
  TensorView mid_bias;         ///< [L]
  TensorView decoder_weight;   ///< [M, S]
  TensorView decoder_bias;     ///< [M]
};

using AutoencoderWeight = TensorView AutoencoderWeights::*;

/// A weight with its name here, its name in a state dict or a .safetensors file, and its shape.
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

/// The four sizes. Throws Error if the weights do not fit each other, are not dense, have different
/// types or are on different devices.
AutoencoderSizes autoencoder_sizes(const AutoencoderWeights& weights);

struct AutoencoderForward {
  TensorView x;                ///< in, [N, F M] or [N, F, M], N >= 0
  AutoencoderWeights weights;  ///< in
  /// Whether float32 data may be multiplied as TF32, if the device supports it.
  bool tf32 = false;

  /// out, exactly one of the three; work that it does not need is skipped.
  TensorView y;       ///< the reconstruction, x's shape
  TensorView latent;  ///< z [N, L]
  TensorView score;   ///< [N]

  /// out, may be absent: B^ c [N, L], float32 (float64 for float64), dense. Backward is faster with
  /// it.
  TensorView projection;

  /// Forces one implementation by name. Empty: the first that takes the call.
  std::string_view implementation = {};
};

/// Enqueues the forward on the context's stream (CUDA) or computes it (CPU).
void autoencoder(const Context& context, const AutoencoderForward& call);
/// What `autoencoder` would run, and why the others decline.
Candidates explain(const Context& context, const AutoencoderForward& call);

/// The gradients of x and the weights, from the gradient of one output. Intermediate results
/// between x and that output are recomputed from x.
struct AutoencoderBackward {
  /// in, exactly one of the three
  TensorView dy;       ///< x's shape and type
  TensorView dlatent;  ///< [N, L], x's type
  TensorView dscore;   ///< [N], the score's type

  TensorView x;                ///< in, as in forward
  AutoencoderWeights weights;  ///< in
  TensorView projection;       ///< in, from forward; absent: recomputed
  bool tf32 = false;

  /// out, each may be absent, and an absent one is not computed. Gradients of weights have the
  /// weights' type. Those that the output does not depend on are set to zero.
  TensorView dx;                 ///< x's shape and type
  AutoencoderWeights gradients;  ///< as the weights

  std::string_view implementation = {};
};

void autoencoder(const Context& context, const AutoencoderBackward& call);
Candidates explain(const Context& context, const AutoencoderBackward& call);

}  // namespace fusewise

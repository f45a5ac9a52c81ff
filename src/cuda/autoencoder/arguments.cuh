#pragma once

// Arguments of the autoencoder's launchers: plain pointers, sizes and flags. The caller has already
// checked them. All tensors are dense and row-major, except that rows of x may be strided.

#include <cstdint>
#include <string>

#include "fusewise/autoencoder.h"
#include "fusewise/context.h"

namespace fusewise::cuda {

/// Returns why the launchers' integer types are too small for these sizes, or an empty string. The
/// limit is far below 2^31 so that sums of a few sizes also fit in int. The product of two sizes is
/// computed in 64 bits unless something else bounds it.
inline std::string indices_decline(const fusewise::AutoencoderSizes& s) {
  constexpr std::int64_t kMost = std::int64_t{1} << 28;
  for (const std::int64_t size : {s.n_mels, s.frames, s.latent, s.slice_latent}) {
    if (size > kMost) return "a size of the model is too large for its 32-bit indices";
  }
  return {};
}

struct AutoencoderSizes {
  std::int64_t rows = 0;
  int n_mels = 64;
  int frames = 5;
  int latent = 32;
  int slice_latent = 64;
};

/// Parameters or their gradients, as in kAutoencoderWeights; Pointer is const void* or void*.
template <typename Pointer>
struct AutoencoderTensors {
  Pointer norm_weight{};      ///< slice_encoder.0.weight   [n_mels]
  Pointer norm_bias{};        ///< slice_encoder.0.bias     [n_mels]
  Pointer encoder_weight{};   ///< slice_encoder.1.weight   [slice_latent, n_mels]
  Pointer encoder_bias{};     ///< slice_encoder.1.bias     [slice_latent]
  Pointer basis{};            ///< global_basis             [latent, frames * slice_latent]
  Pointer mid_norm_weight{};  ///< bottleneck_mlp.0.weight  [latent]
  Pointer mid_norm_bias{};    ///< bottleneck_mlp.0.bias    [latent]
  Pointer mid_weight{};       ///< bottleneck_mlp.1.weight  [latent, latent]
  Pointer mid_bias{};         ///< bottleneck_mlp.1.bias    [latent]
  Pointer decoder_weight{};   ///< slice_decoder.0.weight   [n_mels, slice_latent]
  Pointer decoder_bias{};     ///< slice_decoder.0.bias     [n_mels]
};

/// Any result may be null. Work that only a null result needs is skipped.
struct AutoencoderForwardArguments {
  AutoencoderSizes sizes;
  AutoencoderTensors<const void*> parameters;
  DType dtype = DType::f32;            ///< of x, out and z; score is f32 when dtype is f16 or bf16
  DType parameter_dtype = DType::f32;  ///< dtype, or f32 when dtype is f16 or bf16
  bool tf32 = false;                   ///< f32 data may be multiplied as TF32
  const void* x = nullptr;             ///< [rows, frames * n_mels]
  std::int64_t x_stride = 0;           ///< elements between rows of x
  void* out = nullptr;                 ///< [rows, frames * n_mels]
  void* z = nullptr;                   ///< [rows, latent]
  void* score = nullptr;               ///< [rows]
  /// f32 (f64 for f64), [rows, latent]: c B^T. Backward is faster when it receives this.
  void* projection = nullptr;
};

/// d_out, d_z and d_score may be null, which means zero. A null result is not computed.
struct AutoencoderBackwardArguments {
  AutoencoderSizes sizes;
  AutoencoderTensors<const void*> parameters;
  AutoencoderTensors<void*> gradients;  ///< parameter_dtype
  DType dtype = DType::f32;
  DType parameter_dtype = DType::f32;
  bool tf32 = false;
  const void* x = nullptr;
  std::int64_t x_stride = 0;
  const void* d_out = nullptr;    ///< dtype, [rows, frames * n_mels]
  const void* d_z = nullptr;      ///< dtype, [rows, latent]
  const void* d_score = nullptr;  ///< score's type, [rows]
  /// The projection that forward saved. If null, it is recomputed.
  const void* projection = nullptr;
  void* dx = nullptr;  ///< dtype, [rows, frames * n_mels]
};

}  // namespace fusewise::cuda

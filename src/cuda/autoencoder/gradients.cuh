#pragma once

// Gradients of the parameters: the sums that a block of the backward kernel computes over its rows,
// and how the gradients follow from them.
//
// With d the gradient before a GELU and n the normalised input of the Linear before that GELU,
//   q_encode = sum d^T n,  b_encode = sum d       likewise for mid
//   q_project_f = sum dp^T s_f                    dp: gradient of the projection c B^T
//   q_decode_f = sum dy_f^T z,  b_decode = sum dy_f
// All gradients follow from these sums. Those of a LayerNorm's affine part and of the Linear after
// it need only q and b. Those of decoder and basis need q_decode, because y_f = W_dec B^_f^T z +
// bias.

#include "cuda/autoencoder/pack.cuh"

namespace fusewise::cuda::autoencoder {

/// Offsets of one block's sums, in floats. Rows and columns are padded to 16.
struct SumsLayout {
  int q_encode, b_encode;  ///< [slices, mels], [slices]
  int q_mid, b_mid;        ///< [latents, latents], [latents]
  int q_project;           ///< [frames, latents, slices]
  int q_decode;            ///< [frames, mels, latents]
  int b_decode;            ///< [mels]
  int floats;
};

constexpr SumsLayout sums_layout(const PackedLayout& p) {
  SumsLayout s{};
  int at = 0;
  const auto take = [&](int floats) {
    const int begin = at;
    at += floats;
    return begin;
  };
  s.q_encode = take(256 * p.slices * p.mels);
  s.b_encode = take(16 * p.slices);
  s.q_mid = take(256 * p.latents * p.latents);
  s.b_mid = take(16 * p.latents);
  s.q_project = take(256 * p.latents * p.slices * p.frames);
  s.q_decode = take(256 * p.mels * p.latents * p.frames);
  s.b_decode = take(16 * p.mels);
  s.floats = at;
  return s;
}

/// Which sums a backward call needs.
struct WantedSums {
  bool encode, mid, project, decode;
  bool any() const { return encode || mid || project || decode; }
};

inline WantedSums wanted_sums(const AutoencoderBackwardArguments& call) {
  const auto& g = call.gradients;
  const bool reconstructs = call.d_out != nullptr || call.d_score != nullptr;
  return {.encode = g.norm_weight || g.norm_bias || g.encoder_weight || g.encoder_bias,
          .mid = g.mid_norm_weight || g.mid_norm_bias || g.mid_weight || g.mid_bias,
          .project = g.basis != nullptr,
          .decode = reconstructs && (g.decoder_weight || g.decoder_bias || g.basis)};
}

/// Whether a call has gradients to finish. The latent's gradient adds nothing to the decoder's
/// sums, but the decoder's gradients still have to be written, as zeros.
inline bool finishes(const AutoencoderBackwardArguments& call) {
  return wanted_sums(call).any() || call.gradients.decoder_weight || call.gradients.decoder_bias;
}

/// Computes the wanted gradients, if any, from the sums of `blocks` blocks.
void finish_gradients(const Context& context, const AutoencoderBackwardArguments& call,
                      const PackedLayout& layout, const SumsLayout& sums_layout, int blocks,
                      float* sums, const void* packed);

}  // namespace fusewise::cuda::autoencoder

#pragma once

// The parameters as the fused kernels want them, made anew by every call: folded, so that less is
// left to do a row, and in the order in which a warp's lanes read them.
//
//   encode    W diag(norm_weight), bias + W norm_bias     LayerNorm's affine part goes into Linear
//   project   B^, the normalised basis, by frames
//   mid       as encode
//   decode    G_f = W_dec B^_f^T                          y_f = G_f z + bias: r is never computed
//
// and for backward the transposed ones; of encode and mid, behind a LayerNorm, with the mean taken
// from each output's weights: what comes back then has no mean left to be subtracted, but for what
// rounding leaves of it.

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda::autoencoder {

/// Sizes in blocks of 16, and where each packed matrix begins, in groups of four weights.
struct PackedLayout {
  int mels, latents, slices;  ///< blocks of 16
  int frames;
  int encode, mid, encode_transposed, mid_transposed;
  int resident;  ///< where what all frames share ends
  /// Of frame 0; the next frame's follows `step` groups behind.
  int project, project_transposed, project_step;
  int decode, decode_transposed, decode_step;
  int groups;  ///< of four weights, all together
  /// Behind the weights, floats: biases of the three Linear, 1 / norm of each basis vector.
  int encode_bias, mid_bias, decode_bias, inverse_norm;
  int floats;
  /// The columns of a frame are so ordered that a lane, which has four of a block of 16, has eight
  /// neighbouring ones in two blocks: 16 bytes of halves. n_mels is a multiple of 32 then.
  bool wide;

  /// Where column m of a frame stands in that order.
  constexpr int mel(int m) const {
    return wide ? (m & ~31) | (m >> 2 & 1) << 4 | (m >> 3 & 3) << 2 | (m & 3) : m;
  }
  static constexpr int matrix(int outputs, int inputs) { return 64 * outputs * inputs; }
};

constexpr PackedLayout packed_layout(const AutoencoderSizes& sizes, bool backward) {
  PackedLayout p{};
  p.mels = (sizes.n_mels + 15) / 16;
  p.latents = (sizes.latent + 15) / 16;
  p.slices = (sizes.slice_latent + 15) / 16;
  p.frames = sizes.frames;
  const int encode = PackedLayout::matrix(p.slices, p.mels);
  const int mid = PackedLayout::matrix(p.latents, p.latents);
  const int project = PackedLayout::matrix(p.latents, p.slices);
  const int decode = PackedLayout::matrix(p.mels, p.latents);
  p.mid = p.encode + encode;
  p.resident = p.mid + mid;
  if (backward) {
    p.encode_transposed = p.resident;
    p.mid_transposed = p.encode_transposed + encode;
    p.resident = p.mid_transposed + mid;
  }
  p.project = p.resident;
  p.project_step = project;
  p.decode_transposed = p.project + p.frames * project;
  p.decode = p.decode_transposed + (backward ? decode : 0);
  p.decode_step = backward ? 2 * decode : decode;
  p.project_transposed = p.decode_transposed + p.frames * p.decode_step;
  p.groups = p.project_transposed + (backward ? p.frames * project : 0);
  p.encode_bias = 0;
  p.mid_bias = p.encode_bias + 16 * p.slices;
  p.decode_bias = p.mid_bias + 16 * p.latents;
  p.inverse_norm = p.decode_bias + 16 * p.mels;
  p.floats = p.inverse_norm + 16 * p.latents;
  return p;
}

/// float32 weights as they are, the same rounded to TF32, or halves.
enum class PackedKind { f32, tf32, half };

inline PackedKind packed_kind(DType dtype, bool tf32) {
  if (dtype != DType::f32) return PackedKind::half;
  return tf32 ? PackedKind::tf32 : PackedKind::f32;
}

inline std::int64_t packed_weight_bytes(const PackedLayout& layout, PackedKind kind) {
  return std::int64_t{layout.groups} * (kind == PackedKind::half ? 8 : 16);
}
inline std::int64_t packed_bytes(const PackedLayout& layout, PackedKind kind) {
  return packed_weight_bytes(layout, kind) + 4 * layout.floats;
}
inline const float* packed_floats(const PackedLayout& layout, const void* packed, PackedKind kind) {
  return reinterpret_cast<const float*>(static_cast<const unsigned char*>(packed) +
                                        packed_weight_bytes(layout, kind));
}

/// For activations in registers, or in shared memory, where several warps have them, or for
/// warpgroups, whose sizes are 32 and 64.
enum class PackedOrder { registers, memory, groups };

/// Fills packed_bytes(...) of memory. `dtype` is x's: that of the packed halves.
void pack_weights(const Context& context, const AutoencoderSizes& sizes,
                  const AutoencoderTensors<const void*>& parameters, DType parameter_dtype,
                  DType dtype, PackedKind kind, bool backward, const PackedLayout& layout,
                  void* packed, PackedOrder order = PackedOrder::registers);

/// Shared memory of the kernels that work on a whole vector of the basis, at the most.
inline std::int64_t basis_shared_bytes(const AutoencoderSizes& sizes) {
  return std::int64_t{8} * sizes.frames * sizes.slice_latent + 8192;
}

}  // namespace fusewise::cuda::autoencoder

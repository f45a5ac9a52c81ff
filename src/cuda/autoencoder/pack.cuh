#pragma once

// The parameters in the form that the fused kernels use, recomputed by every call. They are folded,
// which leaves less work per row, and stored in the order in which a warp's lanes read them.
//
//   encode    W diag(norm_weight), bias + W norm_bias     LayerNorm's affine part goes into Linear
//   project   B^, the normalised basis, by frames
//   mid       as encode
//   decode    G_f = W_dec B^_f^T                          y_f = G_f z + bias: r is never computed
//
// For backward, the transposed matrices are also stored. encode and mid follow a LayerNorm, so
// their transposes have the mean subtracted from each output's weights. The gradient then has no
// mean left to subtract, apart from rounding errors.

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda::autoencoder {

/// Sizes in blocks of 16, and the start of each packed matrix, in groups of four weights.
struct PackedLayout {
  int mels, latents, slices;  ///< blocks of 16
  int frames;
  int encode, mid, encode_transposed, mid_transposed;
  int resident;  ///< end of the matrices that all frames share
  /// For frame 0. Each further frame follows at a distance of `step` groups.
  int project, project_transposed, project_step;
  int decode, decode_transposed, decode_step;
  int groups;  ///< of four weights, total
  /// After the weights, floats: biases of the three Linear layers, 1 / norm of each basis vector.
  int encode_bias, mid_bias, decode_bias, inverse_norm;
  int floats;
  /// Reorders the columns of a frame. A lane has four columns of a block of 16; in this order it
  /// has eight neighbouring columns in two blocks, which is 16 bytes in half precision. Requires
  /// n_mels to be a multiple of 32.
  bool wide;

  /// Position of a frame's column m in that order.
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

/// Weights in float32, rounded to TF32, or in half precision.
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

/// For activations in registers; in shared memory, where several warps use them; or for warpgroups,
/// with sizes 32 and 64.
enum class PackedOrder { registers, shared, wgmma };

/// Fills packed_bytes(...) of memory. `dtype` is x's type, and that of packed half-precision
/// weights.
void pack_weights(const Context& context, const AutoencoderSizes& sizes,
                  const AutoencoderTensors<const void*>& parameters, DType parameter_dtype,
                  DType dtype, PackedKind kind, bool backward, const PackedLayout& layout,
                  void* packed, PackedOrder order = PackedOrder::registers);

/// Upper bound on the shared memory of the kernels that hold a whole basis vector.
inline std::int64_t basis_shared_bytes(const AutoencoderSizes& sizes) {
  return std::int64_t{8} * sizes.frames * sizes.slice_latent + 8192;
}

}  // namespace fusewise::cuda::autoencoder

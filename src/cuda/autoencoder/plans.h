#pragma once

// How the kernels of forward.cu and backward.cu are laid out, and how much shared memory that
// takes. Plain C++: tested without a GPU.

#include <algorithm>

#include "cuda/autoencoder/pack.cuh"

namespace fusewise::cuda::autoencoder {

/// The sizes for which the fused kernels keep registers: n_mels 64, latent 32, slice_latent 64, in
/// blocks of 16. The number of frames is any.
struct DefaultShape {
  static constexpr int kMels = 4, kLatents = 2, kSlices = 4;
};

// For the registers of a warp.
inline constexpr int kMostForwardWarps = 12, kMostBackwardWarps = 8;  // of a block
inline constexpr int kChunk = 2;  // blocks of results that forward makes together

struct BackwardPlan {
  int warps;   ///< of a block, with 16 rows each
  bool holds;  ///< the encoder's sums stay in shared memory
};

/// Shared memory through which the warps of forward's block add up what they have of 16 rows.
inline std::int64_t exchange_bytes(int warps) {
  return std::int64_t{1024} * warps * DefaultShape::kLatents;
}

/// The columns of backward's tile in shared memory: what the sums over rows are made of.
struct TileLayout {
  int outer;    ///< a frame of the output's gradient, later of the normalised input
  int inner;    ///< z, later the projection's gradient
  int hidden;   ///< gradient in front of a GELU
  int slice;    ///< behind the encoder's GELU; the bottleneck's normalised input
  int columns;  ///< a multiple of 32
};

constexpr TileLayout tile_layout(int mels, int latents, int slices) {
  TileLayout t{};
  const int wide = 16 * (slices > latents ? slices : latents);
  t.outer = 0;
  t.inner = 16 * mels;
  t.hidden = t.inner + 16 * latents;
  t.slice = t.hidden + wide;
  t.columns = (t.slice + wide + 31) / 32 * 32;
  return t;
}
constexpr TileLayout tile_layout(const PackedLayout& p) {
  return tile_layout(p.mels, p.latents, p.slices);
}

/// Groups of a frame's decoder that backward needs: the score needs both directions.
inline int decode_groups(const AutoencoderBackwardArguments& call, const PackedLayout& layout) {
  return call.d_score != nullptr ? layout.decode_step : layout.decode - layout.decode_transposed;
}

/// Groups of the largest part of the weights that is a frame's own.
inline int frame_groups(const AutoencoderBackwardArguments& call, const PackedLayout& layout) {
  return std::max(layout.project_step, decode_groups(call, layout));
}

/// Shared memory for the packed weights: what all frames share, and two frames' own.
inline std::int64_t staged_bytes(const AutoencoderBackwardArguments& call,
                                 const PackedLayout& layout) {
  const std::int64_t group = call.dtype == DType::f32 ? 16 : 8;
  return group * (layout.resident + 2 * frame_groups(call, layout)) + 4 * layout.floats;
}

/// Shared memory of a block of backward.cu.
inline std::int64_t shared_bytes(const AutoencoderBackwardArguments& call,
                                 const BackwardPlan& plan) {
  const PackedLayout layout = packed_layout(call.sizes, true);
  std::int64_t bytes =
      std::int64_t{64} * plan.warps * tile_layout(layout).columns + staged_bytes(call, layout);
  if (plan.holds) bytes += std::int64_t{4} * 256 * layout.slices * layout.mels;
  return bytes;
}

/// Of a block of backward_block16.cu, which asserts it.
constexpr std::int64_t backward_block16_bytes(DType dtype) {
  return dtype == DType::f32 ? 226944 : 130688;
}

}  // namespace fusewise::cuda::autoencoder

#pragma once

// Launch plans of the kernels in forward.cu and backward.cu, and the shared memory that they take.
// Plain C++: tested without a GPU.

#include <algorithm>

#include "cuda/autoencoder/pack.cuh"

namespace fusewise::cuda::autoencoder {

/// The sizes for which the fused kernels have registers: n_mels 64, latent 32, slice_latent 64, in
/// blocks of 16. Any number of frames is allowed.
struct DefaultShape {
  static constexpr int kMels = 4, kLatents = 2, kSlices = 4;
};

// Limited by the registers per warp.
inline constexpr int kMostForwardWarps = 12, kMostBackwardWarps = 8;  // per block
inline constexpr int kChunk = 2;  // blocks of results that forward computes together

struct BackwardPlan {
  int warps;   ///< per block, with 16 rows each
  bool holds;  ///< the encoder's sums stay in shared memory
};

/// Shared memory through which the warps of a forward block add their partial sums of 16 rows.
inline std::int64_t exchange_bytes(int warps) {
  return std::int64_t{1024} * warps * DefaultShape::kLatents;
}

/// Rows of a block of any_size.cu: as few as keep every SM busy.
inline int any_size_rows(int multiprocessors, const AutoencoderSizes& sizes) {
  const std::int64_t all = multiprocessors;
  return sizes.rows <= all ? 1 : sizes.rows <= 2 * all ? 2 : 4;
}
/// Shared memory of a block of any_size.cu for its rows.
inline std::int64_t any_size_row_bytes(const AutoencoderSizes& s, int rows) {
  const std::int64_t frames = std::int64_t{s.frames} * (s.n_mels + s.slice_latent);
  return 4 * (rows * (frames + 2 * std::int64_t{s.latent}) + s.latent);
}
/// Row stride of a matrix in the shared memory of any_size.cu: the next odd number.
constexpr std::int64_t any_size_stride(std::int64_t columns) { return columns | 1; }
/// Shared memory of a block of any_size.cu with all parameters. The rows must fit into it: then
/// nothing overflows.
inline std::int64_t any_size_bytes(const AutoencoderSizes& s, int rows) {
  const std::int64_t m = s.n_mels, l = s.latent, h = s.slice_latent;
  const auto matrix = [](std::int64_t outputs, std::int64_t inputs) {
    return outputs * any_size_stride(inputs);
  };
  const std::int64_t vectors = 3 * matrix(1, m) + matrix(1, h) + 3 * matrix(1, l);
  const std::int64_t matrices =
      matrix(h, m) + matrix(l, s.frames * h) + matrix(l, l) + matrix(m, h);
  return any_size_row_bytes(s, rows) + 4 * (vectors + matrices);
}

/// Columns of backward's tile in shared memory: the operands of the sums over rows.
struct TileLayout {
  int outer;    ///< a frame of the output's gradient, later of the normalised input
  int inner;    ///< z, later the projection's gradient
  int hidden;   ///< gradient before a GELU
  int slice;    ///< output of the encoder's GELU; the bottleneck's normalised input
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

/// Groups of a frame's decoder weights that backward needs: the score needs both directions.
inline int decode_groups(const AutoencoderBackwardArguments& call, const PackedLayout& layout) {
  return call.d_score != nullptr ? layout.decode_step : layout.decode - layout.decode_transposed;
}

/// Groups in the largest per-frame part of the weights.
inline int frame_groups(const AutoencoderBackwardArguments& call, const PackedLayout& layout) {
  return std::max(layout.project_step, decode_groups(call, layout));
}

/// Shared memory for the packed weights: those that all frames share, and those of two frames.
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

/// Shared memory of a block of backward_block16.cu, which asserts it.
constexpr std::int64_t backward_block16_bytes(DType dtype) {
  return dtype == DType::f32 ? 226944 : 130688;
}

}  // namespace fusewise::cuda::autoencoder

// The GEMMs of Squeeze-and-Excitation over all samples, and what is applied to their results.
// Memory: weights and vectors of the samples, once per tile, from L2; results are written once.
// Bound by latency: a few microseconds each, where every sample by itself would read all weights.

#include <algorithm>
#include <type_traits>

#include "common/divide.h"
#include "common/math.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/squeeze_excite/batched_kernels.cuh"
#include "cuda/squeeze_excite/batched_tile.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda::batched {
namespace {

extern __shared__ __align__(16) unsigned char shared_memory[];

struct NoSums {
  __device__ void operator()(int, float) const {}
};

template <typename E, bool kAlongDepth>
__device__ Operand<E, kAlongDepth> operand(const void* data, int stride, int rows, int depth) {
  constexpr int kVector = 16 / sizeof(E);
  const bool wide = reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % kVector == 0 &&
                    (kAlongDepth ? depth : rows) % kVector == 0;
  return {static_cast<const E*>(data), stride, rows, depth, wide};
}

/// At most this many blocks per SM: the registers that a tile needs.
constexpr int blocks_for(int tile) { return tile == 64 ? 2 : 4; }

template <typename W, int kTile, bool kBackward>
__global__ void __launch_bounds__(kThreads, blocks_for(kTile))
    excite_kernel(Arguments a, int slices) {
  using A = Operand<float, true>;
  using B = Operand<W, !kBackward>;
  const Place place = place_of(blockIdx.x, kTile, a.stride, a.c, slices);
  const W* const b1 = static_cast<const W*>(a.b1);
  TileProduct<A, B, kTile>::run(
      shared_memory, operand<float, true>(kBackward ? a.dz2 : a.pooled, a.c, a.n, a.c),
      operand<W, !kBackward>(kBackward ? a.w2 : a.w1, kBackward ? a.r : a.c, a.r, a.c), place,
      /*early_b=*/true, /*row_sums=*/false,
      [&](int sample, int r, float sum) {
        if (sample >= a.n || r >= a.stride) return;
        const long long at = static_cast<long long>(sample) * a.stride + r;
        const long long saved = static_cast<long long>(sample) * a.r + r;
        const bool real = r < a.r;
        float z = 0;
        if (kBackward) {
          if (real) z = a.hidden[saved];
          a.dz1[at] = real ? math::activation_gradient(a.activation, z, sum) : 0.f;
        } else if (real) {
          z = b1 ? sum + to_accumulator<float>(b1[r]) : sum;
          if (a.hidden) a.hidden[saved] = z;
        }
        a.activated[at] = real ? math::activate(a.activation, z) : 0.f;
      },
      NoSums());
}

template <typename W, int kTile>
__global__ void __launch_bounds__(kThreads, blocks_for(kTile))
    open_gates_kernel(Arguments a, int slices) {
  using A = Operand<float, true>;
  using B = Operand<W, true>;
  const Place place = place_of(blockIdx.x, kTile, a.c, a.r, slices);
  const W* const b2 = static_cast<const W*>(a.b2);
  TileProduct<A, B, kTile>::run(
      shared_memory, operand<float, true>(a.activated, a.stride, a.n, a.stride),
      operand<W, true>(a.w2, a.r, a.c, a.r), place, /*early_b=*/true, /*row_sums=*/false,
      [&](int sample, int c, float sum) {
        if (sample >= a.n || c >= a.c) return;
        a.gates[static_cast<long long>(sample) * a.c + c] =
            math::open_gate(a.gate, b2 ? sum + to_accumulator<float>(b2[c]) : sum);
      },
      NoSums());
}

/// A gradient of weights and the bias beside it: out[m][n] = sum over samples of A(m) B(n).
template <typename W, int kTile>
__device__ void weight_gradient(const float* left, int left_stride, int rows, int real_rows,
                                const float* right, int right_stride, int columns, int real_columns,
                                W* out, W* bias, int samples, unsigned block, int slices) {
  using Side = Operand<float, false>;
  // Without `out`, the first column of tiles has the sums for the bias.
  const Place place = place_of(block, kTile, out ? columns : 1, samples, slices);
  TileProduct<Side, Side, kTile>::run(
      shared_memory, operand<float, false>(left, left_stride, rows, samples),
      operand<float, false>(right, right_stride, columns, samples), place, /*early_b=*/false,
      /*row_sums=*/bias != nullptr && place.column == 0,
      [&](int row, int column, float sum) {
        if (!out || row >= real_rows || column >= real_columns) return;
        out[static_cast<long long>(row) * real_columns + column] = from_accumulator<W>(sum);
      },
      [&](int row, float sum) {
        if (row < real_rows) bias[row] = from_accumulator<W>(sum);
      });
}

template <typename W, int kTile>
__global__ void __launch_bounds__(kThreads, blocks_for(kTile))
    gradients_kernel(Arguments a, int slices, int offset_tiles, int dw1_tiles) {
  unsigned block = blockIdx.x;
  const unsigned offsets = static_cast<unsigned>(offset_tiles) * slices;
  if (block < offsets) {
    using A = Operand<float, true>;
    using B = Operand<W, false>;
    const Place place = place_of(block, kTile, a.c, a.r, slices);
    return TileProduct<A, B, kTile>::run(
        shared_memory, operand<float, true>(a.dz1, a.stride, a.n, a.stride),
        operand<W, false>(a.w1, a.c, a.c, a.r), place, /*early_b=*/true, /*row_sums=*/false,
        [&](int sample, int c, float sum) {
          if (sample >= a.n || c >= a.c) return;
          a.offsets[static_cast<long long>(sample) * a.c + c] = sum * a.inverse_hw;
        },
        NoSums());
  }
  block -= offsets;
  const unsigned of_dw1 = static_cast<unsigned>(dw1_tiles) * slices;
  if (block < of_dw1) {
    weight_gradient<W, kTile>(a.dz1, a.stride, a.stride, a.r, a.pooled, a.c, a.c, a.c,
                              static_cast<W*>(a.dw1), static_cast<W*>(a.db1), a.n, block, slices);
  } else {
    weight_gradient<W, kTile>(a.dz2, a.c, a.c, a.c, a.activated, a.stride, a.stride, a.r,
                              static_cast<W*>(a.dw2), static_cast<W*>(a.db2), a.n, block - of_dw1,
                              slices);
  }
}

// ---- host

std::int64_t tiles_of(std::int64_t rows, std::int64_t columns, int side) {
  return divide_up(rows, side) * divide_up(columns, side);
}

template <typename TilesOf>
BatchedTiles cut_for(const Context& context, std::int64_t depth, TilesOf tiles) {
  const DeviceLimits& limits = limits_of(context.device);
  return batched_tiles(depth, limits.multiprocessors, limits.capability >= 90, tiles);
}

BatchedTiles cut_for(const Context& context, std::int64_t rows, std::int64_t columns,
                     std::int64_t depth) {
  return cut_for(context, depth, [&](int side) { return tiles_of(rows, columns, side); });
}

Launch launch_of(const Context& context, const BatchedTiles& cut, std::int64_t tiles, int shared) {
  return {context,
          tiles * cut.slices,
          kThreads,
          static_cast<std::size_t>(shared),
          /*overlaps_previous=*/true,
          cut.slices};
}

/// Calls body(W{}, std::integral_constant<int, tile>{}) for the type of the weights.
template <typename Body>
void dispatch_tile(DType weights, int tile, Body body) {
  dispatch_short_dtype(weights, [&]<typename W>(W) {
    if (tile == 64) {
      body(W{}, std::integral_constant<int, 64>());
    } else {
      body(W{}, std::integral_constant<int, 32>());
    }
  });
}

template <typename W, bool kBackward, int kTile>
void launch_excite(const Context& context, const Arguments& a, const BatchedTiles& cut) {
  using Product = TileProduct<Operand<float, true>, Operand<W, !kBackward>, kTile>;
  launch_kernel(launch_of(context, cut, tiles_of(a.n, a.stride, kTile), Product::kSharedBytes),
                "multiplying by the first matrix", excite_kernel<W, kTile, kBackward>, a,
                cut.slices);
}

}  // namespace

void excite(const Context& context, DType weights, const Arguments& a, bool backward) {
  const BatchedTiles cut = cut_for(context, a.n, a.stride, a.c);
  dispatch_tile(weights, cut.tile, [&]<typename W, typename Tile>(W, Tile) {
    if (backward) {
      launch_excite<W, true, Tile::value>(context, a, cut);
    } else {
      launch_excite<W, false, Tile::value>(context, a, cut);
    }
  });
}

void open_gates(const Context& context, DType weights, const Arguments& a) {
  const BatchedTiles cut = cut_for(context, a.n, a.c, a.r);
  dispatch_tile(weights, cut.tile, [&]<typename W, typename Tile>(W, Tile) {
    constexpr int kTile = Tile::value;
    using Product = TileProduct<Operand<float, true>, Operand<W, true>, kTile>;
    launch_kernel(launch_of(context, cut, tiles_of(a.n, a.c, kTile), Product::kSharedBytes),
                  "opening the gates", open_gates_kernel<W, kTile>, a, cut.slices);
  });
}

void compute_gradients(const Context& context, DType weights, const Arguments& a) {
  const auto offset_tiles = [&](int side) { return tiles_of(a.n, a.c, side); };
  const auto dw1_tiles = [&](int side) {
    return a.dw1 ? tiles_of(a.r, a.c, side) : a.db1 ? tiles_of(a.r, 1, side) : 0;
  };
  const auto dw2_tiles = [&](int side) {
    return a.dw2 ? tiles_of(a.c, a.r, side) : a.db2 ? tiles_of(a.c, 1, side) : 0;
  };
  const auto tiles = [&](int side) {
    return offset_tiles(side) + dw1_tiles(side) + dw2_tiles(side);
  };
  const BatchedTiles cut = cut_for(context, std::min(a.r, a.n), tiles);
  dispatch_tile(weights, cut.tile, [&]<typename W, typename Tile>(W, Tile) {
    constexpr int kTile = Tile::value;
    using Offsets = TileProduct<Operand<float, true>, Operand<W, false>, kTile>;
    using Gradients = TileProduct<Operand<float, false>, Operand<float, false>, kTile>;
    constexpr int kShared = std::max(Offsets::kSharedBytes, Gradients::kSharedBytes);
    launch_kernel(launch_of(context, cut, tiles(kTile), kShared), "computing the gradients",
                  gradients_kernel<W, kTile>, a, cut.slices, static_cast<int>(offset_tiles(kTile)),
                  static_cast<int>(dw1_tiles(kTile)));
  });
}

}  // namespace fusewise::cuda::batched

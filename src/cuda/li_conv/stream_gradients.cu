// The gradients of LINet's streams before their convolutions in half precision: what reaches a
// stream itself, plus dy times its mixture. A block keeps its rows of dy in shared memory and goes
// through the streams, 64 channels at a time, while the next ones are being fetched.
// Memory: dy and du are read once, g is written once. Bound by memory bandwidth.

#include "cuda/copy_async.cuh"
#include "cuda/launch.cuh"
#include "cuda/li_conv/rows.cuh"
#include "cuda/li_conv/stream_gradients.h"
#include "cuda/mma.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kThreads = 256, kRows = 128, kColumns = kRowElements;
constexpr int kRowsAtOnce = kThreads / kChunks;  // a thread copies one chunk of some rows
constexpr int kRowsOfAThread = kRows / kRowsAtOnce;
constexpr int kRowWarps = 4, kColumnWarps = 2;
constexpr int kWarpRows = kRows / kRowWarps, kWarpColumns = kColumns / kColumnWarps;
constexpr int kRowParts = kWarpRows / 16, kColumnParts = kWarpColumns / 8;

/// Sizes in elements. `kDepth`: channels of dy.
template <int kDepth>
struct Tiles {
  static constexpr int kStages = kDepth == 64 ? 3 : 2;
  static constexpr int kPart = kRows * kRowElements;  // 64 channels of dy, or a tile of du and g
  static constexpr int kDy = kDepth / kRowElements * kPart;
  static constexpr int kMix = kDepth * kColumns;
  static constexpr int kStage = kMix + kPart;
  static constexpr int kBytes = (kDy + kStages * kStage) * 2;
};

/// Two neighbouring values.
template <typename T>
struct alignas(4) Pair {
  T first, second;
};

template <typename T, int kDepth>
__global__ void __launch_bounds__(kThreads, 2)
    stream_gradients_kernel(const __grid_constant__ StreamGradients call) {
  using Tile = Tiles<kDepth>;
  extern __shared__ __align__(128) unsigned char memory[];
  T* const dy = reinterpret_cast<T*>(memory);
  T* const stages = dy + Tile::kDy;

  const std::size_t first_row = std::size_t{blockIdx.x} * kRows;
  const int chunk = threadIdx.x % kChunks, own_row = threadIdx.x / kChunks;
  const int tiles = call.columns / kColumns, steps = call.streams * tiles;
  /// Where the tile of a step begins in du and g, at the block's first row.
  const auto start_of = [&](int step) {
    return (step / tiles * call.rows + first_row) * call.columns + step % tiles * kColumns;
  };

  // Rows beyond the end are zeros; their addresses are those of the block's first row.
  int rows[kRowsOfAThread];
  bool real[kRowsOfAThread];
#pragma unroll
  for (int j = 0; j < kRowsOfAThread; ++j) {
    const int row = own_row + j * kRowsAtOnce;
    real[j] = first_row + row < call.rows;
    rows[j] = real[j] ? row : 0;
#pragma unroll
    for (int part = 0; part < kDepth / kRowElements; ++part) {
      const T* const from = static_cast<const T*>(call.dy) + (first_row + rows[j]) * kDepth;
      copy_vector_or_zeros(dy + part * Tile::kPart + place_of(row, chunk),
                           from + part * kRowElements + chunk * kChunk, real[j]);
    }
  }
  const auto fetch = [&](int step) {
    T* const mix = stages + step % Tile::kStages * Tile::kStage;
    const T* const from = static_cast<const T*>(call.mix[step / tiles]) + step % tiles * kColumns;
#pragma unroll
    for (int j = 0; j < kDepth / kRowsAtOnce; ++j) {
      const int row = own_row + j * kRowsAtOnce;
      copy_vector(mix + place_of(row, chunk), from + row * call.columns + chunk * kChunk);
    }
    if (call.du == nullptr) return;
    const T* const du = static_cast<const T*>(call.du) + start_of(step) + chunk * kChunk;
#pragma unroll
    for (int j = 0; j < kRowsOfAThread; ++j) {
      copy_vector_or_zeros(mix + Tile::kMix + place_of(own_row + j * kRowsAtOnce, chunk),
                           du + static_cast<std::size_t>(rows[j]) * call.columns, real[j]);
    }
  };

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % kRowWarps * kWarpRows;
  const int warp_column = warp / kRowWarps * kWarpColumns;

#pragma unroll
  for (int step = 0; step < Tile::kStages - 1; ++step) {
    if (step < steps) fetch(step);
    commit_copies();  // the first group has dy as well
  }
  for (int step = 0; step < steps; ++step) {
    wait_for_all_but<Tile::kStages - 2>();
    __syncthreads();  // also: nobody reads the stage that is filled next any more
    if (step + Tile::kStages - 1 < steps) fetch(step + Tile::kStages - 1);
    commit_copies();
    T* const mix = stages + step % Tile::kStages * Tile::kStage;
    T* const tile = mix + Tile::kMix;
    float sums[kRowParts][kColumnParts][4]{};
#pragma unroll 4
    for (int k = 0; k < kDepth / 16; ++k) {
      unsigned left[kRowParts][4];
#pragma unroll
      for (int i = 0; i < kRowParts; ++i) {
        const T* const part = dy + k * 16 / kRowElements * Tile::kPart;
        const int first_chunk = k * 16 % kRowElements / kChunk;
        load_matrices(left[i],
                      part + place_of(warp_row + i * 16 + lane % 16, first_chunk + lane / 16));
      }
#pragma unroll
      for (int j = 0; j < kColumnParts; j += 2) {
        unsigned right[4];  // of two parts, each 16 deep
        const int row = k * 16 + lane / 8 % 2 * 8 + lane % 8;
        load_transposed(right, mix + place_of(row, warp_column / kChunk + j + lane / 16));
        multiply_two<T>(left, right, sums, j);
      }
    }

    // A thread reads its values of du and writes those of g to the same places.
#pragma unroll
    for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnParts; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + i * 16 + half * 8 + lane / 4;
          auto* const at = reinterpret_cast<Pair<T>*>(
              tile + place_of(row, warp_column / kChunk + j) + lane % 4 * 2);
          float first = sums[i][j][2 * half], second = sums[i][j][2 * half + 1];
          if (call.du != nullptr) {
            const Pair<T> du = *at;
            first += to_accumulator<float>(du.first);
            second += to_accumulator<float>(du.second);
          }
          *at = {from_accumulator<T>(first), from_accumulator<T>(second)};
        }
      }
    }
    __syncthreads();
    T* const g = static_cast<T*>(call.g) + start_of(step) + chunk * kChunk;
#pragma unroll
    for (int j = 0; j < kRowsOfAThread; ++j) {
      if (!real[j]) break;
      *reinterpret_cast<uint4*>(g + static_cast<std::size_t>(rows[j]) * call.columns) =
          *reinterpret_cast<const uint4*>(tile + place_of(own_row + j * kRowsAtOnce, chunk));
    }
  }
}

template <typename T, int kDepth>
void launch(const Context& context, const StreamGradients& call) {
  launch_kernel({.context = context,
                 .blocks = static_cast<std::int64_t>((call.rows + kRows - 1) / kRows),
                 .threads = kThreads,
                 .shared_bytes = Tiles<kDepth>::kBytes},
                "gradients of streams", stream_gradients_kernel<T, kDepth>, call);
}

template <typename T>
void launch(const Context& context, const StreamGradients& call) {
  if (call.depth == 64) {
    launch<T, 64>(context, call);
  } else {
    launch<T, 128>(context, call);
  }
}

}  // namespace

void stream_gradients(const Context& context, DType dtype, const StreamGradients& call) {
  dispatch_half(dtype, [&]<typename T>(T) { launch<T>(context, call); });
}

}  // namespace fusewise::cuda

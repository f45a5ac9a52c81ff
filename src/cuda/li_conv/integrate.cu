// The integrated stream of LINet in half precision: the 1x1 convolutions of all streams and of the
// integrated stream before, as one GEMM whose inner dimension goes through all of them.
// Memory: each stream is read once for every 64 or 128 columns of y, y is written once.
// Bound by memory bandwidth up to 128 channels, by the tensor cores above.

#include "cuda/copy_async.cuh"
#include "cuda/launch.cuh"
#include "cuda/li_conv/integrate.h"
#include "cuda/li_conv/rows.cuh"
#include "cuda/mma.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kThreads = 256, kRows = 128, kDepth = kRowElements;
constexpr int kRowsAtOnce = kThreads / kChunks;  // a thread copies one chunk of some rows
constexpr int kRowsOfAThread = kRows / kRowsAtOnce;
constexpr int kRowWarps = 4, kColumnWarps = 2;
constexpr int kWarpRows = kRows / kRowWarps;

template <int kColumns>
struct Tiles {
  static constexpr int kStages = kColumns == 64 ? 4 : 3;
  static constexpr int kA = kRows * kDepth, kB = kColumns * kDepth;  // elements
  static constexpr int kBytes = kStages * (kA + kB) * 2;
  static constexpr int kResultStride = kColumns + kChunk;  // keeps stores off each other's banks
  static_assert(kRows * kResultStride * 2 <= kBytes);
};

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 2)
    integrate_kernel(const __grid_constant__ Integration call) {
  using Tile = Tiles<kColumns>;
  constexpr int kWarpColumns = kColumns / kColumnWarps;
  constexpr int kRowParts = kWarpRows / 16, kColumnParts = kWarpColumns / 8;
  extern __shared__ __align__(128) unsigned char memory[];
  T* const shared = reinterpret_cast<T*>(memory);

  const unsigned column_tiles = call.columns / kColumns;
  const unsigned first_row = blockIdx.x / column_tiles * kRows;
  const int first_column = blockIdx.x % column_tiles * kColumns;
  const int chunk = threadIdx.x % kChunks, own_row = threadIdx.x / kChunks;

  // Rows beyond the end are zeros; their addresses are those of row 0.
  unsigned rows[kRowsOfAThread], pixels[kRowsOfAThread];
  bool real[kRowsOfAThread];
#pragma unroll
  for (int j = 0; j < kRowsOfAThread; ++j) {
    const unsigned row = first_row + own_row + j * kRowsAtOnce;
    real[j] = row < call.rows;
    rows[j] = pixels[j] = real[j] ? row : 0;
    if (call.strided.source >= 0) pixels[j] = pixel_of(call.strided, rows[j]);
  }

  int steps = 0;
  for (int i = 0; i < call.sources; ++i) steps += call.source[i].channels / kDepth;
  int next_source = 0, next_channel = 0;
  const auto fetch = [&](int stage) {
    T* const a = shared + stage * (Tile::kA + Tile::kB);
    T* const b = a + Tile::kA;
    const Integration::Source& source = call.source[next_source];
    const bool strided = next_source == call.strided.source;
    const int at = next_channel + chunk * kChunk;
#pragma unroll
    for (int j = 0; j < kRowsOfAThread; ++j) {
      const std::size_t row = strided ? pixels[j] : rows[j];
      copy_vector_or_zeros(a + place_of(own_row + j * kRowsAtOnce, chunk),
                           static_cast<const T*>(source.rows) + row * source.channels + at,
                           real[j]);
    }
#pragma unroll
    for (int j = 0; j < kColumns / kRowsAtOnce; ++j) {
      const int column = own_row + j * kRowsAtOnce;
      const std::size_t row = first_column + column;
      copy_vector(b + place_of(column, chunk),
                  static_cast<const T*>(source.weights) + row * source.channels + at);
    }
    next_channel += kDepth;
    if (next_channel == source.channels) next_channel = 0, ++next_source;
  };

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % kRowWarps * kWarpRows;
  const int warp_column = warp / kRowWarps * kWarpColumns;
  float sums[kRowParts][kColumnParts][4]{};

#pragma unroll
  for (int stage = 0; stage < Tile::kStages - 1; ++stage) {
    if (stage < steps) fetch(stage);
    commit_copies();
  }
  for (int step = 0; step < steps; ++step) {
    wait_for_all_but<Tile::kStages - 2>();
    __syncthreads();  // also: nobody reads the stage that is filled next any more
    if (step + Tile::kStages - 1 < steps) fetch((step + Tile::kStages - 1) % Tile::kStages);
    commit_copies();
    const T* const a = shared + step % Tile::kStages * (Tile::kA + Tile::kB);
    const T* const b = a + Tile::kA;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      unsigned left[kRowParts][4];
#pragma unroll
      for (int i = 0; i < kRowParts; ++i) {
        load_matrices(left[i], a + place_of(warp_row + i * 16 + lane % 16, 2 * k + lane / 16));
      }
#pragma unroll
      for (int j = 0; j < kColumnParts; j += 2) {
        unsigned right[4];  // of two parts, each 16 deep
        const int column = warp_column + j * 8 + lane / 16 * 8 + lane % 8;
        load_matrices(right, b + place_of(column, 2 * k + lane / 8 % 2));
        multiply_two<T>(left, right, sums, j);
      }
    }
  }

  wait_for_copies();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnParts; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + i * 16 + half * 8 + lane / 4;
        T* const to = shared + row * Tile::kResultStride + warp_column + j * 8 + lane % 4 * 2;
        to[0] = from_accumulator<T>(sums[i][j][2 * half]);
        to[1] = from_accumulator<T>(sums[i][j][2 * half + 1]);
      }
    }
  }
  __syncthreads();
  constexpr int kResultChunks = kColumns / kChunk;
#pragma unroll
  for (int i = 0; i < kRows * kResultChunks / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x;
    const int row = at / kResultChunks, column = at % kResultChunks * kChunk;
    if (first_row + row >= call.rows) break;
    *reinterpret_cast<uint4*>(static_cast<T*>(call.y) +
                              static_cast<std::size_t>(first_row + row) * call.columns +
                              first_column + column) =
        *reinterpret_cast<const uint4*>(shared + row * Tile::kResultStride + column);
  }
}

template <typename T, int kColumns>
void launch(const Context& context, const Integration& call) {
  const std::int64_t row_tiles = (std::int64_t{call.rows} + kRows - 1) / kRows;
  launch_kernel({.context = context,
                 .blocks = row_tiles * (call.columns / kColumns),
                 .threads = kThreads,
                 .shared_bytes = Tiles<kColumns>::kBytes},
                "integrating streams", integrate_kernel<T, kColumns>, call);
}

template <typename T>
void launch(const Context& context, const Integration& call) {
  if (call.columns % 128 == 0) {
    launch<T, 128>(context, call);
  } else {
    launch<T, 64>(context, call);
  }
}

}  // namespace

void integrate(const Context& context, DType dtype, const Integration& call) {
  dispatch_half(dtype, [&]<typename T>(T) { launch<T>(context, call); });
}

}  // namespace fusewise::cuda

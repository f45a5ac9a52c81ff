// The gradients of the integration's weights in half precision: dy^T times every stream, and times
// the integrated stream before. A block sums 64 channels of dy times 256 channels of streams over
// some of the pixels; a second kernel adds the blocks' sums.
// Memory: up to 64 channels every tensor is read once, with more dy and the streams are read again
// from L2. The blocks' sums are written and read once. Bound by memory bandwidth.

#include <algorithm>

#include "common/divide.h"
#include "common/scratch.h"
#include "cuda/copy_async.cuh"
#include "cuda/launch.cuh"
#include "cuda/li_conv/rows.cuh"
#include "cuda/li_conv/weight_gradients.h"
#include "cuda/mma.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kThreads = 256, kBlocksOnAnSm = 2;
constexpr int kDepth = 32;  // pixels of a stage
constexpr int kStages = 4;
constexpr int kUnits = 4;  // of 64 channels of a stream, for each block
constexpr int kRows = kRowElements, kColumns = kUnits * kRowElements;  // of a block's sums
constexpr int kTile = kDepth * kRowElements;                           // elements
constexpr int kStage = (1 + kUnits) * kTile;
constexpr int kBytes = kStages * kStage * 2;
constexpr int kWarpRows = 32, kRowParts = kWarpRows / 16, kColumnParts = kRowElements / 8;
static_assert(kThreads == kDepth * kChunks);  // a thread copies a chunk of each tile
static_assert(kThreads / 32 == kUnits * kRows / kWarpRows);

constexpr int kLine = kRowElements / 4;  // a unit's row of sums, as float4
constexpr int kMostParts = kThreads / kLine;

/// 64 channels of a source.
struct Unit {
  int source = -1, channel = 0;
};

__host__ __device__ __forceinline__ Unit unit_of(const WeightGradients& call, int index) {
  for (int i = 0; i < call.sources; ++i) {
    const int units = call.source[i].channels / kRowElements;
    if (index < units) return {i, index * kRowElements};
    index -= units;
  }
  return {};
}

/// How the work is divided. Blocks of the same pixels follow each other, so that they share L2.
struct Division {
  int row_tiles, tiles;  ///< tiles of all results: row_tiles for each group of units
  int splits, steps;     ///< of the pixels, and the stages of each split
};

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksOnAnSm)
    partial_sums_kernel(const __grid_constant__ WeightGradients call,
                        const __grid_constant__ Division division, float* __restrict__ sums_out) {
  extern __shared__ __align__(128) unsigned char memory[];
  T* const shared = reinterpret_cast<T*>(memory);
  const int tile = blockIdx.x % division.tiles, split = blockIdx.x / division.tiles;
  const int first_column = tile % division.row_tiles * kRows;
  const int first_unit = tile / division.row_tiles * kUnits;
  const int chunk = threadIdx.x % kChunks, own_row = threadIdx.x / kChunks;

  const T* rows[kUnits];
  int channels[kUnits];
  bool strided[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const Unit unit = unit_of(call, first_unit + i);
    rows[i] = nullptr;
    channels[i] = 0;
    strided[i] = false;
    if (unit.source < 0) continue;
    const WeightGradients::Source& source = call.source[unit.source];
    rows[i] = static_cast<const T*>(source.rows) + unit.channel + chunk * kChunk;
    channels[i] = source.channels;
    strided[i] = unit.source == call.strided.source;
  }
  const T* const dy = static_cast<const T*>(call.dy) + first_column + chunk * kChunk;

  const unsigned total = (call.rows + kDepth - 1) / kDepth, first = split * division.steps;
  const int steps = static_cast<int>(min(total - first, static_cast<unsigned>(division.steps)));
  const auto fetch = [&](int step) {
    T* const to = shared + step % kStages * kStage + place_of(own_row, chunk);
    // Pixels beyond the end are zeros; their addresses are those of pixel 0.
    const unsigned pixel = (first + step) * kDepth + own_row;
    const bool real = pixel < call.rows;
    const unsigned row = real ? pixel : 0;
    unsigned at = row;
    if (call.strided.source >= 0) at = pixel_of(call.strided, row);
    copy_vector_or_zeros(to, dy + static_cast<std::size_t>(row) * call.columns, real);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (rows[i] == nullptr) continue;
      const std::size_t place = strided[i] ? at : row;
      copy_vector_or_zeros(to + (1 + i) * kTile, rows[i] + place * channels[i], real);
    }
  };

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % 2 * kWarpRows, own_unit = warp / 2;
  const bool has_unit = unit_of(call, first_unit + own_unit).source >= 0;
  float sums[kRowParts][kColumnParts][4]{};

#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) fetch(step);
    commit_copies();
  }
  for (int step = 0; step < steps; ++step) {
    wait_for_all_but<kStages - 2>();
    __syncthreads();  // also: nobody reads the stage that is filled next any more
    if (step + kStages - 1 < steps) fetch(step + kStages - 1);
    commit_copies();
    if (!has_unit) continue;
    const T* const a = shared + step % kStages * kStage;
    const T* const b = a + (1 + own_unit) * kTile;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      // Both operands lie pixel by pixel, so both are transposed while they are loaded.
      unsigned left[kRowParts][4];
#pragma unroll
      for (int i = 0; i < kRowParts; ++i) {
        load_transposed(left[i], a + place_of(k + lane / 16 * 8 + lane % 8,
                                              warp_row / 8 + 2 * i + lane / 8 % 2));
      }
#pragma unroll
      for (int j = 0; j < kColumnParts; j += 2) {
        unsigned right[4];  // of two parts, each 16 deep
        load_transposed(right, b + place_of(k + lane / 8 % 2 * 8 + lane % 8, j + lane / 16));
        multiply_two<T>(left, right, sums, j);
      }
    }
  }

  wait_for_copies();
  if (!has_unit) return;
  float* const to = sums_out + static_cast<std::size_t>(blockIdx.x) * kRows * kColumns +
                    own_unit * kRowElements + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + i * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < kColumnParts; ++j) {
        *reinterpret_cast<float2*>(to + row * kColumns + j * 8) =
            make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
      }
    }
  }
}

/// `parts` groups of threads add each row of a unit's sums, each some of the splits.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_splits_kernel(const __grid_constant__ WeightGradients call,
                      const __grid_constant__ Division division, int parts,
                      const float* __restrict__ sums) {
  __shared__ float4 found[kThreads];
  const int at = threadIdx.x % kLine, part = threadIdx.x / kLine % parts;
  const int line = blockIdx.x * (kMostParts / parts) + threadIdx.x / (kLine * parts);
  const int tile = line / (kRows * kUnits), row = line / kUnits % kRows;
  const Unit unit = unit_of(call, tile / division.row_tiles * kUnits + line % kUnits);
  float4 sum = make_float4(0, 0, 0, 0);
  if (unit.source >= 0) {
    const auto* from = reinterpret_cast<const float4*>(
                           sums + (static_cast<std::size_t>(tile) * kRows + row) * kColumns +
                           line % kUnits * kRowElements) +
                       at;
    const std::size_t step = static_cast<std::size_t>(division.tiles) * kRows * kColumns / 4;
#pragma unroll 4
    for (int i = part; i < division.splits; i += parts) {
      const float4 each = from[i * step];
      sum.x += each.x, sum.y += each.y, sum.z += each.z, sum.w += each.w;
    }
  }
  found[threadIdx.x] = sum;
  __syncthreads();
  if (part > 0 || unit.source < 0) return;
  for (int i = 1; i < parts; ++i) {
    const float4 each = found[threadIdx.x + i * kLine];
    sum.x += each.x, sum.y += each.y, sum.z += each.z, sum.w += each.w;
  }
  struct alignas(8) Four {
    T values[4];
  };
  const WeightGradients::Source& source = call.source[unit.source];
  const int column = tile % division.row_tiles * kRows + row;
  T* const to = static_cast<T*>(source.result) +
                static_cast<std::size_t>(column) * source.channels + unit.channel;
  reinterpret_cast<Four*>(to)[at] = {{from_accumulator<T>(sum.x), from_accumulator<T>(sum.y),
                                      from_accumulator<T>(sum.z), from_accumulator<T>(sum.w)}};
}

Division divide(const Context& context, const WeightGradients& call) {
  int units = 0;
  for (int i = 0; i < call.sources; ++i) units += call.source[i].channels / kRowElements;
  Division found{};
  found.row_tiles = call.columns / kRows;
  found.tiles = found.row_tiles * static_cast<int>(divide_up(units, kUnits));
  const std::int64_t all = divide_up(std::int64_t{call.rows}, std::int64_t{kDepth});
  const std::int64_t blocks =
      std::int64_t{limits_of(context.device).multiprocessors} * kBlocksOnAnSm;
  const std::int64_t wanted = std::clamp<std::int64_t>(blocks / found.tiles, 1, all);
  found.steps = static_cast<int>(divide_up(all, wanted));
  found.splits = static_cast<int>(divide_up(all, std::int64_t{found.steps}));
  return found;
}

template <typename T>
void launch(const Context& context, const WeightGradients& call) {
  const Division division = divide(context, call);
  const std::int64_t blocks = std::int64_t{division.tiles} * division.splits;
  const Scratch<float> sums(context, blocks * kRows * kColumns);
  launch_kernel({.context = context, .blocks = blocks, .threads = kThreads, .shared_bytes = kBytes},
                "gradients of the integration", partial_sums_kernel<T>, call, division,
                sums.data());
  int parts = 1;
  while (parts < kMostParts && 4 * parts < division.splits) parts *= 2;
  const std::int64_t lines = std::int64_t{division.tiles} * kRows * kUnits;
  launch_kernel({.context = context, .blocks = lines * parts / kMostParts, .threads = kThreads},
                "gradients of the integration", add_splits_kernel<T>, call, division, parts,
                sums.data());
}

}  // namespace

void weight_gradients(const Context& context, DType dtype, const WeightGradients& call) {
  if (call.sources == 0) return;
  dispatch_half(dtype, [&]<typename T>(T) { launch<T>(context, call); });
}

}  // namespace fusewise::cuda

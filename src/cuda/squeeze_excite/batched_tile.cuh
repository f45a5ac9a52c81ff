#pragma once

// A tile of a GEMM of float32 accuracy on tensor cores: result[m][n] = sum over k of A(m, k) B(n,
// k). Memory: every tile reads its rows of A and B once, in stages that are copied ahead. Bound by
// latency: the matrices are small, so the depth is divided among the blocks of a cluster.
//
// A float32 is the sum of two TF32 numbers, high and low. The tensor cores multiply high by high,
// and high by low. fp16 and bf16 weights are TF32 numbers already. The tensor cores truncate sums,
// so float32 units, which round to nearest, add the stages.

#include "cuda/cluster.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/squeeze_excite/batched_plan.h"
#include "cuda/vector.cuh"

namespace fusewise::cuda::batched {

constexpr int kThreads = 128;  // four warps, each with a quarter of the tile
constexpr int kDepth = kBatchedDepth;
constexpr int kStages = 4;

/// A matrix in global memory. Its elements are contiguous along the depth, or along the rows.
template <typename E, bool kAlongDepth>
struct Operand {
  using Element = E;
  static constexpr bool kContiguousDepth = kAlongDepth;
  const E* data;
  long long stride;  ///< between rows, or between depths
  int rows, depth;   ///< what lies outside counts as zero
  bool wide;         ///< 16-byte copies: aligned, and the contiguous size is a multiple of 16 bytes
};

/// A stage of a tile of an operand in shared memory. The strides avoid bank conflicts when lane
/// 4g + t reads row g and depth t.
template <typename Operand, int kTile>
struct Stage {
  using E = typename Operand::Element;
  static constexpr bool kAlongDepth = Operand::kContiguousDepth;
  static constexpr int kOuter = kAlongDepth ? kTile : kDepth;
  static constexpr int kInner = kAlongDepth ? kDepth : kTile;
  static constexpr int kVector = 16 / sizeof(E);
  static constexpr int kStride = kInner + (kAlongDepth ? kVector : 8);
  static constexpr int kBytes = kOuter * kStride * sizeof(E);
  static_assert(kStride * sizeof(E) % 16 == 0);

  static __device__ __forceinline__ float at(const E* shared, int row, int k) {
    return to_accumulator<float>(shared[kAlongDepth ? row * kStride + k : k * kStride + row]);
  }

  /// Starts to copy the stage that begins at this row and depth.
  static __device__ __forceinline__ void copy(E* shared, const Operand& m, int row, int k) {
    const int outer = kAlongDepth ? row : k, inner = kAlongDepth ? k : row;
    const int outer_end = kAlongDepth ? m.rows : m.depth;
    const int inner_end = kAlongDepth ? m.depth : m.rows;
    const auto each = [&](int step, auto body) {
      const int across = kInner / step;
      for (int i = threadIdx.x; i < kOuter * across; i += kThreads) {
        const int o = i / across, at = (i - o * across) * step;
        const bool real = outer + o < outer_end && inner + at < inner_end;
        body(shared + o * kStride + at, m.data + (real ? (outer + o) * m.stride + inner + at : 0),
             real);
      }
    };
    if (m.wide) {
      each(kVector, [](E* to, const E* from, bool real) { copy_vector_or_zeros(to, from, real); });
    } else if constexpr (sizeof(E) == 4) {
      each(1, [](E* to, const E* from, bool real) { copy_word(to, from, real ? 4 : 0); });
    } else {
      each(1,
           [](E* to, const E* from, bool real) { *to = real ? *from : from_accumulator<E>(0.f); });
    }
  }
};

__device__ __forceinline__ unsigned tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

struct Split {
  unsigned high, low;
};
/// low is NaN if value is infinite.
__device__ __forceinline__ Split split(float value) {
  const unsigned high = tf32(value);
  return {high, tf32(value - __uint_as_float(high))};
}

__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
  mma_tf32(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3], b[0], b[1]);
}

/// Where a block works.
struct Place {
  int row, column;  ///< of the tile's first element
  int begin, end;   ///< of the slice of the depth
  int rank, slices;
};

/// Blocks are ordered by tile, and tiles by row. The slices of a tile are neighbours.
__device__ __forceinline__ Place place_of(unsigned block, int tile, int columns, int depth,
                                          int slices) {
  const unsigned across = (columns + tile - 1) / tile, index = block / slices;
  const int rank = static_cast<int>(block - index * slices);
  const int stages = (depth + kDepth - 1) / kDepth;
  const int slice_depth = (stages + slices - 1) / slices * kDepth;
  return {static_cast<int>(index / across) * tile,
          static_cast<int>(index % across) * tile,
          min(rank * slice_depth, depth),
          min((rank + 1) * slice_depth, depth),
          rank,
          slices};
}

template <typename A, typename B, int kTile>
struct TileProduct {
  using StageA = Stage<A, kTile>;
  using StageB = Stage<B, kTile>;
  static constexpr int kStageBytes = StageA::kBytes + StageB::kBytes;
  static constexpr int kResultStride = kTile + 8;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert((kTile * kResultStride + kTile) * 4 <= kSharedBytes);
  static constexpr bool kExactB = sizeof(typename B::Element) == 2;
  static constexpr int kRows = kTile / 32, kColumns = kTile / 16;  // MMAs of a warp

  /// Calls store(row, column, sum) for every element of the tile, and store_sum(row, sum over k of
  /// A(row, k)) for every row if `row_sums`. Both are called for rows and columns outside the
  /// matrix, too. B is copied before the previous kernel is done if `early_b`. Called by all blocks
  /// of the cluster.
  template <typename Store, typename StoreSum>
  static __device__ __forceinline__ void run(unsigned char* shared, const A& a, const B& b,
                                             const Place& place, bool early_b, bool row_sums,
                                             Store store, StoreSum store_sum) {
    const int stages = (place.end - place.begin + kDepth - 1) / kDepth;
    const auto stage_a = [&](int slot) {
      return reinterpret_cast<typename A::Element*>(shared + slot * kStageBytes);
    };
    const auto stage_b = [&](int slot) {
      return reinterpret_cast<typename B::Element*>(shared + slot * kStageBytes + StageA::kBytes);
    };
    const auto copy_a = [&](int stage) {
      if (stage >= stages) return;
      StageA::copy(stage_a(stage % kStages), a, place.row, place.begin + stage * kDepth);
    };
    const auto copy_b = [&](int stage) {
      if (stage >= stages) return;
      StageB::copy(stage_b(stage % kStages), b, place.column, place.begin + stage * kDepth);
    };
    if (early_b) {
      for (int stage = 0; stage < kStages - 1; ++stage) copy_b(stage);
    }
    wait_for_previous_kernel();
    allow_next_kernel();
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (!early_b) copy_b(stage);
      copy_a(stage);
      commit_copies();
    }

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int first_row = warp / 2 * (kTile / 2), first_column = warp % 2 * (kTile / 2);
    float total[kRows][kColumns][4] = {}, low[kRows][kColumns][4] = {};
    float row_sum = 0;
    for (int stage = 0; stage < stages; ++stage) {
      wait_for_all_but<kStages - 2>();
      __syncthreads();  // all copies of this stage have landed, and nobody reads the previous stage
      copy_a(stage + kStages - 1);
      copy_b(stage + kStages - 1);
      commit_copies();
      const auto* const in_a = stage_a(stage % kStages);
      const auto* const in_b = stage_b(stage % kStages);
      float sum[kRows][kColumns][4] = {};
#pragma unroll
      for (int k = 0; k < kDepth; k += 8) {
        unsigned a_high[kRows][4], a_low[kRows][4], b_high[kColumns][2], b_low[kColumns][2];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const Split parts =
                split(StageA::at(in_a, first_row + i * 16 + g + j % 2 * 8, k + t + j / 2 * 4));
            a_high[i][j] = parts.high, a_low[i][j] = parts.low;
          }
        }
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float value = StageB::at(in_b, first_column + i * 8 + g, k + t + j * 4);
            const Split parts = kExactB ? Split{__float_as_uint(value), 0} : split(value);
            b_high[i][j] = parts.high, b_low[i][j] = parts.low;
          }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            multiply(sum[i][j], a_high[i], b_high[j]);
            multiply(low[i][j], a_low[i], b_high[j]);
            if constexpr (!kExactB) multiply(low[i][j], a_high[i], b_low[j]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) total[i][j][e] += sum[i][j][e];
        }
      }
      if (row_sums && threadIdx.x < kTile) {
        float part = 0;
        for (int k = 0; k < kDepth; ++k) part += StageA::at(in_a, threadIdx.x, k);
        row_sum += part;
      }
    }

    // The result takes the place of the stages.
    wait_for_copies();
    __syncthreads();
    float* const result = reinterpret_cast<float*>(shared);
    float* const sums = result + kTile * kResultStride;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = first_row + i * 16 + g + e / 2 * 8;
          const int column = first_column + j * 8 + 2 * t + e % 2;
          // An infinity is complete without its low part, which is NaN.
          const float high = total[i][j][e];
          result[row * kResultStride + column] = isfinite(high) ? high + low[i][j][e] : high;
        }
      }
    }
    if (threadIdx.x < kTile) sums[threadIdx.x] = row_sum;
    const auto sum_over_slices = [&](const float* mine) {
      if (place.slices == 1) return *mine;
      float sum = 0;
#if __CUDA_ARCH__ >= 900
      for (int rank = 0; rank < place.slices; ++rank) sum += load_from_block(mine, rank);
#endif
      return sum;
    };
    meet(place.slices);
    for (int i = place.rank * kThreads + threadIdx.x; i < kTile * kTile;
         i += place.slices * kThreads) {
      const int row = i / kTile, column = i % kTile;
      store(place.row + row, place.column + column,
            sum_over_slices(result + row * kResultStride + column));
    }
    if (row_sums && place.rank == 0 && threadIdx.x < kTile) {
      store_sum(place.row + static_cast<int>(threadIdx.x), sum_over_slices(sums + threadIdx.x));
    }
    // The others may still read this block's result.
    if (place.slices > 1) meet(place.slices);
  }

 private:
  static __device__ __forceinline__ void meet(int slices) {
#if __CUDA_ARCH__ >= 900
    if (slices > 1) {
      arrive_in_cluster();
      wait_for_cluster();
      return;
    }
#endif
    __syncthreads();
  }
};

}  // namespace fusewise::cuda::batched

#pragma once

// Matrix products of a warp with operands in shared memory, stored row by row: activations that
// several warps share. A tile of the result is 16 rows by 8 columns. Lane 4g + t has a pair of
// columns in rows g and g + 8.

#include "cuda/autoencoder/warp_tile.cuh"
#include "cuda/copy_async.cuh"

namespace fusewise::cuda::autoencoder {

/// c += a b, 16 by 8, with a depth of 8 float32 values as TF32, or 16 in half precision.
__device__ __forceinline__ void multiply_tile(float, float (&c)[4], const unsigned (&a)[4],
                                              unsigned b0, unsigned b1) {
  mma_tf32(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1);
}
template <typename T>
__device__ __forceinline__ void multiply_tile(T, float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                              unsigned b1) {
  mma_halves(T{}, c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1);
}

/// The first of the two columns that a lane has of a tile. In half precision, a tile is eight
/// neighbouring columns. In float32, it is four columns and the four that are 16 further on. If the
/// row stride is 16 bytes more than a multiple of 128, a warp's stores of pairs then have no bank
/// conflicts.
template <typename T>
__device__ __forceinline__ int pair_column(int tile, int lane) {
  const int t = lane % 4;
  if constexpr (sizeof(T) == 4) {
    return 32 * (tile / 4) + 4 * (tile % 4) + 2 * (t & 1) + 8 * (t & 2);
  } else {
    return 8 * tile + 2 * t;
  }
}

/// 16 rows by 16 columns as the left operand: of two MMAs in float32, of one in half precision.
template <typename T>
struct Left16 {
  static constexpr int kSteps = sizeof(T) / 2;
  unsigned v[kSteps][4];

  __device__ __forceinline__ Left16(const T* first, int stride, int lane) {
    const T* row = first + lane % 16 * stride + lane / 16 * (16 / static_cast<int>(sizeof(T)));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      load_matrices(v[i], row + i * (32 / static_cast<int>(sizeof(T))));
    }
  }
  /// From registers: lane 4g + t has columns 4t to 4t + 3 of rows g and g + 8. The inputs of the
  /// weights are packed in that order.
  __device__ __forceinline__ explicit Left16(const float (&values)[2][4]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i / 4][i % 4] = __float_as_uint(values[i % 2][i / 2]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[0][i] = pack_pair(T{}, values[i % 2][i / 2 * 2], values[i % 2][i / 2 * 2 + 1]);
      }
    }
  }
};

/// c[j] += left times 16 rows and 8 columns of weights, packed for operands in shared memory. Small
/// products come first.
template <typename P, int kTiles, typename Group>
__device__ __forceinline__ void multiply_16(float (&c)[kTiles][4],
                                            const Left16<typename P::Weight>& left,
                                            const Group (&w)[kTiles]) {
  using T = typename P::Weight;
  if constexpr (P::kExact) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      unsigned left_high[4], left_low[4], high[kTiles][2], low[kTiles][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        split(__uint_as_float(left.v[s][i]), left_high[i], left_low[i]);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        split(s == 0 ? w[j].x : w[j].z, high[j][0], low[j][0]);
        split(s == 0 ? w[j].y : w[j].w, high[j][1], low[j][1]);
      }
      float parts[kTiles][4] = {};
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        multiply_tile(T{}, parts[j], left_low, high[j][0], high[j][1]);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        multiply_tile(T{}, parts[j], left_high, low[j][0], low[j][1]);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        multiply_tile(T{}, parts[j], left_high, high[j][0], high[j][1]);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) c[j][i] += parts[j][i];
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if constexpr (sizeof(T) == 4) {
        multiply_tile(T{}, c[j], left.v[0], __float_as_uint(w[j].x), __float_as_uint(w[j].y));
      } else {
        multiply_tile(T{}, c[j], left.v[0], w[j].x, w[j].y);
      }
    }
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        multiply_tile(T{}, c[j], left.v[1], __float_as_uint(w[j].z), __float_as_uint(w[j].w));
      }
    }
  }
}

/// Sums of 16 columns over all rows that were passed to add_rows().
template <typename T>
struct ColumnSums {
  float v[sizeof(T) == 4 ? 2 : 4] = {};

  /// Total of column g, or of column g + 8 with `upper`. All lanes with the same g get it.
  __device__ __forceinline__ float total(int upper) const {
    if constexpr (sizeof(T) == 4) {
      return row_sum(v[upper]);
    } else {
      return v[2 * upper];
    }
  }
};

// As bit patterns: a conversion would be done at run time.
__device__ __forceinline__ unsigned pair_of_ones(__half) { return 0x3c003c00u; }
__device__ __forceinline__ unsigned pair_of_ones(__nv_bfloat16) { return 0x3f803f80u; }

/// c[i][j] += a^T b over 16 rows: 16 * kLefts columns of a by 8 * kTiles of b. If `sums` is given,
/// sums[i] += a's columns. With float32 accuracy, the tensor cores sum over these rows only,
/// because they truncate. The result is then added in float32 arithmetic, which rounds. TF32
/// operands are rounded here.
template <typename P, int kLefts, int kTiles>
__device__ __forceinline__ void add_rows(float (&c)[kLefts][kTiles][4],
                                         ColumnSums<typename P::Weight>* sums,
                                         const typename P::Weight* a, int a_stride,
                                         const typename P::Weight* b, int b_stride, int lane) {
  using T = typename P::Weight;
  const int g = lane / 4, t = lane % 4;
  if constexpr (sizeof(T) == 2) {
    unsigned right[kTiles / 2][4];
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      load_transposed(right[j], b + lane % 16 * b_stride + 16 * j + lane / 16 * 8);
    }
#pragma unroll
    for (int i = 0; i < kLefts; ++i) {
      unsigned left[4];
      load_transposed(left, a + (lane % 8 + lane / 16 * 8) * a_stride + 16 * i + lane / 8 % 2 * 8);
      if (sums != nullptr) {
        multiply_tile(T{}, sums[i].v, left, pair_of_ones(T{}), pair_of_ones(T{}));
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        multiply_tile(T{}, c[i][j], left, right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
      }
    }
  } else {
    // Neighbouring rows make up a pair. With strides of 4 more than a multiple of 32, there are no
    // bank conflicts.
    const T* a_row = a + 2 * t * a_stride + g;
    const T* b_row = b + 2 * t * b_stride + g;
#pragma unroll
    for (int i = 0; i < kLefts; ++i) {
      unsigned left[2][4], low[2][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const T* at = a_row + 8 * s * a_stride + 16 * i;
        const float av[4] = {at[0], at[8], at[a_stride], at[a_stride + 8]};
        if (sums != nullptr) {
          sums[i].v[0] += av[0] + av[2];
          sums[i].v[1] += av[1] + av[3];
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if constexpr (P::kExact) {
            split(av[k], left[s][k], low[s][k]);
          } else {
            left[s][k] = round_to_tf32(av[k]);
          }
        }
      }
      // Two tiles at a time: more would not fit in registers.
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        float part[2][4] = {};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          unsigned high[2][2], rest[2][2];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float value = b_row[(8 * s + k % 2) * b_stride + 8 * (j + k / 2)];
            if constexpr (P::kExact) {
              split(value, high[k / 2][k % 2], rest[k / 2][k % 2]);
            } else {
              high[k / 2][k % 2] = round_to_tf32(value);
            }
          }
          if constexpr (P::kExact) {
#pragma unroll
            for (int k = 0; k < 2; ++k) multiply_tile(T{}, part[k], low[s], high[k][0], high[k][1]);
#pragma unroll
            for (int k = 0; k < 2; ++k)
              multiply_tile(T{}, part[k], left[s], rest[k][0], rest[k][1]);
#pragma unroll
            for (int k = 0; k < 2; ++k)
              multiply_tile(T{}, part[k], left[s], high[k][0], high[k][1]);
          } else {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              multiply_tile(T{}, c[i][j + k], left[s], high[k][0], high[k][1]);
            }
          }
        }
        if constexpr (P::kExact) {
#pragma unroll
          for (int k = 0; k < 8; ++k) c[i][j + k / 4][k % 4] += part[k / 4][k % 4];
        }
      }
    }
  }
}

}  // namespace fusewise::cuda::autoencoder

#pragma once

// The reductions that all kernels share. They add in a fixed order.

namespace fusewise::cuda {

/// Sum over groups of `width` neighbouring lanes (a power of two, at most 32). Every lane gets it.
template <typename A>
__device__ __forceinline__ A warp_sum(A value, int width = 32) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

/// Replaces each value by its sum over a block of kThreads threads, in all threads. Call it only
/// once per kernel: nothing prevents a second call from overwriting what the first one still reads.
template <int kThreads, int kCount, typename A>
__device__ __forceinline__ void block_totals(A (&values)[kCount]) {
  __shared__ alignas(kCount * sizeof(A)) A parts[kThreads / 32][kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = warp_sum(values[i]);
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) parts[threadIdx.x / 32][i] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = parts[0][i];
    for (int w = 1; w < kThreads / 32; ++w) values[i] += parts[w][i];
  }
}

/// Sum of `value` over the threads of a block with the same threadIdx.x % kColumns. The first
/// kColumns threads get it. Call it only once per kernel, like block_totals.
template <int kThreads, int kColumns, typename A>
__device__ __forceinline__ A block_column_sum(A value) {
  static_assert(kThreads % 32 == 0 && 32 % kColumns == 0);
  __shared__ A parts[kThreads / 32][kColumns];
  for (int offset = 16; offset >= kColumns; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  if (threadIdx.x % 32 < kColumns) parts[threadIdx.x / 32][threadIdx.x % 32] = value;
  __syncthreads();
  if (threadIdx.x < kColumns) {
    for (int warp = 1; warp < kThreads / 32; ++warp) value += parts[warp][threadIdx.x];
  }
  return value;
}

/// Calls finish(k, sum over i < lanes of part(k, i), i) for k < width. Called by the whole block.
/// `lanes` neighbouring lanes, a power of two, share a k, and each of them gets the sum.
template <typename Part, typename Finish>
__device__ __forceinline__ void sum_by_lanes(int width, int lanes, Part part, Finish finish) {
  const int shift = __ffs(lanes) - 1;
#pragma unroll 1
  for (int t = threadIdx.x; (t & ~31) >> shift < width; t += blockDim.x) {
    const int k = t >> shift, i = t & (lanes - 1);
    const float sum = warp_sum(k < width ? part(k, i) : 0.f, lanes);
    if (k < width) finish(k, sum, i);
  }
}

/// The same for rows in shared memory: the sum over `count` rows of rows[row * stride + k].
template <typename Finish>
__device__ __forceinline__ void sum_rows_by_lanes(const float* rows, int count, int stride,
                                                  int width, int lanes, Finish finish) {
  sum_by_lanes(
      width, lanes,
      [&](int k, int i) {
        const float* at = rows + i * stride + k;
        float sum = 0;
        int left = count - i;
#pragma unroll 1
        for (; left > 3 * lanes; left -= 4 * lanes, at += 4 * lanes * stride) {
          sum += (at[0] + at[lanes * stride]) + (at[2 * lanes * stride] + at[3 * lanes * stride]);
        }
#pragma unroll 1
        for (; left > 0; left -= lanes, at += lanes * stride) sum += *at;
        return sum;
      },
      finish);
}

/// Calls finish(k, sum over i of part(i, parts, k)) for k < width. Called by the whole block. Up to
/// most_parts threads share a k, if the block has that many. part(i, parts, k) returns the partial
/// sum of thread i of the `parts` threads. `scratch` is shared memory for max(blockDim.x, width)
/// values. Ends with a barrier.
template <typename A, typename Part, typename Finish>
__device__ __forceinline__ void block_sum(int most_parts, int width, A* scratch, Part part,
                                          Finish finish) {
  const int parts = max(1, min(most_parts, static_cast<int>(blockDim.x) / width));
  for (int t = threadIdx.x; t < parts * width; t += blockDim.x) {
    const int i = t / width;
    scratch[t] = part(i, parts, t - i * width);
  }
  __syncthreads();
  for (int k = threadIdx.x; k < width; k += blockDim.x) {
    A sum = 0;
    for (int i = 0; i < parts; ++i) sum += scratch[i * width + k];
    finish(k, sum);
  }
  __syncthreads();
}

/// Calls finish(k, sum over `count` rows of rows[row * width + k]) for rows in shared memory. Adds
/// in the scratch's type, which may be the rows: a thread overwrites only what no other one reads.
template <typename T, typename A, typename Finish>
__device__ __forceinline__ void block_sum_rows(const T* rows, int count, int width, A* scratch,
                                               Finish finish) {
  block_sum(
      count, width, scratch,
      [&](int i, int parts, int k) {
        A sum = 0;
#pragma unroll 4
        for (int row = i; row < count; row += parts) sum += rows[row * width + k];
        return sum;
      },
      finish);
}

}  // namespace fusewise::cuda

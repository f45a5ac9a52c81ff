#pragma once

// The reductions that all kernels share. They add in a fixed order.

#include "cuda/mailbox.cuh"

namespace fusewise::cuda {

/// Sum over groups of `width` neighbouring lanes (a power of two, at most 32); every lane has it.
template <typename A>
__device__ __forceinline__ A warp_sum(A value, int width = 32) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

/// finish(k, sum over parts of part(i, k)) for k < width, by the whole block: as many threads as
/// there are share a k. `part(i, parts, k)` adds what thread i of a k's `parts` threads has.
/// `scratch` is shared memory for max(blockDim.x, width) values. Ends with a barrier.
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

/// finish(k, sum over `count` rows of rows[row * width + k]), rows in shared memory.
template <typename A, typename Finish>
__device__ __forceinline__ void block_sum_rows(const A* rows, int count, int width, A* scratch,
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

/// The same for rows of mail, which it waits for.
template <typename Finish>
__device__ __forceinline__ void block_sum_mail(const Mail* rows, int count, int width,
                                               float* scratch, Finish finish) {
  block_sum(
      count, width, scratch,
      [&](int i, int parts, int k) {
        constexpr int kAtOnce = 4;
        float sum = 0;
        for (int row = i; row < count; row += kAtOnce * parts) {
          Mail words[kAtOnce];
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            if (row + j * parts < count) words[j] = peek_mail(rows + (row + j * parts) * width + k);
          }
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            if (row + j * parts < count) {
              sum += read_mail(rows + (row + j * parts) * width + k, words[j]);
            }
          }
        }
        return sum;
      },
      finish);
}

}  // namespace fusewise::cuda

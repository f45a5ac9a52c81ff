#pragma once

// The tensor cores' instructions for a warp: products with operands in registers, and loads of
// operands from shared memory.

#include "cuda/copy_async.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {

/// c += a b, 16 x 8 with a depth of 8.
__device__ __forceinline__ void mma_tf32(float& c0, float& c1, float& c2, float& c3, unsigned a0,
                                         unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                         unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// The same with a depth of 16 in fp16 or bf16, packed in pairs.
__device__ __forceinline__ void mma_halves(__half, float& c0, float& c1, float& c2, float& c3,
                                           unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                           unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_halves(__nv_bfloat16, float& c0, float& c1, float& c2,
                                           float& c3, unsigned a0, unsigned a1, unsigned a2,
                                           unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// sums[i][j] += left[i] right[0, 1] and sums[i][j + 1] += left[i] right[2, 3], for every i.
template <typename T, int kRowParts, int kColumnParts>
__device__ __forceinline__ void multiply_two(const unsigned (&left)[kRowParts][4],
                                             const unsigned (&right)[4],
                                             float (&sums)[kRowParts][kColumnParts][4], int j) {
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float (&c)[4] = sums[i][j + half];
      mma_halves(T{}, c[0], c[1], c[2], c[3], left[i][0], left[i][1], left[i][2], left[i][3],
                 right[2 * half], right[2 * half + 1]);
    }
  }
}

/// Four matrices of eight rows of 16 bytes. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row)));
}
/// The same, with each matrix of 8 by 8 half-precision values transposed.
__device__ __forceinline__ void load_transposed(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row)));
}

}  // namespace fusewise::cuda

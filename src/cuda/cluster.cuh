#pragma once

// Communication between the blocks of a cluster (Hopper and newer) through shared memory.

#include "cuda/copy_async.cuh"

namespace fusewise::cuda {

/// Signals that this thread has arrived. `wait_for_cluster` waits until all threads of the cluster
/// have.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/// Writes a value to another block's shared memory, at the address that `mine` has in this block,
/// and signals four bytes to the barrier at the corresponding address there. Needs no fence, which
/// would wait for all stores of this thread.
__device__ __forceinline__ void send_to_block(float* mine, ByteBarrier& barrier, int rank,
                                              float value) {
  asm volatile(
      "{\n"
      ".reg .b32 place, bar;\n"
      "mapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 bar, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], %3, [bar];\n"
      "}" ::"r"(shared_address(mine)),
      "r"(shared_address(&barrier)), "r"(rank), "r"(__float_as_uint(value))
      : "memory");
}

/// Reads a float of another block's shared memory, at the address that `mine` has in this block.
__device__ __forceinline__ float load_from_block(const float* mine, int rank) {
  float value;
  asm volatile(
      "{\n"
      ".reg .b32 place;\n"
      "mapa.shared::cluster.u32 place, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [place];\n"
      "}"
      : "=f"(value)
      : "r"(shared_address(mine)), "r"(rank)
      : "memory");
  return value;
}

}  // namespace fusewise::cuda

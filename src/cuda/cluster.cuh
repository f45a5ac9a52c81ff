#pragma once

// What the blocks of a cluster (Hopper and newer) tell each other through shared memory.

#include "cuda/copy_async.cuh"

namespace fusewise::cuda {

/// Says that this thread came here; `wait_for_cluster` waits until all of the cluster's have.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/// Sends a value to the place of another block's shared memory that `mine` is of this block's, and
/// tells its barrier, likewise, of the four bytes. No fence is needed, which would wait for all of
/// this thread's stores.
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

}  // namespace fusewise::cuda

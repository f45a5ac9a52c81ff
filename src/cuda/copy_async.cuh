#pragma once

// Asynchronous copies between global and shared memory, and the barriers they complete on.
// Addresses and sizes are multiples of 16 bytes.

#include <cstdint>

namespace fusewise::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// A barrier in shared memory that copies complete.
class CopyBarrier {
 public:
  __device__ __forceinline__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }
  /// Once after init, before the block's barrier, so that the copy engine sees it.
  static __device__ __forceinline__ void publish() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  /// Arrives, and says how many bytes of bulk copies the phase waits for.
  __device__ __forceinline__ void expect(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  /// Arrives as soon as this thread's copies by `copy_vector` are there.
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address())
                 : "memory");
  }
  __device__ __forceinline__ void wait(std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
  /// Hopper's copy engine; completes on this barrier.
  __device__ __forceinline__ void copy_bulk(void* shared, const void* global, std::uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(address())
        : "memory");
  }

 private:
  __device__ __forceinline__ std::uint32_t address() { return shared_address(&state_); }
  std::uint64_t state_;
};

/// 16 bytes by this thread.
__device__ __forceinline__ void copy_vector(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}

/// Makes this thread's writes to shared memory visible to the copy engine; a barrier of the block
/// follows before one thread calls `store_bulk`.
__device__ __forceinline__ void release_to_copy_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void store_bulk(void* global, const void* shared, std::uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}

/// Waits until the engine has read what this thread's stores send, but for the newest `kPending`.
template <int kPending>
__device__ __forceinline__ void wait_for_store_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace fusewise::cuda

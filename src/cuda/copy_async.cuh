#pragma once

// Asynchronous copies from global to shared memory, and barriers that wait for bytes.

#include <cstdint>

namespace fusewise::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// A barrier in shared memory that completes when the expected number of bytes has arrived.
class ByteBarrier {
 public:
  __device__ __forceinline__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }
  /// Called once after init, before a cluster barrier, so that the other blocks of the cluster see
  /// it.
  static __device__ __forceinline__ void publish() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  /// Called when nobody uses it any more. Memory checkers need this.
  __device__ __forceinline__ void invalidate() {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(address()) : "memory");
  }
  /// Arrives, and sets how many bytes the phase waits for.
  __device__ __forceinline__ void expect(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  /// Acquires at cluster scope, because stores of other blocks complete the barrier.
  __device__ __forceinline__ void wait(std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }

 private:
  __device__ __forceinline__ std::uint32_t address() { return shared_address(&state_); }
  std::uint64_t state_;
};

/// This thread copies 16 bytes.
__device__ __forceinline__ void copy_vector(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}

/// This thread copies 16 bytes, or writes zeros if `real` is false.
__device__ __forceinline__ void copy_vector_or_zeros(void* shared, const void* global, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(real ? 16 : 0)
               : "memory");
}

/// This thread copies one float.
__device__ __forceinline__ void copy_float(float* shared, const float* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

/// This thread copies the first `real` bytes of a word, at most 4, and writes zeros behind them.
__device__ __forceinline__ void copy_word(void* shared, const void* global, int real) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(real)
               : "memory");
}

/// Makes the copies that this thread has started since the last call a group.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until all groups of this thread but the last kGroups have landed.
template <int kGroups>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

/// Waits until all copies of this thread have landed. They are then visible to this thread only.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace fusewise::cuda

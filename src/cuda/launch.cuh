#pragma once

// Launches kernels back to back, with as small a gap between them as the GPU allows.

#include <cstdint>

#include "common/check.h"
#include "cuda/cuda_error.h"
#include "cuda/device.h"
#include "fusewise/context.h"

namespace fusewise::cuda {

struct Launch {
  const Context& context;
  std::int64_t blocks;
  int threads;
  std::size_t shared_bytes = 0;
  /// Blocks may start while the previous kernel is still ending (Hopper and newer). Such a kernel
  /// always calls wait_for_previous_kernel() before it touches memory that others wrote or read,
  /// and allow_next_kernel() only after that. Then everything before its predecessor is done, too.
  bool overlaps_previous = false;
  /// Blocks per cluster (Hopper and newer). `blocks` is a multiple of it.
  int cluster = 1;
  /// All blocks run at once, or the launch fails. They may meet at a barrier of the whole grid.
  bool cooperative = false;
};

/// Allows a kernel to use all shared memory of a block and the largest clusters. Done once per
/// kernel, device and thread.
void allow_all(const void* kernel, Device device);

template <typename... Parameters, typename... Arguments>
void launch_kernel(const Launch& launch, const char* what, void (*kernel)(Parameters...),
                   Arguments... arguments) {
  if (launch.blocks == 0) return;
  check(launch.blocks < (std::int64_t{1} << 31), what, ": the problem is too large for one launch");
  const DeviceLimits& limits = limits_of(launch.context.device);
  allow_all(reinterpret_cast<const void*>(kernel), launch.context.device);
  cudaLaunchAttribute attributes[3]{};
  unsigned count = 0;
  if (launch.overlaps_previous && limits.capability >= 90) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  }
  if (launch.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = static_cast<cudaStream_t>(launch.context.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), what);
}

/// Allows the blocks of an overlapping next kernel to start as soon as there is room.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

__device__ __forceinline__ void sleep_for(int nanoseconds) {
  long long now, end;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  // Bounded, in case the timer does not advance.
  end = now + nanoseconds;
  for (int i = 0; now < end && i <= nanoseconds / 50; ++i) {
    asm volatile("nanosleep.u32 100;");
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  }
}

/// Prefetches the cache line of an address into L2.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace fusewise::cuda

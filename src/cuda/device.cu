// Properties queried once per GPU: its limits, and the resources that its kernels may use. Also the
// memory pool, used if the caller passes no allocator.

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "common/backends.h"
#include "cuda/cuda_error.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "asking for the GPU's limits");
  return value;
}

__global__ void empty_kernel() {}

/// Capability of the code built for this GPU. Kernels for sm_80 that were JIT-compiled for a newer
/// GPU still lack everything that __CUDA_ARCH__ excluded.
int built_capability(int device) {
  const CurrentDevice current({DeviceType::cuda, device});
  cudaFuncAttributes built{};
  check_cuda(cudaFuncGetAttributes(&built, empty_kernel), "looking for kernels for this GPU");
  return built.ptxVersion;
}

DeviceLimits ask(int device) {
  const int gpu = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                  attribute(cudaDevAttrComputeCapabilityMinor, device);
  return {
      .capability = std::min(built_capability(device), gpu),
      .gpu_capability = gpu,
      .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device),
      .shared_memory = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
      .block_shared_memory = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
      .l2_cache = attribute(cudaDevAttrL2CacheSize, device),
  };
}

}  // namespace

const char* built_architectures() { return FUSEWISE_CUDA_ARCHITECTURES; }

CurrentDevice::CurrentDevice(Device device) {
  if (device.type != DeviceType::cuda) return;
  int before = 0;
  check_cuda(cudaGetDevice(&before), "asking for the current GPU");
  if (before == device.index) return;
  check_cuda(cudaSetDevice(device.index), "making the context's GPU the current one");
  before_ = before;
}

CurrentDevice::~CurrentDevice() {
  // Fails only if the context is gone already.
  if (before_ >= 0) static_cast<void>(cudaSetDevice(before_));
}

const DeviceLimits& limits_of(Device device) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<DeviceLimits, kMaxDevices> limits;
  check(device.index >= 0 && device.index < kMaxDevices, "device: expected a GPU from 0 to ",
        kMaxDevices - 1, ", got ", device.index);
  std::call_once(once[device.index], [&] { limits[device.index] = ask(device.index); });
  return limits[device.index];
}

void allow_all(const void* kernel, Device device) {
  // A launch costs a few microseconds, and these calls would add as much.
  thread_local std::set<std::pair<const void*, int>> done;
  const std::pair key(kernel, device.index);
  if (done.contains(key)) return;
  const DeviceLimits& limits = limits_of(device);
  const CurrentDevice current(device);
  cudaFuncAttributes built{};
  check_cuda(cudaFuncGetAttributes(&built, kernel), "looking at a kernel");
  const int fixed = static_cast<int>(built.sharedSizeBytes);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  limits.block_shared_memory - fixed),
             "allowing a kernel its shared memory");
  if (limits.capability >= 90 &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
          cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // this GPU has no such clusters; plans do not need them
  }
  done.insert(key);
}

void* allocate(const Context& context, std::size_t bytes) {
  void* memory = nullptr;
  check_cuda(cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(context.stream)),
             "allocating scratch memory");
  return memory;
}

void deallocate(const Context& context, void* memory) noexcept {
  // Fails only if the context is gone already, and the memory with it.
  static_cast<void>(cudaFreeAsync(memory, static_cast<cudaStream_t>(context.stream)));
}

}  // namespace fusewise::cuda

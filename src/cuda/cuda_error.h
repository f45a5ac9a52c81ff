#pragma once

// Every CUDA status is checked. A failure becomes an exception that says what was being done.

#include <cuda_runtime_api.h>

#include <string>

#include "fusewise/error.h"

namespace fusewise::cuda {

/// The GPU architectures of this build, in CMake's notation: "90-real 90-virtual".
const char* built_architectures();

inline void check_cuda(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // clear the error so that later calls do not report it
  const std::string message =
      std::string("CUDA: ") + doing + " failed: " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation) throw OutOfMemory(message);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion) {
    throw Error(message + ": fusewise was built for " + built_architectures() +
                "; build it with CMAKE_CUDA_ARCHITECTURES or CUDAARCHS set for this GPU");
  }
  throw Error(message);
}

}  // namespace fusewise::cuda

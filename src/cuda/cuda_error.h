#pragma once

// Every CUDA status is looked at; a bad one becomes an exception that says what was being done.

#include <cuda_runtime_api.h>

#include <string>

#include "fusewise/error.h"

namespace fusewise::cuda {

inline void check_cuda(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // told here, it must not come up again in another's call
  const std::string message =
      std::string("CUDA: ") + doing + " failed: " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation) throw OutOfMemory(message + " (out of memory)");
  throw Error(message);
}

}  // namespace fusewise::cuda

#pragma once

// What the tests of every family on a GPU share.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "fusewise/context.h"

namespace fusewise::testing {

inline constexpr Device kGpu{DeviceType::cuda, 0};

class NeedsGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no GPU";
  }
};

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

inline Context on_gpu(cudaStream_t stream = nullptr) {
  Context context;
  context.device = kGpu;
  context.stream = stream;
  return context;
}

}  // namespace fusewise::testing

// What a CUDA status becomes. Needs no GPU.

#include "cuda/cuda_error.h"

#include <gtest/gtest.h>

namespace fusewise::cuda {
namespace {

std::string message_of(cudaError_t status) {
  try {
    check_cuda(status, "trying");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(CudaError, OnlyBadStatusIsThrown) {
  EXPECT_EQ(message_of(cudaSuccess), "");
  EXPECT_EQ(message_of(cudaErrorIllegalAddress).find("CUDA: trying failed: "), 0u);
  EXPECT_THROW(check_cuda(cudaErrorMemoryAllocation, "trying"), OutOfMemory);
  EXPECT_EQ(message_of(cudaErrorIllegalAddress).find("was built for"), std::string::npos);
}

TEST(CudaError, AGpuWithoutKernelsIsToldWhatWasBuilt) {
  for (const cudaError_t status :
       {cudaErrorNoKernelImageForDevice, cudaErrorUnsupportedPtxVersion}) {
    const std::string message = message_of(status);
    EXPECT_NE(message.find(std::string("was built for ") + built_architectures()),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("CMAKE_CUDA_ARCHITECTURES"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace fusewise::cuda

#pragma once

// GPU memory and the current GPU. Defined in src/cuda, or in no_cuda.cpp for a build without CUDA.

#include <cstddef>

#include "fusewise/context.h"

namespace fusewise::cuda {

void* allocate(const Context& context, std::size_t bytes);
void deallocate(const Context& context, void* memory) noexcept;

/// Makes a GPU the thread's current one, as launches require, and restores the previous one at the
/// end. Does nothing for a CPU.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = -1;
};

}  // namespace fusewise::cuda

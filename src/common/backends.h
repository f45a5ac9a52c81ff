#pragma once

// What each backend offers to the core. The CUDA half is defined in src/cuda, or, in a build
// without CUDA, in no_cuda.cpp, where every list is empty.

#include "common/implementation.h"
#include "fusewise/autoencoder.h"
#include "fusewise/linear_act.h"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cpu {

Implementations<AutoencoderForward> autoencoder_forward();
Implementations<AutoencoderBackward> autoencoder_backward();
Implementations<SqueezeExciteForward> squeeze_excite_forward();
Implementations<SqueezeExciteBackward> squeeze_excite_backward();
Implementations<LinearActForward> linear_act_forward();
Implementations<LinearActBackward> linear_act_backward();

}  // namespace fusewise::cpu

namespace fusewise::cuda {

void* allocate(const Context& context, std::size_t bytes);
void deallocate(const Context& context, void* memory) noexcept;

/// Makes a GPU the thread's current one, as launches want it, and the one before it again at its
/// end. Nothing for a CPU.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = -1;
};

Implementations<AutoencoderForward> autoencoder_forward();
Implementations<AutoencoderBackward> autoencoder_backward();
Implementations<SqueezeExciteForward> squeeze_excite_forward();
Implementations<SqueezeExciteBackward> squeeze_excite_backward();
Implementations<LinearActForward> linear_act_forward();
Implementations<LinearActBackward> linear_act_backward();

}  // namespace fusewise::cuda

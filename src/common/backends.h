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

namespace fusewise {

/// A call that passed its checks: the first implementation of its device's list that takes it.
template <typename Call>
void run_on_device(const Context& context, const Call& call, Implementations<Call> (*on_cpu)(),
                   Implementations<Call> (*on_cuda)()) {
  const cuda::CurrentDevice current(context.device);
  run_chosen(context.device.type == DeviceType::cpu ? on_cpu() : on_cuda(), context, call);
}

template <typename Call>
Candidates explain_on_device(const Context& context, const Call& call,
                             Implementations<Call> (*on_cpu)(),
                             Implementations<Call> (*on_cuda)()) {
  const cuda::CurrentDevice current(context.device);
  return candidates(context.device.type == DeviceType::cpu ? on_cpu() : on_cuda(), context, call);
}

}  // namespace fusewise

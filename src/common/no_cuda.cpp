// The CUDA half of a build without CUDA: nothing to allocate, nothing to choose from.

#include "common/backends.h"

namespace fusewise::cuda {
namespace {

[[noreturn]] void refuse() {
  fail("this build of fusewise has no CUDA part; build it where nvcc is on the path");
}

}  // namespace

void* allocate(const Context&, std::size_t) { refuse(); }
void deallocate(const Context&, void*) noexcept {}

CurrentDevice::CurrentDevice(Device) {}
CurrentDevice::~CurrentDevice() = default;

Implementations<AutoencoderForward> autoencoder_forward() { refuse(); }
Implementations<AutoencoderBackward> autoencoder_backward() { refuse(); }
Implementations<SqueezeExciteForward> squeeze_excite_forward() { refuse(); }
Implementations<SqueezeExciteBackward> squeeze_excite_backward() { refuse(); }
Implementations<LinearActForward> linear_act_forward() { refuse(); }
Implementations<LinearActBackward> linear_act_backward() { refuse(); }

}  // namespace fusewise::cuda

// Stubs for a build without CUDA: nothing to allocate, no implementations to choose from.

#include "common/li_conv.h"
#include "common/operators.h"

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

#define FUSEWISE_REFUSE(name, Name)                             \
  Implementations<Name##Forward> name##_forward() { refuse(); } \
  Implementations<Name##Backward> name##_backward() { refuse(); }
FUSEWISE_EACH_OPERATOR(FUSEWISE_REFUSE)
Implementations<BatchNormStatistics> batch_norm_statistics() { refuse(); }
Implementations<LiConvForward> li_conv_forward() { refuse(); }
Implementations<LiConvBackward> li_conv_backward() { refuse(); }

}  // namespace fusewise::cuda

// The CUDA library's context: the tensor's device, torch's current stream there, torch's allocator.

#include <algorithm>
#include <utility>
#include <vector>

#include "call.h"
#include "common/backends.h"
#include "convolution.h"
#include "cuda/cuda_error.h"
#include "cuda/li_conv/casts.h"
#include "failure.h"

namespace fusewise::binding {
namespace {

/// Scratch memory as tensors of torch's caching allocator: counted, capturable, ordered by stream.
class TorchMemory : public Allocator {
 public:
  explicit TorchMemory(std::int32_t device) : device_(device) {}

  void* allocate(std::size_t bytes) override {
    const auto size = static_cast<std::int64_t>(bytes);
    const std::int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    const AOTITorchError status =
        aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(),
                                 aoti_torch_device_type_cuda(), device_, &handle);
    if (status != AOTI_TORCH_SUCCESS) {
      fail_as_torch("scratch memory", {DeviceType::cuda, device_}, size);
    }
    Tensor tensor(handle);
    void* memory = tensor.mutable_data_ptr();
    held_.emplace_back(memory, std::move(tensor));
    return memory;
  }

  void deallocate(void* memory) noexcept override {
    std::erase_if(held_, [memory](const auto& entry) { return entry.first == memory; });
  }

 private:
  std::int32_t device_;
  std::vector<std::pair<void*, Tensor>> held_;
};

}  // namespace

/// After a kernel has failed, its CUDA context is unusable and every call reports the error. A
/// capture becomes invalid when it forbids torch's allocations and one was tried.
void check_works(Device device) {
  if (device.type != DeviceType::cuda) return;
  const cuda::CurrentDevice current(device);
  std::size_t free = 0, total = 0;
  cuda::check_cuda(cudaMemGetInfo(&free, &total), "an earlier operation");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream));
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cuda::check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture),
                   "graph capture");
  if (capture == cudaStreamCaptureStatusInvalidated) {
    throw Error("CUDA: graph capture failed: torch may not allocate memory during it");
  }
}

void cast_all(const Context& context, std::span<const CastPair> pairs) {
  if (pairs.empty()) return;
  std::vector<cuda::Cast> casts;
  casts.reserve(pairs.size());
  for (const CastPair& pair : pairs) casts.push_back({pair.from, pair.to});
  const cuda::CurrentDevice current(context.device);
  cuda::cast(context, casts);
}

/// No device guard: the core has its own around every launch, and torch's functions get the device
/// as an argument or from their tensors.
struct CallContext::State {
  explicit State(std::int32_t device) : memory(device) {}
  TorchMemory memory;
};

CallContext::CallContext(const Tensor& tensor) {
  // A CPU tensor among CUDA tensors gets here too. The core's checks then name it.
  if (!tensor.is_cuda()) {
    context_.device = {DeviceType::cpu, 0};
    return;
  }
  const std::int32_t device = tensor.device_index();
  state_ = std::make_unique<State>(device);
  context_.device = {DeviceType::cuda, device};
  context_.allocator = &state_->memory;
  context_.convolution = &torch_convolution();
  context_.warn = [](const char* message) { aoti_torch_warn("fusewise", "", 0, message); };
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &context_.stream));
}

CallContext::~CallContext() = default;

}  // namespace fusewise::binding

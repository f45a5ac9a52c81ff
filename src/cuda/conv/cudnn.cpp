#ifdef FUSEWISE_WITH_CUDNN

#include "cuda/conv/cudnn.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "fusewise/error.h"

namespace fusewise::cuda {
namespace {

template <typename Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

std::optional<Cudnn> load() {
  const char* wanted = std::getenv("FUSEWISE_CUDNN");
  if (wanted != nullptr && std::string(wanted) == "0") return std::nullopt;
  // Never closed: what cuDNN has made lives as long as the process.
  void* library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::nullopt;
  Cudnn api{};
  const bool complete = look_up(library, "cudnnGetVersion", api.version) &&
                        look_up(library, "cudnnGetErrorString", api.error_string) &&
                        look_up(library, "cudnnCreate", api.create) &&
                        look_up(library, "cudnnSetStream", api.set_stream) &&
                        look_up(library, "cudnnBackendCreateDescriptor", api.create_descriptor) &&
                        look_up(library, "cudnnBackendDestroyDescriptor", api.destroy_descriptor) &&
                        look_up(library, "cudnnBackendFinalize", api.finalize) &&
                        look_up(library, "cudnnBackendSetAttribute", api.set_attribute) &&
                        look_up(library, "cudnnBackendGetAttribute", api.get_attribute) &&
                        look_up(library, "cudnnBackendExecute", api.execute);
  return complete ? std::optional(api) : std::nullopt;
}

}  // namespace

const Cudnn* Cudnn::get() {
  static const std::optional<Cudnn> api = load();
  return api.has_value() ? &*api : nullptr;
}

void check_cudnn(cudnnStatus_t status, const char* doing) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  static_cast<void>(cudaGetLastError());  // so that later calls do not report it
  const std::string message =
      std::string("cuDNN: ") + doing + " failed: " + Cudnn::get()->error_string(status);
  if (CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_INTERNAL_ERROR &&
      (status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ||
       status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)) {
    throw OutOfMemory(message);
  }
  throw Error(message);
}

Descriptor::Descriptor(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t made = nullptr;
  check_cudnn(Cudnn::get()->create_descriptor(type, &made), "making a descriptor");
  held_.reset(made);
}

void Descriptor::Destroy::operator()(cudnnBackendDescriptor_t descriptor) const {
  static_cast<void>(Cudnn::get()->destroy_descriptor(descriptor));
}

void Descriptor::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                     const void* values, std::int64_t count) {
  check_cudnn(Cudnn::get()->set_attribute(get(), name, type, count, values),
              "describing a convolution");
}

Descriptor&& Descriptor::finalized() {
  check_cudnn(Cudnn::get()->finalize(get()), "describing a convolution");
  return std::move(*this);
}

}  // namespace fusewise::cuda

#endif

#include "failure.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <string>

#include "common/check.h"

/// Exists in torch 2.13 and newer. Null before.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace fusewise::binding {
namespace {

bool can_allocate(Device device, std::int64_t bytes) {
  const std::int64_t stride = 1;
  const bool cuda = device.type == DeviceType::cuda;
  AtenTensorHandle handle = nullptr;
  const AOTITorchError status = aoti_torch_empty_strided(
      1, &bytes, &stride, aoti_torch_dtype_uint8(),
      cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(), device.index, &handle);
  if (status != AOTI_TORCH_SUCCESS) return false;
  aoti_torch_delete_tensor_object(handle);
  return true;
}

}  // namespace

void fail_as_torch(const char* call, Device device, std::int64_t bytes) {
  if (torch_exception_get_what_without_backtrace != nullptr) {
    const std::string message = torch_exception_get_what_without_backtrace();
    for (const char* words : {"out of memory", "can't allocate memory", "not enough memory"}) {
      if (message.find(words) != std::string::npos) throw OutOfMemory(message);
    }
    fail(call, ": ", message);
  }
  check_works(device);
  // Torch cannot allocate this size but can allocate in general, so memory was the reason.
  if (!can_allocate(device, bytes) && can_allocate(device, 0)) {
    throw OutOfMemory(std::string(call) + " needs " + std::to_string(bytes) + " bytes on " +
                      name_of(device));
  }
  fail(call, ": failed in torch, which has written the reason to stderr");
}

}  // namespace fusewise::binding

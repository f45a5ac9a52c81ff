#pragma once

// Finds the reason of a failed call into torch. The stable ABI returns only a status: before torch
// 2.13 the exception's type and message are lost (torch writes the message to stderr).

#include <cstdint>
#include <exception>

#include "fusewise/tensor.h"

namespace fusewise::binding {

/// For a call into torch that failed on a device while it needed memory for `bytes`. Throws
/// OutOfMemory if that was the reason, otherwise Error with torch's message as far as it is known.
[[noreturn]] void fail_as_torch(const char* call, Device device, std::int64_t bytes);

/// Runs a call into torch that may allocate `bytes`. Failures are reported as above.
template <typename Body>
auto torch_call(const char* call, Device device, std::int64_t bytes, const Body& body) {
  try {
    return body();
  } catch (const std::exception&) {
    fail_as_torch(call, device, bytes);
  }
}

/// Throws Error with the reason if the device can run nothing more. Defined once for the CPU
/// library and once for the CUDA library.
void check_works(Device device);

}  // namespace fusewise::binding

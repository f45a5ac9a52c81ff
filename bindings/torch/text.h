#pragma once

// A string as an argument of an operator.

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <string>

namespace fusewise::binding {

/// Used instead of std::string, whose conversion in torch 2.11 leaks 48 bytes at every call.
struct Text : std::string {
  using std::string::string;
};

}  // namespace fusewise::binding

namespace torch::stable::detail {

template <>
struct ToImpl<fusewise::binding::Text> {
  static fusewise::binding::Text call(StableIValue value, std::uint64_t, bool) {
    const auto handle = to<StringHandle>(value);
    std::size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    fusewise::binding::Text text(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

}  // namespace torch::stable::detail

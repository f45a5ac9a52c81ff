#pragma once

// The way to reject an argument: check(condition, "what ", was, " expected").

#include <ostream>
#include <span>
#include <sstream>
#include <string>

#include "fusewise/error.h"
#include "fusewise/tensor.h"

namespace fusewise {

// How messages show these types. Formatting costs nothing if the check holds.
inline std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name_of(dtype); }
inline std::ostream& operator<<(std::ostream& out, Device device) { return out << name_of(device); }
inline std::ostream& operator<<(std::ostream& out, const TensorView& t) { return out << t.shape(); }

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

/// Adds the part's name and number, as in "stream 1: ", in front of the message of an error in
/// `body`.
template <typename Body>
auto in_part(const char* part, std::size_t number, const Body& body) {
  try {
    return body();
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error& error) {
    fail(part, " ", number, ": ", error.what());
  }
}
template <typename Body>
auto in_layer(std::size_t layer, const Body& body) {
  return in_part("layer", layer, body);
}
template <typename Body>
auto in_stream(std::size_t stream, const Body& body) {
  return in_part("stream", stream, body);
}

/// "'silu', 'relu' or 'hardswish'"
inline std::string quoted(std::span<const char* const> names) {
  std::string text;
  for (const char* const& name : names) {
    if (!text.empty()) text += &name == &names.back() ? " or " : ", ";
    text.append("'").append(name).append("'");
  }
  return text;
}

/// Row-major without gaps.
inline bool is_dense(const TensorView& t) {
  if (t.numel() == 0) return true;
  std::int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    if (t.sizes[d] > 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

}  // namespace fusewise

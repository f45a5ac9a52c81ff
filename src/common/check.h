#pragma once

// One way to refuse an argument: check(condition, "what ", was, " expected").

#include <ostream>
#include <sstream>

#include "fusewise/error.h"
#include "fusewise/tensor.h"

namespace fusewise {

// How messages show them. As parts of a message they cost nothing where the check holds.
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

}  // namespace fusewise

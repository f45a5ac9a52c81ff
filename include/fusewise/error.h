#pragma once

#include <stdexcept>
#include <string>

namespace fusewise {

/// Thrown by every function of the library that cannot do what was asked. The message names the
/// argument, what was expected and what was passed. It is thrown before any output is touched.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Memory could not be allocated. The message begins with "out of memory: ".
class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(const std::string& message) : Error("out of memory: " + message) {}
};

}  // namespace fusewise

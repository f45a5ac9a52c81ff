#pragma once

#include <string>

#include "fusewise/error.h"

namespace fusewise::testing {

/// The message of the Error that `body` throws.
template <typename Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace fusewise::testing

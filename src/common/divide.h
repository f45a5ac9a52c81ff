#pragma once

#include <cstdint>

namespace fusewise {

/// How many pieces of size b cover a.
constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace fusewise

#pragma once

// Types in memory that C++ has no name for, and the accumulation type of each.

#include <cstdint>

namespace fusewise::cpu {

struct F16 {
  std::uint16_t bits;
};
struct BF16 {
  std::uint16_t bits;
};

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename T>
using AccumulatorOf = typename Accumulator<T>::type;

}  // namespace fusewise::cpu

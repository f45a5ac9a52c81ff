#pragma once

#include <cstdint>

namespace fusewise::cuda {

using Index = long long;

/// Divides by a number that is fixed for a launch: with a multiplication if all indices fit 31
/// bits.
class Divisor {
 public:
  Divisor(Index value, bool wide) : value_(value), wide_(wide) {
    if (wide) return;
    while ((Index{1} << shift_) < value) ++shift_;
    const std::uint64_t rest = (std::uint64_t{1} << shift_) - static_cast<std::uint64_t>(value);
    magic_ = static_cast<unsigned>((rest << 32) / static_cast<std::uint64_t>(value) + 1);
  }
  __device__ __forceinline__ Index quotient(Index a) const {
    if (wide_) return a / value_;
    return narrow_quotient(static_cast<unsigned>(a));
  }
  /// The same for a divisor that is not wide, without the branch.
  __device__ __forceinline__ unsigned narrow_quotient(unsigned a) const {
    return (__umulhi(a, magic_) + a) >> shift_;
  }
  /// a becomes the quotient; returns the remainder.
  __device__ __forceinline__ Index split(Index& a) const {
    const Index before = a;
    a = quotient(a);
    return before - a * value_;
  }
  __device__ __forceinline__ Index value() const { return value_; }

 private:
  Index value_;
  unsigned magic_ = 0;
  int shift_ = 0;
  bool wide_;
};

}  // namespace fusewise::cuda

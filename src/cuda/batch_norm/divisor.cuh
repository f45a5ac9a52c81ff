#pragma once

#include <cstdint>

namespace fusewise::cuda {

using Index = long long;

/// Divides numbers below 2^31 by one that is fixed for a launch, with a multiplication.
class ShortDivisor {
 public:
  explicit ShortDivisor(Index value) : value_(static_cast<int>(value)) {
    while ((Index{1} << shift_) < value) ++shift_;
    const std::uint64_t rest = (std::uint64_t{1} << shift_) - static_cast<std::uint64_t>(value);
    magic_ = static_cast<unsigned>((rest << 32) / static_cast<std::uint64_t>(value) + 1);
  }
  __device__ __forceinline__ unsigned quotient(unsigned a) const {
    return (__umulhi(a, magic_) + a) >> shift_;
  }
  /// a becomes the quotient; returns the remainder.
  __device__ __forceinline__ unsigned split(unsigned& a) const {
    const unsigned before = a;
    a = quotient(a);
    return before - a * value_;
  }
  __host__ __device__ __forceinline__ int value() const { return value_; }

 private:
  int value_;
  unsigned magic_ = 0;
  int shift_ = 0;
};

/// The same for numbers that may be larger: then by a division.
class Divisor {
 public:
  Divisor(Index value, bool wide) : value_(value), short_(wide ? 1 : value), wide_(wide) {}
  __device__ __forceinline__ Index quotient(Index a) const {
    return wide_ ? a / value_ : short_.quotient(static_cast<unsigned>(a));
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
  ShortDivisor short_;
  bool wide_;
};

}  // namespace fusewise::cuda

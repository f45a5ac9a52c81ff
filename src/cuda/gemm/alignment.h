#pragma once

#include <cstdint>

namespace fusewise::cuda {

/// Alignment of addresses and strides that vector loads and bulk copies need.
inline constexpr std::int64_t kVectorBytes = 16;

inline bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kVectorBytes == 0;
}

/// The alignment that a kernel may rely on: 256 or 16 bytes, or the exact power of two below that.
inline std::uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address);
  if (bits % 256 == 0) return 256;
  const std::uintptr_t lowest = bits & -bits;
  return lowest < kVectorBytes ? static_cast<std::uint32_t>(lowest) : kVectorBytes;
}

}  // namespace fusewise::cuda

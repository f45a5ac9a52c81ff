#pragma once

// One bit per lane of a vector, and back. The rule of cpu/vector.h applies.

#include "cpu/vector.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

/// One bit per lane: its sign bit, as comparisons set it.
[[maybe_unused]] unsigned to_bits(I32 mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask));
#else
  unsigned bits = 0;
  for (int i = 0; i < kFloats; ++i) bits |= static_cast<unsigned>(mask[i] & 1) << i;
  return bits;
#endif
}

using I64 = Vector<long, kBytes / 8>::type;
[[maybe_unused]] unsigned to_bits(I64 mask) {
  unsigned bits = 0;
  for (int i = 0; i < kBytes / 8; ++i) bits |= static_cast<unsigned>(mask[i] & 1) << i;
  return bits;
}

template <typename M>
M lane_bits() {
  M bits;
  for (unsigned i = 0; i < sizeof(M) / sizeof(bits[0]); ++i) bits[i] = 1u << i;
  return bits;
}

/// Sets all bits of a lane if its bit is set.
[[maybe_unused]] I32 from_bits(F32, unsigned bits) {
  return ((I32{} + static_cast<int>(bits)) & lane_bits<I32>()) != 0;
}
[[maybe_unused]] I64 from_bits(F64, unsigned bits) {
  return ((I64{} + static_cast<long>(bits)) & lane_bits<I64>()) != 0;
}

}  // namespace
}  // namespace fusewise::cpu::FUSEWISE_ISA

#pragma once

// Vectors whose lanes are rows or columns: one value in all lanes, and squares of lanes by lanes
// values transposed.

// Included only by files that are compiled once per instruction set, see cpu/vector.h.

#include "cpu/vector.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

/// x in every lane. Subtracts zero: the compiler can drop x - 0, but not x + 0, because -0 + 0 is
/// not -0.
template <typename V, typename E>
V broadcast(E x) {
  return x - V{};
}

template <int... kLane>
struct Lanes {};

template <int kStep, typename V, int... kLane>
[[gnu::always_inline]] inline void exchange(V& a, V& b, Lanes<kLane...>) {
  constexpr int kCount = sizeof...(kLane);
  const V low =
      __builtin_shufflevector(a, b, ((kLane & kStep) != 0 ? kCount + kLane - kStep : kLane)...);
  b = __builtin_shufflevector(a, b, ((kLane & kStep) != 0 ? kCount + kLane : kLane + kStep)...);
  a = low;
}

/// Transposes a square of lanes by lanes values: swaps the blocks beside the diagonal, with
/// doubling block sizes. Inlined, so that the values stay in registers.
template <typename A, int kStep = 1>
[[gnu::always_inline]] inline void transpose(LanesOf<A> (&v)[Memory<A>::kLanes]) {
  constexpr int kLanes = Memory<A>::kLanes;
  if constexpr (kStep < kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kStep) == 0) exchange<kStep>(v[i], v[i + kStep], Lanes<__integer_pack(kLanes)...>());
    }
    transpose<A, 2 * kStep>(v);
  }
}

/// Calls store(i, row i of the transposed square), with the square from load(i). Unrolled, and
/// `transpose` is inlined: a square indexed by a variable would be in memory, and that costs as
/// much as the rest.
template <typename A, typename Load, typename Store>
[[gnu::always_inline]] inline void transpose_square(const Load& load, const Store& store) {
  constexpr int kLanes = Memory<A>::kLanes;
  LanesOf<A> tile[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) tile[i] = load(i);
  transpose<A>(tile);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(i, tile[i]);
}

}  // namespace
}  // namespace fusewise::cpu::FUSEWISE_ISA

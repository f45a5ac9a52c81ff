#pragma once

#include <span>

#include "fusewise/context.h"

namespace fusewise::cuda {

/// Copies the elements of `from` to `to` in the order of memory, which has no gaps in either.
struct Cast {
  TensorView from, to;
};

/// Casts from float32 to half precision or back, all of one pair of types, in one launch for every
/// kMostCasts tensors.
inline constexpr int kMostCasts = 32;
void cast(const Context& context, std::span<const Cast> casts);

}  // namespace fusewise::cuda

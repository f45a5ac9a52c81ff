#pragma once

// The two operators that BatchNorm + activation + Squeeze-and-Excitation consists of.

#include "fusewise/batch_norm_excite.h"

namespace fusewise {

/// The BatchNorm of a call. Forward's has no y.
BatchNormActForward norm_of(const BatchNormExciteForward& call);
BatchNormActBackward norm_of(const BatchNormExciteBackward& call);

/// The Squeeze-and-Excitation of a call. Its x must be replaced by the activated tensor, which does
/// not exist in memory. Backward's has no dx.
SqueezeExciteForward excite_of(const BatchNormExciteForward& call);
SqueezeExciteBackward excite_of(const BatchNormExciteBackward& call);

}  // namespace fusewise

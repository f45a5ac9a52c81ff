#pragma once

#include "common/implementation.h"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {

/// The generic fallback: takes every call on every GPU.
void general_run(const Context& context, const SqueezeExciteForward& call);
void general_run(const Context& context, const SqueezeExciteBackward& call);

}  // namespace fusewise::cuda

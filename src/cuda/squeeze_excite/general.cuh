#pragma once

#include "common/implementation.h"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {

/// Takes every call on every GPU.
void general_run(const Context& context, const SqueezeExciteForward& call);
void general_run(const Context& context, const SqueezeExciteBackward& call);

}  // namespace fusewise::cuda

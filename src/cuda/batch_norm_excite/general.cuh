#pragma once

#include "common/implementation.h"
#include "fusewise/batch_norm_excite.h"

namespace fusewise::cuda {

/// Takes every call on every GPU.
void general_run(const Context& context, const BatchNormExciteForward& call);
void general_run(const Context& context, const BatchNormExciteBackward& call);

}  // namespace fusewise::cuda

#pragma once

#include <string>

#include "fusewise/batch_norm_excite.h"

namespace fusewise::cuda {

/// The forward of BatchNorm + activation, then that of Squeeze-and-Excitation. Takes every call.
void composed_run(const Context& context, const BatchNormExciteForward& call);
/// Why another implementation is faster, as a sentence. Empty if none is.
std::string composed_yields(const Context& context, const BatchNormExciteForward& call);

}  // namespace fusewise::cuda

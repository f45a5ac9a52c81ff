#pragma once

// Squeeze-and-Excitation with GEMMs over all samples: pool, two GEMMs, scale.

#include <string>

#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {

std::string batched_declines(const SqueezeExciteForward& call);
std::string batched_declines(const SqueezeExciteBackward& call);
/// Why another implementation is expected to be faster.
std::string batched_yields(const Context& context, const SqueezeExciteForward& call);
std::string batched_yields(const Context& context, const SqueezeExciteBackward& call);
void batched_run(const Context& context, const SqueezeExciteForward& call);
void batched_run(const Context& context, const SqueezeExciteBackward& call);

}  // namespace fusewise::cuda

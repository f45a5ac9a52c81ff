#pragma once

#include <string>

#include "cuda/squeeze_excite/ring_plan.h"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {

std::string ring_declines(const Context& context, const SqueezeExciteForward& call);
std::string ring_yields(const Context& context, const SqueezeExciteForward& call);
void ring_run(const Context& context, const SqueezeExciteForward& call);
/// With a plan of one's own, for experiments.
void ring_run(const Context& context, const SqueezeExciteForward& call, const RingPlan& plan);

}  // namespace fusewise::cuda

#pragma once

#include <string>

#include "cuda/squeeze_excite/cluster_plan.h"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {

std::string cluster_declines(const Context& context, const SqueezeExciteForward& call);
std::string cluster_declines(const Context& context, const SqueezeExciteBackward& call);
/// Approximate time in microseconds of a call that it takes.
double cluster_expected_time(const Context& context, const SqueezeExciteForward& call);
double cluster_expected_time(const Context& context, const SqueezeExciteBackward& call);
void cluster_run(const Context& context, const SqueezeExciteForward& call);
void cluster_run(const Context& context, const SqueezeExciteBackward& call);

/// Limits of the GPU, queried once.
const ClusterLimits& cluster_limits(Device device);

/// With an explicit plan, for experiments.
void cluster_run(const Context& context, const SqueezeExciteForward& call, const ClusterPlan& plan);
void cluster_run(const Context& context, const SqueezeExciteBackward& call,
                 const ClusterPlan& plan);

}  // namespace fusewise::cuda

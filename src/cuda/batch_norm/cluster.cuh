#pragma once

#include <string>

#include "fusewise/batch_norm.h"

namespace fusewise::cuda {

std::string cluster_declines(const Context& context, const BatchNormActForward& call);
std::string cluster_declines(const Context& context, const BatchNormActBackward& call);
/// Why two_pass is expected to be faster.
std::string cluster_yields(const TensorView& x);
void cluster_run(const Context& context, const BatchNormActForward& call);
void cluster_run(const Context& context, const BatchNormActBackward& call);

}  // namespace fusewise::cuda

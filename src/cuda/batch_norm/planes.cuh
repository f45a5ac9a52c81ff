#pragma once

#include <string>

#include "fusewise/batch_norm.h"

namespace fusewise::cuda {

std::string planes_declines(const Context& context, const BatchNormActForward& call);
std::string planes_declines(const Context& context, const BatchNormActBackward& call);
void planes_run(const Context& context, const BatchNormActForward& call);
void planes_run(const Context& context, const BatchNormActBackward& call);

}  // namespace fusewise::cuda

#pragma once

#include <string>

#include "fusewise/batch_norm.h"

namespace fusewise::cuda {

std::string resident_declines(const Context& context, const BatchNormActForward& call);
std::string resident_declines(const Context& context, const BatchNormActBackward& call);
void resident_run(const Context& context, const BatchNormActForward& call);
void resident_run(const Context& context, const BatchNormActBackward& call);

}  // namespace fusewise::cuda

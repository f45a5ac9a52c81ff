#pragma once

#include <string>

#include "fusewise/batch_norm.h"

namespace fusewise::cuda {

std::string columns_declines(const Context& context, const BatchNormActForward& call);
std::string columns_declines(const Context& context, const BatchNormActBackward& call);
void columns_run(const Context& context, const BatchNormActForward& call);
void columns_run(const Context& context, const BatchNormActBackward& call);

}  // namespace fusewise::cuda

#pragma once

#include "fusewise/batch_norm.h"

namespace fusewise::cuda {

void general_run(const Context& context, const BatchNormActForward& call);
void general_run(const Context& context, const BatchNormActBackward& call);
void general_run(const Context& context, const BatchNormStatistics& call);

}  // namespace fusewise::cuda

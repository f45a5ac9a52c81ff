#pragma once

#include "common/operator.h"

namespace fusewise {

extern const Operator<SqueezeExciteForward, SqueezeExciteBackward> kSqueezeExcite;

}  // namespace fusewise

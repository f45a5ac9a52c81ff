#pragma once

#include "common/operator.h"

namespace fusewise {

extern const Operator<AutoencoderForward, AutoencoderBackward> kAutoencoder;

}  // namespace fusewise

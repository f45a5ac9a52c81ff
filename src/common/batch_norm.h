#pragma once

// What BatchNorm with and without a max-pool share.

#include "fusewise/batch_norm.h"

namespace fusewise {

/// Throws Error if forward breaks a rule about statistics that its table does not express.
void check_statistics(const BatchNormActForward& call);

/// The same call without its max-pool. y and what depends on it is absent.
BatchNormActForward without_pool(const BatchNormActPoolForward& call);
BatchNormActBackward without_pool(const BatchNormActPoolBackward& call);

}  // namespace fusewise

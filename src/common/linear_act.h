#pragma once

// The checks of a call alone, for those who make several of them and refuse all or none.

#include "fusewise/linear_act.h"

namespace fusewise {

void check_call(const Context& context, const LinearActForward& call);
void check_call(const Context& context, const LinearActBackward& call);

}  // namespace fusewise

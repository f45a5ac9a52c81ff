#pragma once

// The GEMM libraries that the CPU kernels can use: the context's, or the BLAS of the build.

#include "fusewise/context.h"

namespace fusewise::cpu {

/// d = a b + c, as `Gemm::multiply`. Sizes may be 0, and a stride that is never used may have any
/// value. Returns false if there is no library or it declines.
bool multiply_by_library(const Context& context, const TensorView& a, const TensorView& b,
                         const TensorView& c, const TensorView& d);

}  // namespace fusewise::cpu

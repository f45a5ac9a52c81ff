#pragma once

// The elementwise kernels around linear_act's GEMMs: activations, bits, gradients and their sums.

#include "fusewise/context.h"
#include "fusewise/linear_act.h"

namespace fusewise::cuda {

/// y = act(z), and relu's bits if `bits` is defined. y and z may be the same memory. If y is
/// undefined, it is not written. z may then already be the output of relu, because its bits are the
/// same.
struct ActivationPass {
  TensorView z, y, bits;
  Activation activation;
};
void activate(const Context& context, const ActivationPass& pass);

/// dz = dy * act' and db = sum of dz over rows, each only if defined. dz may be dy. db has dy's
/// type, or float32 if dy is half precision.
struct GradientPass {
  TensorView dy, kept, dz, db;
  Activation activation;
};
void differentiate(const Context& context, const GradientPass& pass);

}  // namespace fusewise::cuda

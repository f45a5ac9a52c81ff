#pragma once

// What linear_act does around the products: activations, bits, gradients and their sums.

#include "fusewise/context.h"
#include "fusewise/linear_act.h"

namespace fusewise::cuda {

/// y = act(z) and, where `kept` wants bits, these; y and z may be the same memory. A `y` that is
/// absent is not written: the bits of a z that has its relu behind it are the same.
struct ActivationPass {
  TensorView z, y, bits;
  Activation activation;
};
void activate(const Context& context, const ActivationPass& pass);

/// dz = dy * act', db = sum over rows of dz, each where it is wanted; dz may be dy. db has dy's
/// type, or float32 beside halves.
struct GradientPass {
  TensorView dy, kept, dz, db;
  Activation activation;
};
void differentiate(const Context& context, const GradientPass& pass);

}  // namespace fusewise::cuda

#pragma once

// The kernels of the batched implementation, in the order of their launches. Each of them starts
// while the previous one ends.

#include "cuda/squeeze_excite/batched_plan.h"
#include "fusewise/context.h"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda::batched {

struct Arguments {
  const void* kept;   ///< the image that is scaled: x, in backward dy
  const void* extra;  ///< backward: x
  void* out;          ///< y, in backward dx
  const void *w1, *b1, *w2, *b2;
  float *pooled, *hidden, *gates;  ///< forward: written, hidden may be null; backward: read
  float *dz2, *dz1;                ///< backward: the gradients before gate and activation
  float* activated;                ///< act(hidden); like dz1, its rows are padded with zeros
  float* offsets;                  ///< backward: what is added to dy * gates
  void *dw1, *db1, *dw2, *db2;     ///< backward: may be null
  int n, c, hw, r;
  int stride;  ///< of the rows of dz1 and activated: r, rounded up to 16 bytes
  float inverse_hw;
  Activation activation;
  Gate gate;
};

/// Forward: pooled = mean of x. Backward: dz2 = sum of dy * x, times the gate's slope.
void sum_images(const Context& context, DType images, const Arguments& a, bool backward);
/// Forward: hidden = pooled W1^T + b1, activated. Backward: dz1 = dz2 W2, times the activation's
/// slope; activated.
void excite(const Context& context, DType weights, const Arguments& a, bool backward);
/// gates = gate(activated W2^T + b2).
void open_gates(const Context& context, DType weights, const Arguments& a);
/// offsets = dz1 W1 / HW, and the gradients of the weights.
void compute_gradients(const Context& context, DType weights, const Arguments& a);
/// out = kept * gates, in backward + offsets.
void scale_images(const Context& context, DType images, const Arguments& a, bool backward);

}  // namespace fusewise::cuda::batched

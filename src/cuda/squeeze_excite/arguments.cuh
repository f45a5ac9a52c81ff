#pragma once

// Converts a call to a kernel's arguments, for kernels that serve both forward and backward. The
// arguments name the tensors by their role, so that one kernel can do both.

#include "cuda/squeeze_excite/weight_gradients.cuh"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {

/// The arguments that both directions have.
template <typename Arguments, typename Call>
Arguments shared_arguments(const Call& call) {
  Arguments a{};
  a.w1 = call.w1.data;
  a.w2 = call.w2.data;
  a.pooled = static_cast<float*>(call.pooled.data);
  a.hidden = static_cast<float*>(call.hidden.data);
  a.gates = static_cast<float*>(call.gates.data);
  a.c = static_cast<int>(call.x.sizes[1]);
  a.hw = static_cast<int>(call.x.sizes[2] * call.x.sizes[3]);
  a.r = static_cast<int>(call.w1.sizes[0]);
  a.inverse_hw = 1.0f / static_cast<float>(a.hw);
  a.activation = call.activation;
  a.gate = call.gate;
  return a;
}

template <typename Arguments>
Arguments arguments_of(const SqueezeExciteForward& call) {
  auto a = shared_arguments<Arguments>(call);
  a.kept = call.x.data;
  a.out = call.y.data;
  a.b1 = call.b1.data;
  a.b2 = call.b2.data;
  return a;
}

template <typename Arguments>
Arguments arguments_of(const SqueezeExciteBackward& call, const WeightGradientVectors& vectors) {
  auto a = shared_arguments<Arguments>(call);
  a.kept = call.dy.data;
  a.extra = call.x.data;
  a.out = call.dx.data;
  a.dz2 = vectors.dz2();
  a.dz1 = vectors.dz1();
  return a;
}

}  // namespace fusewise::cuda

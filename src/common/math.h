#pragma once

// Pointwise functions shared by host and device code. `A` is the accumulation type.
// All of them let NaN through, as torch does.

#include <cmath>

#include "fusewise/squeeze_excite.h"

#ifdef __CUDACC__
#define FUSEWISE_HOST_DEVICE __host__ __device__
#else
#define FUSEWISE_HOST_DEVICE
#endif

namespace fusewise::math {

// expf and not a fast approximation: the result is exact to the last bits of float32.
FUSEWISE_HOST_DEVICE inline float exp(float z) { return ::expf(z); }
FUSEWISE_HOST_DEVICE inline double exp(double z) { return ::exp(z); }

template <typename A>
FUSEWISE_HOST_DEVICE inline A sigmoid(A z) {
  return A(1) / (A(1) + exp(-z));
}

template <typename A>
FUSEWISE_HOST_DEVICE inline A activate(Activation kind, A z) {
  if (kind == Activation::relu) return z < A(0) ? A(0) : z;
  return z / (A(1) + exp(-z));
}

/// The gradient before the activation, from the one behind it. relu selects and does not multiply,
/// as torch: where it is closed, not even NaN comes through.
template <typename A>
FUSEWISE_HOST_DEVICE inline A activation_gradient(Activation kind, A z, A gradient) {
  if (kind == Activation::relu) return z <= A(0) ? A(0) : gradient;
  const A s = sigmoid(z);
  return gradient * (s * (A(1) + z * (A(1) - s)));
}

template <typename A>
FUSEWISE_HOST_DEVICE inline A open_gate(Gate kind, A z) {
  if (kind == Gate::sigmoid) return sigmoid(z);
  const A t = z + A(3);
  return (t < A(0) ? A(0) : t > A(6) ? A(6) : t) / A(6);
}

/// The gradient before the gate, from the one behind it and the gate's value g, which forward keeps
/// in place of z. hardsigmoid selects, as relu does.
template <typename A>
FUSEWISE_HOST_DEVICE inline A gate_gradient(Gate kind, A g, A gradient) {
  if (kind == Gate::sigmoid) return gradient * (g * (A(1) - g));
  return g > A(0) && g < A(1) ? gradient / A(6) : A(0);
}

}  // namespace fusewise::math

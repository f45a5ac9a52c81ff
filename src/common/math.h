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

FUSEWISE_HOST_DEVICE inline float erf(float z) { return ::erff(z); }
FUSEWISE_HOST_DEVICE inline double erf(double z) { return ::erf(z); }
FUSEWISE_HOST_DEVICE inline float tanh(float z) { return ::tanhf(z); }
FUSEWISE_HOST_DEVICE inline double tanh(double z) { return ::tanh(z); }

template <typename A>
FUSEWISE_HOST_DEVICE inline A gelu_argument(A z) {
  return A(0.79788456080286536) * (z + A(0.044715) * z * z * z);
}

template <typename A>
FUSEWISE_HOST_DEVICE inline A sigmoid(A z) {
  return A(1) / (A(1) + exp(-z));
}

template <Activation kKind, typename A>
FUSEWISE_HOST_DEVICE inline A activate(A z) {
  if constexpr (kKind == Activation::relu) return z < A(0) ? A(0) : z;
  if constexpr (kKind == Activation::silu) return z / (A(1) + exp(-z));
  if constexpr (kKind == Activation::gelu) {
    return A(0.5) * z * (A(1) + erf(z * A(0.70710678118654752)));
  }
  if constexpr (kKind == Activation::gelu_tanh) {
    return A(0.5) * z * (A(1) + tanh(gelu_argument(z)));
  }
  return z;
}

/// The gradient before the activation, from the one behind it. relu selects and does not multiply,
/// as torch: where it is closed, not even NaN comes through.
template <Activation kKind, typename A>
FUSEWISE_HOST_DEVICE inline A activation_gradient(A z, A gradient) {
  if constexpr (kKind == Activation::relu) return z <= A(0) ? A(0) : gradient;
  if constexpr (kKind == Activation::silu) {
    const A s = sigmoid(z);
    return gradient * (s * (A(1) + z * (A(1) - s)));
  }
  if constexpr (kKind == Activation::gelu) {
    const A cdf = A(0.5) * (A(1) + erf(z * A(0.70710678118654752)));
    const A density = A(0.39894228040143268) * exp(A(-0.5) * z * z);
    return gradient * (cdf + z * density);
  }
  if constexpr (kKind == Activation::gelu_tanh) {
    const A t = tanh(gelu_argument(z));
    const A slope = A(0.79788456080286536) * (A(1) + A(3 * 0.044715) * z * z);
    return gradient * (A(0.5) * (A(1) + t) + A(0.5) * z * (A(1) - t * t) * slope);
  }
  return gradient;
}

/// For those that know the function only at run time: silu or relu.
template <typename A>
FUSEWISE_HOST_DEVICE inline A activate(Activation kind, A z) {
  return kind == Activation::relu ? activate<Activation::relu>(z) : activate<Activation::silu>(z);
}

template <typename A>
FUSEWISE_HOST_DEVICE inline A activation_gradient(Activation kind, A z, A gradient) {
  return kind == Activation::relu ? activation_gradient<Activation::relu>(z, gradient)
                                  : activation_gradient<Activation::silu>(z, gradient);
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

#pragma once

// Pointwise functions shared by host and device code. `A` is the accumulation type. All of them
// propagate NaN, as torch does.

#include <cmath>

#include "fusewise/squeeze_excite.h"

#ifdef __CUDACC__
#define FUSEWISE_HOST_DEVICE __host__ __device__
#else
#define FUSEWISE_HOST_DEVICE
#endif

namespace fusewise::math {

// expf, not a fast approximation: the result is accurate to the last bits of float32.
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

template <typename A>
FUSEWISE_HOST_DEVICE inline A clamp_to_6(A z) {
  return z < A(0) ? A(0) : z > A(6) ? A(6) : z;
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
  if constexpr (kKind == Activation::relu6) return clamp_to_6(z);
  if constexpr (kKind == Activation::hardswish) return z * (clamp_to_6(z + A(3)) / A(6));
  return z;
}

/// The gradient before the activation, from the gradient after it. relu and hardswish select
/// instead of multiplying, as in torch: where they are closed, even NaN does not pass. hardswish
/// has slope 0 at -3, 1 at 3, and 1 if z is NaN.
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
    // With s = sigmoid(2u), 1 - tanh(u)^2 is 4 s (1 - s). Computing it from the exponential of
    // -2|u| avoids cancellation when tanh(u) is almost 1.
    const A u = gelu_argument(z), e = exp(u < A(0) ? A(2) * u : A(-2) * u);
    const A larger = A(1) / (A(1) + e), smaller = e * larger;
    const A slope = A(0.79788456080286536) * (A(1) + A(3 * 0.044715) * z * z);
    return gradient * ((u < A(0) ? smaller : larger) + A(2) * z * (smaller * larger) * slope);
  }
  if constexpr (kKind == Activation::relu6) return z <= A(0) || z >= A(6) ? A(0) : gradient;
  if constexpr (kKind == Activation::hardswish) {
    if (z <= A(-3)) return A(0);
    return z < A(3) ? gradient * (z / A(3) + A(0.5)) : gradient;
  }
  return gradient;
}

/// For callers that know the function only at run time. It must be one of
/// kSqueezeExciteActivations.
template <typename A>
FUSEWISE_HOST_DEVICE inline A activate(Activation kind, A z) {
  if (kind == Activation::relu) return activate<Activation::relu>(z);
  if (kind == Activation::hardswish) return activate<Activation::hardswish>(z);
  return activate<Activation::silu>(z);
}

template <typename A>
FUSEWISE_HOST_DEVICE inline A activation_gradient(Activation kind, A z, A gradient) {
  if (kind == Activation::relu) return activation_gradient<Activation::relu>(z, gradient);
  if (kind == Activation::hardswish) return activation_gradient<Activation::hardswish>(z, gradient);
  return activation_gradient<Activation::silu>(z, gradient);
}

template <typename A>
FUSEWISE_HOST_DEVICE inline A open_gate(Gate kind, A z) {
  if (kind == Gate::sigmoid) return sigmoid(z);
  return clamp_to_6(z + A(3)) / A(6);
}

/// The gradient before the gate, from the gradient after it and the gate's value g, which forward
/// saves instead of z. hardsigmoid selects, as relu does.
template <typename A>
FUSEWISE_HOST_DEVICE inline A gate_gradient(Gate kind, A g, A gradient) {
  if (kind == Gate::sigmoid) return gradient * (g * (A(1) - g));
  return g > A(0) && g < A(1) ? gradient / A(6) : A(0);
}

}  // namespace fusewise::math

#pragma once

// Activations as accurate as the type of their result. In float32 and float64 they are those of
// common/math.h. fp16 and bf16 keep at most 11 bits, so approximations with an error of some 1e-6
// are enough. This matters: exact ones take longer than reading their operands from memory.

#include "common/math.h"
#include "cuda/vector.cuh"

namespace fusewise::cuda {

/// exp(-z^2 / 2). Both the distribution and the density of a normal variable follow from it.
__device__ __forceinline__ float fast_bell(float z) { return __expf(-0.5f * z * z); }

/// P(x < z): a rational approximation of the tail with an error of at most 1e-7 (Abramowitz and
/// Stegun, 7.1.26).
__device__ __forceinline__ float fast_normal_cdf(float z, float bell) {
  const float t = __fdividef(1.0f, fmaf(0.3275911f * 0.70710678f, fabsf(z), 1.0f));
  float p = fmaf(1.061405429f, t, -1.453152027f);
  p = fmaf(p, t, 1.421413741f);
  p = fmaf(p, t, -0.284496736f);
  p = fmaf(p, t, 0.254829592f);
  const float tail = 0.5f * p * t * bell;
  return z < 0.0f ? tail : 1.0f - tail;
}

/// Without the instructions that __expf spends on denormal numbers, which 1 + e does not show.
__device__ __forceinline__ float fast_sigmoid(float z) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(z * -1.44269504f));
  return __fdividef(1.0f, 1.0f + e);
}

/// For a result of type T.
template <Activation kKind, typename T, typename A>
__device__ __forceinline__ A activate_as(A z) {
  if constexpr (sizeof(T) > 2 || kKind == Activation::relu || kKind == Activation::identity) {
    return math::activate<kKind>(z);
  } else if constexpr (kKind == Activation::silu) {
    return z * fast_sigmoid(z);
  } else if constexpr (kKind == Activation::gelu) {
    return z * fast_normal_cdf(z, fast_bell(z));
  } else {  // 1 + tanh(u) = 2 sigmoid(2u)
    return z * fast_sigmoid(2.0f * math::gelu_argument(z));
  }
}

template <Activation kKind, typename T, typename A>
__device__ __forceinline__ A activation_gradient_as(A z, A gradient) {
  if constexpr (sizeof(T) > 2 || kKind == Activation::relu || kKind == Activation::identity) {
    return math::activation_gradient<kKind>(z, gradient);
  } else if constexpr (kKind == Activation::silu) {
    const float s = fast_sigmoid(z);
    return gradient * (s * (1.0f + z * (1.0f - s)));
  } else if constexpr (kKind == Activation::gelu) {
    const float bell = fast_bell(z);
    return gradient * (fast_normal_cdf(z, bell) + z * 0.39894228f * bell);
  } else {
    const float s = fast_sigmoid(2.0f * math::gelu_argument(z));
    const float slope = 0.79788456f * fmaf(0.134145f * z, z, 1.0f);
    return gradient * (s + 2.0f * z * s * (1.0f - s) * slope);
  }
}

}  // namespace fusewise::cuda

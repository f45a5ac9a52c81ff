#pragma once

// The activations of BatchNorm, chosen at run time for several values at once. One branch serves
// them all, so that kernels need no instance per activation.

#include "cuda/fast_math.cuh"

namespace fusewise::cuda {

/// The gradient of relu and relu6 passes where 0 < y (< 6), as y is stored. In terms of v: between
/// the largest v that rounds to 0 and the smallest that rounds to 6. Both are ties, which go to the
/// even number, 0 and 6.
template <typename T>
inline constexpr float kRoundsTo0 = 0.0f;
template <>
inline constexpr float kRoundsTo0<__half> = 0x1p-25f;
template <>
inline constexpr float kRoundsTo0<__nv_bfloat16> = 0x1p-134f;
template <typename T>
inline constexpr float kRoundsTo6 = 6.0f;
template <>
inline constexpr float kRoundsTo6<__half> = 5.998046875f;
template <>
inline constexpr float kRoundsTo6<__nv_bfloat16> = 5.984375f;

/// NaN passes.
template <Activation kKind, typename T, typename A>
__device__ __forceinline__ bool passes_at(A v) {
  const bool open = !(v <= A(kRoundsTo0<T>));
  if constexpr (kKind == Activation::relu6) return open && !(v >= A(kRoundsTo6<T>));
  return open;
}

/// As accurate as a result of type T, see fast_math.cuh.
template <Activation kKind, typename T, typename A>
__device__ __forceinline__ A act(A v) {
  if constexpr (kKind == Activation::hardswish && sizeof(T) == 2) {
    return v * (math::clamp_to_6(v + A(3)) * A(1.0 / 6));
  } else if constexpr (kKind == Activation::silu) {
    return activate_as<kKind, T>(v);
  } else {
    return math::activate<kKind>(v);
  }
}

template <Activation kKind, typename T, typename A>
__device__ __forceinline__ A act_gradient(A v, A d) {
  if constexpr (kKind == Activation::hardswish && sizeof(T) == 2) {
    if (v <= A(-3)) return A(0);
    return v < A(3) ? d * (v * A(1.0 / 3) + A(0.5)) : d;
  } else if constexpr (kKind == Activation::relu || kKind == Activation::relu6) {
    return passes_at<kKind, T>(v) ? d : A(0);
  } else if constexpr (kKind == Activation::silu) {
    return activation_gradient_as<kKind, T>(v, d);
  } else {
    return math::activation_gradient<kKind>(v, d);
  }
}

/// act(v), and its slope, which share the sigmoid of silu.
template <Activation kKind, typename T, typename A>
__device__ __forceinline__ A act_with_slope(A v, A& slope) {
  if constexpr (kKind == Activation::silu) {
    A sigmoid;
    if constexpr (sizeof(T) == 2) {
      sigmoid = fast_sigmoid(v);
    } else {
      sigmoid = math::sigmoid(v);
    }
    const A activated = v * sigmoid;
    slope = fma(activated, A(1) - sigmoid, sigmoid);
    return activated;
  } else {
    slope = act_gradient<kKind, T>(v, A(1));
    return act<kKind, T>(v);
  }
}

/// Calls body(std::integral_constant-like tag) for the activation's value at run time.
template <Activation kValue>
struct ActivationTag {
  static constexpr Activation kKind = kValue;
};
/// The activations that a kernel can be called with. Few make it shorter: its code is not in the
/// caches when it starts.
enum class Kinds { all, piecewise, smooth };
constexpr Kinds kinds_of(Activation activation) {
  const bool smooth = activation == Activation::silu || activation == Activation::hardswish;
  return smooth ? Kinds::smooth : Kinds::piecewise;
}
template <Kinds kKinds, typename Body>
__device__ __forceinline__ void with_activation(Activation kind, Body body) {
  if constexpr (kKinds == Kinds::smooth) {
    if (kind == Activation::silu) return body(ActivationTag<Activation::silu>{});
    return body(ActivationTag<Activation::hardswish>{});
  }
  if constexpr (kKinds == Kinds::piecewise) {
    if (kind == Activation::relu) return body(ActivationTag<Activation::relu>{});
    if (kind == Activation::relu6) return body(ActivationTag<Activation::relu6>{});
    return;
  }
  switch (kind) {
    case Activation::relu:
      return body(ActivationTag<Activation::relu>{});
    case Activation::relu6:
      return body(ActivationTag<Activation::relu6>{});
    case Activation::silu:
      return body(ActivationTag<Activation::silu>{});
    case Activation::hardswish:
      return body(ActivationTag<Activation::hardswish>{});
    default:
      return;  // identity
  }
}

template <typename T, Kinds kKinds = Kinds::all, int kCount, typename A>
__device__ __forceinline__ void activate_all(Activation kind, A (&v)[kCount]) {
  with_activation<kKinds>(kind, [&](auto tag) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) v[k] = act<decltype(tag)::kKind, T>(v[k]);
  });
}

/// d becomes the gradient before the activation.
template <typename T, Kinds kKinds = Kinds::all, int kCount, typename A>
__device__ __forceinline__ void differentiate_all(Activation kind, const A (&v)[kCount],
                                                  A (&d)[kCount]) {
  with_activation<kKinds>(kind, [&](auto tag) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) d[k] = act_gradient<decltype(tag)::kKind, T>(v[k], d[k]);
  });
}

/// Bit k is set where the gradient of relu or relu6 passes.
template <typename T, int kCount, typename A>
__device__ __forceinline__ unsigned passing(Activation kind, const A (&v)[kCount]) {
  unsigned bits = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const bool passes = kind == Activation::relu6 ? passes_at<Activation::relu6, T>(v[k])
                                                  : passes_at<Activation::relu, T>(v[k]);
    bits |= static_cast<unsigned>(passes) << k;
  }
  return bits;
}

/// d becomes 0 where its bit is not set.
template <int kCount, typename A>
__device__ __forceinline__ void keep_passing(unsigned bits, A (&d)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if ((bits >> k & 1) == 0) d[k] = A(0);
  }
}

}  // namespace fusewise::cuda

#pragma once

// exp, erf and the activations on vectors of one instruction set, accurate to the last bits of
// float32. float64 uses the C library, lane by lane. NaN propagates. The rule of cpu/vector.h
// applies.

#include "cpu/vector.h"
#include "fusewise/activation.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

/// `yes` where the condition holds, otherwise `no`. The condition sets all bits of a lane, as
/// comparisons do.
template <typename V, typename M>
V select(M condition, V yes, V no) {
  return condition ? yes : no;
}

/// e^x as p 2^n. For NaN, p is NaN.
struct Power {
  F32 p;
  I32 n;
};

Power power(F32 x) {
  // n ln(2) + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer, which is in the low
  // bits.
  constexpr float kRound = 0x1.8p23f;
  const F32 shifted = multiply_add(x, F32{} + 1.44269504f, F32{} + kRound);
  const F32 n = shifted - kRound;
  F32 r =
      multiply_add(n, F32{} - 0x1.62e4p-1f, x);  // ln(2) in two parts: the first times n is exact
  r = multiply_add(n, F32{} - 1.42860677e-6f, r);
  F32 p = F32{} + 0.0013956218f;
  p = multiply_add(p, r, F32{} + 0.0083752321f);
  p = multiply_add(p, r, F32{} + 0.0416660793f);
  p = multiply_add(p, r, F32{} + 0.1666641384f);
  p = multiply_add(p, r, F32{} + 0.5f);
  p = multiply_add(p, r, F32{} + 1.0f);
  p = multiply_add(p, r, F32{} + 1.0f);
  return {p, (I32)shifted - (I32)(F32{} + kRound)};
}

[[maybe_unused]] F32 exp(F32 argument) {
  // Outside this range the result is 0 or infinite anyway, and n would not fit.
  F32 x = select(argument > 89.0f, F32{} + 89.0f, argument);
  x = select(x < -104.0f, F32{} - 104.0f, x);
  const auto [p, whole] = power(x);
  // In two steps, so that neither factor leaves the range of normal numbers.
  const I32 half = whole >> 1;
  const F32 low = (F32)((half + 127) << 23), high = (F32)((whole - half + 127) << 23);
  return select(x != x, x, p * low * high);
}

/// For |x| < 80, where no overflow is possible.
F32 exp_bounded(F32 x) {
  const auto [p, whole] = power(x);
  return p * (F32)((whole + 127) << 23);
}

[[maybe_unused]] F32 erf(F32 x) {
  const F32 t = select(x < 0.0f, -x, x), s = x * x;
  F32 p = F32{} + 8.3978019e-05f;  // erf(x) / x near zero
  p = multiply_add(p, s, F32{} - 0.00081498071f);
  p = multiply_add(p, s, F32{} + 0.0052017160f);
  p = multiply_add(p, s, F32{} - 0.0268597025f);
  p = multiply_add(p, s, F32{} + 0.1128370166f);
  p = multiply_add(p, s, F32{} - 0.3761263490f);
  const F32 small = multiply_add(multiply_add(p, s, F32{} + 0.1283792257f), x, x);
  const F32 bounded = select(t > 3.95f, F32{} + 3.95f, t);
  F32 q = F32{} + 2.1184265e-05f;  // -log(1 - erf(t)) beyond; from 3.95 on, erf is 1 in float32
  q = multiply_add(q, bounded, F32{} - 0.00043547808f);
  q = multiply_add(q, bounded, F32{} + 0.0041759023f);
  q = multiply_add(q, bounded, F32{} - 0.0251319520f);
  q = multiply_add(q, bounded, F32{} + 0.1082991064f);
  q = multiply_add(q, bounded, F32{} + 0.6333299279f);
  q = multiply_add(q, bounded, F32{} + 1.1295231581f);
  q = multiply_add(q, bounded, F32{} - 0.00017636213f);
  const F32 large = 1.0f - exp(-q);
  const F32 signed_large = select(x < 0.0f, -large, large);
  return select(t < 0.921875f, small, select(x != x, x, signed_large));
}

/// Its relative error grows near zero. Callers that add 1 to it do not see that.
[[maybe_unused]] F32 tanh(F32 x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

template <typename Function>
F64 by_lane(F64 x, Function function) {
  for (unsigned i = 0; i < sizeof(F64) / sizeof(double); ++i) x[i] = function(x[i]);
  return x;
}
[[maybe_unused]] F64 exp(F64 x) {
  return by_lane(x, [](double v) { return __builtin_exp(v); });
}
[[maybe_unused]] F64 erf(F64 x) {
  return by_lane(x, [](double v) { return __builtin_erf(v); });
}
[[maybe_unused]] F64 tanh(F64 x) {
  return by_lane(x, [](double v) { return __builtin_tanh(v); });
}

// The formulas are those of common/math.h. ------------------------------------------------------

constexpr float lane(F32, double value) { return static_cast<float>(value); }
constexpr double lane(F64, double value) { return value; }

template <typename V>
V gelu_argument(V z) {
  return (z + z * z * z * lane(V{}, 0.044715)) * lane(V{}, 0.79788456080286536);
}

/// Half of 1 + erf(z / sqrt(2)).
template <typename V>
V normal_cdf(V z) {
  return lane(V{}, 0.5) * (1 + erf(z * lane(V{}, 0.70710678118654752)));
}

/// float32 version with half the instructions: one exponential of a polynomial, which is the
/// logarithm of the tail beyond |z|. It has a third of the error of 1 + erf.
[[maybe_unused]] F32 normal_cdf(F32 z) {
  const F32 size = (F32)((U32)z & 0x7fffffff);
  const F32 t = select(size > 5.6f, F32{} + 5.6f, size);
  F32 p = F32{} + 1.56326951e-07f;
  p = multiply_add(p, t, F32{} - 3.56046676e-06f);
  p = multiply_add(p, t, F32{} + 3.26750932e-05f);
  p = multiply_add(p, t, F32{} - 0.000132969272f);
  p = multiply_add(p, t, F32{} - 0.000111106657f);
  p = multiply_add(p, t, F32{} + 0.00493631808f);
  p = multiply_add(p, t, F32{} - 0.0364235648f);
  p = multiply_add(p, t, F32{} - 0.318285269f);
  p = multiply_add(p, t, F32{} - 0.797887154f);
  p = multiply_add(p, t, F32{} - 0.693147137f);
  const F32 tail = select(size > 5.6f, F32{}, exp_bounded(p));  // beyond, 1 - tail is 1
  return select(z < 0.0f, tail, 1.0f - tail);
}

/// exp(-z^2 / 2) / sqrt(2 pi)
[[maybe_unused]] F32 normal_density(F32 z) {
  const F32 exponent = -0.5f * z * z;
  const F32 bounded = select(exponent < -79.0f, F32{} - 79.0f, exponent);
  return select(exponent < -79.0f, F32{}, 0.398942280f * exp_bounded(bounded));
}
[[maybe_unused]] F64 normal_density(F64 z) { return 0.39894228040143268 * exp(-0.5 * z * z); }

// fp16 and bf16 keep at most 11 bits, so relative errors below 4e-5 are not visible. --------------

/// 2^x for -126 < x < 127.
F32 short_exp2(F32 x) {
  constexpr float kRound = 0x1.8p23f;
  const F32 shifted = x + kRound;
  const F32 r = x - (shifted - kRound);
  F32 p = F32{} + 0.00957008647f;
  p = multiply_add(p, r, F32{} + 0.0559179012f);
  p = multiply_add(p, r, F32{} + 0.240247455f);
  p = multiply_add(p, r, F32{} + 0.69312181f);
  p = multiply_add(p, r, F32{} + 0.999999261f);
  return (F32)((I32)p + ((I32)shifted << 23));  // the integer is in the low bits
}

[[maybe_unused]] F32 short_normal_cdf(F32 z) {
  const F32 size = (F32)((U32)z & 0x7fffffff);
  const F32 t = select(size > 5.6f, F32{} + 5.6f, size);
  F32 p = F32{} + 2.55046638e-05f;
  p = multiply_add(p, t, F32{} - 0.000651083002f);
  p = multiply_add(p, t, F32{} + 0.00743213426f);
  p = multiply_add(p, t, F32{} - 0.0518247216f);
  p = multiply_add(p, t, F32{} - 0.460498651f);
  p = multiply_add(p, t, F32{} - 1.1505128f);
  p = multiply_add(p, t, F32{} - 1.0000409f);
  const F32 tail = select(size > 5.6f, F32{}, short_exp2(p));
  return select(z < 0.0f, tail, 1.0f - tail);
}

[[maybe_unused]] F32 short_normal_density(F32 z) {
  const F32 exponent = -0.721347520f * z * z;
  const F32 bounded = select(exponent < -120.0f, F32{} - 120.0f, exponent);
  return select(exponent < -120.0f, F32{}, 0.398942280f * short_exp2(bounded));
}

template <typename V>
V clamp_to_6(V z) {
  return select(z < 0, V{}, select(z > 6, V{} + 6, z));
}

template <Activation kKind, bool kHalf = false, typename V>
V activate(V z) {
  if constexpr (kKind == Activation::gelu && kHalf) return z * short_normal_cdf(z);
  if constexpr (kKind == Activation::relu) return select(z < 0, V{}, z);
  if constexpr (kKind == Activation::silu) return z / (1 + exp(-z));
  if constexpr (kKind == Activation::gelu) return z * normal_cdf(z);
  if constexpr (kKind == Activation::gelu_tanh) {
    return z * lane(V{}, 0.5) * (1 + tanh(gelu_argument(z)));
  }
  if constexpr (kKind == Activation::relu6) return clamp_to_6(z);
  if constexpr (kKind == Activation::hardswish) return z * (clamp_to_6(z + 3) / 6);
  return z;
}

template <Activation kKind, bool kHalf = false, typename V>
V activation_gradient(V z, V gradient) {
  if constexpr (kKind == Activation::gelu && kHalf) {
    return gradient * (short_normal_cdf(z) + z * short_normal_density(z));
  }
  if constexpr (kKind == Activation::relu) return select(z <= 0, V{}, gradient);
  if constexpr (kKind == Activation::silu) {
    const V s = 1 / (1 + exp(-z));
    return gradient * (s * (1 + z * (1 - s)));
  }
  if constexpr (kKind == Activation::gelu) {
    return gradient * (normal_cdf(z) + z * normal_density(z));
  }
  if constexpr (kKind == Activation::gelu_tanh) {
    // With s = sigmoid(2u), 1 - tanh(u)^2 is 4 s (1 - s). Computing it from the exponential of
    // -2|u| avoids cancellation when tanh(u) is almost 1. Denormal exponentials are replaced by 0,
    // because they are slow.
    const V u = gelu_argument(z), size = select(u < 0, -u, u);
    const V e = select(size > 40, V{}, exp(-2 * select(size > 40, V{} + 40, size)));
    const V larger = 1 / (1 + e), smaller = e * larger;
    const V slope = lane(V{}, 0.79788456080286536) * (1 + lane(V{}, 3 * 0.044715) * z * z);
    return gradient * (select(u < 0, smaller, larger) + 2 * z * (smaller * larger) * slope);
  }
  if constexpr (kKind == Activation::relu6) return select((z <= 0) | (z >= 6), V{}, gradient);
  if constexpr (kKind == Activation::hardswish) {
    const V open = select(z < 3, gradient * (z / 3 + lane(V{}, 0.5)), gradient);
    return select(z <= -3, V{}, open);
  }
  return gradient;
}

}  // namespace
}  // namespace fusewise::cpu::FUSEWISE_ISA

#pragma once

// exp and erf of vectors, within 2 ulp; NaN and infinities as in the C library. Included by files
// that are compiled once for each instruction set, with the rule of cpu/vector.h.

#include "cpu/vector.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

/// x in every lane. Minus zero, because plus zero would cost an addition: -0 + 0 is not -0.
template <typename V, typename E>
V broadcast(E x) {
  return x - V{};
}

/// A polynomial by Horner's rule, the highest coefficient first.
template <typename V, typename E, typename... Rest>
V polynomial_from(V sum, V x, E next, Rest... rest) {
  sum = multiply_add(sum, x, broadcast<V>(next));
  if constexpr (sizeof...(rest) == 0)
    return sum;
  else
    return polynomial_from(sum, x, rest...);
}
template <typename V, typename E, typename... Rest>
V polynomial(V x, E highest, Rest... rest) {
  return polynomial_from(broadcast<V>(highest), x, rest...);
}

F32 absolute(F32 x) { return (F32)((U32)x & 0x7fffffff); }

/// 2^n (1 + r + r^2 P(r)) with |r| <= log(2) / 2; P is a minimax fit, 3e-9 off.
F32 exp(F32 x) {
  x = x > 89.0f ? broadcast<F32>(89.0f) : x;  // e^89 is infinite, e^-104 zero; NaN stays
  x = x < -104.0f ? broadcast<F32>(-104.0f) : x;
  const F32 magic = broadcast<F32>(0x1.8p23f);  // its last bit is worth 1: rounds, and shows n
  const F32 shifted = multiply_add(x, broadcast<F32>(1.44269504f), magic);
  const F32 n = shifted - magic;
  F32 r = multiply_add(n, broadcast<F32>(-0.693359375f), x);  // log(2) in two parts, the first short
  r = multiply_add(n, broadcast<F32>(2.12194440e-4f), r);
  const F32 p = polynomial(r, 0.00139504788f, 0.00836888224f, 0.041666206f, 0.166665189f, 0.5f);
  const F32 mantissa = multiply_add(p * r, r, r) + 1.0f;
  // 2^n in two factors, as n may lie outside the exponents of normal numbers.
  const I32 whole = (I32)shifted - 0x4b400000;
  const I32 half = whole >> 1;
  return mantissa * (F32)((half + 127) << 23) * (F32)((whole - half + 127) << 23);
}

/// Below 0.93 an odd polynomial, above 1 - exp(log(erfc)), with minimax fits.
F32 erf(F32 x) {
  const F32 size = absolute(x);
  const F32 square = x * x;
  const F32 small = multiply_add(
      x,
      polynomial(square, -0.000595374175f, 0.00498594061f, -0.0267617199f, 0.112816825f,
                 -0.376124811f, 0.128379148f),
      x);
  const F32 t = size > 4.0f ? broadcast<F32>(4.0f) : size;  // from there on it is 1
  const F32 log_erfc = polynomial(t, 0.000194777641f, -0.0030318195f, 0.0221813848f, -0.103836904f,
                                  -0.637290424f, -1.12761121f, -0.000211313302f);
  const F32 large = (F32)((U32)(1.0f - exp(log_erfc)) | ((U32)x & 0x80000000));
  return size < 0.93f ? small : large;
}

F32 square_root(F32 x) {
  for (int i = 0; i < kFloats; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

// float64 is there to be right, not to be fast: the C library's, lane by lane.
F64 exp(F64 x) {
  for (int i = 0; i < kBytes / 8; ++i) x[i] = __builtin_exp(x[i]);
  return x;
}
F64 erf(F64 x) {
  for (int i = 0; i < kBytes / 8; ++i) x[i] = __builtin_erf(x[i]);
  return x;
}
F64 square_root(F64 x) {
  for (int i = 0; i < kBytes / 8; ++i) x[i] = __builtin_sqrt(x[i]);
  return x;
}

}  // namespace
}  // namespace fusewise::cpu::FUSEWISE_ISA

#pragma once

// The vectors of one instruction set: loads and stores of every dtype, sums of lanes.
//
// The rule: this header is included by files that are compiled once per instruction set. The linker
// may merge a function that is not in the set's own namespace with a copy that needs other
// instructions. So those files must not call any inline function of another header, including the
// standard library's.

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "cpu/types.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

using Index = std::int64_t;

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <typename E, int kLanes>
struct Vector {
  typedef E type __attribute__((vector_size(sizeof(E) * kLanes)));
};

constexpr int kFloats = kBytes / 4;
using F32 = Vector<float, kFloats>::type;
using I32 = Vector<std::int32_t, kFloats>::type;
using U32 = Vector<std::uint32_t, kFloats>::type;
using U16 = Vector<std::uint16_t, kFloats>::type;

template <typename V>
V load_bits(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}

using F64 = Vector<double, kBytes / 8>::type;

// a * b + c. It rounds once if the instruction set has FMA, everywhere or nowhere. Left to the
// compiler, loops of different shape might differ, and a sum split in different ways would then
// give different results.
#if defined(__AVX512F__)
[[maybe_unused]] F32 multiply_add(F32 a, F32 b, F32 c) {
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
[[maybe_unused]] F64 multiply_add(F64 a, F64 b, F64 c) {
  return (F64)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif defined(__FMA__)
[[maybe_unused]] F32 multiply_add(F32 a, F32 b, F32 c) {
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
[[maybe_unused]] F64 multiply_add(F64 a, F64 b, F64 c) {
  return (F64)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#else
[[maybe_unused]] F32 multiply_add(F32 a, F32 b, F32 c) { return a * b + c; }
[[maybe_unused]] F64 multiply_add(F64 a, F64 b, F64 c) { return a * b + c; }
#endif

// fp16 and bf16: from and to one float32 vector. -----------------------------------------------

F32 widen(BF16, U16 bits) { return (F32)(__builtin_convertvector(bits, U32) << 16); }

U16 narrow(BF16, F32 value) {
  const U32 bits = (U32)value;
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32 quiet = (bits >> 16) | 0x40;  // a NaN stays NaN, even if its low bits are cut off
  return __builtin_convertvector(value != value ? quiet : rounded, U16);
}

#if defined(__AVX512F__)
// The masked forms with a full mask: g++ 12 warns about an undefined operand in the others.
F32 widen(F16, U16 bits) { return (F32)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits); }
U16 narrow(F16, F32 value) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return (U16)_mm512_maskz_cvtps_ph(0xffff, (__m512)value, kNearest);
}
#elif defined(__F16C__)
F32 widen(F16, U16 bits) { return (F32)_mm256_cvtph_ps((__m128i)bits); }
U16 narrow(F16, F32 value) {
  return (U16)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
F32 widen(F16, U16 half) {
  const U32 bits = __builtin_convertvector(half, U32);
  const U32 sign = (bits & 0x8000) << 16;
  const U32 body = (bits & 0x7fff) << 13;
  // Multiplying rebiases the exponent, and also makes subnormals normal.
  const F32 finite = (F32)body * 0x1p112f;
  const U32 magnitude = body >= (0x7c00u << 13) ? (body | 0x7f800000) : (U32)finite;
  return (F32)(magnitude | sign);
}
U16 narrow(F16, F32 value) {
  const U32 bits = (U32)value;
  const U32 sign = (bits >> 16) & 0x8000;
  const U32 body = bits & 0x7fffffff;
  const U32 normal = (body - (112u << 23) + 0xfff + ((body >> 13) & 1)) >> 13;
  // Adding 0.5 aligns the bits of a subnormal with float32's last bit, and the addition rounds
  // them.
  const U32 subnormal = (U32)((F32)body + 0.5f) - 0x3f000000;
  const U32 large = body > 0x7f800000 ? ((body >> 13) & 0x3ff) | 0x7e00 : U32{} + 0x7c00;
  const U32 finite = body < (113u << 23) ? subnormal : normal;
  return __builtin_convertvector((body >= 0x477ff000 ? large : finite) | sign, U16);
}
#endif

// From memory to vectors of sums and back. With `count` < kLanes, only that many elements are
// touched. -

template <typename T>
struct Memory {  // F16 and BF16
  using Sum = float;
  using V = F32;
  static constexpr int kLanes = kFloats;

  static V load(const T* from) { return widen(T{}, load_bits<U16>(from)); }
  static void store(T* to, V value) {
    const U16 bits = narrow(T{}, value);
    __builtin_memcpy(to, &bits, sizeof(bits));
  }
#if defined(__AVX512BW__)
  static V load(const T* from, Index count) {
    return widen(T{}, (U16)_mm256_maskz_loadu_epi16((1u << count) - 1, from));
  }
  static void store(T* to, V value, Index count) {
    _mm256_mask_storeu_epi16(to, (1u << count) - 1, (__m256i)narrow(T{}, value));
  }
#else
  static V load(const T* from, Index count) {
    U16 bits{};
    for (Index i = 0; i < count; ++i) bits[i] = from[i].bits;
    return widen(T{}, bits);
  }
  static void store(T* to, V value, Index count) {
    const U16 bits = narrow(T{}, value);
    for (Index i = 0; i < count; ++i) to[i].bits = bits[i];
  }
#endif
  static void stream(T* to, V value) {
    const U16 bits = narrow(T{}, value);
#if defined(__AVX512F__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)bits);
#elif defined(__AVX2__)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)bits);
#else
    __builtin_memcpy(to, &bits, sizeof(bits));
#endif
  }
};

template <typename T>
struct Plain {  // float and double
  using Sum = T;
  static constexpr int kLanes = kBytes / sizeof(T);
  using V = typename Vector<T, kLanes>::type;

  static V load(const T* from) { return load_bits<V>(from); }
  static void store(T* to, V value) { __builtin_memcpy(to, &value, sizeof(value)); }
#if defined(__AVX512F__)
  static V load(const T* from, Index count) {
    const unsigned mask = (1u << count) - 1;
    if constexpr (sizeof(T) == 4)
      return (V)_mm512_maskz_loadu_ps(mask, from);
    else
      return (V)_mm512_maskz_loadu_pd(mask, from);
  }
  static void store(T* to, V value, Index count) {
    const unsigned mask = (1u << count) - 1;
    if constexpr (sizeof(T) == 4)
      _mm512_mask_storeu_ps(to, mask, (__m512)value);
    else
      _mm512_mask_storeu_pd(to, mask, (__m512d)value);
  }
#else
  static V load(const T* from, Index count) {
    V value{};
    for (Index i = 0; i < count; ++i) value[i] = from[i];
    return value;
  }
  static void store(T* to, V value, Index count) {
    for (Index i = 0; i < count; ++i) to[i] = value[i];
  }
#endif
  static void stream(T* to, V value) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#elif defined(__SSE2__)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
#else
    store(to, value);
#endif
  }
};
template <>
struct Memory<float> : Plain<float> {};
template <>
struct Memory<double> : Plain<double> {};

/// A vector of sums of T.
template <typename T>
using LanesOf = typename Memory<T>::V;

/// Streaming stores are not ordered with later stores, so wait until all of them are visible.
[[maybe_unused]] void end_of_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/// Sum of the lanes of v, in one fixed tree.
template <typename E, typename V>
E add_lanes(V v) {
  if constexpr (sizeof(V) == 2 * sizeof(E)) {
    return v[0] + v[1];
  } else {
    constexpr int kHalf = sizeof(V) / sizeof(E) / 2;
    using Half = typename Vector<E, kHalf>::type;
    Half low, high;
    __builtin_memcpy(&low, &v, sizeof(Half));
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(Half), sizeof(Half));
    return add_lanes<E, Half>(low + high);
  }
}

}  // namespace
}  // namespace fusewise::cpu::FUSEWISE_ISA

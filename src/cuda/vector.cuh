#pragma once

// The 16-byte vector that every kernel loads and stores, and conversions to and from the
// accumulation type.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fusewise/tensor.h"

namespace fusewise::cuda {

template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
/// float32 for every type except float64.
template <typename T>
using Accumulator = typename Accumulate<T>::type;

template <typename A, typename T>
__device__ __forceinline__ A to_accumulator(T value) {
  return static_cast<A>(value);
}
template <>
__device__ __forceinline__ float to_accumulator<float, __half>(__half value) {
  return __half2float(value);
}
template <>
__device__ __forceinline__ float to_accumulator<float, __nv_bfloat16>(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

template <typename T, typename A>
__device__ __forceinline__ T from_accumulator(A value) {
  return static_cast<T>(value);
}
template <>
__device__ __forceinline__ __half from_accumulator<__half, float>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_accumulator<__nv_bfloat16, float>(float value) {
  return __float2bfloat16_rn(value);
}

/// 16 bytes of T.
template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];

  __device__ __forceinline__ auto operator[](int i) const {
    return to_accumulator<Accumulator<T>>(values[i]);
  }
  __device__ __forceinline__ void set(int i, Accumulator<T> value) {
    values[i] = from_accumulator<T>(value);
  }
};

template <typename T>
__device__ __forceinline__ Vector<T> load_vector(const T* address) {
  const uint4 bits = *reinterpret_cast<const uint4*>(address);
  return reinterpret_cast<const Vector<T>&>(bits);
}

/// For data that this kernel does not read again: not cached in L1.
template <typename T>
__device__ __forceinline__ Vector<T> load_once(const T* address) {
  uint4 bits;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(address));
  return reinterpret_cast<const Vector<T>&>(bits);
}

template <typename T>
__device__ __forceinline__ void store_vector(T* address, const Vector<T>& vector) {
  *reinterpret_cast<uint4*>(address) = reinterpret_cast<const uint4&>(vector);
}

/// For data that will not be read again soon: evicted from L2 first.
template <typename T>
__device__ __forceinline__ void store_streaming(T* address, const Vector<T>& vector) {
  __stcs(reinterpret_cast<uint4*>(address), reinterpret_cast<const uint4&>(vector));
}

/// Calls `body` with a value of the half-precision type.
template <typename Body>
void dispatch_half(DType dtype, Body&& body) {
  if (dtype == DType::f16) {
    body(__half{});
  } else {
    body(__nv_bfloat16{});
  }
}

/// Calls `body` with a value of the device type of `dtype`. float64 is not supported.
template <typename Body>
void dispatch_short_dtype(DType dtype, Body&& body) {
  if (dtype == DType::f32) return body(float{});
  if (dtype == DType::f16) return body(__half{});
  if (dtype == DType::bf16) return body(__nv_bfloat16{});
}

/// Calls body(T, W) with values of the device types of images and weights. W is T, or float if T is
/// half precision.
template <typename Body>
void dispatch_short_dtypes(DType images, DType weights, Body&& body) {
  dispatch_short_dtype(images, [&]<typename T>(T) {
    if (weights == images) {
      body(T{}, T{});
    } else {
      body(T{}, float{});
    }
  });
}

/// Calls `body` with a value of the device type of `dtype`.
template <typename Body>
void dispatch_dtype(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32:
      return body(float{});
    case DType::f64:
      return body(double{});
    case DType::f16:
      return body(__half{});
    case DType::bf16:
      return body(__nv_bfloat16{});
    case DType::u8:
    case DType::b8:
    case DType::i64:
      return;
  }
}

}  // namespace fusewise::cuda

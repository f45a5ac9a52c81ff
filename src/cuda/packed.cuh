#pragma once

// 16 bytes of T in four registers until they are used. The compiler keeps a Vector of bfloat16 in
// eight registers from the load on, which costs the kernels their loads in flight.

#include <type_traits>

#include "cuda/vector.cuh"

namespace fusewise::cuda {

template <typename T>
struct Packed {
  static constexpr int kSize = 16 / sizeof(T);
  unsigned words[4];

  /// Not cached in L1: this kernel does not read it again.
  __device__ __forceinline__ void load(const T* address) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(address));
  }
  __device__ __forceinline__ void load_shared(const void* address) {
    const uint4 bits = *static_cast<const uint4*>(address);
    words[0] = bits.x;
    words[1] = bits.y;
    words[2] = bits.z;
    words[3] = bits.w;
  }
  __device__ __forceinline__ void store_shared(void* address) const {
    *static_cast<uint4*>(address) = make_uint4(words[0], words[1], words[2], words[3]);
  }
  /// `streaming`: evicted from L2 first. Otherwise write-back, as of a plain store, which the
  /// compiler may split into four.
  __device__ __forceinline__ void store(T* address, bool streaming) const {
    const uint4 bits = make_uint4(words[0], words[1], words[2], words[3]);
    if (streaming) {
      __stcs(reinterpret_cast<uint4*>(address), bits);
    } else {
      __stwb(reinterpret_cast<uint4*>(address), bits);
    }
  }
  __device__ __forceinline__ void unpack(Accumulator<T> (&values)[kSize]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 8) {
        values[i / 2] = __hiloint2double(words[i / 2 * 2 + 1], words[i / 2 * 2]);
      } else if constexpr (sizeof(T) == 4) {
        values[i] = __uint_as_float(words[i]);
      } else if constexpr (std::is_same_v<T, __half>) {
        const float2 two = __half22float2(reinterpret_cast<const __half2&>(words[i]));
        values[2 * i] = two.x;
        values[2 * i + 1] = two.y;
      } else {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
    }
  }
  __device__ __forceinline__ void pack(const Accumulator<T> (&values)[kSize]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 8) {
        words[i] = i % 2 == 0 ? __double2loint(values[i / 2]) : __double2hiint(values[i / 2]);
      } else if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(values[i]);
      } else if constexpr (std::is_same_v<T, __half>) {
        const __half2 two = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        words[i] = reinterpret_cast<const unsigned&>(two);
      } else {
        const __nv_bfloat162 two = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        words[i] = reinterpret_cast<const unsigned&>(two);
      }
    }
  }
};

}  // namespace fusewise::cuda

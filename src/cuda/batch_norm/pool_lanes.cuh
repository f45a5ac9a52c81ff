#pragma once

// The values of 16 bytes, and the places of windows in lanes as wide as the values: two lanes per
// register for half precision. One instruction then compares or selects two values.

#include "cuda/packed.cuh"

namespace fusewise::cuda {

template <typename T>
struct Lanes {
  using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  static constexpr bool kTwo = sizeof(T) == 2;
  static constexpr int kSize = 16 / sizeof(T);

  __device__ __forceinline__ static Two two(unsigned word) {
    return reinterpret_cast<const Two&>(word);
  }
  __device__ __forceinline__ static unsigned word(Two two) {
    return reinterpret_cast<const unsigned&>(two);
  }

  // ---- Values. NaN wins and stays.

  __device__ __forceinline__ static unsigned larger(unsigned a, unsigned b) {
    if constexpr (kTwo) {
      return word(__hmax2_nan(two(a), two(b)));
    } else {
      const float x = __uint_as_float(a), y = __uint_as_float(b);
      return x > y || x != x ? a : b;
    }
  }
  __device__ __forceinline__ static unsigned smaller(unsigned a, unsigned b) {
    if constexpr (kTwo) {
      return word(__hmin2_nan(two(a), two(b)));
    } else {
      const float x = __uint_as_float(a), y = __uint_as_float(b);
      return x < y || x != x ? a : b;
    }
  }
  /// All bits of a lane are set where the values are equal. NaN is not.
  __device__ __forceinline__ static unsigned equal(unsigned a, unsigned b) {
    if constexpr (kTwo) return __heq2_mask(two(a), two(b));
    return __uint_as_float(a) == __uint_as_float(b) ? ~0u : 0u;
  }
  __device__ __forceinline__ static unsigned is_nan(unsigned a) {
    if constexpr (kTwo) return __hneu2_mask(two(a), two(a));
    return __uint_as_float(a) != __uint_as_float(a) ? ~0u : 0u;
  }
  /// The same value in all lanes.
  __device__ __forceinline__ static unsigned all(float value) {
    Packed<T> packed;
    float values[kSize];
#pragma unroll
    for (int k = 0; k < kSize; ++k) values[k] = value;
    packed.pack(values);
    return packed.words[0];
  }

  // ---- Places.

  __device__ __forceinline__ static constexpr unsigned place(unsigned value) {
    return kTwo ? value * 0x00010001u : value;
  }
  /// Places are denormal numbers of half precision: those compare exactly, two at once.
  __device__ __forceinline__ static unsigned same_place(unsigned a, unsigned b) {
    if constexpr (kTwo) {
      return __heq2_mask(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    } else {
      return a == b ? ~0u : 0u;
    }
  }
};

__device__ __forceinline__ unsigned select(unsigned mask, unsigned a, unsigned b) {
  return (a & mask) | (b & ~mask);
}

/// The bytes of the choices of 16 bytes of values.
template <typename T>
struct Bytes {
  static constexpr int kWords = 16 / sizeof(T) / 4;
  unsigned words[kWords];

  __device__ __forceinline__ void load(const unsigned char* from) {
    if constexpr (kWords == 1) {
      words[0] = *reinterpret_cast<const unsigned*>(from);
    } else {
      const uint2 both = *reinterpret_cast<const uint2*>(from);
      words[0] = both.x;
      words[1] = both.y;
    }
  }
  __device__ __forceinline__ void store(unsigned char* to) const {
    if constexpr (kWords == 1) {
      *reinterpret_cast<unsigned*>(to) = words[0];
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
  }
  /// The lanes of word i of the values.
  __device__ __forceinline__ unsigned places(int i) const {
    if constexpr (kWords == 1) return words[0] >> 8 * i & 0xff;
    return __byte_perm(words[i / 2], 0, i % 2 == 0 ? 0x4140 : 0x4342);
  }
  __device__ __forceinline__ void pack(const unsigned (&places)[4]) {
    if constexpr (kWords == 1) {
      words[0] = places[0] | places[1] << 8 | places[2] << 16 | places[3] << 24;
    } else {
      words[0] = __byte_perm(places[0], places[1], 0x6420);
      words[1] = __byte_perm(places[2], places[3], 0x6420);
    }
  }
};

}  // namespace fusewise::cuda

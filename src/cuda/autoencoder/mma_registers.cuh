#pragma once

// Matrix products of a warp's 16 rows with mma.sync, operands and results in registers.
//
// A Block is 16 rows by 16 columns: lane 4g + t has columns 4t to 4t + 3 of rows g and g + 8. With
// this layout, the result of one product is the left operand of the next without a shuffle, because
// the order of the columns in a sum is free. Also, a lane reads and writes 16 bytes of a row at a
// time. Weights are packed to match (pack.cuh).

#include <cstdint>
#include <type_traits>

#include "cuda/mma.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda::autoencoder {

struct Block {
  float v[2][4];

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[r][i] = value;
    }
  }
  /// The same four values in both rows.
  __device__ __forceinline__ void fill(float4 row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      v[r][0] = row.x, v[r][1] = row.y, v[r][2] = row.z, v[r][3] = row.w;
    }
  }
  __device__ __forceinline__ void add(const Block& other) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[r][i] += other.v[r][i];
    }
  }
};

/// The tensor cores truncate float32 operands to TF32. Adding half of the last kept bit first
/// rounds to nearest. NaN needs care: the carry must not reach the sign bit.
constexpr unsigned kTf32Half = 0x1000u;
constexpr unsigned kTf32Mask = 0xffffe000u;

__device__ __forceinline__ float nearest_tf32(float value) {
  const unsigned bits = (__float_as_uint(value) + kTf32Half) & kTf32Mask;
  return isfinite(value) ? __uint_as_float(bits) : value;
}

/// Mean relative error of truncating to TF32, averaged over the mantissas. Code that multiplies
/// truncated numbers folds this into one of the factors. The remaining error is at most two thirds
/// of the last kept bit. It is as good as zero on average and has no preferred sign.
constexpr float kCutLoss = 3.3857e-4f;

/// Rounds an operand of the tensor cores, in one instruction.
__device__ __forceinline__ unsigned round_to_tf32(float value) {
  return __float_as_uint(fmaf(value, kCutLoss, value));
}

/// value = high + low, with high rounded to nearest. low is NaN if value is infinite or NaN. If
/// high were truncated instead, low would always have value's sign, and so would the part of low
/// that the tensor cores truncate.
__device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
  high = (__float_as_uint(value) + kTf32Half) & kTf32Mask;
  low = __float_as_uint(value - __uint_as_float(high));
}

/// 1 / max(norm, 1e-12) of a basis vector. Not fmaxf, which would discard NaN.
__device__ __forceinline__ float inverse_norm(float squares) {
  const float norm = sqrtf(squares);
  return 1.f / (norm < 1e-12f ? 1e-12f : norm);
}

// Ways to multiply a block by packed weights. A term is one instruction. Each term waits for the
// previous term of the same result, so callers interleave the terms of several results.

/// A float32 as the sum of two TF32 numbers: three MMAs instead of one, as accurate as float32 FMA
/// units. The tensor cores truncate every sum to 24 bits, so all errors have the same sign relative
/// to the sum. Therefore the sum over an input block starts at zero, and float32 units, which round
/// to nearest, add it to the result.
struct ExactProducts {
  using Weight = float;
  static constexpr int kTerms = 6;
  static constexpr bool kExact = true;
  static constexpr int kGeluDegree = 8;
  struct Left {
    unsigned high[2][4], low[2][4];
  };
  struct Right {
    unsigned high[4], low[4];
  };
  static __device__ __forceinline__ Left left(const Block& b) {
    Left o;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        split(b.v[r][i], o.high[r][i], o.low[r][i]);
      }
    }
    return o;
  }
  static __device__ __forceinline__ Right right(float4 w) {
    Right o;
    split(w.x, o.high[0], o.low[0]);
    split(w.y, o.high[1], o.low[1]);
    split(w.z, o.high[2], o.low[2]);
    split(w.w, o.high[3], o.low[3]);
    return o;
  }
  /// Accumulates columns 8 * half_block to 8 * half_block + 7 of a block of results. Small products
  /// come first.
  static __device__ __forceinline__ void term(int which, Block& c, int half_block, const Left& a,
                                              const Right& w) {
    const int n = 2 * half_block, k = which % 2 * 2;
    const auto& l = which < 2 ? a.low : a.high;
    const auto& r = which / 2 == 1 ? w.low : w.high;
    mma_tf32(c.v[0][n], c.v[0][n + 1], c.v[1][n], c.v[1][n + 1], l[0][k], l[1][k], l[0][k + 1],
             l[1][k + 1], r[k], r[k + 1]);
  }
};

/// TF32: the left operand is truncated, which costs no instruction. Weights are rounded when
/// packed, and are scaled to compensate for the truncation.
struct Tf32Products {
  using Weight = float;
  static constexpr int kTerms = 2;
  static constexpr bool kExact = false;
  static constexpr int kGeluDegree = 5;
  struct Left {
    unsigned value[2][4];
  };
  using Right = float4;
  static __device__ __forceinline__ Left left(const Block& b) {
    Left o;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o.value[r][i] = __float_as_uint(b.v[r][i]);
    }
    return o;
  }
  static __device__ __forceinline__ Right right(float4 w) { return w; }
  static __device__ __forceinline__ void term(int which, Block& c, int half_block, const Left& a,
                                              const Right& w) {
    const int n = 2 * half_block, k = 2 * which;
    mma_tf32(c.v[0][n], c.v[0][n + 1], c.v[1][n], c.v[1][n + 1], a.value[0][k], a.value[1][k],
             a.value[0][k + 1], a.value[1][k + 1], __float_as_uint(which == 0 ? w.x : w.z),
             __float_as_uint(which == 0 ? w.y : w.w));
  }
};

__device__ __forceinline__ unsigned pack_pair(__half, float a, float b) {
  const __half2 pair = __floats2half2_rn(a, b);
  return reinterpret_cast<const unsigned&>(pair);
}
__device__ __forceinline__ unsigned pack_pair(__nv_bfloat16, float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const unsigned&>(pair);
}

/// Operands in float16 or bfloat16.
template <typename T>
struct HalfProducts {
  using Weight = T;
  static constexpr int kTerms = 1;
  static constexpr bool kExact = false;
  static constexpr int kGeluDegree = 3;
  struct Left {
    unsigned pair[2][2];
  };
  using Right = uint2;
  static __device__ __forceinline__ Left left(const Block& b) {
    Left o;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      o.pair[r][0] = pack_pair(T{}, b.v[r][0], b.v[r][1]);
      o.pair[r][1] = pack_pair(T{}, b.v[r][2], b.v[r][3]);
    }
    return o;
  }
  static __device__ __forceinline__ Right right(uint2 w) { return w; }
  static __device__ __forceinline__ void term(int, Block& c, int half_block, const Left& a,
                                              const Right& w) {
    const int n = 2 * half_block;
    mma_halves(T{}, c.v[0][n], c.v[0][n + 1], c.v[1][n], c.v[1][n + 1], a.pair[0][0], a.pair[1][0],
               a.pair[0][1], a.pair[1][1], w.x, w.y);
  }
};

/// Index of output n, input k in a packed matrix. Lanes read four inputs of an output at a time.
/// The outputs are ordered so that a lane gets neighbouring columns.
__device__ __forceinline__ int register_position(int n, int k, int input_blocks) {
  const int r = n & 15, tile = 2 * (n >> 4) + ((r >> 1) & 1), g = 2 * (r >> 2) + (r & 1);
  return 4 * ((tile * input_blocks + (k >> 4)) * 32 + 4 * g + ((k & 15) >> 2)) + (k & 3);
}

/// A weight in the tensor cores' format. TF32 is rounded, and scaled to compensate for the
/// truncation of the other operand.
template <typename E>
__device__ __forceinline__ E packed_value(float value, bool tf32) {
  if constexpr (sizeof(E) == 4) {
    return tf32 ? nearest_tf32(fmaf(value, kCutLoss, value)) : value;
  } else {
    return from_accumulator<E>(value);
  }
}

// ---- rows in memory

/// Four neighbouring values in memory format. They are converted to float when they are used, so
/// that nothing waits for the load earlier.
template <typename T>
struct Four {
  uint2 bits;

  /// For memory that no kernel writes while this one runs.
  __device__ __forceinline__ void load(const T* p) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(bits.x), "=r"(bits.y)
                 : "l"(p));
  }
  /// For memory that this kernel itself wrote.
  __device__ __forceinline__ void load_own(const T* p) {
    bits = *reinterpret_cast<const uint2*>(p);
  }
  __device__ __forceinline__ void set(int i, T value) { reinterpret_cast<T*>(&bits)[i] = value; }
  __device__ __forceinline__ float operator[](int i) const {
    return to_accumulator<float>(reinterpret_cast<const T*>(&bits)[i]);
  }
};
template <>
struct Four<float> {
  float values[4];

  __device__ __forceinline__ void load(const float* p) {
    const Vector<float> v = load_once(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = v.values[i];
  }
  __device__ __forceinline__ void load_own(const float* p) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
  }
  __device__ __forceinline__ void set(int i, float value) { values[i] = value; }
  __device__ __forceinline__ float operator[](int i) const { return values[i]; }
};

__device__ __forceinline__ void store_four(float* p, const float (&v)[4]) {
  __stcs(reinterpret_cast<float4*>(p), make_float4(v[0], v[1], v[2], v[3]));
}
template <typename T>
__device__ __forceinline__ void store_four(T* p, const float (&v)[4]) {
  __stcs(reinterpret_cast<uint2*>(p),
         make_uint2(pack_pair(T{}, v[0], v[1]), pack_pair(T{}, v[2], v[3])));
}

/// A non-const T means that this kernel wrote the memory.
template <typename T>
__device__ __forceinline__ Four<std::remove_const_t<T>> load_four(T* p) {
  Four<std::remove_const_t<T>> four;
  if constexpr (std::is_const_v<T>) {
    four.load(p);
  } else {
    four.load_own(p);
  }
  return four;
}

/// Sum over the four lanes that share a row.
__device__ __forceinline__ float row_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// ---- GELU

__device__ __forceinline__ float fast_exp2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

/// The base-two logarithm of the normal distribution's integral from |z| to infinity is nearly a
/// parabola. This returns the coefficient of |z|^i in a polynomial, fitted to minimise the error of
/// GELU: 1e-4 with degree 3 and 6e-7 with degree 5. With degree 8 it is 1.2e-8, or 5e-8 with
/// rounding.
template <int kDegree>
__device__ __forceinline__ constexpr float tail_logarithm(int i) {
  static_assert(kDegree == 3 || kDegree == 5 || kDegree == 8);
  if constexpr (kDegree == 3) {
    constexpr float terms[] = {-1.f, -1.14335179f, -0.484793991f, -0.0287436191f};
    return terms[i];
  } else if constexpr (kDegree == 5) {
    constexpr float terms[] = {-1.f,           -1.15104711f,   -0.459459752f,
                               -0.0522814989f, 0.00725317933f, -0.000495746499f};
    return terms[i];
  } else {
    constexpr float terms[] = {-1.f,
                               -1.1511069536209106f,
                               -0.4591890275478363f,
                               -0.05256233364343643f,
                               0.007167263422161341f,
                               -0.0002211608225479722f,
                               -0.00014978430408518761f,
                               3.1459450838156044e-05f,
                               -2.1561399989877827e-06f};
    return terms[i];
  }
}

template <int kDegree>
__device__ __forceinline__ float normal_tail(float z) {
  float p = tail_logarithm<kDegree>(kDegree);
#pragma unroll
  for (int i = kDegree - 1; i >= 0; --i) p = fmaf(p, fabsf(z), tail_logarithm<kDegree>(i));
  return fast_exp2(p);
}

/// z times the integral up to z: z - |z| tail, or -|z| tail if z is negative.
template <int kDegree>
__device__ __forceinline__ float gelu(float z) {
  return fmaf(-fabsf(z), normal_tail<kDegree>(z), fmaxf(z, 0.f));
}

/// The same when infinite results are visible to the caller: infinity stays, minus infinity becomes
/// NaN, as in torch.
template <int kDegree>
__device__ __forceinline__ float gelu_of_any(float z) {
  const float tail = normal_tail<kDegree>(z);
  return z * (z < 0.f ? tail : 1.f - tail);
}

template <int kDegree>
__device__ __forceinline__ float gelu_and_slope(float z, float& slope) {
  constexpr float kInverseRootTwoPi = 0.39894228040143268f;
  const float tail = normal_tail<kDegree>(z), bell = fast_exp2(-0.72134752f * z * z);
  slope = fmaf(z * kInverseRootTwoPi, bell, z < 0.f ? tail : 1.f - tail);
  return fmaf(-fabsf(z), tail, fmaxf(z, 0.f));
}

template <int kDegree>
__device__ __forceinline__ void gelu(Block& b) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) b.v[r][i] = gelu<kDegree>(b.v[r][i]);
  }
}
template <int kDegree>
__device__ __forceinline__ void gelu_of_any(Block& b) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) b.v[r][i] = gelu_of_any<kDegree>(b.v[r][i]);
  }
}

/// GELU of a block, as the left operand of the next product.
template <typename P>
__device__ __forceinline__ typename P::Left gelu_left(Block b) {
  gelu<P::kGeluDegree>(b);
  return P::left(b);
}

}  // namespace fusewise::cuda::autoencoder

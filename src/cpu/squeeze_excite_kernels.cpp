// Squeeze-and-Excitation's inner loops: sums over pixels, scaling, and the two small products.
// The caller lets each byte of x and dy come from memory once and a second time from the caches;
// y and dx leave once. Bound by memory bandwidth, and for small images by the weights' traffic.

// Compiled once for each instruction set. Whatever is not in the namespace of its own set could be
// merged by the linker with a copy that needs other instructions, so nothing here may call an
// inline function of another header, those of the standard library included.

#include "cpu/squeeze_excite_kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

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

// a * b + c: in one rounding where the set has such an instruction, everywhere or nowhere. Left to
// the compiler, loops of different shape may differ, and with them the results of one sum that was
// cut in different ways.
#if defined(__AVX512F__)
F32 multiply_add(F32 a, F32 b, F32 c) {
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
F64 multiply_add(F64 a, F64 b, F64 c) {
  return (F64)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif defined(__FMA__)
F32 multiply_add(F32 a, F32 b, F32 c) {
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
F64 multiply_add(F64 a, F64 b, F64 c) {
  return (F64)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#else
F32 multiply_add(F32 a, F32 b, F32 c) { return a * b + c; }
F64 multiply_add(F64 a, F64 b, F64 c) { return a * b + c; }
#endif

// Half types: from and to one float32 vector. --------------------------------------------------

F32 widen(BF16, U16 bits) { return (F32)(__builtin_convertvector(bits, U32) << 16); }

U16 narrow(BF16, F32 value) {
  const U32 bits = (U32)value;
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32 quiet = (bits >> 16) | 0x40;  // a NaN stays one, even if its low bits fall away
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
  // The exponent is rebiased by a product, which makes subnormals normal as well.
  const F32 finite = (F32)body * 0x1p112f;
  const U32 magnitude = body >= (0x7c00u << 13) ? (body | 0x7f800000) : (U32)finite;
  return (F32)(magnitude | sign);
}
U16 narrow(F16, F32 value) {
  const U32 bits = (U32)value;
  const U32 sign = (bits >> 16) & 0x8000;
  const U32 body = bits & 0x7fffffff;
  const U32 normal = (body - (112u << 23) + 0xfff + ((body >> 13) & 1)) >> 13;
  // Adding 0.5 lines the bits of a subnormal up with float32's last bit, rounded by the adder.
  const U32 subnormal = (U32)((F32)body + 0.5f) - 0x3f000000;
  const U32 large = body > 0x7f800000 ? ((body >> 13) & 0x3ff) | 0x7e00 : U32{} + 0x7c00;
  const U32 finite = body < (113u << 23) ? subnormal : normal;
  return __builtin_convertvector((body >= 0x477ff000 ? large : finite) | sign, U16);
}
#endif

// Memory to vectors of sums and back; `count` < kLanes touches that many elements alone. --------

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

/// Streamed stores are not ordered with what follows: everything before must be out first.
void end_of_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/// The lanes of v in one fixed tree.
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

// Sums over pixels. ----------------------------------------------------------------------------

/// sum + element i of a, or of a * b; `count` as in Memory.
template <typename T, bool kDot, typename... Count>
typename Memory<T>::V add(typename Memory<T>::V sum, const T* a, const T* b, Index i,
                          Count... count) {
  using M = Memory<T>;
  if constexpr (kDot)
    return multiply_add(M::load(a + i, count...), M::load(b + i, count...), sum);
  else
    return sum + M::load(a + i, count...);
}

template <typename T, bool kDot>
AccumulatorOf<T> reduce_plane(const T* a, const T* b, Index pixels) {
  using M = Memory<T>;
  constexpr int kChains = 4;  // enough to hide the latency of an addition
  typename M::V sums[kChains] = {};
  Index i = 0;
  for (; i + kChains * M::kLanes <= pixels; i += kChains * M::kLanes) {
    for (int k = 0; k < kChains; ++k) sums[k] = add<T, kDot>(sums[k], a, b, i + k * M::kLanes);
  }
  for (; i + M::kLanes <= pixels; i += M::kLanes) sums[0] = add<T, kDot>(sums[0], a, b, i);
  if (i < pixels) sums[1] = add<T, kDot>(sums[1], a, b, i, pixels - i);
  return add_lanes<typename M::Sum>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
void reduce_planes(const T* a, Index a_stride, const T* b, Index b_stride, Index planes,
                   Index pixels, AccumulatorOf<T>* sums) {
  for (Index i = 0; i < planes; ++i) {
    sums[i] = b == nullptr ? reduce_plane<T, false>(a + i * a_stride, nullptr, pixels)
                           : reduce_plane<T, true>(a + i * a_stride, b + i * b_stride, pixels);
  }
}

template <typename T, bool kDot, int kRows>
void reduce_some_rows(const T* a, Index a_stride, const T* b, Index b_stride, Index columns,
                      AccumulatorOf<T>* sums) {
  using M = Memory<T>;
  using S = Memory<AccumulatorOf<T>>;
  const auto step = [&](Index i, auto... count) {
    typename M::V sum = S::load(sums + i, count...);
    for (int k = 0; k < kRows; ++k) {
      if constexpr (kRows > 1) {  // into L2: the hardware does not follow this many streams
        __builtin_prefetch(a + (k + kRows) * a_stride + i, 0, 2);
        if (kDot) __builtin_prefetch(b + (k + kRows) * b_stride + i, 0, 2);
      }
      sum = add<T, kDot>(sum, a + k * a_stride, b + k * b_stride, i, count...);
    }
    S::store(sums + i, sum, count...);
  };
  Index i = 0;
  for (; i + M::kLanes <= columns; i += M::kLanes) step(i);
  if (i < columns) step(i, columns - i);
}

template <typename T, bool kDot>
void reduce_all_rows(const T* a, Index a_stride, const T* b, Index b_stride, Index rows,
                     Index columns, AccumulatorOf<T>* sums) {
  // Short rows are read in the order of memory. The sums of long ones would fill L1 with every row.
  constexpr Index kLongRow = 1024;
  Index row = 0;
  for (; columns >= kLongRow && row + 4 <= rows; row += 4) {
    reduce_some_rows<T, kDot, 4>(a + row * a_stride, a_stride, b + row * b_stride, b_stride,
                                 columns, sums);
  }
  for (; row < rows; ++row) {
    reduce_some_rows<T, kDot, 1>(a + row * a_stride, a_stride, b + row * b_stride, b_stride,
                                 columns, sums);
  }
}

template <typename T>
void reduce_rows(const T* a, Index a_stride, const T* b, Index b_stride, Index rows, Index columns,
                 AccumulatorOf<T>* sums) {
  if (b == nullptr)
    reduce_all_rows<T, false>(a, a_stride, a, 0, rows, columns, sums);
  else
    reduce_all_rows<T, true>(a, a_stride, b, b_stride, rows, columns, sums);
}

// Scaling. -------------------------------------------------------------------------------------

/// How many elements lie before the first address where a streamed store may go.
template <typename T>
Index to_alignment(const T* to) {
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  return (kBytes - address % kBytes) % kBytes / sizeof(T);
}

/// out[i] = value(i, count...) for all i < n; values come as vectors.
template <typename T, bool kStream, typename Value>
void write(T* out, Index n, const Value& value) {
  using M = Memory<T>;
  Index i = 0;
  if constexpr (kStream) {
    Index head = to_alignment(out);
    if (head > n) head = n;
    for (; head - i > M::kLanes; i += M::kLanes) M::store(out + i, value(i));
    if (head > i) M::store(out + i, value(i, head - i), head - i), i = head;
  }
  for (; i + M::kLanes <= n; i += M::kLanes) {
    if constexpr (kStream)
      M::stream(out + i, value(i));
    else
      M::store(out + i, value(i));
  }
  if (i < n) M::store(out + i, value(i, n - i), n - i);
}

template <typename T, bool kStream>
void scale_plane(const T* in, AccumulatorOf<T> factor, AccumulatorOf<T> offset, bool shift,
                 Index pixels, T* out) {
  using M = Memory<T>;
  if (shift) {
    const typename M::V factors = typename M::V{} + factor, offsets = typename M::V{} + offset;
    write<T, kStream>(out, pixels, [=](Index i, auto... count) {
      return multiply_add(M::load(in + i, count...), factors, offsets);
    });
  } else {
    write<T, kStream>(out, pixels,
                      [=](Index i, auto... count) { return M::load(in + i, count...) * factor; });
  }
}

template <typename T>
void scale_planes(const T* in, Index in_stride, const AccumulatorOf<T>* factors,
                  const AccumulatorOf<T>* offsets, Index planes, Index pixels, T* out,
                  Index out_stride, bool stream) {
  const auto scale = stream ? scale_plane<T, true> : scale_plane<T, false>;
  const bool shift = offsets != nullptr;
  for (Index i = 0; i < planes; ++i) {
    scale(in + i * in_stride, factors[i], shift ? offsets[i] : 0, shift, pixels,
          out + i * out_stride);
  }
  if (stream) end_of_stream();
}

template <typename T, bool kStream>
void scale_row(const T* in, const AccumulatorOf<T>* factors, const AccumulatorOf<T>* offsets,
               Index columns, T* out) {
  using M = Memory<T>;
  using S = Memory<AccumulatorOf<T>>;
  if (offsets != nullptr) {
    write<T, kStream>(out, columns, [=](Index i, auto... count) {
      return multiply_add(M::load(in + i, count...), S::load(factors + i, count...),
                          S::load(offsets + i, count...));
    });
  } else {
    write<T, kStream>(out, columns, [=](Index i, auto... count) {
      return M::load(in + i, count...) * S::load(factors + i, count...);
    });
  }
}

template <typename T>
void scale_rows(const T* in, Index in_stride, const AccumulatorOf<T>* factors,
                const AccumulatorOf<T>* offsets, Index rows, Index columns, T* out,
                Index out_stride, bool stream) {
  const auto scale = stream ? scale_row<T, true> : scale_row<T, false>;
  for (Index i = 0; i < rows; ++i) {
    scale(in + i * in_stride, factors, offsets, columns, out + i * out_stride);
  }
  if (stream) end_of_stream();
}

// The small matrix products. A block shares its loads; every element has one chain of its own. ----

template <typename T, int kRows, int kCount>
void transposed_block(const T* weights, const T* bias, Index columns,
                      const AccumulatorOf<T>* vectors, Index vector_stride, AccumulatorOf<T>* out,
                      Index out_stride) {
  using M = Memory<T>;
  using S = Memory<AccumulatorOf<T>>;
  typename M::V sums[kRows][kCount] = {};
  const auto step = [&](Index i, auto... count) {
    typename M::V vector[kCount];
    for (int j = 0; j < kCount; ++j) vector[j] = S::load(vectors + j * vector_stride + i, count...);
    for (int r = 0; r < kRows; ++r) {
      const typename M::V row = M::load(weights + r * columns + i, count...);
      for (int j = 0; j < kCount; ++j) sums[r][j] = multiply_add(row, vector[j], sums[r][j]);
    }
  };
  Index i = 0;
  for (; i + M::kLanes <= columns; i += M::kLanes) step(i);
  if (i < columns) step(i, columns - i);
  for (int r = 0; r < kRows; ++r) {
    const AccumulatorOf<T> start = bias == nullptr ? 0 : M::load(bias + r, 1)[0];
    for (int j = 0; j < kCount; ++j) {
      out[j * out_stride + r] = start + add_lanes<typename M::Sum>(sums[r][j]);
    }
  }
}

template <typename T, int kCount>
void transposed_rows(const T* weights, const T* bias, Index rows, Index columns,
                     const AccumulatorOf<T>* vectors, Index vector_stride, AccumulatorOf<T>* out,
                     Index out_stride) {
  const auto bias_at = [=](Index row) { return bias == nullptr ? nullptr : bias + row; };
  Index r = 0;
  for (; r + 4 <= rows; r += 4) {
    transposed_block<T, 4, kCount>(weights + r * columns, bias_at(r), columns, vectors,
                                   vector_stride, out + r, out_stride);
  }
  for (; r < rows; ++r) {
    transposed_block<T, 1, kCount>(weights + r * columns, bias_at(r), columns, vectors,
                                   vector_stride, out + r, out_stride);
  }
}

template <typename T>
void multiply_transposed(const T* weights, const T* bias, Index rows, Index columns,
                         const AccumulatorOf<T>* vectors, Index vector_stride, Index count,
                         AccumulatorOf<T>* out, Index out_stride) {
  Index j = 0;
  for (; j + 4 <= count; j += 4) {
    transposed_rows<T, 4>(weights, bias, rows, columns, vectors + j * vector_stride, vector_stride,
                          out + j * out_stride, out_stride);
  }
  for (; j + 2 <= count; j += 2) {
    transposed_rows<T, 2>(weights, bias, rows, columns, vectors + j * vector_stride, vector_stride,
                          out + j * out_stride, out_stride);
  }
  for (; j < count; ++j) {
    transposed_rows<T, 1>(weights, bias, rows, columns, vectors + j * vector_stride, vector_stride,
                          out + j * out_stride, out_stride);
  }
}

/// out[m][n] = sum over k of a[m * a_row + k * a_column] * b[k][n], kRows x kVectors vectors at
/// once.
template <typename B, typename O, int kRows, int kVectors, typename... Count>
void product_block(const AccumulatorOf<B>* a, Index a_row, Index a_column, const B* b,
                   Index b_stride, Index depth, O* out, Index out_stride, Count... count) {
  using M = Memory<B>;
  typename M::V sums[kRows][kVectors] = {};
  for (Index k = 0; k < depth; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      const typename M::V row = M::load(b + k * b_stride + v * M::kLanes, count...);
      for (int r = 0; r < kRows; ++r) {
        const typename M::V factor = typename M::V{} + a[r * a_row + k * a_column];
        sums[r][v] = multiply_add(factor, row, sums[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      Memory<O>::store(out + r * out_stride + v * M::kLanes, sums[r][v], count...);
    }
  }
}

template <typename B, typename O, int kRows>
void product_rows(const AccumulatorOf<B>* a, Index a_row, Index a_column, const B* b,
                  Index b_stride, Index depth, Index columns, O* out, Index out_stride) {
  constexpr int kLanes = Memory<B>::kLanes;
  Index i = 0;
  for (; i + 4 * kLanes <= columns; i += 4 * kLanes) {
    product_block<B, O, kRows, 4>(a, a_row, a_column, b + i, b_stride, depth, out + i, out_stride);
  }
  for (; i + kLanes <= columns; i += kLanes) {
    product_block<B, O, kRows, 1>(a, a_row, a_column, b + i, b_stride, depth, out + i, out_stride);
  }
  if (i < columns) {
    product_block<B, O, kRows, 1>(a, a_row, a_column, b + i, b_stride, depth, out + i, out_stride,
                                  columns - i);
  }
}

template <typename B, typename O>
void product(const AccumulatorOf<B>* a, Index a_row, Index a_column, Index rows, const B* b,
             Index b_stride, Index depth, Index columns, O* out, Index out_stride) {
  Index r = 0;
  for (; r + 4 <= rows; r += 4) {
    product_rows<B, O, 4>(a + r * a_row, a_row, a_column, b, b_stride, depth, columns,
                          out + r * out_stride, out_stride);
  }
  for (; r + 2 <= rows; r += 2) {
    product_rows<B, O, 2>(a + r * a_row, a_row, a_column, b, b_stride, depth, columns,
                          out + r * out_stride, out_stride);
  }
  for (; r < rows; ++r) {
    product_rows<B, O, 1>(a + r * a_row, a_row, a_column, b, b_stride, depth, columns,
                          out + r * out_stride, out_stride);
  }
}

template <typename T>
void multiply(const AccumulatorOf<T>* vectors, Index vector_stride, Index count, const T* weights,
              Index weight_stride, Index rows, Index columns, AccumulatorOf<T>* out,
              Index out_stride) {
  product<T, AccumulatorOf<T>>(vectors, vector_stride, 1, count, weights, weight_stride, rows,
                               columns, out, out_stride);
}

template <typename T>
void outer_products(const AccumulatorOf<T>* a, Index a_stride, const AccumulatorOf<T>* b,
                    Index b_stride, Index samples, Index rows, Index columns, T* out,
                    Index out_stride) {
  product<AccumulatorOf<T>, T>(a, 1, a_stride, rows, b, b_stride, samples, columns, out,
                               out_stride);
}

template <typename T>
constexpr Kernels<T> all() {
  return {reduce_planes<T>,       reduce_rows<T>, scale_planes<T>,  scale_rows<T>,
          multiply_transposed<T>, multiply<T>,    outer_products<T>};
}

}  // namespace

constinit const KernelSet kernels = {all<float>(), all<double>(), all<F16>(), all<BF16>()};

}  // namespace fusewise::cpu::FUSEWISE_ISA

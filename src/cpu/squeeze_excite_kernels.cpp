// Squeeze-and-Excitation's inner loops: sums over pixels, scaling, and the two small GEMMs.
// The caller arranges that each byte of x and dy comes from memory once and a second time from the
// caches. y and dx are written once. Bound by memory bandwidth, for small images by reading the
// weights.

// Compiled once per instruction set, under the rule of cpu/vector.h.

#include "cpu/squeeze_excite_kernels.h"

#include "cpu/vector_lanes.h"
#include "cpu/vector_loops.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

// Sums over pixels. ----------------------------------------------------------------------------

/// sum + element i of a, or of a * b. `count` is as in Memory.
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
      if constexpr (kRows > 1) {  // into L2: there are too many streams for the hardware prefetcher
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
  // Short rows are read in memory order. Long rows are summed four at a time, because reading and
  // writing their sums for every single row would fill L1.
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

// The small GEMMs. A block shares its loads; every element has its own accumulator. -----------

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
        const auto factor = broadcast<typename M::V>(a[r * a_row + k * a_column]);
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

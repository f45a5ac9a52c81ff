#pragma once

// The vectorised loops of Squeeze-and-Excitation, one set per instruction set.
// T is the type in memory, A the type of sums: float64 for float64, float32 for all others.
// No sum depends on how the caller splits rows, columns, planes or matrices among threads.

#include <cstdint>

#include "cpu/types.h"

namespace fusewise::cpu {

template <typename T, typename A = AccumulatorOf<T>>
struct Kernels {
  /// sums[i] = sum of a (times b, unless b is null) over plane i of `pixels` contiguous elements.
  void (*reduce_planes)(const T* a, std::int64_t a_stride, const T* b, std::int64_t b_stride,
                        std::int64_t planes, std::int64_t pixels, A* sums);
  /// sums[i] += sum over the rows of a[row][i] (times b[row][i], unless b is null).
  void (*reduce_rows)(const T* a, std::int64_t a_stride, const T* b, std::int64_t b_stride,
                      std::int64_t rows, std::int64_t columns, A* sums);
  /// out = in * factors[plane] (+ offsets[plane], unless null). `stream`: use streaming stores.
  void (*scale_planes)(const T* in, std::int64_t in_stride, const A* factors, const A* offsets,
                       std::int64_t planes, std::int64_t pixels, T* out, std::int64_t out_stride,
                       bool stream);
  /// out = in * factors[column] (+ offsets[column], unless null)
  void (*scale_rows)(const T* in, std::int64_t in_stride, const A* factors, const A* offsets,
                     std::int64_t rows, std::int64_t columns, T* out, std::int64_t out_stride,
                     bool stream);
  /// out[j][row] = bias[row] (0 if null) + sum over columns of weights[row] * vectors[j]
  void (*multiply_transposed)(const T* weights, const T* bias, std::int64_t rows,
                              std::int64_t columns, const A* vectors, std::int64_t vector_stride,
                              std::int64_t count, A* out, std::int64_t out_stride);
  /// out[j][column] = sum over rows of vectors[j][row] * weights[row][column]
  void (*multiply)(const A* vectors, std::int64_t vector_stride, std::int64_t count,
                   const T* weights, std::int64_t weight_stride, std::int64_t rows,
                   std::int64_t columns, A* out, std::int64_t out_stride);
  /// out[row][column] = sum over samples of a[sample][row] * b[sample][column]
  void (*outer_products)(const A* a, std::int64_t a_stride, const A* b, std::int64_t b_stride,
                         std::int64_t samples, std::int64_t rows, std::int64_t columns, T* out,
                         std::int64_t out_stride);
};

struct KernelSet {
  Kernels<float> f32;
  Kernels<double> f64;
  Kernels<F16> f16;
  Kernels<BF16> bf16;
};

namespace portable {
extern const KernelSet kernels;
}
namespace avx2 {
extern const KernelSet kernels;
}
namespace avx512 {
extern const KernelSet kernels;
}

}  // namespace fusewise::cpu

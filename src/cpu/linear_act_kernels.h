#pragma once

// The vectorised loops of linear + activation, one set per instruction set. T is the type in
// memory, A the type of sums. No sum depends on how the caller splits rows.

#include "cpu/types.h"
#include "fusewise/activation.h"

namespace fusewise::cpu {

/// Strides of a matrix of any layout, in elements.
struct Strides {
  std::int64_t row, column;
};

template <typename T, typename A = AccumulatorOf<T>>
struct LinearKernels {
  /// y = act(z + bias) and relu's bits; bias and bits may be null.
  void (*activate)(Activation kind, const T* z, std::int64_t z_stride, const T* bias, T* y,
                   std::int64_t y_stride, std::uint8_t* bits, std::int64_t bit_stride,
                   std::int64_t rows, std::int64_t columns);
  /// dz = dy * act' unless null, and sums[column] += dz unless null. relu needs the bits or its
  /// input or output; the others need z.
  void (*differentiate)(Activation kind, const T* dy, std::int64_t dy_stride,
                        const std::uint8_t* bits, std::int64_t bit_stride, const T* kept,
                        std::int64_t kept_stride, T* dz, std::int64_t dz_stride, A* sums,
                        std::int64_t rows, std::int64_t columns);
  /// out[column] = the sum of chunks[i][column], in order.
  void (*add_chunks)(const A* chunks, std::int64_t count, std::int64_t columns, T* out);
  /// panel[i][column] = b[i][column] for product_columns columns, zero-padded past `columns`.
  void (*pack)(const T* b, Strides b_strides, std::int64_t inner, std::int64_t columns, A* panel);
  /// d[row][column] = c[row][column] (0 if null) + sum over i of a[row][i] * panel[i][column]. c
  /// may be d. With a stride of 0, as an absent c has, all rows share one.
  void (*multiply)(const T* a, Strides a_strides, const A* panel, std::int64_t inner, const T* c,
                   std::int64_t c_stride, T* d, std::int64_t d_stride, std::int64_t rows,
                   std::int64_t columns);
  std::int64_t product_columns;
};

struct LinearKernelSet {
  LinearKernels<float> f32;
  LinearKernels<double> f64;
  LinearKernels<F16> f16;
  LinearKernels<BF16> bf16;
};

namespace portable {
extern const LinearKernelSet linear_kernels;
}
namespace avx2 {
extern const LinearKernelSet linear_kernels;
}
namespace avx512 {
extern const LinearKernelSet linear_kernels;
}

}  // namespace fusewise::cpu

#pragma once

// The vectorised loops of LINet's convolution, one set per instruction set. T is the type in
// memory, A the type of sums.

#include "cpu/types.h"

namespace fusewise::cpu {

template <typename T, typename A = AccumulatorOf<T>>
struct LiConvKernels {
  /// out[i] = rows[0][i] + rows[1][i] + ..., rounded once. `count` may be 0, and out one of the
  /// rows.
  void (*sum_rows)(const T* const* rows, int count, std::int64_t columns, T* out);
  /// sums[i] += row[i].
  void (*accumulate)(const T* row, std::int64_t columns, A* sums);
  /// out[i] = sums[i], rounded.
  void (*round)(const A* sums, std::int64_t columns, T* out);
};

struct LiConvKernelSet {
  LiConvKernels<float> f32;
  LiConvKernels<double> f64;
  LiConvKernels<F16> f16;
  LiConvKernels<BF16> bf16;
};

namespace portable {
extern const LiConvKernelSet li_conv_kernels;
}
namespace avx2 {
extern const LiConvKernelSet li_conv_kernels;
}
namespace avx512 {
extern const LiConvKernelSet li_conv_kernels;
}

}  // namespace fusewise::cpu

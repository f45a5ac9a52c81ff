#pragma once

// The vectorised loops of BatchNorm + activation + Squeeze-and-Excitation, one set per instruction
// set. T is the type in memory, A the type of sums: float64 for float64, float32 for all others.
//
// All of them take a matrix of `rows` with `columns` contiguous elements of one sample. If it is
// `planar`, a row is the plane of one channel, and values per channel have one element per row.
// Otherwise a row has the channels of one or more pixels, and values per channel have one element
// per column.

#include <cstdint>

#include "cpu/batch_norm_kernels.h"
#include "cpu/types.h"
#include "fusewise/activation.h"

namespace fusewise::cpu {

struct ExciteShape {
  std::int64_t rows = 0, columns = 0;
  bool planar = true;
};

/// v = (x - mean) * scale + shift.
template <typename T, typename A = AccumulatorOf<T>>
struct NormalizedRows {
  Rows<const T> x;
  const A *mean = nullptr, *scale = nullptr, *shift = nullptr;
  Activation activation = Activation::identity;
};

/// Sums per channel, from which backward computes the gradients of gates and of BatchNorm's
/// parameters.
template <typename A>
struct GateSums {
  A* a = nullptr;  // dy * a

  /// All present or all absent.
  A* open = nullptr;             // act'(v)
  A* open_centered = nullptr;    // act'(v) * (x - mean)
  A* passed = nullptr;           // dy * act'(v)
  A* passed_centered = nullptr;  // dy * act'(v) * (x - mean)
};

/// dv = (dy * gate + dp) * act'(v), dx = scale * dv + slope * (x - mean) + offset; without the last
/// two terms if slope is null. Gates, dp, slope and offset are values per channel.
template <typename T, typename A = AccumulatorOf<T>>
struct GatedGradient {
  Rows<const T> dy;
  const A *gates = nullptr, *dp = nullptr;
  const A *slope = nullptr, *offset = nullptr;
};

template <typename T, typename A = AccumulatorOf<T>>
struct BatchNormExciteKernels {
  /// a = act(v); its sums are added to `sums`.
  void (*activate)(const ExciteShape& shape, const NormalizedRows<T>& in, Rows<A> a, A* sums);
  /// y = a * gate. `stream`: use streaming stores.
  void (*gate)(const ExciteShape& shape, Rows<const A> a, const A* gates, Rows<T> y, bool stream);
  /// Adds to the sums.
  void (*gate_sums)(const ExciteShape& shape, const NormalizedRows<T>& in, Rows<const T> dy,
                    const GateSums<A>& sums);
  /// Adds dv and dv * (x - mean) to the sums.
  void (*gradient_sums)(const ExciteShape& shape, const NormalizedRows<T>& in,
                        const GatedGradient<T>& gradient, A* dv, A* dv_centered);
  /// Writes dx.
  void (*differentiate)(const ExciteShape& shape, const NormalizedRows<T>& in,
                        const GatedGradient<T>& gradient, Rows<T> dx, bool stream);
};

struct BatchNormExciteKernelSet {
  BatchNormExciteKernels<float> f32;
  BatchNormExciteKernels<double> f64;
  BatchNormExciteKernels<F16> f16;
  BatchNormExciteKernels<BF16> bf16;
};

namespace portable {
extern const BatchNormExciteKernelSet batch_norm_excite_kernels;
}
namespace avx2 {
extern const BatchNormExciteKernelSet batch_norm_excite_kernels;
}
namespace avx512 {
extern const BatchNormExciteKernelSet batch_norm_excite_kernels;
}

}  // namespace fusewise::cpu

#pragma once

// The vectorised loops of BatchNorm + activation, one set per instruction set.
// T is the type in memory, A the type of sums: float64 for float64, float32 for all others.
//
// All of them take a matrix of `rows` with `columns` contiguous elements. If it is `planar`, all
// elements belong to one channel (rows of pixels), and the values per channel have one element.
// With `channels`, so many such planes follow each other in a row. Otherwise the values per channel
// have one element per column (channels-last).

#include <cstdint>

#include "cpu/types.h"
#include "fusewise/activation.h"

namespace fusewise::cpu {

/// Rows with a stride in elements. Null data: absent.
template <typename T>
struct Rows {
  T* data = nullptr;
  std::int64_t stride = 0;
};

struct BatchNormShape {
  std::int64_t rows = 0, columns = 0;
  bool planar = true;
  bool stream = false;        // write outputs with streaming stores
  std::int64_t channels = 1;  // planes of `columns` elements in a row
};

constexpr std::int64_t kBundledRow = 2048;  // the most elements in a row of several planes

/// v = (x - mean) * scale + shift (+ residual).
template <typename T, typename A = AccumulatorOf<T>>
struct Normalization {
  Rows<const T> x, residual;
  const A *mean = nullptr, *scale = nullptr, *shift = nullptr;
  Activation activation = Activation::identity;
};

/// What backward reads: dv = dy * act'(v), or dy where its bit is set, if there are bits. A row of
/// bits starts at a byte, and two bytes after the last one must be readable.
template <typename T, typename A = AccumulatorOf<T>>
struct ActivationGradient {
  Normalization<T> forward;
  Rows<const T> dy;
  Rows<const A> wide_dy;  // in place of dy, if present
  Rows<const std::uint8_t> bits;
};

/// One row of output of a max-pool of 3 x 3 values with stride 2 and padding 1: `width` pixels of
/// input and `outputs` of output, as a plane of one channel or as rows of channels.
struct PoolShape {
  std::int64_t width = 0, outputs = 0, channels = 1;
  bool planar = true;
};

/// The rows of output that read one row of input: one or two, and which row of their windows it is.
template <typename T>
struct PoolReaders {
  const T* dy[2] = {};
  const std::uint8_t* choices[2] = {};
  int row[2] = {};
  int count = 0;
};

template <typename T, typename A = AccumulatorOf<T>>
struct BatchNormKernels {
  /// pivots: an approximate mean of each channel. sums and squares: the sums of x - pivot and of
  /// its square.
  void (*moments)(const BatchNormShape& shape, Rows<const T> x, A* pivots, A* sums, A* squares);
  /// y = act(v). Unless bits are absent (relu and relu6), a bit is set where the gradient passes.
  /// Bits after the last of a row are undefined, up to the end of its last byte.
  void (*normalize)(const BatchNormShape& shape, const Normalization<T>& in, Rows<T> y,
                    Rows<std::uint8_t> bits);
  /// The sums of dv and of dv * (x - mean) of each channel.
  void (*gradient_sums)(const BatchNormShape& shape, const ActivationGradient<T>& in, A* sums,
                        A* products);
  /// dresidual = dv. dx = scale * dv + slope * (x - mean) + offset; without the last two terms if
  /// slope is null. Either may be absent.
  void (*differentiate)(const BatchNormShape& shape, const ActivationGradient<T>& in,
                        const A* slope, const A* offset, Rows<T> dx, Rows<T> dresidual);
  /// y = the largest values of a row's windows, whose three rows of input are `rows`; null outside
  /// of the image. choices: their places in the windows. scratch: 5 * width + 16 values, if planar.
  void (*pool)(const PoolShape& shape, const T* const (&rows)[3], A* scratch, T* y,
               std::uint8_t* choices);
  /// The gradients of `count` pixels of a row of input, from column `first` on.
  void (*unpool)(const PoolShape& shape, const PoolReaders<T>& readers, std::int64_t first,
                 std::int64_t count, A* scratch, A* to);
  /// Conversions of contiguous values.
  void (*widen)(const T* from, std::int64_t count, A* to);
  void (*narrow)(const A* from, std::int64_t count, T* to);
};

struct BatchNormKernelSet {
  BatchNormKernels<float> f32;
  BatchNormKernels<double> f64;
  BatchNormKernels<F16> f16;
  BatchNormKernels<BF16> bf16;
};

namespace portable {
extern const BatchNormKernelSet batch_norm_kernels;
}
namespace avx2 {
extern const BatchNormKernelSet batch_norm_kernels;
}
namespace avx512 {
extern const BatchNormKernelSet batch_norm_kernels;
}

}  // namespace fusewise::cpu

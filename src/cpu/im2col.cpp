// A convolution as GEMMs over rows of taps. A block of rows stays in the cache between the copy and
// the GEMM. Bound by the arithmetic of the GEMM, and by the copies where the kernel is small.

#include "cpu/im2col.h"

#include <algorithm>

#include "common/divide.h"
#include "common/li_conv.h"
#include "common/matrix.h"
#include "common/scratch.h"
#include "cpu/gemm_loops.h"
#include "cpu/threads.h"

namespace fusewise::cpu {

namespace {

using Index = std::int64_t;

constexpr Index kBlockBytes = 1 << 20;
constexpr Index kPieceElements = 64 * 1024;  // work unit of a cheap pass, for one thread

template <typename T>
T* at(const TensorView& t, Index a, Index b, Index c, Index d) {
  return static_cast<T*>(t.data) + a * t.strides[0] + b * t.strides[1] + c * t.strides[2] +
         d * t.strides[3];
}

/// The convolution of a call, and its rows of taps.
template <typename T>
class Taps {
 public:
  Taps(const TensorView& x, const TensorView& w, Index stride, Index padding, const TensorView& y)
      : x_(x),
        stride_(stride),
        padding_(padding),
        kernel_(w.sizes[2]),
        p_(y.sizes[2]),
        q_(y.sizes[3]),
        channels_(x.sizes[1]) {}

  Index rows() const { return x_.sizes[0] * p_ * q_; }
  Index rows_of_an_image() const { return p_ * q_; }
  Index width() const { return kernel_ * kernel_ * channels_; }
  /// At least as many rows as output channels, because every GEMM packs all weights.
  Index rows_of_a_block(Index channels) const {
    const Index wanted = kBlockBytes / (width() * static_cast<Index>(sizeof(T)));
    return std::min(std::max(wanted, channels), rows());
  }

  /// Copies the taps of `count` output pixels from `first` on. Those in the padding are 0.
  void gather(const Context& context, Index first, Index count, T* to) const {
    const Index piece = std::max<Index>(1, kPieceElements / width());
    parallel_for(context, divide_up(count, piece), [&](Index begin, Index end) {
      for (Index i = begin * piece; i < std::min(end * piece, count); ++i) {
        gather_row(first + i, to + i * width());
      }
    });
  }

  /// Calls each(offset) for every place in the rows of an image that holds a copy of pixel (h, w).
  template <typename Each>
  void for_readers(Index h, Index w, const Each& each) const {
    for (Index r = 0; r < kernel_; ++r) {
      const Index p = h + padding_ - r;
      if (p < 0 || p % stride_ != 0 || p / stride_ >= p_) continue;
      for (Index s = 0; s < kernel_; ++s) {
        const Index q = w + padding_ - s;
        if (q < 0 || q % stride_ != 0 || q / stride_ >= q_) continue;
        each((p / stride_ * q_ + q / stride_) * width() + (r * kernel_ + s) * channels_);
      }
    }
  }

 private:
  void gather_row(Index row, T* to) const {
    const Index n = row / (p_ * q_), p = row / q_ % p_, q = row % q_;
    for (Index r = 0; r < kernel_; ++r) {
      const Index h = p * stride_ - padding_ + r;
      for (Index s = 0; s < kernel_; ++s, to += channels_) {
        const Index w = q * stride_ - padding_ + s;
        if (h < 0 || h >= x_.sizes[2] || w < 0 || w >= x_.sizes[3]) {
          std::fill_n(to, channels_, T{});
          continue;
        }
        const T* from = at<T>(x_, n, 0, h, w);
        if (x_.strides[1] == 1) {
          std::copy_n(from, channels_, to);
        } else {
          for (Index c = 0; c < channels_; ++c) to[c] = from[c * x_.strides[1]];
        }
      }
    }
  }

  const TensorView& x_;
  Index stride_, padding_, kernel_, p_, q_, channels_;
};

/// Calls step(value of a dense [K, R, R, C] copy, value of w [K, C, R, R]) for all weights.
template <typename T, typename Step>
void for_weights(const TensorView& w, T* dense, const Step& step) {
  for (Index k = 0; k < w.sizes[0]; ++k) {
    for (Index r = 0; r < w.sizes[2]; ++r) {
      for (Index s = 0; s < w.sizes[3]; ++s) {
        for (Index c = 0; c < w.sizes[1]; ++c) step(*dense++, *at<T>(w, k, c, r, s));
      }
    }
  }
}

template <typename T>
TensorView matrix(const void* data, const TensorView& like, Index rows, Index columns) {
  return {data, like.dtype, like.device, {rows, columns}};
}

/// Whether the pixels are the rows of taps.
bool are_rows(const TensorView& x, const TensorView& w, Index stride) {
  return w.sizes[2] == 1 && stride == 1 && is_channels_last(x);
}

/// Weights as a matrix [K, R * R * C]: themselves, or a copy.
template <typename T>
class Weights {
 public:
  Weights(const Context& context, const TensorView& w)
      : copy_(context, is_channels_last(w) ? 0 : w.numel()),
        matrix_(matrix<T>(w.data, w, w.sizes[0], w.numel() / w.sizes[0])) {
    if (copy_.data() == nullptr) return;
    matrix_.data = copy_.data();
    for_weights(w, copy_.data(), [](T& dense, const T& value) { dense = value; });
  }
  const TensorView& view() const { return matrix_; }

 private:
  Scratch<T> copy_;
  TensorView matrix_;
};

}  // namespace

template <typename T>
void Im2col<T>::forward(const TensorView& x, const TensorView& w, Index stride, Index padding,
                        const TensorView& y) {
  const Weights<T> weights(context_, w);
  if (are_rows(x, w, stride)) {
    return multiply(context_, gemm_, as_matrix(x), transposed(weights.view()), {}, as_matrix(y));
  }
  const Taps<T> taps(x, w, stride, padding, y);
  const Index width = taps.width(), channels = w.sizes[0], block = taps.rows_of_a_block(channels);
  const Scratch<T> columns(context_, block * width);
  for (Index first = 0; first < taps.rows(); first += block) {
    const Index count = std::min(block, taps.rows() - first);
    taps.gather(context_, first, count, columns.data());
    multiply(context_, gemm_, matrix<T>(columns.data(), x, count, width),
             transposed(weights.view()), {},
             matrix<T>(static_cast<T*>(y.data) + first * channels, x, count, channels));
  }
}

template <typename T>
void Im2col<T>::backward(const TensorView& dy, const TensorView& x, const TensorView& w,
                         Index stride, Index padding, const TensorView& dx, const TensorView& dw,
                         bool add) {
  if (dw.defined()) weight_gradient(dy, x, stride, padding, dw);
  if (dx.defined()) input_gradient(dy, w, stride, padding, dx, add);
}

template <typename T>
void Im2col<T>::weight_gradient(const TensorView& dy, const TensorView& x, Index stride,
                                Index padding, const TensorView& dw) const {
  using A = AccumulatorOf<T>;
  const Taps<T> taps(x, dw, stride, padding, dy);
  const Index width = taps.width(), channels = dw.sizes[0], all = channels * width;
  if (are_rows(x, dw, stride) && is_channels_last(dw)) {
    return multiply(context_, gemm_, transposed(as_matrix(dy)), as_matrix(x), {},
                    matrix<T>(dw.data, dw, channels, width));
  }
  const Index block = taps.rows_of_a_block(channels);
  const bool in_place = kKeepsSums<T> && is_channels_last(dw);
  const Scratch<T> columns(context_, block * width), part(context_, in_place ? 0 : all);
  const Scratch<A> sums(context_, kKeepsSums<T> ? 0 : all);
  std::fill_n(sums.data(), kKeepsSums<T> ? 0 : all, A(0));
  const TensorView to = matrix<T>(in_place ? dw.data : part.data(), x, channels, width);
  const T* gradient = static_cast<const T*>(dy.data);
  for (Index first = 0; first < taps.rows(); first += block) {
    const Index count = std::min(block, taps.rows() - first);
    taps.gather(context_, first, count, columns.data());
    multiply(context_, gemm_,
             transposed(matrix<T>(gradient + first * channels, x, count, channels)),
             matrix<T>(columns.data(), x, count, width),
             kKeepsSums<T> && first > 0 ? to : TensorView(), to);
    if (!kKeepsSums<T>) kernels_.accumulate(part.data(), all, sums.data());
  }
  if (!kKeepsSums<T>) kernels_.round(sums.data(), all, part.data());
  if (!in_place) for_weights(dw, part.data(), [](const T& sum, T& value) { value = sum; });
}

template <typename T>
void Im2col<T>::input_gradient(const TensorView& dy, const TensorView& w, Index stride,
                               Index padding, const TensorView& dx, bool add) const {
  const Taps<T> taps(dx, w, stride, padding, dy);
  const Index width = taps.width(), channels = w.sizes[0], inputs = dx.sizes[1];
  const Index rows = taps.rows_of_an_image(), samples = dx.sizes[0], height = dx.sizes[2];
  const Index images = std::clamp<Index>(taps.rows_of_a_block(channels) / rows, 1, samples);
  const Weights<T> weights(context_, w);
  if (are_rows(dx, w, stride) && !add) {
    return multiply(context_, gemm_, as_matrix(dy), weights.view(), {}, as_matrix(dx));
  }
  const Scratch<T> columns(context_, images * rows * width);
  const T* gradient = static_cast<const T*>(dy.data);
  for (Index first = 0; first < samples; first += images) {
    const Index count = std::min(images, samples - first);
    multiply(context_, gemm_,
             matrix<T>(gradient + first * rows * channels, dx, count * rows, channels),
             weights.view(), {}, matrix<T>(columns.data(), dx, count * rows, width));
    parallel_for(context_, count * height, [&](Index begin, Index end) {
      const Scratch<T> line(context_, inputs);
      const Scratch<const T*> readers(context_, w.sizes[2] * w.sizes[2]);
      for (Index i = begin; i < end; ++i) {
        const T* const image = columns.data() + i / height * rows * width;
        for (Index column = 0; column < dx.sizes[3]; ++column) {
          int terms = 0;
          taps.for_readers(i % height, column,
                           [&](Index offset) { readers.data()[terms++] = image + offset; });
          T* const to = at<T>(dx, first + i / height, 0, i % height, column);
          T* const sum = dx.strides[1] == 1 && !add ? to : line.data();
          kernels_.sum_rows(readers.data(), terms, inputs, sum);
          if (sum != to) write_pixel(kernels_, sum, inputs, to, dx.strides[1], add);
        }
      }
    });
  }
}

template class Im2col<float>;
template class Im2col<double>;
template class Im2col<F16>;
template class Im2col<BF16>;

}  // namespace fusewise::cpu

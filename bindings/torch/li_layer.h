#pragma once

// What LINet's convolution and its blocks share in the binding: weights and their gradients.
// Weights may be float32 beside half-precision images. They are cast here, and so are their
// gradients.

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "call.h"
#include "common/divide.h"
#include "fusewise/li_conv.h"

namespace fusewise::binding {

/// The weights of a layer as the core's views, and the copies that they may need.
class LiWeights {
 public:
  /// `previous`: null in the first layer.
  LiWeights(std::span<const Tensor> weights, std::span<const Tensor> mix, const Tensor* previous);

  std::vector<LiConvStream> streams;  ///< without images
  TensorView previous;

 private:
  std::vector<Tensor> copies_;
};

/// Throws Error unless the streams and the integrated one have the same number of channels behind
/// the layer.
void check_packed(const LiWeights& layer);

/// Rounds up to where the next image or weight in a tensor begins: at multiples of 128 elements,
/// which are 256 bytes in half precision.
constexpr std::int64_t aligned(std::int64_t elements) { return divide_up(elements, 128) * 128; }

/// Copies of float32 weights in the type of half-precision images, for several layers.
class WeightCasts {
 public:
  WeightCasts(const Context& context, DType images) : context_(context), dtype_(images) {}

  /// The layer's weights will be read from copies. The layer must stay where it is.
  void add(LiWeights& layer);
  /// Casts all weights in one launch, and returns the copies. `made`: what this has returned for
  /// the same weights; then nothing is cast.
  Tensor finish(const Tensor& like, const std::optional<Tensor>& made = std::nullopt);

 private:
  const Context& context_;
  DType dtype_;
  std::vector<TensorView*> found_;
  std::vector<Tensor> copies_;
};

/// Hands out the results of backward: those that are not wanted are empty.
class Gradients {
 public:
  Gradients(const Tensor& like, const std::vector<std::int64_t>& needs)
      : like_(like), dtype_(view_of("x", like).dtype), needs_(needs) {}

  bool next_is_needed() const { return needs_[found_.size()] != 0; }
  void skip() { found_.push_back(new_dense(like_, dtype_, {0})); }
  TensorView add(Tensor tensor) {
    found_.push_back(std::move(tensor));
    return view_of("gradient", found_.back());
  }
  /// The gradient of a weight. Absent if it is not needed. If the weight is float32 beside
  /// half-precision images, the view is of a gradient in their type, which `finish` casts.
  TensorView next(const Tensor& weight);
  /// The same for the weights of a 1x1 convolution, as a dense matrix.
  TensorView next_kernel(const Tensor& weight, const TensorView& matrix);
  void finish(const Context& context) { cast_all(context, casts_); }

  Tensor& operator[](std::size_t i) { return found_[i]; }
  std::vector<Tensor> take() { return std::move(found_); }

 private:
  TensorView add_weight(Tensor tensor);

  const Tensor& like_;
  DType dtype_;
  const std::vector<std::int64_t>& needs_;
  std::vector<Tensor> found_, halves_;
  std::vector<CastPair> casts_;
};

/// The tensor if it is channels-last without gaps, otherwise such a copy.
Tensor channels_last_tensor(const char* name, const Tensor& tensor);

/// The first `count` streams of a packed tensor.
inline TensorView first_streams(TensorView packed, std::int64_t count) {
  packed.sizes[0] = count;
  return packed;
}

}  // namespace fusewise::binding

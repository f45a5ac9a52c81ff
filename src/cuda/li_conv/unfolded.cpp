#include "cuda/li_conv/unfolded.h"

#include "common/divide.h"
#include "cuda/conv/convolution.h"

namespace fusewise::cuda {
namespace {

using Index = std::int64_t;

constexpr Index kVector = 8, kAlignment = 256;
constexpr Index kMost = Index{1} << 31;

/// An image [N, C, H, W], channels-last, without memory.
TensorView image_of(const TensorView& like, Index n, Index c, Index h, Index w) {
  return {nullptr, like.dtype, like.device, {n, c, h, w}, {h * w * c, 1, w * c, c}};
}

Index vectors_of(const LiConvStream& stream, const LiConvSizes& s) {
  return divide_up(s.r * stream.x.sizes[1], kVector);
}

bool gains(const LiConvStream& stream, const LiConvSizes& s, bool backward) {
  const Index c = stream.x.sizes[1];
  if (size_of(s.dtype) != 2 || c >= kVector || s.r == 1 || s.k % kVector != 0) return false;
  if (!has_cudnn() || !is_channels_last(stream.x) || !is_channels_last(stream.w)) return false;
  if (backward && (stream.dx.defined() || !stream.dw.defined() || !is_channels_last(stream.dw))) {
    return false;
  }
  return s.n * s.h * s.q * vectors_of(stream, s) < kMost && s.w * c < kMost &&
         s.k * s.r * s.r * c < kMost;
}

}  // namespace

UnfoldedStreams::UnfoldedStreams(const Context& context, std::span<const LiConvStream> streams,
                                 const LiConvSizes& s, Steps steps, bool backward)
    : context_(context), stride_{steps.stride, 1}, padding_{steps.padding, 0} {
  Index bytes = 0;
  const auto place = [&](const TensorView& view) {
    const Index begin = bytes;
    bytes += divide_up(view.numel() * size_of(view.dtype), kAlignment) * kAlignment;
    return begin;
  };
  std::vector<std::array<Index, 2>> places;
  for (const LiConvStream& stream : streams) {
    Stream& made = streams_.emplace_back();
    std::array<Index, 2>& at = places.emplace_back();
    if (!gains(stream, s, backward)) continue;
    const Index channels = vectors_of(stream, s) * kVector;
    made = {image_of(stream.x, s.n, channels, s.h, s.q), image_of(stream.x, s.k, channels, s.r, 1)};
    at = {place(made.x), place(made.w)};
  }
  if (bytes == 0) return;
  memory_.emplace(context, bytes);
  std::vector<Windows> windows;
  for (std::size_t i = 0; i < streams.size(); ++i) {
    Stream& made = streams_[i];
    if (!made.x.defined()) continue;
    made.x.data = memory_->data() + places[i][0];
    made.w.data = memory_->data() + places[i][1];
    const auto narrow = [](Index value) { return static_cast<int>(value); };
    const LiConvStream& stream = streams[i];
    const Index c = stream.x.sizes[1];
    const int taps = narrow(s.r * c), vectors = narrow(vectors_of(stream, s));
    windows.push_back({stream.x.data, made.x.data, s.n * s.h, narrow(s.w * c), narrow(s.q),
                       narrow(steps.stride * c), narrow(steps.padding * c), taps, vectors});
    if (backward) continue;
    windows.push_back({stream.w.data, made.w.data, s.k * s.r, taps, 1, 0, 0, taps, vectors});
  }
  unfold(context, windows);
}

bool UnfoldedStreams::convolve(Index i, ProductMath math, const TensorView& u) const {
  const Stream& made = streams_[i];
  return made.x.defined() && cuda::convolve(context_, {ConvolutionKind::forward, made.x, made.w, u,
                                                       stride_, padding_, math});
}

bool UnfoldedStreams::weight_gradient(Index i, ProductMath math, const TensorView& g,
                                      const TensorView& dw) {
  const Stream& made = streams_[i];
  if (!made.x.defined()) return false;
  if (!cuda::convolve(context_, {ConvolutionKind::weight_gradient, made.x, made.w, g, stride_,
                                 padding_, math})) {
    return false;
  }
  trimmed_.push_back({made.w.data, dw.data, dw.sizes[0] * dw.sizes[2],
                      static_cast<int>(made.w.sizes[1]),
                      static_cast<int>(dw.sizes[1] * dw.sizes[3])});
  return true;
}

}  // namespace fusewise::cuda

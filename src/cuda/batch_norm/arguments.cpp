#include "cuda/batch_norm/arguments.h"

#include <numeric>

namespace fusewise::cuda {
namespace {

constexpr std::int64_t kMostIndex = std::int64_t{1} << 30;
constexpr const char* kTooLarge = "a dimension is too large for its 32-bit indices";

/// Whether any of the parameters is float32 beside half-precision x.
template <typename... Views>
bool are_wide(const TensorView& x, const Views&... parameters) {
  return ((parameters.defined() && parameters.dtype != x.dtype) || ...);
}

/// Dense in the order S, N, H, W, C or S, N, C, H, W.
bool is_dense(const TensorView& t, bool channels_last) {
  const int r = t.rank;
  const int last[] = {r - 3, r - 1, r - 2, r - 4, r - 5};
  const int planar[] = {r - 1, r - 2, r - 3, r - 4, r - 5};
  std::int64_t stride = 1;
  for (const int d : channels_last ? last : planar) {
    if (d < 0) continue;
    if (t.sizes[d] != 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

}  // namespace

ForwardChannels channels_of(const BatchNormActForward& call) {
  return {.weight = call.weight.data,
          .bias = call.bias.data,
          .running_mean = call.running_mean.data,
          .running_var = call.running_var.data,
          .counter = {static_cast<long long*>(call.num_batches_tracked.data),
                      call.num_batches_tracked.rank == 1},
          .group = call.group.data,
          .mean = call.mean.data,
          .inverse = call.inverse_deviation.data,
          .statistics = nullptr,
          .momentum = call.momentum,
          .eps = call.eps,
          .wide = are_wide(call.x, call.weight, call.bias, call.running_mean, call.running_var),
          .training = call.training,
          .streams = streams_of(call.x),
          .channels = dimension(call.x, 3)};
}

ForwardChannels channels_of(const BatchNormStatistics& call) {
  BatchNormActForward forward;
  forward.x = call.x;
  forward.training = true;
  ForwardChannels f = channels_of(forward);
  f.statistics = call.statistics.data;
  return f;
}

BackwardChannels channels_of(const BatchNormActBackward& call) {
  return {.weight = call.weight.data,
          .bias = call.bias.data,
          .mean = call.mean.data,
          .inverse = call.inverse_deviation.data,
          .group = call.group.data,
          .dweight = call.dweight.data,
          .dbias = call.dbias.data,
          .dgroup = call.dgroup.data,
          .wide = are_wide(call.x, call.weight, call.bias, call.dweight, call.dbias),
          .training = call.training,
          .streams = streams_of(call.x),
          .channels = dimension(call.x, 3)};
}

BackwardNeeds needs_of(const BatchNormActBackward& call) {
  const bool for_dx = call.dx.defined() && call.training && !call.group.defined();
  const bool others = call.dweight.defined() || call.dbias.defined() || call.dgroup.defined();
  return {.sums = for_dx || others, .images = call.dx.defined() || call.dresidual.defined()};
}

bool reads_residual(const BatchNormActBackward& call) {
  return call.residual.defined() && !call.passes.defined() &&
         call.activation != Activation::identity;
}

bool has_adjacent_channels(const TensorView& x) {
  return dimension(x, 3) > 1 && x.strides[x.rank - 3] == 1;
}

std::string image_decline(std::initializer_list<const TensorView*> images) {
  const TensorView& x = **images.begin();
  if (x.dtype == DType::f64) return "it has no float64 kernels";
  if (x.numel() == 0) return "the batch is empty";
  const bool channels_last = has_adjacent_channels(x);
  for (const TensorView* image : images) {
    if (!image->defined()) continue;
    if (!is_dense(*image, channels_last)) {
      return "it takes dense NCHW or channels-last images, all in one layout";
    }
    if (reinterpret_cast<std::uintptr_t>(image->data) % 16 != 0) {
      return "an image does not start on a 16-byte boundary";
    }
  }
  const std::int64_t pixels = dimension(x, 2) * dimension(x, 1);
  if (dimension(x, 3) >= kMostIndex || dimension(x, 4) * pixels >= kMostIndex ||
      (x.rank == 5 && x.sizes[0] >= kMostIndex)) {
    return kTooLarge;
  }
  return {};
}

std::string dense_decline(std::initializer_list<const TensorView*> images, bool with_bits) {
  std::string reason = image_decline(images);
  if (!reason.empty()) return reason;
  const TensorView& x = **images.begin();
  const bool channels_last = has_adjacent_channels(x);
  const std::int64_t inner = channels_last ? dimension(x, 3) : dimension(x, 2) * dimension(x, 1);
  if (inner * size_of(x.dtype) % 16 != 0) {
    return channels_last ? "the channels of a pixel are not a multiple of 16 bytes"
                         : "the pixels of a channel are not a multiple of 16 bytes";
  }
  if (with_bits && inner % 8 != 0) return "the bits of relu do not fill bytes";
  return {};
}

std::int64_t folded_pixels(const TensorView& x, const TensorView& blanked, bool with_bits) {
  const std::int64_t row = with_bits || size_of(x.dtype) == 2 ? 8 : 4;  // values
  const std::int64_t folded = row / std::gcd(row, dimension(x, 3));
  const std::int64_t pixels = dimension(x, 2) * dimension(x, 1);
  return (blanked.defined() ? pixels : dimension(x, 4) * pixels) % folded == 0 ? folded : 0;
}

std::string folded_decline(std::initializer_list<const TensorView*> images,
                           const TensorView& blanked, bool with_bits) {
  const TensorView& x = **images.begin();
  if (!has_adjacent_channels(x)) return dense_decline(images, with_bits);
  std::string reason = image_decline(images);
  if (!reason.empty()) return reason;
  const std::int64_t folded = folded_pixels(x, blanked, with_bits);
  if (folded == 0) return "the channels of neighbouring pixels do not fill 16 bytes";
  if (folded * dimension(x, 3) >= kMostIndex) return kTooLarge;
  return {};
}

}  // namespace fusewise::cuda

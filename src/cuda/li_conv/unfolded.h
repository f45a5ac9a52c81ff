#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "common/li_conv.h"
#include "common/scratch.h"
#include "cuda/li_conv/taps.h"

namespace fusewise::cuda {

/// Streams of less than 8 channels in half precision, such as those of the first layer. cuDNN's
/// fast kernels need multiples of 8 channels, so what a row of the kernel sees becomes the
/// channels: x [N, H, W, C] turns into [N, H, Q, R * C], padded with zeros to a multiple of 8, and
/// w into [K, R, 1, R * C]. The sums are of the same products, and of products of two zeros.
class UnfoldedStreams {
 public:
  struct Steps {
    std::int64_t stride, padding;
  };
  /// `backward`: only streams that need the gradient of w and not that of x.
  UnfoldedStreams(const Context& context, std::span<const LiConvStream> streams,
                  const LiConvSizes& sizes, Steps steps, bool backward);

  /// u of stream i. Returns false, with nothing written, if it is not one of these.
  bool convolve(std::int64_t i, ProductMath math, const TensorView& u) const;
  /// The same for the gradient of w, which is complete after `finish`.
  bool weight_gradient(std::int64_t i, ProductMath math, const TensorView& g, const TensorView& dw);
  void finish() const { trim(context_, trimmed_); }

 private:
  struct Stream {
    TensorView x, w;  ///< absent if the stream is computed as it is
  };

  const Context& context_;
  std::array<std::int64_t, 2> stride_, padding_;
  std::vector<Stream> streams_;
  std::optional<Scratch<char>> memory_;
  std::vector<Trimmed> trimmed_;
};

}  // namespace fusewise::cuda

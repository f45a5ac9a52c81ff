#pragma once

// What the implementations of LINet's convolution share: sizes, and images as matrices.

#include "common/implementation.h"
#include "fusewise/li_conv.h"

namespace fusewise {

struct LiConvSizes {
  std::int64_t streams, n, h, w;
  std::int64_t k, r;  ///< channels of a stream's convolution, and the size of its kernel
  std::int64_t d, e;  ///< channels of the integrated stream after and before; e = 0 without m
  std::int64_t p, q;  ///< the image after the convolution
  DType dtype;

  std::int64_t pixels() const { return n * p * q; }  ///< after the convolution
};

/// Throws Error if a call breaks a rule. Otherwise returns its sizes.
LiConvSizes check_sizes(const LiConvForward& call);
LiConvSizes check_sizes(const LiConvBackward& call);

/// Whether the elements fill their memory, in whatever order. An absent tensor does.
bool has_no_gaps(const TensorView& t);
/// Whether an image [..., N, C, H, W] is channels-last without gaps.
bool is_channels_last(const TensorView& t);
/// One stream of a stream-major tensor [S, N, C, H, W].
TensorView stream_of(const TensorView& packed, std::int64_t stream);
/// A channels-last image [N, C, H, W] without gaps as the matrix [N * H * W, C].
TensorView as_matrix(const TensorView& image);
/// Every t-th pixel of an image, in both directions.
TensorView every(std::int64_t t, TensorView image);

namespace cpu {
Implementations<LiConvForward> li_conv_forward();
Implementations<LiConvBackward> li_conv_backward();
}  // namespace cpu
/// Defined in src/cuda, or in no_cuda.cpp for a build without CUDA.
namespace cuda {
Implementations<LiConvForward> li_conv_forward();
Implementations<LiConvBackward> li_conv_backward();
}  // namespace cuda

}  // namespace fusewise

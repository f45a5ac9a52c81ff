#pragma once

// Convolutions by cuDNN, without bias, dilation and groups.

#include <array>

#include "fusewise/context.h"
#include "fusewise/linear_act.h"

namespace fusewise::cuda {

enum class ConvolutionKind { forward, data_gradient, weight_gradient };

/// result = conv(image, kernel), or a gradient: `kind` says which of the three tensors is written.
/// All have one type, and the strides that is_channels_last describes.
struct ConvolutionCall {
  ConvolutionKind kind;
  TensorView image;   ///< [N, C, H, W]
  TensorView kernel;  ///< [K, C, R, S]
  TensorView result;  ///< [N, K, P, Q]
  std::array<std::int64_t, 2> stride, padding;
  ProductMath math;  ///< TF32, and whether algorithms may be measured
  bool add = false;  ///< of data_gradient: it is added to what `image` holds
};

/// Whether this build knows cuDNN, and the process has it. FUSEWISE_CUDNN=0 in the environment
/// turns it off.
bool has_cudnn();

/// Computes a convolution by a deterministic algorithm with at least float32 sums. Without a graph
/// being captured, the first call of its kind measures several; the choice is cached like that of a
/// GEMM. Returns false, with nothing written, if cuDNN is missing or has no such algorithm.
bool convolve(const Context& context, const ConvolutionCall& call);

}  // namespace fusewise::cuda

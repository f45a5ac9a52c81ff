#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "fusewise/context.h"
#include "fusewise/implementation.h"
#include "fusewise/linear_act.h"
#include "fusewise/tensor.h"

/// The convolution of a LINet layer, forward and backward: S streams with weights of their own, and
/// an integrated stream that mixes them.
///
///     u_s = conv(x_s, w_s)                               with stride t and zero padding
///     y   = previous m[::t, ::t] + sum_s mix_s u_s       1x1 convolutions
///
/// Shapes: N images of H x W, and P x Q after the convolution; C_s channels of a stream before it,
/// K after it; E and D channels of the integrated stream before and after it. The first layer has
/// no m. N may be 0, every other size is at least 1. Types: float32, float64, float16 or bfloat16,
/// the same for all tensors of a call. Sums are float32 (float64 for float64); the CPU's own
/// convolution rounds partial sums of half precision. Layouts: u, y, du and dy are channels-last
/// without gaps; mix, previous, dmix and dprevious are dense; x, w, m and their gradients may have
/// any strides. Convolutions on the CPU: `Context::convolution`, or without it loops of its own. In
/// float32 and float64, channels-last, those with R = 1 or with N P Q <= K are GEMMs instead. On
/// CUDA: cuDNN, if the build has its headers, the process has libcudnn.so.9, x is channels-last and
/// not float64, and w is dense as [K, R, R, C]; else `Context::convolution`. Where t > 1, m is read
/// by a convolution too. Memory: see tensor.h; no output may overlap an input or another output.
/// Errors: `Error`, before anything is written. Exceptions of a caller's convolution pass through.
namespace fusewise {

struct LiConvStream {
  TensorView x;    ///< in, [N, C_s, H, W]
  TensorView w;    ///< in, [K, C_s, R, R]
  TensorView mix;  ///< in, [D, K]

  /// Backward: out, each may be absent, and an absent one is not computed.
  TensorView dx;    ///< [N, C_s, H, W]
  TensorView dw;    ///< [K, C_s, R, R]
  TensorView dmix;  ///< [D, K]
};

struct LiConvForward {
  std::span<const LiConvStream> streams;  ///< at least one
  TensorView m;                           ///< in, [N, E, H, W]; absent in the first layer
  TensorView previous;                    ///< in, [D, E]; absent where m is
  std::int64_t stride = 1;
  std::int64_t padding = 0;  ///< less than R; where m is given, R is odd and this is R / 2
  /// How the GEMMs are computed. The convolutions follow the settings of whoever computes them.
  ProductMath math{};

  TensorView u;  ///< out, [S, N, K, P, Q]
  TensorView y;  ///< out, [N, D, P, Q]

  std::string_view implementation = {};
};

void li_conv(const Context& context, const LiConvForward& call);
Candidates explain(const Context& context, const LiConvForward& call);

/// The gradients. du and dy are those of the two results; du does not include what reaches u
/// through y, which is added here:
///
///     g_s       = du_s + mix_s^T dy
///     dw_s, dx_s  of the convolution, from g_s
///     dmix_s    = sum over N, P, Q of dy u_s^T
///     dprevious = sum over N, P, Q of dy m[::t, ::t]^T
///     dm        = previous^T dy at the pixels that were read, 0 at the others
struct LiConvBackward {
  std::span<const LiConvStream> streams;
  TensorView m;
  TensorView previous;
  std::int64_t stride = 1;
  std::int64_t padding = 0;
  ProductMath math{};

  TensorView u;   ///< in, from forward
  TensorView du;  ///< in, [S, N, K, P, Q], laid out like u, may be absent: 0
  TensorView dy;  ///< in, [N, D, P, Q], laid out like y

  /// out, each may be absent.
  TensorView dm;         ///< [N, E, H, W]
  TensorView dprevious;  ///< [D, E]
  bool add = false;      ///< every dx and dm is added to what it holds

  std::string_view implementation = {};
};

void li_conv(const Context& context, const LiConvBackward& call);
Candidates explain(const Context& context, const LiConvBackward& call);

/// The size of an image after a convolution.
constexpr std::int64_t convolved(std::int64_t size, std::int64_t kernel, std::int64_t stride,
                                 std::int64_t padding) {
  return (size + 2 * padding - kernel) / stride + 1;
}

}  // namespace fusewise

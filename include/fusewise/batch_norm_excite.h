#pragma once

#include <string_view>

#include "fusewise/activation.h"
#include "fusewise/batch_norm.h"
#include "fusewise/context.h"
#include "fusewise/implementation.h"
#include "fusewise/squeeze_excite.h"
#include "fusewise/tensor.h"

/// BatchNorm, an activation and Squeeze-and-Excitation, forward and backward: what stands between
/// two convolutions of EfficientNet, MobileNetV3 and RegNetY. The activated tensor is no output and
/// is not kept for backward.
///
///     mean, var = mean and biased variance of x over N, H, W    (training, else the running ones)
///     a = act((x - mean) / sqrt(var + eps) * weight + bias)     [N, C, H, W]
///     p = mean over H, W of a                                   [N, C]
///     z = W1 p + b1,  h = hidden_act(z)                         [N, R]
///     g = gate(W2 h + b2)                                       [N, C]
///     y = a * g                                                 [N, C, H, W]
///
/// Types: x is float32, float64, float16 or bfloat16. All parameters and running statistics share
/// one type: x's own, or float32 if x is half precision. Statistics, pooled values, dot products
/// and gates are float32 (float64 for float64). Layouts: contiguous NCHW and channels-last are
/// native; any other strides work too, and x, y, dy and dx may each have their own. All other
/// tensors are dense. Memory: see tensor.h; no output may overlap an input or another output.
/// Errors: `Error`, before anything is written.
namespace fusewise {

struct BatchNormExciteForward {
  TensorView x;       ///< in, [N, C, H, W], N >= 0, the others >= 1
  TensorView weight;  ///< in, [C], may be absent: 1
  TensorView bias;    ///< in, [C], may be absent: 0
  TensorView w1;      ///< in, [R, C] or [R, C, 1, 1]
  TensorView b1;      ///< in, [R], may be absent
  TensorView w2;      ///< in, [C, R] or [C, R, 1, 1]
  TensorView b2;      ///< in, [C], may be absent

  /// in, and for training also out: [C], both or none. If absent, x's own statistics are used, in
  /// inference too. They are updated as by `batch_norm_act`.
  TensorView running_mean;
  TensorView running_var;
  TensorView num_batches_tracked;  ///< in and, for training, out: int64 scalar, may be absent

  Activation activation = Activation::silu;  ///< of BatchNorm, one of kBatchNormActivations
  /// Of the hidden layer, one of kSqueezeExciteActivations.
  Activation hidden_activation = Activation::silu;
  Gate gate = Gate::sigmoid;
  bool training = false;
  double momentum = 0.1;  ///< negative: 1 / num_batches_tracked, the mean over all calls
  double eps = 1e-5;

  TensorView y;  ///< out, [N, C, H, W], x's type

  /// out, for backward, statistics' type: all present or all absent.
  TensorView mean;               ///< [C]
  TensorView inverse_deviation;  ///< [C]: 1 / sqrt(var + eps)
  TensorView pooled;             ///< p [N, C]
  TensorView hidden;             ///< z [N, R], before the activation
  TensorView gates;              ///< g [N, C]

  /// Forces one implementation by name. Empty: the first that takes the call.
  std::string_view implementation = {};
};

/// Enqueues the forward on the context's stream (CUDA) or computes it (CPU).
void batch_norm_excite(const Context& context, const BatchNormExciteForward& call);
/// What `batch_norm_excite` would run, and why the others decline.
Candidates explain(const Context& context, const BatchNormExciteForward& call);

/// The gradients, with n = (x - mean) / sqrt(var + eps), v = n * weight + bias, a = act(v):
///
///     dz2 = sum_HW(dy * a) * gate'        dz = (dz2 W2) * hidden_act'
///     dW2 = dz2^T h    db2 = sum_N dz2    dW1 = dz^T p    db1 = sum_N dz
///     dv = (dy * g + (dz W1) / HW) * act'(v)
///     dweight = sum dv * n                dbias = sum dv
///     dx = weight / sqrt(var + eps) * (dv - dbias / NHW - n * dweight / NHW)    (training)
///     dx = weight / sqrt(var + eps) * dv                                        (inference)
struct BatchNormExciteBackward {
  TensorView dy;                 ///< in, [N, C, H, W], x's type
  TensorView x;                  ///< in, as in forward
  TensorView weight;             ///< in, may be absent
  TensorView bias;               ///< in, may be absent
  TensorView w1;                 ///< in
  TensorView w2;                 ///< in
  TensorView mean;               ///< in, from forward
  TensorView inverse_deviation;  ///< in, from forward
  TensorView pooled;             ///< in, from forward
  TensorView hidden;             ///< in, from forward
  TensorView gates;              ///< in, from forward

  Activation activation = Activation::silu;
  Activation hidden_activation = Activation::silu;
  Gate gate = Gate::sigmoid;
  /// Whether forward used the statistics of x.
  bool training = false;

  /// out, each may be absent, and an absent one is not computed. Gradients of parameters have the
  /// parameters' type.
  TensorView dx;       ///< [N, C, H, W], x's type
  TensorView dweight;  ///< [C]
  TensorView dbias;    ///< [C]
  TensorView dw1;      ///< [R, C] or [R, C, 1, 1]
  TensorView db1;      ///< [R]
  TensorView dw2;      ///< [C, R] or [C, R, 1, 1]
  TensorView db2;      ///< [C]

  std::string_view implementation = {};
};

void batch_norm_excite(const Context& context, const BatchNormExciteBackward& call);
Candidates explain(const Context& context, const BatchNormExciteBackward& call);

}  // namespace fusewise

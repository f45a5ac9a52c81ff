#pragma once

#include <string_view>

#include "fusewise/activation.h"
#include "fusewise/context.h"
#include "fusewise/implementation.h"
#include "fusewise/tensor.h"

/// BatchNorm, an optional residual and an activation, forward and backward, for one stream or many.
///
///     mean, var = mean and biased variance of x over N, H, W    (training, else the running ones)
///     v = (x - mean) / sqrt(var + eps) * weight + bias [+ residual]
///     y = act(v)
///
/// Shapes: x is [N, C, H, W], or [S, N, C, H, W] for S streams. Then everything that is [C] below
/// is [S, C], and what is [N] is [S, N]. Types: x is float32, float64, float16 or bfloat16. Weight,
/// bias and running statistics share one type: x's own, or float32 if x is half precision.
/// Statistics are float32 (float64 for float64). Layouts: contiguous NCHW and channels-last are
/// native; any other strides work too, and x, residual, y and their gradients may each have their
/// own. All other tensors are dense. Blanked samples: their values do not matter, NaN included.
/// They do not count in the statistics, their y is 0, and so are their dx and dresidual. Memory:
/// see tensor.h; no output and no running statistic may overlap another tensor. Errors: `Error`,
/// before anything is written.
namespace fusewise {

inline constexpr Activation kBatchNormActivations[] = {Activation::identity, Activation::relu,
                                                       Activation::relu6, Activation::silu,
                                                       Activation::hardswish};

struct BatchNormActForward {
  TensorView x;         ///< in, N >= 0, the others >= 1
  TensorView weight;    ///< in, [C], may be absent: 1
  TensorView bias;      ///< in, [C], may be absent: 0
  TensorView residual;  ///< in, x's shape and type, may be absent
  TensorView blanked;   ///< in, bool, [N], may be absent: no sample is blanked

  /// in, [3, C] or [S, 3, C], may be absent, statistics' type. For training where x is a part of
  /// what several processes have: the number of all values, their mean and biased variance. Each
  /// process gets its part of it from `batch_norm_statistics`.
  TensorView group;

  /// in, and for training also out: [C], both or none. If absent, x's own statistics are used, in
  /// inference too. Their new value is (1 - momentum) times the old one plus momentum times that of
  /// this call, where the variance is the unbiased one. A stream with fewer than two values keeps
  /// its old ones.
  TensorView running_mean;
  TensorView running_var;
  /// in and, for training, out: int64, may be absent. A scalar counts the calls. [S] counts, for
  /// each stream, those in which it had at least two values.
  TensorView num_batches_tracked;

  Activation activation = Activation::relu;  ///< one of kBatchNormActivations
  bool training = false;
  double momentum = 0.1;  ///< negative: 1 / num_batches_tracked, the mean over all calls
  double eps = 1e-5;

  TensorView y;  ///< out, x's shape and type

  /// out, for backward: all present or all absent.
  TensorView mean;               ///< [C], statistics' type
  TensorView inverse_deviation;  ///< [C]: 1 / sqrt(var + eps)
  /// out, only for relu and relu6 with a residual: a bit for each value of x, set where the
  /// gradient passes. uint8, [ceil(numel / 8)]. The values are in the order S, N, H, W, C if x's
  /// channels are adjacent in memory, else in the order S, N, C, H, W.
  TensorView passes;

  /// Forces one implementation by name. Empty: the first that takes the call.
  std::string_view implementation = {};
};

/// Enqueues the forward on the context's stream (CUDA) or computes it (CPU).
void batch_norm_act(const Context& context, const BatchNormActForward& call);
/// What `batch_norm_act` would run, and why the others decline.
Candidates explain(const Context& context, const BatchNormActForward& call);

/// The gradients, with dv = dy * act'(v) and n = (x - mean) / sqrt(var + eps), over `count` values:
///
///     dweight = sum dv * n    dbias = sum dv    dresidual = dv
///     dx = weight / sqrt(var + eps) * (dv - dbias / count - n * dweight / count)    (training)
///     dx = weight / sqrt(var + eps) * dv                                            (inference)
struct BatchNormActBackward {
  TensorView dy;                 ///< in, x's shape and type
  TensorView x;                  ///< in, as in forward
  TensorView weight;             ///< in, may be absent
  TensorView bias;               ///< in, may be absent
  TensorView residual;           ///< in, read for silu and hardswish, which need it
  TensorView blanked;            ///< in, may be absent
  TensorView mean;               ///< in, from forward
  TensorView inverse_deviation;  ///< in, from forward
  /// in, from forward. relu and relu6 need it if forward had a residual. Without it, they take
  /// their decisions again from x alone.
  TensorView passes;

  /// in, [3, C] or [S, 3, C], may be absent, statistics' type. The sums of `dgroup` over all
  /// processes.
  TensorView group;

  Activation activation = Activation::relu;
  /// Whether forward used the statistics of x, or of x and other processes' tensors.
  bool training = false;

  /// out, each may be absent, and an absent one is not computed. Gradients of weight and bias have
  /// their type and are those of x alone.
  TensorView dx;
  TensorView dweight;
  TensorView dbias;
  TensorView dresidual;
  /// [3, C] or [S, 3, C], statistics' type: the number of values, dbias and dweight of x alone. The
  /// part of this process in `group`.
  TensorView dgroup;

  std::string_view implementation = {};
};

void batch_norm_act(const Context& context, const BatchNormActBackward& call);
Candidates explain(const Context& context, const BatchNormActBackward& call);

/// BatchNorm, an activation and a max-pool of 3 x 3 values with stride 2 and padding 1, as at the
/// start of a ResNet. Everything as above, without a residual:
///
///     y = max_pool(act(v))    [N, C, ceil(H / 2), ceil(W / 2)]
///
/// The values are compared as they would be stored, in y's type. Of equal ones, the first in the
/// order of rows is taken; of several NaN, the last one. act(v) is never written.
struct BatchNormActPoolForward {
  TensorView x;
  TensorView weight;
  TensorView bias;
  TensorView blanked;
  TensorView group;
  TensorView running_mean;
  TensorView running_var;
  TensorView num_batches_tracked;

  Activation activation = Activation::relu;
  bool training = false;
  double momentum = 0.1;
  double eps = 1e-5;

  TensorView y;  ///< out

  /// out, for backward: all present or all absent.
  TensorView mean;
  TensorView inverse_deviation;
  /// For each value of y, which of the 3 x 3 it is: 0 to 8, in the order of rows. uint8, [numel of
  /// y]. In the order S, N, H, W, C if x's channels are adjacent in memory, else S, N, C, H, W.
  TensorView choices;

  std::string_view implementation = {};
};

void batch_norm_act_pool(const Context& context, const BatchNormActPoolForward& call);
Candidates explain(const Context& context, const BatchNormActPoolForward& call);

/// The gradients as above. The gradient of a value of y belongs to the value of x that was chosen.
struct BatchNormActPoolBackward {
  TensorView dy;  ///< in, y's shape
  TensorView x;
  TensorView weight;
  TensorView bias;
  TensorView blanked;
  TensorView mean;
  TensorView inverse_deviation;
  TensorView choices;
  TensorView group;

  Activation activation = Activation::relu;
  bool training = false;

  /// out, each may be absent.
  TensorView dx;
  TensorView dweight;
  TensorView dbias;
  TensorView dgroup;

  std::string_view implementation = {};
};

void batch_norm_act_pool(const Context& context, const BatchNormActPoolBackward& call);
Candidates explain(const Context& context, const BatchNormActPoolBackward& call);

/// The statistics of x alone. Several processes combine theirs into forward's `group`.
struct BatchNormStatistics {
  TensorView x;        ///< in, as in forward
  TensorView blanked;  ///< in, may be absent

  /// out, [3, C] or [S, 3, C], statistics' type: the number of values, their mean and biased
  /// variance, which are 0 where there are no values.
  TensorView statistics;

  std::string_view implementation = {};
};

void batch_norm_statistics(const Context& context, const BatchNormStatistics& call);
Candidates explain(const Context& context, const BatchNormStatistics& call);

}  // namespace fusewise

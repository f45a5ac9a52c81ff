#pragma once

#include <string_view>

#include "fusewise/activation.h"
#include "fusewise/context.h"
#include "fusewise/implementation.h"
#include "fusewise/tensor.h"

/// Squeeze-and-Excitation, forward and backward.
///
///     p = mean over H, W of x            [N, C]
///     z = W1 p + b1,  h = act(z)         [N, R]
///     g = gate(W2 h + b2)                [N, C]
///     y = x * g                          [N, C, H, W]
///
/// Types: x is float32, float64, float16 or bfloat16. The four weights share one type: x's own, or
/// float32 if x is half precision. Pooled values, dot products and gates are float32 (float64 for
/// float64).
/// Layouts: contiguous NCHW and channels-last are native; any other strides work too, and x, y, dy
/// and dx may each have their own. Weights, biases and their gradients are dense.
/// Memory: see tensor.h; no output may overlap an input or another output.
/// Errors: `Error`, before anything is written.
namespace fusewise {

enum class Gate { sigmoid, hardsigmoid };
inline constexpr Gate kGates[] = {Gate::sigmoid, Gate::hardsigmoid};

/// "sigmoid", "hardsigmoid".
constexpr const char* name_of(Gate gate) {
  return gate == Gate::sigmoid ? "sigmoid" : "hardsigmoid";
}

inline constexpr Activation kSqueezeExciteActivations[] = {Activation::silu, Activation::relu,
                                                           Activation::hardswish};

/// From a name such as "sigmoid". Throws Error that lists the known names.
Gate gate_from(std::string_view name);

struct SqueezeExciteForward {
  TensorView x;                              ///< in, [N, C, H, W], N >= 0, the others >= 1
  TensorView w1;                             ///< in, [R, C] or [R, C, 1, 1]
  TensorView b1;                             ///< in, [R], may be absent
  TensorView w2;                             ///< in, [C, R] or [C, R, 1, 1]
  TensorView b2;                             ///< in, [C], may be absent
  Activation activation = Activation::silu;  ///< one of kSqueezeExciteActivations
  Gate gate = Gate::sigmoid;
  TensorView y;  ///< out, [N, C, H, W], x's type

  /// out, for backward, float32 (float64 for float64): all three present or all absent.
  TensorView pooled;  ///< p [N, C]
  TensorView hidden;  ///< z [N, R], before the activation
  TensorView gates;   ///< g [N, C]

  /// Forces one implementation by name. Empty: the first that takes the call.
  std::string_view implementation = {};
};

/// Enqueues the forward on the context's stream (CUDA) or computes it (CPU).
void squeeze_excite(const Context& context, const SqueezeExciteForward& call);
/// What `squeeze_excite` would run, and why the others decline.
Candidates explain(const Context& context, const SqueezeExciteForward& call);

/// The gradients, with dz2 = sum_HW(dy * x) * gate', dz = (dz2 W2) * act':
///
///     dx = dy * g + (dz W1) / HW      dW2 = dz2^T h    db2 = sum_N dz2
///                                     dW1 = dz^T p     db1 = sum_N dz
struct SqueezeExciteBackward {
  TensorView dy;      ///< in, [N, C, H, W], x's type
  TensorView x;       ///< in, as in forward
  TensorView w1;      ///< in
  TensorView w2;      ///< in
  TensorView pooled;  ///< in, from forward
  TensorView hidden;  ///< in, from forward
  TensorView gates;   ///< in, from forward
  Activation activation = Activation::silu;
  Gate gate = Gate::sigmoid;

  /// out, each may be absent, and an absent one is not computed. Gradients of weights and biases
  /// have the weights' type.
  TensorView dx;   ///< [N, C, H, W], x's type
  TensorView dw1;  ///< [R, C] or [R, C, 1, 1]
  TensorView db1;  ///< [R]
  TensorView dw2;  ///< [C, R] or [C, R, 1, 1]
  TensorView db2;  ///< [C]

  std::string_view implementation = {};
};

void squeeze_excite(const Context& context, const SqueezeExciteBackward& call);
Candidates explain(const Context& context, const SqueezeExciteBackward& call);

}  // namespace fusewise

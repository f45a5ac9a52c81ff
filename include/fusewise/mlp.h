#pragma once

#include <span>

#include "fusewise/linear_act.h"

/// A stack of linear maps with activations, forward and backward:
///
///     y_0 = x,    y_i = act_i(y_{i-1} W_i^T + b_i)    for i = 1 ... n
///
/// All but the last have one activation, the last its own. Types, layouts and errors are those of
/// linear_act.h. No output may overlap an input or another output, except that forward may write y
/// of layers that are not neighbours to the same memory.
namespace fusewise {

struct MlpLayer {
  TensorView w;  ///< in, [K_i, K_{i-1}]
  TensorView b;  ///< in, [K_i], may be absent
  TensorView y;  ///< forward: out, backward: in, [M, K_i], rows adjacent
  /// Forward: out, may be absent; backward: in. What linear_act keeps, except that for relu only
  /// the last layer needs it: the others have y.
  TensorView kept;
  /// Backward: out, each may be absent.
  TensorView dw;  ///< [K_i, K_{i-1}]
  TensorView db;  ///< [K_i]
};

struct MlpForward {
  TensorView x;  ///< in, [M, K_0]
  std::span<const MlpLayer> layers;
  Activation activation = Activation::relu;
  Activation final_activation = Activation::identity;
  ProductMath math{};
};

void mlp(const Context& context, const MlpForward& call);

struct MlpBackward {
  TensorView dy;  ///< in, [M, K_n], any strides
  TensorView x;   ///< in
  std::span<const MlpLayer> layers;
  Activation activation = Activation::relu;
  Activation final_activation = Activation::identity;
  ProductMath math{};
  TensorView dx;  ///< out, [M, K_0], may be absent
};

void mlp(const Context& context, const MlpBackward& call);

}  // namespace fusewise

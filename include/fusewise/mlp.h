#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "fusewise/linear_act.h"

/// A stack of linear maps with activations, forward and backward:
///
///     y_0 = x,    y_i = act_i(y_{i-1} W_i^T + b_i)    for i = 1 ... n
///
/// All but the last have one activation, the last its own. Types, layouts and errors are those of
/// linear_act.h. No output may overlap an input or another output, except that forward may write y
/// of layers that are not neighbours to the same memory.
namespace fusewise {

/// Whether backward of a layer needs what forward keeps. Of a hidden relu, its gradient is
/// recomputed from its output, which the next layer's backward reads anyway.
constexpr bool is_kept(Activation activation, bool last) {
  return activation != Activation::identity && (last || activation != Activation::relu);
}

struct MlpLayer {
  TensorView w;  ///< in, [K_i, K_{i-1}]
  TensorView b;  ///< in, [K_i], may be absent
  /// Forward: out, backward: in, [M, K_i], rows adjacent. Backward does not need the last layer's.
  TensorView y;
  /// Forward: out, may be absent; backward: in, where `is_kept`. What linear_act keeps.
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
  /// Of linear_act, forced for every layer.
  std::string_view implementation = {};
};

void mlp(const Context& context, const MlpForward& call);
/// Of each layer, in order, what linear_act's `explain` answers.
std::vector<Candidates> explain(const Context& context, const MlpForward& call);

struct MlpBackward {
  TensorView dy;  ///< in, [M, K_n], any strides
  TensorView x;   ///< in
  std::span<const MlpLayer> layers;
  Activation activation = Activation::relu;
  Activation final_activation = Activation::identity;
  ProductMath math{};
  TensorView dx;  ///< out, [M, K_0], may be absent
  std::string_view implementation = {};
};

void mlp(const Context& context, const MlpBackward& call);
/// As forward's; nothing for a layer that has no gradient to compute.
std::vector<Candidates> explain(const Context& context, const MlpBackward& call);

}  // namespace fusewise

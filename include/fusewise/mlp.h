#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "fusewise/linear_act.h"

/// A stack of linear maps with activations, forward and backward:
///
///     y_0 = x,    y_i = act_i(y_{i-1} W_i^T + b_i)    for i = 1 ... n
///
/// All layers but the last share one activation; the last has its own. Types, layouts and errors
/// are those of linear_act.h. No output may overlap an input or another output, except that forward
/// may write the y of non-adjacent layers to the same memory.
namespace fusewise {

/// Whether backward of a layer needs a tensor saved by forward. The gradient of a hidden relu is
/// recomputed from its output, which the next layer's backward reads anyway.
constexpr bool is_kept(Activation activation, bool last) {
  return activation != Activation::identity && (last || activation != Activation::relu);
}

struct MlpLayer {
  TensorView w;  ///< in, [K_i, K_{i-1}]
  TensorView b;  ///< in, [K_i], may be absent
  /// Forward: out, backward: in, [M, K_i], rows contiguous. Backward does not need the last
  /// layer's.
  TensorView y;
  /// Forward: out, may be absent; backward: in, if `is_kept`. The tensor that linear_act saves.
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
  /// An implementation of linear_act, forced for every layer.
  std::string_view implementation = {};
};

void mlp(const Context& context, const MlpForward& call);
/// The answers of linear_act's `explain` for each layer, in order.
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
/// As for forward. Empty for a layer that has no gradient to compute.
std::vector<Candidates> explain(const Context& context, const MlpBackward& call);

}  // namespace fusewise

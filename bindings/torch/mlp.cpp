// Stacks of linear + activation for torch: allocation and the calls; the core does the rest.
// Compiled once per device: FUSEWISE_DEVICE is CPU or CUDA.
//
// This operator is bound by hand. A description lists an operator's tensors one by one, but a stack
// has as many as its layers need. The checks are not here: the core's `mlp` checks each layer with
// linear_act's description.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "call.h"
#include "common/check.h"
#include "common/linear_act.h"
#include "fusewise/mlp.h"
#include "text.h"

namespace fusewise::binding {
namespace {

/// A tensor [..., K] as the matrix [M, K]. If it is a copy of the tensor, also the owner of that.
struct HeldView {
  TensorView view;
  std::optional<Tensor> copy;
};

HeldView held_view(const char* name, const Tensor& tensor, Layout layout, bool leading = true) {
  HeldView held;
  held.copy = point_at(held.view, name, tensor, layout, leading);
  return held;
}

HeldView weight_view(const Tensor& w) { return held_view("w", w, Layout::matrix, false); }

std::int64_t rows_in(const TensorView& t) { return t.rank >= 1 ? t.sizes[0] : 0; }

/// Allocates what backward needs of a layer with m rows and n columns.
Tensor new_kept(const Tensor& x, Activation activation, DType dtype, std::int64_t m,
                std::int64_t n) {
  if (activation == Activation::relu) return new_dense(x, DType::u8, {m, bit_bytes(n)});
  return new_dense(x, dtype, {m, n});
}

/// A gradient in the shape and strides of `like`. Empty if it is not wanted.
class Gradient {
 public:
  Gradient(const Tensor& like, DType dtype, bool wanted)
      : tensor_(wanted ? new_like(like) : new_dense(like, dtype, {0})) {
    if (wanted) copy_ = point_at(view_, "gradient", tensor_, Layout::matrix, true);
  }
  /// Absent if it is not wanted.
  const TensorView& view() const { return view_; }
  /// If no GEMM can write these strides, a dense copy was written, which is copied back here.
  Tensor finished() {
    if (copy_.has_value()) copy(*copy_, tensor_);
    return tensor_;
  }

 private:
  Tensor tensor_;
  std::optional<Tensor> copy_;
  TensorView view_;
};

template <typename Call>
void set_options(Call& call, const Text& activation, const Text& final_activation, ProductMath math,
                 const Text& implementation) {
  const auto words = kLinearAct.rules.choices[0].values;
  call.activation = kActivations[check_choice({"activation", words}, activation)];
  call.final_activation = kActivations[check_choice({"final_activation", words}, final_activation)];
  call.math = math;
  call.implementation = implementation;
}

template <typename Call>
bool is_kept(const Call& call, std::size_t layer, std::size_t layers) {
  const bool last = layer + 1 == layers;
  return is_kept(last ? call.final_activation : call.activation, last);
}

/// Throws the first layer's message for a scalar x, which has no shape for the results.
void refuse_scalar(const TensorView& x, const MlpLayer& layer, Device device) {
  LinearActForward call;
  call.x = x;
  call.w = layer.w;
  call.b = layer.b;
  in_layer(0, [&] {
    check_tensors(kLinearAct.rules, GivenTensors(kLinearAct, call, GivenTensors::Which::inputs),
                  device);
  });
}

/// Returns y. For backward, also returns the outputs of all layers but the last, followed by the
/// tensors that layers saved.
std::tuple<Tensor, std::vector<Tensor>> mlp_forward(
    const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
    const Text& activation, const Text& final_activation, bool save, bool tf32, bool reduced_sums,
    bool tune, const Text& implementation) {
  const CallContext context(x);
  MlpForward call;
  set_options(call, activation, final_activation, {tf32, reduced_sums, tune}, implementation);
  const std::size_t layers = weights.size();
  check(layers >= 1, "weights: expected at least one");
  check(biases.empty() || biases.size() == layers, "biases: expected ", layers,
        ", one per weight, got ", biases.size());
  const HeldView x_held = in_layer(0, [&] { return held_view("x", x, Layout::matrix); });
  call.x = x_held.view;
  const DType dtype = call.x.dtype;
  const std::int64_t m = call.x.sizes[0];
  std::vector<HeldView> w(layers);
  std::vector<HeldView> b(biases.size());
  std::vector<MlpLayer> views(layers);
  std::int64_t widest[2] = {0, 0};  // of the hidden layers with even and with odd numbers
  for (std::size_t i = 0; i < layers; ++i) {
    in_layer(i, [&] {
      w[i] = weight_view(weights[i]);
      views[i].w = w[i].view;
      if (biases.empty()) return;
      b[i] = held_view("b", biases[i], Layout::dense, false);
      views[i].b = b[i].view;
    });
    if (i + 1 < layers) widest[i % 2] = std::max(widest[i % 2], rows_in(views[i].w));
  }
  if (call.x.rank == 0) refuse_scalar(call.x, views[0], context.get().device);

  std::vector<Tensor> saved, kept;
  const std::size_t last = layers - 1;
  const std::int64_t columns = rows_in(views[last].w);
  const Tensor y = new_with_last(x, dtype, columns);
  views[last].y = held_view("y", y, Layout::rows).view;
  // Outputs that are not saved alternate between two places. One of them is y, if they fit there.
  std::optional<Tensor> places[2];
  if (widest[last % 2] <= columns) places[last % 2] = y;
  for (std::size_t i = 0; i < layers; ++i) {
    const std::int64_t n = rows_in(views[i].w);
    if (save && i < last) {
      saved.push_back(new_with_last(x, dtype, n));
      views[i].y = held_view("y", saved.back(), Layout::rows).view;
    } else if (i < last) {
      std::optional<Tensor>& place = places[i % 2];
      if (!place.has_value()) place = new_dense(x, dtype, {m * widest[i % 2]});
      views[i].y = {place->mutable_data_ptr(), dtype, context.get().device, {m, n}};
    }
    if (save && is_kept(call, i, layers)) {
      kept.push_back(new_kept(x, i == last ? call.final_activation : call.activation, dtype, m, n));
      views[i].kept = held_view("kept", kept.back(), Layout::rows).view;
    }
  }
  call.layers = views;
  mlp(context.get(), call);
  saved.insert(saved.end(), kept.begin(), kept.end());
  return {y, saved};
}

/// Returns dx, then dW and then db of every layer. Those not needed are empty.
std::vector<Tensor> mlp_backward(const Tensor& dy, const Tensor& x,
                                 const std::vector<Tensor>& weights,
                                 const std::vector<Tensor>& saved, const Text& activation,
                                 const Text& final_activation, bool need_dx,
                                 const std::vector<std::int64_t>& needs, bool tf32,
                                 bool reduced_sums, bool tune, const Text& implementation) {
  const CallContext context(x);
  MlpBackward call;
  set_options(call, activation, final_activation, {tf32, reduced_sums, tune}, implementation);
  const std::size_t layers = weights.size();
  std::size_t expected = layers - 1;
  for (std::size_t i = 0; i < layers; ++i) expected += is_kept(call, i, layers);
  check(saved.size() == expected && needs.size() == 2 * layers, "saved: expected the ", expected,
        " tensors that forward saved, got ", saved.size());

  const HeldView dy_held = held_view("dy", dy, Layout::any),
                 x_held = held_view("x", x, Layout::matrix);
  call.dy = dy_held.view;
  call.x = x_held.view;
  const DType dtype = call.dy.dtype;
  std::vector<HeldView> held;  // weights and saved tensors
  std::vector<Gradient> dw;
  std::vector<Tensor> db;
  std::vector<MlpLayer> views(layers);
  const auto hold = [&](HeldView each) { return held.emplace_back(std::move(each)).view; };
  for (std::size_t i = 0, next = layers - 1; i < layers; ++i) {
    MlpLayer& layer = views[i];
    layer.w = hold(weight_view(weights[i]));
    if (i + 1 < layers) layer.y = hold(held_view("y", saved[i], Layout::rows));
    if (is_kept(call, i, layers)) layer.kept = hold(held_view("kept", saved[next++], Layout::rows));
    layer.dw = dw.emplace_back(weights[i], dtype, needs[i] != 0).view();
    db.push_back(new_dense(x, dtype, {needs[layers + i] ? layer.w.sizes[0] : 0}));
    if (needs[layers + i]) layer.db = view_of("db", db.back());
  }
  Gradient dx(x, dtype, need_dx);
  call.dx = dx.view();
  call.layers = views;
  mlp(context.get(), call);
  std::vector<Tensor> found{dx.finished()};
  for (Gradient& gradient : dw) found.push_back(gradient.finished());
  found.insert(found.end(), db.begin(), db.end());
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusewise, FUSEWISE_DEVICE, m) {
  m.impl("_mlp", TORCH_BOX(&mlp_forward));
  m.impl("_mlp_backward", TORCH_BOX(&mlp_backward));
}

#ifndef FUSEWISE_CUDA_VERSION  // no tensors, so no device: only the CPU library has it
namespace {

bool mlp_is_kept(const Text& activation, bool last) {
  return is_kept(activation_from(activation), last);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusewise, CompositeExplicitAutograd, m) {
  m.impl("_mlp_is_kept", TORCH_BOX(&mlp_is_kept));
}
#endif

}  // namespace fusewise::binding

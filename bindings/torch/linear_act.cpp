// Linear + activation and stacks of it for torch: allocation and the calls; the core does the rest.
// Compiled once for each device: FUSEWISE_DEVICE is CPU or CUDA.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "call.h"
#include "common/check.h"
#include "common/matrix.h"
#include "fusewise/mlp.h"
#include "text.h"

namespace fusewise::binding {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Sizes = std::vector<std::int64_t>;

Sizes sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

/// x's leading sizes, and `last` behind them.
Sizes with_last(const Tensor& x, std::int64_t last) {
  Sizes sizes = sizes_of(x);
  sizes.back() = last;
  return sizes;
}

/// A tensor [..., K] as the matrix [M, K], and whoever holds its memory.
struct Rows {
  Tensor tensor;
  TensorView view;
};

/// Without a copy where the leading dimensions can be walked as one, and, for `operand`, where
/// GEMMs take it.
Rows rows_of(const char* name, const Tensor& tensor, bool operand) {
  check(tensor.dim() >= 1, name, ": expected at least 1 dimension, got a scalar");
  TensorView view = kind_of(name, tensor);
  view.rank = 2;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const int last = static_cast<int>(sizes.size()) - 1;
  view.sizes[0] = 1;
  view.sizes[1] = sizes[last];
  view.strides[0] = sizes[last];
  view.strides[1] = strides[last];
  bool joined = true;
  for (int d = last - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (view.sizes[0] == 1) view.strides[0] = strides[d];
    joined = joined && strides[d] == view.strides[0] * view.sizes[0];
    view.sizes[0] *= sizes[d];
  }
  if ((joined && (!operand || is_matrix(view))) || tensor.numel() == 0) return {tensor, view};
  return rows_of(name, dense(tensor), operand);
}

/// The core's checks say what is wrong with a weight that is no matrix.
Rows weight_rows(const Tensor& w) {
  return w.dim() == 2 ? rows_of("w", w, true) : Rows{w, view_of("w", w)};
}

std::int64_t rows_in(const TensorView& t) { return t.rank >= 1 ? t.sizes[0] : 0; }

/// What backward needs of a layer with m rows; y has the shape `shape`.
Tensor new_kept(const Tensor& x, Activation activation, DType dtype, std::int64_t m,
                const Sizes& shape) {
  if (activation == Activation::relu) return new_dense(x, DType::u8, {m, bit_bytes(shape.back())});
  return new_dense(x, dtype, shape);
}

/// A gradient in the shape and strides of `like`; empty where it is not wanted.
class Gradient {
 public:
  Gradient(const Tensor& like, DType dtype, bool wanted)
      : tensor_(wanted ? new_like(like) : new_dense(like, dtype, {0})) {
    if (wanted) rows_ = rows_of("gradient", tensor_, true);
  }
  /// Absent where it is not wanted.
  const TensorView& view() const { return rows_.view; }
  /// Where no GEMM can write its strides, a dense one was written.
  Tensor finished() {
    if (view().defined() && view().data != tensor_.const_data_ptr()) {
      torch::stable::copy_(tensor_, rows_.tensor);
    }
    return tensor_;
  }

 private:
  Tensor tensor_;
  Rows rows_;
};

void check_gradient(const TensorView& dy, const TensorView& x, const TensorView& w) {
  check(dy.sizes[0] == x.sizes[0] && dy.sizes[1] == w.sizes[0], "dy: expected [", x.sizes[0], ", ",
        w.sizes[0], "], got ", dy);
  check(dy.dtype == x.dtype, "dy: expected dtype ", x.dtype, ", got ", dy.dtype);
}

// One layer. -------------------------------------------------------------------------------------

/// A call, and who holds its memory.
struct Forward {
  Rows x, w;
  OptionalTensor b;
  Tensor y, kept;  // kept is empty where nothing is
  LinearActForward call;

  Forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
          const Text& activation, bool save)
      : x(rows_of("x", input, true)), w(weight_rows(weight)), b(dense(bias)) {
    call.x = x.view;
    call.w = w.view;
    call.b = view_of("b", b);
    call.activation = activation_from(activation);
    const DType dtype = call.x.dtype;
    const Sizes shape = with_last(input, rows_in(call.w));
    y = new_dense(input, dtype, shape);
    call.y = rows_of("y", y, true).view;
    if (save && call.activation != Activation::identity) {
      kept = new_kept(input, call.activation, dtype, call.x.sizes[0], shape);
      call.kept = rows_of("kept", kept, true).view;
    } else {
      kept = new_dense(input, dtype, {0});
    }
  }
};

std::tuple<Tensor, Tensor> linear_act_forward(const Tensor& x, const Tensor& w,
                                              const OptionalTensor& b, const Text& activation,
                                              bool save, bool tf32, bool reduced_sums, bool tune,
                                              const Text& implementation) {
  const CallContext context(x);
  Forward forward(x, w, b, activation, save);
  forward.call.math = {tf32, reduced_sums, tune};
  forward.call.implementation = implementation;
  linear_act(context.get(), forward.call);
  return {forward.y, forward.kept};
}

std::tuple<Tensor, Tensor, Tensor> linear_act_backward(const Tensor& dy, const Tensor& x,
                                                       const Tensor& w, const Tensor& kept,
                                                       const Text& activation, bool need_dx,
                                                       bool need_dw, bool need_db, bool tf32,
                                                       bool reduced_sums, bool tune,
                                                       const Text& implementation) {
  const CallContext context(x);
  // Where no GEMM reads it, x is but a shape: nothing is made of it.
  const Rows dy_rows = rows_of("dy", dy, false), x_rows = rows_of("x", x, need_dw),
             w_rows = rows_of("w", w, need_dx);
  LinearActBackward call;
  call.dy = dy_rows.view;
  call.x = x_rows.view;
  call.w = w_rows.view;
  check_gradient(call.dy, call.x, call.w);
  call.activation = activation_from(activation);
  Rows kept_rows;
  if (call.activation != Activation::identity) kept_rows = rows_of("kept", dense(kept), true);
  call.kept = kept_rows.view;
  call.math = {tf32, reduced_sums, tune};
  call.implementation = implementation;
  const DType dtype = call.dy.dtype;
  Gradient dx(x, dtype, need_dx), dw(w, dtype, need_dw);
  const Tensor db = new_dense(x, dtype, {need_db ? call.dy.sizes[1] : 0});
  call.dx = dx.view();
  call.dw = dw.view();
  if (need_db) call.db = view_of("db", db);
  linear_act(context.get(), call);
  return {dx.finished(), dw.finished(), db};
}

/// What would run may have to be measured, on the tensors of a call.
std::string linear_act_explain(const Tensor& x, const Tensor& w, const OptionalTensor& b,
                               const Text& activation, bool save, bool backward, bool tf32,
                               bool reduced_sums, bool tune, const Text& implementation) {
  const CallContext context(x);
  Forward forward(x, w, b, activation, save || backward);
  forward.call.math = {tf32, reduced_sums, tune};
  forward.call.implementation = implementation;
  if (!backward) return to_text(explain(context.get(), forward.call));
  LinearActBackward call;
  call.dy = forward.call.y;
  call.x = call.dx = forward.call.x;
  call.w = call.dw = forward.call.w;
  call.kept = forward.call.kept;
  call.activation = forward.call.activation;
  call.math = forward.call.math;
  call.implementation = implementation;
  return to_text(explain(context.get(), call));
}

// Stacks. ----------------------------------------------------------------------------------------

template <typename Call>
void set_options(Call& call, const Text& activation, const Text& final_activation, ProductMath math,
                 const Text& implementation) {
  call.activation = activation_from(activation);
  call.final_activation = activation_from(final_activation);
  call.math = math;
  call.implementation = implementation;
}

template <typename Call>
bool is_kept(const Call& call, std::size_t layer, std::size_t layers) {
  const bool last = layer + 1 == layers;
  return is_kept(last ? call.final_activation : call.activation, last);
}

/// y, and for backward the outputs of all layers but the last, then what those that keep something
/// have kept.
std::tuple<Tensor, std::vector<Tensor>> mlp_forward(
    const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
    const Text& activation, const Text& final_activation, bool save, bool tf32, bool reduced_sums,
    bool tune, const Text& implementation) {
  const CallContext context(x);
  MlpForward call;
  set_options(call, activation, final_activation, {tf32, reduced_sums, tune}, implementation);
  const std::size_t layers = weights.size();
  check(layers >= 1, "weights: expected at least one");
  check(biases.empty() || biases.size() == layers, "biases: expected none or ", layers, ", got ",
        biases.size());
  const Rows x_rows = in_layer(0, [&] { return rows_of("x", x, true); });
  call.x = x_rows.view;
  const DType dtype = call.x.dtype;
  const std::int64_t m = call.x.sizes[0];
  std::vector<Rows> w(layers);
  std::vector<Tensor> b(biases.size());
  std::vector<MlpLayer> views(layers);
  std::int64_t widest[2] = {0, 0};  // of the hidden layers with even and with odd numbers
  for (std::size_t i = 0; i < layers; ++i) {
    in_layer(i, [&] {
      w[i] = weight_rows(weights[i]);
      views[i].w = w[i].view;
      if (biases.empty()) return;
      b[i] = dense(biases[i]);
      views[i].b = view_of("b", b[i]);
    });
    if (i + 1 < layers) widest[i % 2] = std::max(widest[i % 2], rows_in(views[i].w));
  }

  std::vector<Tensor> saved, kept;
  Tensor y, scratch[2];  // unless they are saved, neighbours' outputs alternate between these
  for (std::size_t i = 0; i < layers; ++i) {
    const std::int64_t n = rows_in(views[i].w);
    const Sizes shape = with_last(x, n);
    if (save || i + 1 == layers) {
      y = new_dense(x, dtype, shape);
      views[i].y = rows_of("y", y, true).view;
      if (i + 1 < layers) saved.push_back(y);
    } else {
      if (i < 2) scratch[i] = new_dense(x, dtype, {m * widest[i]});
      const TensorView memory = view_of("y", scratch[i % 2]);
      views[i].y = {memory.data, memory.dtype, memory.device, {m, n}};
    }
    if (save && is_kept(call, i, layers)) {
      const bool last = i + 1 == layers;
      kept.push_back(new_kept(x, last ? call.final_activation : call.activation, dtype, m, shape));
      views[i].kept = rows_of("kept", kept.back(), true).view;
    }
  }
  call.layers = views;
  mlp(context.get(), call);
  saved.insert(saved.end(), kept.begin(), kept.end());
  return {y, saved};
}

/// dx, then dW and then db of every layer; what is not needed is empty.
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

  const Rows dy_rows = rows_of("dy", dy, false), x_rows = rows_of("x", x, true);
  call.dy = dy_rows.view;
  call.x = x_rows.view;
  const DType dtype = call.dy.dtype;
  std::vector<Rows> held;  // weights, and what was saved
  std::vector<Gradient> dw;
  std::vector<Tensor> db;
  std::vector<MlpLayer> views(layers);
  const auto hold = [&](const Rows& rows) { return held.emplace_back(rows).view; };
  for (std::size_t i = 0, next = layers - 1; i < layers; ++i) {
    MlpLayer& layer = views[i];
    layer.w = hold(rows_of("w", weights[i], true));
    if (i + 1 < layers) layer.y = hold(rows_of("y", dense(saved[i]), true));
    if (is_kept(call, i, layers)) layer.kept = hold(rows_of("kept", dense(saved[next++]), true));
    layer.dw = dw.emplace_back(weights[i], dtype, needs[i] != 0).view();
    db.push_back(new_dense(x, dtype, {needs[layers + i] ? layer.w.sizes[0] : 0}));
    if (needs[layers + i]) layer.db = view_of("db", db.back());
  }
  in_layer(layers - 1, [&] {
    check_gradient(call.dy, layers > 1 ? views[layers - 2].y : call.x, views.back().w);
  });
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
  m.impl("_linear_act", TORCH_BOX(&linear_act_forward));
  m.impl("_linear_act_backward", TORCH_BOX(&linear_act_backward));
  m.impl("_linear_act_explain", TORCH_BOX(&linear_act_explain));
  m.impl("_mlp", TORCH_BOX(&mlp_forward));
  m.impl("_mlp_backward", TORCH_BOX(&mlp_backward));
}

#ifndef FUSEWISE_CUDA_VERSION  // no tensors, so no device: the CPU library has it
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

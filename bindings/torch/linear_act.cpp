// Linear + activation and stacks of it for torch: allocation and the calls; the core does the
// checks. On the CPU torch's own libraries do the products, and the core the rest.
// Compiled once for each device: FUSEWISE_DEVICE is CPU or CUDA.

#include "fusewise/linear_act.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "call.h"
#include "common/check.h"
#include "common/linear_act.h"
#include "common/matrix.h"
#include "products.h"
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

bool is_usable(const TensorView& t) { return has_adjacent_rows(t) || has_adjacent_columns(t); }

/// A tensor [..., K] as the matrix [M, K], and whoever holds its memory.
struct Rows {
  Tensor tensor;
  TensorView view;
};

/// Without a copy where the leading dimensions can be walked as one, and, for `operand`, where
/// libraries of products take it.
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
  if ((joined && (!operand || is_usable(view))) || tensor.numel() == 0) return {tensor, view};
  return rows_of(name, dense(tensor), operand);
}

struct Settings {
  Activation activation;
  ProductMath math;
  const Text& implementation;
};

/// What forward needs besides y, and what it keeps of it. Nothing is empty.
struct Forward {
  Tensor y, kept;
};

bool keeps_z(Activation activation) {
  return activation != Activation::identity && activation != Activation::relu;
}

LinearActForward forward_call(const TensorView& x, const TensorView& w, const TensorView& b,
                              const Settings& settings) {
  LinearActForward call;
  call.x = x;
  call.w = w;
  call.b = b;
  call.activation = settings.activation;
  call.math = settings.math;
  call.implementation = settings.implementation;
  return call;
}

/// A view of what is not there yet, for checks and for those who ask what would run.
TensorView imagined(const TensorView& like, DType dtype, std::int64_t rows, std::int64_t columns) {
  static char somewhere;
  return TensorView(&somewhere, dtype, like.device, {rows, columns});
}

std::int64_t rows_in(const TensorView& t) { return t.rank >= 1 ? t.sizes[0] : 0; }

Forward forward(const CallContext& context, const Tensor& x, const Tensor& w,
                const OptionalTensor& b, const Settings& settings, bool save) {
  const Rows x_rows = rows_of("x", x, true);
  const Rows w_rows = w.dim() == 2 ? rows_of("w", w, true) : Rows{w, view_of("w", w)};
  const OptionalTensor b_dense = dense(b);
  LinearActForward call = forward_call(x_rows.view, w_rows.view, view_of("b", b_dense), settings);
  const std::int64_t m = call.x.sizes[0], n = rows_in(call.w);
  const DType dtype = call.x.dtype;
  call.y = imagined(call.x, dtype, m, n);
  check_call(context.get(), call);

  const bool relu = settings.activation == Activation::relu;
  const bool z_kept = save && keeps_z(settings.activation);
  const Sizes shape = with_last(x, n);
  Forward result;
  if (x.is_cpu()) {
    const Tensor z = linear(x, w, b_dense);
    call.z = rows_of("z", z, true).view;
    result.y = z_kept ? new_dense(x, dtype, shape) : z;
    result.kept = z_kept ? z : new_dense(x, dtype, {0});
  } else {
    result.y = new_dense(x, dtype, shape);
    result.kept = new_dense(x, dtype, z_kept ? shape : Sizes{0});
  }
  if (save && relu) result.kept = new_dense(x, DType::u8, {m, bit_bytes(n)});
  call.y = rows_of("y", result.y, true).view;
  if (save && settings.activation != Activation::identity) {
    call.kept = rows_of("kept", result.kept, true).view;
  }
  linear_act(context.get(), call);
  return result;
}

struct Backward {
  Tensor dx, dw, db;
};

struct Needs {
  bool dx, dw, db;
};

/// A gradient like `tensor`; empty where it is not wanted.
Tensor gradient_of(const Tensor& tensor, DType dtype, bool needed) {
  return needed ? new_like(tensor) : new_dense(tensor, dtype, {0});
}

/// A product's result as a tensor of the shape and strides of `like`.
Tensor laid_out_as(const Tensor& like, const Tensor& result) {
  if (like.is_contiguous()) return torch::stable::reshape(result, sizes_of(like));
  Tensor out = new_like(like);
  torch::stable::copy_(out, torch::stable::reshape(result, sizes_of(like)));
  return out;
}

/// `dy` may be overwritten where it is `ours`.
Backward backward(const CallContext& context, const Tensor& dy, const Tensor& x, const Tensor& w,
                  const Tensor& kept, const Settings& settings, Needs needs, bool ours) {
  const Rows dy_rows = rows_of("dy", dy, false);
  LinearActBackward call;
  call.dy = dy_rows.view;
  const std::int64_t m = call.dy.sizes[0], n = call.dy.sizes[1];
  const DType dtype = call.dy.dtype;
  // Where no product reads it, x is but a shape: nothing is made of it.
  const Rows x_rows = rows_of("x", x, needs.dw), w_rows = rows_of("w", w, needs.dx);
  const bool identity = settings.activation == Activation::identity;
  const Rows kept_rows = identity ? Rows{kept, {}} : rows_of("kept", dense(kept), true);
  call.x = x_rows.view;
  call.w = w_rows.view;
  check(m == call.x.sizes[0] && n == call.w.sizes[0], "dy: expected [", call.x.sizes[0], ", ",
        call.w.sizes[0], "], got ", call.dy);
  check(dtype == call.x.dtype, "dy: expected dtype ", call.x.dtype, ", got ", dtype);
  // The gradient of a hidden layer has the strides that a hook on saved tensors gave its input.
  const bool in_place = ours && has_adjacent_rows(call.dy);
  if (!identity) call.kept = kept_rows.view;
  call.activation = settings.activation;
  call.math = settings.math;
  call.implementation = settings.implementation;

  Backward result;
  result.db = new_dense(x, dtype, {needs.db ? n : 0});
  if (needs.db) call.db = view_of("db", result.db);
  if (x.is_cpu()) {
    const bool products = needs.dx || needs.dw;
    const bool same = identity;
    Tensor dz = products && !same && !in_place ? new_dense(x, dtype, {m, n}) : dy_rows.tensor;
    if (products && !same) call.dz = rows_of("dz", dz, true).view;
    linear_act(context.get(), call);
    result.dx = new_dense(x, dtype, {0});
    result.dw = new_dense(x, dtype, {0});
    if (products) dz = torch::stable::reshape(dz, Sizes{m, n});
    if (needs.dw) result.dw = laid_out_as(w, outer(dz, x));
    if (needs.dx) result.dx = laid_out_as(x, back(dz, w));
    return result;
  }
  result.dx = gradient_of(x, dtype, needs.dx);
  result.dw = gradient_of(w, dtype, needs.dw);
  // Where strides are such that no product can write them, through a dense one.
  const Rows dx_rows = rows_of("dx", result.dx, true), dw_rows = rows_of("dw", result.dw, true);
  if (needs.dx) call.dx = dx_rows.view;
  if (needs.dw) call.dw = dw_rows.view;
  if (in_place && !identity) call.dz = call.dy;
  linear_act(context.get(), call);
  if (needs.dx && dx_rows.view.data != result.dx.const_data_ptr()) {
    torch::stable::copy_(result.dx, dx_rows.tensor);
  }
  if (needs.dw && dw_rows.view.data != result.dw.const_data_ptr()) {
    torch::stable::copy_(result.dw, dw_rows.tensor);
  }
  return result;
}

// The operators. ---------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> linear_act_forward(const Tensor& x, const Tensor& w,
                                              const OptionalTensor& b, const Text& activation,
                                              bool save, bool tf32, bool reduced_sums, bool tune,
                                              const Text& implementation) {
  const CallContext context(x);
  const Settings settings{activation_from(activation), {tf32, reduced_sums, tune}, implementation};
  const Forward result = forward(context, x, w, b, settings, save);
  return {result.y, result.kept};
}

std::tuple<Tensor, Tensor, Tensor> linear_act_backward(const Tensor& dy, const Tensor& x,
                                                       const Tensor& w, const Tensor& kept,
                                                       const Text& activation, bool need_dx,
                                                       bool need_dw, bool need_db, bool tf32,
                                                       bool reduced_sums, bool tune,
                                                       const Text& implementation) {
  const CallContext context(x);
  const Settings settings{activation_from(activation), {tf32, reduced_sums, tune}, implementation};
  const Backward result =
      backward(context, dy, x, w, kept, settings, {need_dx, need_dw, need_db}, false);
  return {result.dx, result.dw, result.db};
}

std::string linear_act_explain(const Tensor& x, const Tensor& w, const OptionalTensor& b,
                               const Text& activation, bool save, bool backward, bool tf32,
                               bool reduced_sums, bool tune, const Text& implementation) {
  const CallContext context(x);
  const Settings settings{activation_from(activation), {tf32, reduced_sums, tune}, implementation};
  const Rows x_rows = rows_of("x", x, true), w_rows = rows_of("w", w, true);
  const OptionalTensor b_dense = dense(b);
  const LinearActForward forward =
      forward_call(x_rows.view, w_rows.view, view_of("b", b_dense), settings);
  const std::int64_t m = forward.x.sizes[0], n = forward.w.sizes[0];
  const bool relu = settings.activation == Activation::relu;
  // What would run may have to be measured, so there must be something to be measured on.
  const Tensor y = new_dense(x, forward.x.dtype, {m, n});
  const Tensor kept =
      relu ? new_dense(x, DType::u8, {m, bit_bytes(n)}) : new_dense(x, forward.x.dtype, {m, n});
  const bool keeps = settings.activation != Activation::identity;
  if (!backward) {
    LinearActForward call = forward;
    if (x.is_cpu()) call.z = view_of("z", y);
    call.y = view_of("y", y);
    if (save && keeps) call.kept = rows_of("kept", kept, true).view;
    return to_text(explain(context.get(), call));
  }
  LinearActBackward call;
  call.dy = view_of("y", y);
  call.x = call.dx = forward.x;
  call.w = call.dw = forward.w;
  if (keeps) call.kept = rows_of("kept", kept, true).view;
  call.activation = settings.activation;
  call.math = settings.math;
  call.implementation = implementation;
  return to_text(explain(context.get(), call));
}

/// A stack's layers: all but the last have one activation.
struct Stack {
  const std::vector<Tensor>& weights;
  Activation activation, final_activation;
  ProductMath math;
  const Text& implementation;  // forced for every layer, or empty

  std::size_t size() const { return weights.size(); }
  Settings settings(std::size_t layer) const {
    return {layer + 1 == size() ? final_activation : activation, math, implementation};
  }
  /// Of a hidden relu, the output tells what backward needs, and the next layer keeps that anyway.
  bool told_by_output(std::size_t layer) const {
    return layer + 1 < size() && settings(layer).activation == Activation::relu;
  }
  bool keeps(std::size_t layer) const {
    return settings(layer).activation != Activation::identity && !told_by_output(layer);
  }
};

template <typename Body>
auto in_layer(std::size_t layer, const Body& body) {
  try {
    return body();
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error& error) {
    fail("layer ", layer, ": ", error.what());
  }
}

/// y, and for backward the outputs of all layers but the last, then what those that keep something
/// have kept.
std::tuple<Tensor, std::vector<Tensor>> mlp_forward(
    const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
    const Text& activation, const Text& final_activation, bool save, bool tf32, bool reduced_sums,
    bool tune, const Text& implementation) {
  const CallContext context(x);
  const Stack stack{weights,
                    activation_from(activation),
                    activation_from(final_activation),
                    {tf32, reduced_sums, tune},
                    implementation};
  check(stack.size() >= 1, "weights: expected at least one");
  check(biases.empty() || biases.size() == stack.size(), "biases: expected none or ", stack.size(),
        ", got ", biases.size());
  std::vector<Tensor> hidden, kept;
  Tensor y = x;
  for (std::size_t i = 0; i < stack.size(); ++i) {
    const OptionalTensor bias = biases.empty() ? OptionalTensor() : biases[i];
    Forward result = in_layer(i, [&] {
      return forward(context, y, weights[i], bias, stack.settings(i), save && stack.keeps(i));
    });
    if (save && i > 0) hidden.push_back(y);
    if (save && stack.keeps(i)) kept.push_back(result.kept);
    y = result.y;
  }
  hidden.insert(hidden.end(), kept.begin(), kept.end());
  return {y, hidden};
}

/// dx, then dW and then db of every layer; what is not needed is empty.
std::vector<Tensor> mlp_backward(const Tensor& dy, const Tensor& x,
                                 const std::vector<Tensor>& weights,
                                 const std::vector<Tensor>& saved, const Text& activation,
                                 const Text& final_activation, bool need_dx,
                                 const std::vector<std::int64_t>& needs, bool tf32,
                                 bool reduced_sums, bool tune, const Text& implementation) {
  const CallContext context(x);
  const Stack stack{weights,
                    activation_from(activation),
                    activation_from(final_activation),
                    {tf32, reduced_sums, tune},
                    implementation};
  const std::size_t layers = stack.size();
  std::vector<std::size_t> kept(layers);
  std::size_t expected = layers - 1;
  for (std::size_t i = 0; i < layers; ++i) {
    kept[i] = stack.keeps(i) ? expected++ : layers;
  }
  check(saved.size() == expected && needs.size() == 2 * layers, "saved: expected the ", expected,
        " tensors that forward saved, got ", saved.size());
  std::size_t first = need_dx ? 0 : layers;  // below it nothing wants a gradient
  for (std::size_t i = layers; i-- > 0;) {
    if (needs[i] || needs[layers + i]) first = std::min(first, i);
  }

  std::vector<Tensor> found(1 + 2 * layers);
  Tensor gradient = dy;
  for (std::size_t i = layers; i-- > 0;) {
    const Tensor& input = i == 0 ? x : saved[i - 1];
    const bool last = i + 1 == layers;
    const Needs wanted{i > first || (i == 0 && need_dx), needs[i] != 0, needs[layers + i] != 0};
    if (!wanted.dx && !wanted.dw && !wanted.db) {
      const DType dtype = view_of("x", input).dtype;
      found[1 + i] = new_dense(x, dtype, {0});
      found[1 + layers + i] = new_dense(x, dtype, {0});
      continue;
    }
    const Tensor& what = stack.keeps(i)            ? saved[kept[i]]
                         : stack.told_by_output(i) ? saved[i]
                                                   : gradient;
    const Backward result = in_layer(i, [&] {
      return backward(context, gradient, input, weights[i], what, stack.settings(i), wanted, !last);
    });
    found[1 + i] = result.dw;
    found[1 + layers + i] = result.db;
    gradient = result.dx;
  }
  found[0] = need_dx ? gradient : new_dense(x, view_of("dy", dy).dtype, {0});
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

}  // namespace fusewise::binding

// Squeeze-and-Excitation for torch: allocation and the call; the core does the checks.
// Compiled once for each device: FUSEWISE_DEVICE is CPU or CUDA.

#include "fusewise/squeeze_excite.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "call.h"
#include "common/check.h"
#include "text.h"

namespace fusewise::binding {
namespace {

using OptionalTensor = std::optional<Tensor>;

/// Sizes as far as they can be read from tensors that nobody checked yet.
struct Sizes {
  std::int64_t n = 0, c = 0, r = 0;
  bool known = false;

  Sizes(const Tensor& x, const Tensor& w1) : known(x.dim() == 4 && w1.dim() >= 1) {
    if (!known) return;
    n = x.size(0);
    c = x.size(1);
    r = w1.size(0);
  }
  std::int64_t saved() const { return n * (2 * c + r); }
};

DType saved_dtype(const TensorView& x) { return x.dtype == DType::f64 ? DType::f64 : DType::f32; }

/// `saved` holds pooled [N, C], gates [N, C] and hidden [N, R], one after another.
template <typename Call>
void point_at_saved(Call& call, const TensorView& saved, const Sizes& sizes) {
  call.pooled = matrix_at(saved, 0, sizes.n, sizes.c);
  call.gates = matrix_at(saved, sizes.n * sizes.c, sizes.n, sizes.c);
  call.hidden = matrix_at(saved, 2 * sizes.n * sizes.c, sizes.n, sizes.r);
}

SqueezeExciteForward forward_call(const Tensor& x, const Tensor& w1, const OptionalTensor& b1,
                                  const Tensor& w2, const OptionalTensor& b2,
                                  const Text& activation, const Text& gate,
                                  const Text& implementation) {
  SqueezeExciteForward call;
  call.x = view_of("x", x);
  call.w1 = view_of("w1", w1);
  call.b1 = view_of("b1", b1);
  call.w2 = view_of("w2", w2);
  call.b2 = view_of("b2", b2);
  call.activation = activation_from(activation, kSqueezeExciteActivations);
  call.gate = gate_from(gate);
  call.implementation = implementation;
  return call;
}

std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& w1, const OptionalTensor& b1,
                                   const Tensor& w2, const OptionalTensor& b2,
                                   const Text& activation, const Text& gate, bool save,
                                   const Text& implementation) {
  const CallContext context(x);
  const Tensor w1_dense = dense(w1), w2_dense = dense(w2);
  const OptionalTensor b1_dense = dense(b1), b2_dense = dense(b2);
  SqueezeExciteForward call =
      forward_call(x, w1_dense, b1_dense, w2_dense, b2_dense, activation, gate, implementation);
  const Sizes sizes(x, w1);
  const bool keep = save && sizes.known;
  const Tensor y = new_like(x);
  const Tensor saved = new_dense(x, saved_dtype(call.x), {keep ? sizes.saved() : 0});
  call.y = view_of("y", y);
  if (keep) point_at_saved(call, view_of("saved", saved), sizes);
  squeeze_excite(context.get(), call);
  return {y, saved};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& dy, const Tensor& x, const Tensor& w1, const Tensor& w2, const Tensor& saved,
    const Text& activation, const Text& gate, bool need_dx, bool need_dw1, bool need_db1,
    bool need_dw2, bool need_db2, const Text& implementation) {
  const CallContext context(x);
  const Tensor w1_dense = dense(w1), w2_dense = dense(w2);
  SqueezeExciteBackward call;
  call.dy = view_of("dy", dy);
  call.x = view_of("x", x);
  call.w1 = view_of("w1", w1_dense);
  call.w2 = view_of("w2", w2_dense);
  call.activation = activation_from(activation, kSqueezeExciteActivations);
  call.gate = gate_from(gate);
  call.implementation = implementation;

  const Sizes sizes(x, w1);
  const Tensor saved_dense = dense(saved);  // hooks on saved tensors may bring back any strides
  const TensorView saved_view = view_of("saved", saved_dense);
  check(saved_view.dtype == saved_dtype(call.x) && saved.numel() == sizes.saved(),
        "saved: expected the ", sizes.saved(), " ", saved_dtype(call.x),
        " values that forward saved, got ", saved.numel(), " of ", saved_view.dtype);
  point_at_saved(call, saved_view, sizes);

  // What is not wanted comes back empty, each a tensor of its own: outputs must not alias.
  const auto like = [](bool need, const Tensor& weight, DType dtype) {
    const auto shape = weight.sizes();
    return new_dense(weight, dtype,
                     need ? std::vector<std::int64_t>(shape.begin(), shape.end())
                          : std::vector<std::int64_t>{0});
  };
  const DType weight_dtype = call.w1.dtype;
  const Tensor dx = need_dx ? new_like(x) : new_dense(x, call.x.dtype, {0});
  const Tensor dw1 = like(need_dw1, w1, weight_dtype);
  const Tensor db1 = new_dense(x, weight_dtype, {need_db1 ? sizes.r : 0});
  const Tensor dw2 = like(need_dw2, w2, weight_dtype);
  const Tensor db2 = new_dense(x, weight_dtype, {need_db2 ? sizes.c : 0});
  if (need_dx) call.dx = view_of("dx", dx);
  if (need_dw1) call.dw1 = view_of("dw1", dw1);
  if (need_db1) call.db1 = view_of("db1", db1);
  if (need_dw2) call.dw2 = view_of("dw2", dw2);
  if (need_db2) call.db2 = view_of("db2", db2);
  squeeze_excite(context.get(), call);
  return {dx, dw1, db1, dw2, db2};
}

/// Answers from shapes and pointers alone: results and saved values are taken to lie as x does.
std::string explain_call(const Tensor& x, const Tensor& w1, const OptionalTensor& b1,
                         const Tensor& w2, const OptionalTensor& b2, const Text& activation,
                         const Text& gate, bool backward, const Text& implementation) {
  const CallContext context(x);
  const SqueezeExciteForward forward =
      forward_call(x, dense(w1), dense(b1), dense(w2), dense(b2), activation, gate, implementation);
  const Sizes sizes(x, w1);
  TensorView saved;
  saved.data = forward.x.data;
  saved.dtype = saved_dtype(forward.x);
  saved.device = forward.x.device;
  saved.rank = 1;
  if (!backward) {
    SqueezeExciteForward call = forward;
    call.y = call.x;
    if (sizes.known) point_at_saved(call, saved, sizes);
    return to_text(explain(context.get(), call));
  }
  SqueezeExciteBackward call;
  call.dy = call.x = call.dx = forward.x;
  call.w1 = call.dw1 = forward.w1;
  call.w2 = call.dw2 = forward.w2;
  call.activation = forward.activation;
  call.gate = forward.gate;
  call.implementation = implementation;
  if (sizes.known) point_at_saved(call, saved, sizes);
  return to_text(explain(context.get(), call));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusewise, FUSEWISE_DEVICE, m) {
  m.impl("_squeeze_excite", TORCH_BOX(&forward));
  m.impl("_squeeze_excite_backward", TORCH_BOX(&backward));
  m.impl("_squeeze_excite_explain", TORCH_BOX(&explain_call));
}

}  // namespace fusewise::binding

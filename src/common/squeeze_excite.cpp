// Squeeze-and-Excitation's front door: every check, then the choice of an implementation.

#include "fusewise/squeeze_excite.h"

#include "common/backends.h"
#include "common/check.h"
#include "common/overlap.h"

namespace fusewise {
namespace {

void check_image(const char* name, const TensorView& t, const TensorView& like, Device device) {
  check(t.defined(), name, ": is missing");
  check(t.rank == 4, name, ": expected 4 dimensions [N, C, H, W], got ", t);
  check_device(name, t, device);
  check(t.sizes == like.sizes, name, ": expected x's shape ", like, ", got ", t);
  check(t.dtype == like.dtype, name, ": expected x's dtype ", like.dtype, ", got ", t.dtype);
}

/// Weights may come as matrices or as 1x1 convolution weights.
void check_matrix(const char* name, const TensorView& t, std::int64_t rows, std::int64_t columns,
                  DType dtype, Device device) {
  check(t.defined(), name, ": is missing");
  const bool convolution = t.rank == 4 && t.sizes[2] == 1 && t.sizes[3] == 1;
  check((t.rank == 2 || convolution) && t.sizes[0] == rows && t.sizes[1] == columns, name,
        ": expected [", rows, ", ", columns, "] or [", rows, ", ", columns, ", 1, 1], got ", t);
  check_device(name, t, device);
  check(t.dtype == dtype, name, ": expected dtype ", dtype, " as the other weights, got ", t.dtype);
}

void check_vector(const char* name, const TensorView& t, std::int64_t size, DType dtype,
                  Device device) {
  if (!t.defined()) return;
  check(t.rank == 1 && t.sizes[0] == size, name, ": expected [", size, "], got ", t);
  check_device(name, t, device);
  check(t.dtype == dtype, name, ": expected dtype ", dtype, " as the other weights, got ", t.dtype);
}

void check_saved(const char* name, const TensorView& t, std::int64_t rows, std::int64_t columns,
                 DType x, Device device) {
  const DType dtype = x == DType::f64 ? DType::f64 : DType::f32;
  check(t.defined(), name, ": is missing");
  check(t.rank == 2 && t.sizes[0] == rows && t.sizes[1] == columns, name, ": expected [", rows,
        ", ", columns, "], got ", t);
  check_dense(name, t);
  check_device(name, t, device);
  check(t.dtype == dtype, name, ": expected dtype ", dtype, ", got ", t.dtype);
}

/// What both ways share: x and the two matrices.
void check_inputs(const TensorView& x, const TensorView& w1, const TensorView& w2,
                  Activation activation, Device device) {
  activation_from(name_of(activation), kSqueezeExciteActivations);  // throws for the others
  check(x.defined(), "x: is missing");
  check(x.rank == 4, "x: expected 4 dimensions [N, C, H, W], got ", x);
  check_device("x", x, device);
  check(x.dtype != DType::u8, "x: expected a floating dtype, got uint8");
  check(x.sizes[0] >= 0, "x: expected N >= 0, got ", x);
  check(x.sizes[1] >= 1, "x: expected at least one channel, got ", x);
  check(x.sizes[2] >= 1 && x.sizes[3] >= 1, "x: expected at least one pixel, got ", x);
  check(w1.defined(), "w1: is missing");
  const bool half = x.dtype == DType::f16 || x.dtype == DType::bf16;
  check(w1.dtype == x.dtype || (half && w1.dtype == DType::f32), "w1: expected dtype ", x.dtype,
        " as x", half ? " or float32" : "", ", got ", w1.dtype);
  const std::int64_t channels = x.sizes[1];
  check(w1.rank >= 1 && w1.sizes[0] >= 1, "w1: expected [R, ", channels, "] with R >= 1, got ", w1);
  check_matrix("w1", w1, w1.sizes[0], channels, w1.dtype, device);
  check_matrix("w2", w2, channels, w1.sizes[0], w1.dtype, device);
  check_dense("w1", w1);
  check_dense("w2", w2);
}

void check_call(const Context& context, const SqueezeExciteForward& call) {
  const Device device = context.device;
  check_inputs(call.x, call.w1, call.w2, call.activation, device);
  const std::int64_t n = call.x.sizes[0], c = call.x.sizes[1], r = call.w1.sizes[0];
  check_vector("b1", call.b1, r, call.w1.dtype, device);
  check_vector("b2", call.b2, c, call.w1.dtype, device);
  check_dense("b1", call.b1);
  check_dense("b2", call.b2);
  check_image("y", call.y, call.x, device);
  const int saved = call.pooled.defined() + call.hidden.defined() + call.gates.defined();
  check(saved == 0 || saved == 3, "pooled, hidden, gates: expected all three or none");
  if (saved == 0) return;
  check_saved("pooled", call.pooled, n, c, call.x.dtype, device);
  check_saved("hidden", call.hidden, n, r, call.x.dtype, device);
  check_saved("gates", call.gates, n, c, call.x.dtype, device);
}

void check_call(const Context& context, const SqueezeExciteBackward& call) {
  const Device device = context.device;
  check_inputs(call.x, call.w1, call.w2, call.activation, device);
  const std::int64_t n = call.x.sizes[0], c = call.x.sizes[1], r = call.w1.sizes[0];
  check_image("dy", call.dy, call.x, device);
  check_saved("pooled", call.pooled, n, c, call.x.dtype, device);
  check_saved("hidden", call.hidden, n, r, call.x.dtype, device);
  check_saved("gates", call.gates, n, c, call.x.dtype, device);
  if (call.dx.defined()) check_image("dx", call.dx, call.x, device);
  if (call.dw1.defined()) check_matrix("dw1", call.dw1, r, c, call.w1.dtype, device);
  if (call.dw2.defined()) check_matrix("dw2", call.dw2, c, r, call.w1.dtype, device);
  check_vector("db1", call.db1, r, call.w1.dtype, device);
  check_vector("db2", call.db2, c, call.w1.dtype, device);
  check_dense("dw1", call.dw1);
  check_dense("dw2", call.dw2);
  check_dense("db1", call.db1);
  check_dense("db2", call.db2);
}

}  // namespace

Gate gate_from(std::string_view name) {
  if (name == "sigmoid") return Gate::sigmoid;
  if (name == "hardsigmoid") return Gate::hardsigmoid;
  fail("gate: expected 'sigmoid' or 'hardsigmoid', got '", name, "'");
}

void squeeze_excite(const Context& context, const SqueezeExciteForward& call) {
  check_call(context, call);
  const Argument outputs[] = {
      {"y", call.y}, {"pooled", call.pooled}, {"hidden", call.hidden}, {"gates", call.gates}};
  const Argument inputs[] = {
      {"x", call.x}, {"w1", call.w1}, {"b1", call.b1}, {"w2", call.w2}, {"b2", call.b2}};
  check_outputs(outputs, inputs);
  run_on_device(context, call, cpu::squeeze_excite_forward, cuda::squeeze_excite_forward);
}

void squeeze_excite(const Context& context, const SqueezeExciteBackward& call) {
  check_call(context, call);
  const Argument outputs[] = {
      {"dx", call.dx}, {"dw1", call.dw1}, {"db1", call.db1}, {"dw2", call.dw2}, {"db2", call.db2}};
  const Argument inputs[] = {{"dy", call.dy},      {"x", call.x},           {"w1", call.w1},
                             {"w2", call.w2},      {"pooled", call.pooled}, {"hidden", call.hidden},
                             {"gates", call.gates}};
  check_outputs(outputs, inputs);
  run_on_device(context, call, cpu::squeeze_excite_backward, cuda::squeeze_excite_backward);
}

Candidates explain(const Context& context, const SqueezeExciteForward& call) {
  check_call(context, call);
  return explain_on_device(context, call, cpu::squeeze_excite_forward,
                           cuda::squeeze_excite_forward);
}

Candidates explain(const Context& context, const SqueezeExciteBackward& call) {
  check_call(context, call);
  return explain_on_device(context, call, cpu::squeeze_excite_backward,
                           cuda::squeeze_excite_backward);
}

}  // namespace fusewise

// Linear + activation's front door: every check, then the choice of an implementation.

#include "common/linear_act.h"

#include "common/backends.h"
#include "common/check.h"
#include "common/matrix.h"
#include "common/overlap.h"

namespace fusewise {
namespace {

struct Sizes {
  std::int64_t m, n, k;
};

/// Throws for those that linear maps do not have.
void check_activation(Activation activation) { activation_from(name_of(activation), kActivations); }

void check_floating(const char* name, const TensorView& t) {
  check(t.dtype != DType::u8, name, ": expected a floating dtype, got uint8");
}

void check_matrix(const char* name, const TensorView& t, std::int64_t rows, std::int64_t columns,
                  DType dtype, Device device) {
  check(t.defined(), name, ": is missing");
  check(t.rank == 2 && t.sizes[0] == rows && t.sizes[1] == columns, name, ": expected [", rows,
        ", ", columns, "], got ", t);
  check_device(name, t, device);
  check(t.dtype == dtype, name, ": expected dtype ", dtype, ", got ", t.dtype);
}

/// As libraries take them: one of the strides is 1.
void check_operand(const char* name, const TensorView& t, std::int64_t rows, std::int64_t columns,
                   DType dtype, Device device) {
  check_matrix(name, t, rows, columns, dtype, device);
  check(is_matrix(t), name, ": expected adjacent rows or columns");
}

void check_rows(const char* name, const TensorView& t, std::int64_t rows, std::int64_t columns,
                DType dtype, Device device) {
  check_matrix(name, t, rows, columns, dtype, device);
  check(has_adjacent_rows(t), name, ": expected adjacent rows");
}

void check_vector(const char* name, const TensorView& t, std::int64_t size, DType dtype,
                  Device device) {
  if (!t.defined()) return;
  check(t.rank == 1 && t.sizes[0] == size, name, ": expected [", size, "], got ", t);
  check_device(name, t, device);
  check(t.dtype == dtype, name, ": expected dtype ", dtype, ", got ", t.dtype);
  check_dense(name, t);
}

/// From x [M, K] and w [N, K], which must fit each other.
Sizes sizes_of(const TensorView& x, const TensorView& w) {
  check(x.defined(), "x: is missing");
  check(x.rank == 2, "x: expected 2 dimensions [M, K], got ", x);
  check(w.defined(), "w: is missing");
  check(w.rank == 2, "w: expected 2 dimensions [N, K], got ", w);
  check(w.sizes[1] == x.sizes[1], "w: expected [N, ", x.sizes[1], "] as x has ", x.sizes[1],
        " features, got ", w);
  return {x.sizes[0], w.sizes[0], x.sizes[1]};
}

void check_kept(const TensorView& kept, Activation activation, std::int64_t m, std::int64_t n,
                DType dtype, Device device) {
  if (activation == Activation::relu && kept.dtype == DType::u8) {
    check_rows("kept", kept, m, bit_bytes(n), DType::u8, device);
  } else {
    check_rows("kept", kept, m, n, dtype, device);
  }
}

}  // namespace

void check_call(const Context& context, const LinearActForward& call) {
  check_activation(call.activation);
  const Device device = context.device;
  if (call.x.defined()) check_floating("x", call.x);
  check(call.y.defined(), "y: is missing");
  check_floating("y", call.y);
  check(call.y.rank == 2, "y: expected 2 dimensions [M, N], got ", call.y);
  const DType dtype = call.y.dtype;
  const auto [m, n, k] = sizes_of(call.x, call.w);
  check_operand("x", call.x, m, k, dtype, device);
  check_operand("w", call.w, n, k, dtype, device);
  check_vector("b", call.b, n, dtype, device);
  check_rows("y", call.y, m, n, dtype, device);
  if (!call.kept.defined()) return;
  check(call.activation != Activation::identity, "kept: identity keeps nothing");
  check(call.activation != Activation::relu || call.kept.dtype == DType::u8,
        "kept: expected uint8 for relu, got ", call.kept.dtype);
  check_kept(call.kept, call.activation, m, n, dtype, device);
  check(call.kept.data != call.y.data || call.y.numel() == 0,
        "kept: is y itself, but what backward needs is not what forward returns");
}

void check_call(const Context& context, const LinearActBackward& call) {
  check_activation(call.activation);
  const Device device = context.device;
  check(call.dy.defined(), "dy: is missing");
  check(call.dy.rank == 2, "dy: expected 2 dimensions [M, N], got ", call.dy);
  check_floating("dy", call.dy);
  const DType dtype = call.dy.dtype;
  const std::int64_t m = call.dy.sizes[0], n = call.dy.sizes[1];
  check_device("dy", call.dy, device);
  if (call.dw.defined()) {
    check(call.x.defined() && call.x.rank == 2, "x: expected [", m, ", K], got ", call.x);
    check_operand("x", call.x, m, call.x.sizes[1], dtype, device);
    check_operand("dw", call.dw, n, call.x.sizes[1], dtype, device);
  }
  if (call.dx.defined()) {
    check(call.w.defined() && call.w.rank == 2, "w: expected [", n, ", K], got ", call.w);
    check_operand("w", call.w, n, call.w.sizes[1], dtype, device);
    check_operand("dx", call.dx, m, call.w.sizes[1], dtype, device);
  }
  check_vector("db", call.db, n, dtype, device);
  if (call.activation == Activation::identity) return;
  check(call.kept.defined(), "kept: is missing");
  check_kept(call.kept, call.activation, m, n, dtype, device);
}

void run_checked(const Context& context, const LinearActForward& call) {
  run_on_device(context, call, cpu::linear_act_forward, cuda::linear_act_forward);
}

void run_checked(const Context& context, const LinearActBackward& call) {
  run_on_device(context, call, cpu::linear_act_backward, cuda::linear_act_backward);
}

Candidates explain_checked(const Context& context, const LinearActForward& call) {
  return explain_on_device(context, call, cpu::linear_act_forward, cuda::linear_act_forward);
}

Candidates explain_checked(const Context& context, const LinearActBackward& call) {
  return explain_on_device(context, call, cpu::linear_act_backward, cuda::linear_act_backward);
}

void linear_act(const Context& context, const LinearActForward& call) {
  check_call(context, call);
  const Argument outputs[] = {{"y", call.y}, {"kept", call.kept}};
  const Argument inputs[] = {{"x", call.x}, {"w", call.w}, {"b", call.b}};
  check_outputs(outputs, inputs);
  run_checked(context, call);
}

void linear_act(const Context& context, const LinearActBackward& call) {
  check_call(context, call);
  const TensorView absent;
  const Argument outputs[] = {{"dx", call.dx},
                              {"dw", call.dw},
                              {"db", call.db},
                              {"dy", call.overwrite_dy ? call.dy : absent}};
  const Argument inputs[] = {{"dy", call.overwrite_dy ? absent : call.dy},
                             {"x", call.x},
                             {"w", call.w},
                             {"kept", call.kept}};
  check_outputs(outputs, inputs);
  run_checked(context, call);
}

Candidates explain(const Context& context, const LinearActForward& call) {
  check_call(context, call);
  return explain_checked(context, call);
}

Candidates explain(const Context& context, const LinearActBackward& call) {
  check_call(context, call);
  return explain_checked(context, call);
}

}  // namespace fusewise

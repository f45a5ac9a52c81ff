// What linear + activation has on CUDA. Forward: the activation in the product's epilogue, or in a
// pass of its own behind it. Backward: one pass for dz and db, then the two products.

#include <map>
#include <unordered_map>

#include "common/backends.h"
#include "common/matrix.h"
#include "common/scratch.h"
#include "cuda/gemm/product.h"
#include "cuda/gemm/tuning.h"
#include "cuda/linear_act/passes.cuh"

namespace fusewise::cuda {
namespace {

Product forward_product(const LinearActForward& call, const TensorView& d) {
  Product p{};
  p.rows = call.x.sizes[0];
  p.columns = call.w.sizes[0];
  p.inner = call.x.sizes[1];
  p.a = matrix_of(call.x);
  p.b = matrix_of(call.w);
  p.b.transposed = !p.b.transposed;
  p.d = matrix_of(d);
  p.dtype = d.dtype;
  p.bias = call.b.data;
  p.math = with_environment(call.math);
  return p;
}

Epilogue epilogue_of(Activation activation) {
  if (activation == Activation::relu) return Epilogue::relu;
  if (activation == Activation::gelu_tanh) return Epilogue::gelu_tanh;
  return Epilogue::none;
}

Product epilogue_product(const LinearActForward& call) {
  Product p = forward_product(call, call.y);
  p.epilogue = epilogue_of(call.activation);
  return p;
}

// Forward, the two ways. --------------------------------------------------------------------------

/// relu's bits are ours: those of the vendor's epilogue are set where z is 0 and not where it is
/// NaN, unlike torch's gradient.
void epilogue_run(const Context& context, const LinearActForward& call) {
  multiply(context, epilogue_product(call));
  if (call.kept.defined()) activate(context, {call.y, {}, call.kept, call.activation});
}

std::string pass_declines(const Context&, const LinearActForward&) { return ""; }

void pass_run(const Context& context, const LinearActForward& call) {
  const bool bits = call.kept.defined() && call.kept.dtype == DType::u8;
  TensorView z = call.z;
  if (!z.defined()) {
    z = call.kept.defined() && !bits ? call.kept : call.y;
    multiply(context, forward_product(call, z));
  } else if (call.kept.defined() && !bits && call.kept.data != z.data) {
    activate(context, {z, call.kept, {}, Activation::identity});
  }
  if (call.activation == Activation::identity && z.data == call.y.data) return;
  activate(context, {z, call.y, bits ? call.kept : TensorView(), call.activation});
}

// Which of the two. ------------------------------------------------------------------------------

enum class Verdict { fine, loses_nan, slower };

/// Where the vendor runs an epilogue as a second kernel, quietly, a pass of ours may be faster: the
/// first call of a kind measures both.
bool is_slower(const Context& context, const LinearActForward& call, const ProductKey& key) {
  const std::string text = (call.kept.defined() ? "training" : "inference") + text_of(key);
  std::optional<std::string> choice = kept_choice(context, text);
  if (!choice && may_measure(context, with_environment(call.math))) {
    const auto alone = measuring(context.device);
    choice = kept_choice(context, text);  // another thread may have been faster
    if (choice) return choice == "pass";
    try {
      const PreparedProduct fused(context, epilogue_product(call));
      const PreparedProduct plain(context, forward_product(call, call.y));
      const std::function<void(const Context&)> ways[] = {
          [&](const Context& where) {
            fused.run(where);
            if (call.kept.defined()) activate(where, {call.y, {}, call.kept, call.activation});
          },
          [&](const Context& where) {
            plain.run(where);
            activate(where, {call.y, call.y, call.kept, call.activation});
          }};
      choice = fastest(context, ways) == 0 ? "epilogue" : "pass";
    } catch (const OutOfMemory&) {
      return false;  // both at once did not fit; one may
    }
    keep_choice(context, text, *choice);
  }
  return choice == "pass";
}

/// Every call asks, so after the first of its kind this must cost next to nothing.
Verdict judge(const Context& context, const LinearActForward& call) {
  if (epilogue_of(call.activation) == Epilogue::none || call.y.numel() == 0) return Verdict::fine;
  thread_local std::map<std::pair<int, bool>,
                        std::unordered_map<ProductKey, Verdict, ProductKeyHash>>
      known;
  auto& here = known[{context.device.index, call.kept.defined()}];
  const Product product = epilogue_product(call);
  const ProductKey key = key_of(product);
  if (const auto found = here.find(key); found != here.end()) return found->second;

  Verdict verdict = Verdict::fine;
  if (!PreparedProduct(context, product).lets_nan_through()) {
    verdict = Verdict::loses_nan;
  } else if (product.math.tune) {
    // Also under capture: it then stays so for this process, as results must not change in it.
    if (is_slower(context, call, key)) verdict = Verdict::slower;
  }
  return here[key] = verdict;
}

std::string epilogue_declines(const Context& context, const LinearActForward& call) {
  if (call.z.defined()) return "the product is there already";
  if (call.activation == Activation::identity) return "";
  if (epilogue_of(call.activation) == Epilogue::none) {
    return "cuBLASLt has no epilogue for this activation";
  }
  if (call.activation == Activation::gelu_tanh) {
    if (call.kept.defined()) return "z is to be kept, and the epilogue writes y alone";
    // In float32 it is off by some 20 ulp. In float16 a z beyond its range is NaN behind torch's
    // gelu, which takes z rounded, and 0 behind this one.
    if (call.y.dtype != DType::bf16) {
      return "cuBLASLt's gelu is not torch's in this dtype";
    }
  }
  if (judge(context, call) != Verdict::loses_nan) return "";
  return "cuBLASLt's epilogue is not known to keep NaN here";
}

std::string epilogue_yields(const Context& context, const LinearActForward& call) {
  if (judge(context, call) != Verdict::slower) return "";
  return "measured: a product and a pass behind it are faster";
}

// Backward. --------------------------------------------------------------------------------------

std::string backward_declines(const Context&, const LinearActBackward&) { return ""; }

void backward_run(const Context& context, const LinearActBackward& call) {
  const std::int64_t m = call.dy.sizes[0], n = call.dy.sizes[1];
  const bool products = call.dx.defined() || call.dw.defined();
  const bool usable = has_adjacent_rows(call.dy) || has_adjacent_columns(call.dy);
  const bool same = call.activation == Activation::identity && usable && !call.dz.defined();
  const bool own = products && !same && !call.dz.defined();
  const Scratch<char> memory(context, own ? m * n * size_of(call.dy.dtype) : 0);
  TensorView dz = call.dz;
  if (own) dz = TensorView(memory.data(), call.dy.dtype, call.dy.device, {m, n});
  if (dz.defined() || call.db.defined()) {
    differentiate(context, {call.dy, call.kept, dz, call.db, call.activation});
  }
  if (same) dz = call.dy;

  Product p{};
  p.dtype = call.dy.dtype;
  p.math = with_environment(call.math);
  if (call.dw.defined()) {
    p.rows = n;
    p.columns = call.x.sizes[1];
    p.inner = m;
    p.a = matrix_of(dz);
    p.a.transposed = !p.a.transposed;
    p.b = matrix_of(call.x);
    p.d = matrix_of(call.dw);
    multiply(context, p);
  }
  // Last, as what comes next in backward reads dx.
  if (call.dx.defined()) {
    p.rows = m;
    p.columns = call.w.sizes[1];
    p.inner = n;
    p.a = matrix_of(dz);
    p.b = matrix_of(call.w);
    p.d = matrix_of(call.dx);
    multiply(context, p);
  }
}

}  // namespace

Implementations<LinearActForward> linear_act_forward() {
  static constexpr Implementation<LinearActForward> list[] = {
      {"epilogue", epilogue_declines, epilogue_run, epilogue_yields},
      {"pass", pass_declines, pass_run}};
  return list;
}

Implementations<LinearActBackward> linear_act_backward() {
  static constexpr Implementation<LinearActBackward> list[] = {
      {"pass", backward_declines, backward_run}};
  return list;
}

}  // namespace fusewise::cuda

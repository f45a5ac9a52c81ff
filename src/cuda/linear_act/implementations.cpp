// The CUDA implementations of linear + activation. Forward: the activation in the GEMM's epilogue,
// or in a separate elementwise kernel. Backward: one kernel for dz and db, then the two GEMMs.

#include <mutex>
#include <optional>
#include <string>

#include "common/implementation.h"
#include "common/linear_act.h"
#include "common/lru.h"
#include "cuda/gemm/product.h"
#include "cuda/gemm/tuning.h"
#include "cuda/linear_act/passes.cuh"
#include "fusewise/linear_act.h"

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
  // Partial sums that are added in half precision may end up on the other side of relu's kink.
  if (call.activation == Activation::relu) p.math.reduced_sums = false;
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

// Forward: the two implementations. ---------------------------------------------------------------

std::string pass_declines(const Context&, const LinearActForward&) { return ""; }

void pass_run(const Context& context, const LinearActForward& call) {
  const bool bits = call.kept.defined() && call.kept.dtype == DType::u8;
  const TensorView z = call.kept.defined() && !bits ? call.kept : call.y;
  multiply(context, forward_product(call, z));
  if (call.activation == Activation::identity) return;
  activate(context, {z, call.y, bits ? call.kept : TensorView(), call.activation});
}

/// relu's bits come from our own kernel. cuBLASLt's epilogue sets them where z is 0 and clears them
/// where z is NaN, unlike torch's gradient.
void epilogue_run(const Context& context, const LinearActForward& call) {
  const PreparedProduct product(context, epilogue_product(call));
  // The bucket was judged by another of its sizes, which may use another algorithm.
  if (!product.is_right()) return pass_run(context, call);
  product.run(context);
  if (call.kept.defined()) activate(context, {call.y, {}, call.kept, call.activation});
}

// Choosing between the two. -----------------------------------------------------------------------

enum class Verdict { fine, not_right, slower };

/// Measures both. cuBLASLt runs some epilogues as a second kernel. Then our elementwise kernel may
/// be faster.
bool is_slower(const Context& context, const LinearActForward& call) {
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
  return fastest(context, weights_of(epilogue_product(call)), ways) == 1;
}

/// Decides for the first call of a product bucket. Every later call gets the same decision.
Verdict first_verdict(const Context& context, const LinearActForward& call, const Product& product,
                      const ProductBucket& bucket) {
  if (!PreparedProduct(context, product).is_right()) return Verdict::not_right;
  if (!product.math.tune) return Verdict::fine;
  const bool may = may_measure(context, product.math, bucket);
  const std::string key = (call.kept.defined() ? "training" : "inference") + text_of(bucket);
  std::optional<std::string> choice = kept_choice(context, key);
  if (!choice) {
    choice = "epilogue";
    Lifetime lifetime = Lifetime::process;
    try {
      if (may && is_slower(context, call)) choice = "pass";
      if (may) lifetime = Lifetime::file;
    } catch (const OutOfMemory&) {  // both at once did not fit; one may
    }
    keep_choice(context, key, *choice, lifetime);
  }
  return choice == "pass" ? Verdict::slower : Verdict::fine;
}

/// Every call asks this, so after the first call of its bucket it must cost next to nothing.
Verdict judge(const Context& context, const LinearActForward& call) {
  if (epilogue_of(call.activation) == Epilogue::none || call.y.numel() == 0) return Verdict::fine;
  constexpr std::size_t kMostKnown = 1024;
  struct Key {
    int device;
    bool training;
    ProductBucket bucket;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return KeyHash()(key.bucket) * 31 + 2 * key.device + key.training;
    }
  };
  static std::mutex mutex;
  static LruMap<Key, Verdict, Hash> known{kMostKnown};
  const Product product = epilogue_product(call);
  const Key key{context.device.index, call.kept.defined(), bucket_of(product)};
  {
    const std::lock_guard lock(mutex);
    if (const Verdict* found = known.find(key)) return *found;
  }
  const Measuring alone(context.device);
  const Verdict verdict = first_verdict(context, call, product, key.bucket);
  const std::lock_guard lock(mutex);
  return known.add(key, verdict);
}

std::string epilogue_declines(const Context& context, const LinearActForward& call) {
  if (call.activation == Activation::identity) return "";
  if (epilogue_of(call.activation) == Epilogue::none) {
    return "cuBLASLt has no epilogue for this activation";
  }
  if (call.activation == Activation::gelu_tanh) {
    if (call.kept.defined()) return "z must be saved for backward, and the epilogue writes only y";
    // In float32 its error is some 20 ulp. In float16, if z is out of range, torch's gelu gives NaN
    // because it takes the rounded z; this one gives 0.
    if (call.y.dtype != DType::bf16) {
      return "cuBLASLt's gelu differs from torch's in this dtype";
    }
  }
  if (judge(context, call) != Verdict::not_right) return "";
  return "cuBLASLt's epilogue did not pass its check (NaN stays NaN, rounded once), or the "
         "check was not possible because a graph is being captured";
}

std::string epilogue_yields(const Context& context, const LinearActForward& call) {
  if (judge(context, call) != Verdict::slower) return "";
  return "measured: a GEMM and a separate elementwise kernel are faster";
}

// Backward. --------------------------------------------------------------------------------------

std::string backward_declines(const Context&, const LinearActBackward&) { return ""; }

void backward_run(const Context& context, const LinearActBackward& call) {
  const std::int64_t m = call.dy.sizes[0], n = call.dy.sizes[1];
  const Dz dz(context, call);
  if (dz.output().defined() || call.db.defined()) {
    differentiate(context, {call.dy, call.kept, dz.output(), call.db, call.activation});
  }

  Product p{};
  p.dtype = call.dy.dtype;
  p.math = with_environment(call.math);
  if (call.dw.defined()) {
    p.rows = n;
    p.columns = call.x.sizes[1];
    p.inner = m;
    p.batch = BatchSize::inner;
    p.a = matrix_of(dz.view());
    p.a.transposed = !p.a.transposed;
    p.b = matrix_of(call.x);
    p.d = matrix_of(call.dw);
    multiply(context, p);
  }
  // Last, because the next step of backward reads dx.
  if (call.dx.defined()) {
    p.rows = m;
    p.columns = call.w.sizes[1];
    p.inner = n;
    p.batch = BatchSize::rows;
    p.a = matrix_of(dz.view());
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

// Squeeze-and-Excitation on the CPU: sums over pixels, gates and scaling, a few samples at a time,
// so that the second read of x (and of dy in backward) hits the caches. Bound by memory bandwidth.

#include "fusewise/squeeze_excite.h"

#include "common/implementation.h"
#include "cpu/instruction_sets.h"
#include "cpu/squeeze_excite_gates.h"

namespace fusewise::cpu {
namespace {

using namespace squeeze_excite;

/// Sums over pixels and scaling, block by block, in either layout.
template <typename T, typename A = AccumulatorOf<T>>
class Passes {
 public:
  Passes(const Context& context, const Kernels<T>& kernels, const Walk& walk, Index slots)
      : kernels_(kernels), walk_(walk), sums_(context, walk, slots) {}

  /// The sums of block b over a, or over a * b if b is given.
  void reduce(Index slot, Index block, const T* a, Index a_step, const T* b, Index b_step) const {
    const Index count = walk_.end(block) - walk_.begin(block);
    A* const sums = sums_.of(slot, block);
    if (walk_.planar) {
      return kernels_.reduce_planes(a, a_step, b, b_step, count, walk_.pixels, sums);
    }
    sums_.clear(slot, block);
    const Index joined = walk_.joined, rows = count / joined, rest = count % joined;
    kernels_.reduce_rows(a, a_step * joined, b, b_step * joined, rows, walk_.row(), sums);
    if (rest > 0) {
      const T* b_rest = b == nullptr ? nullptr : b + rows * joined * b_step;
      kernels_.reduce_rows(a + rows * joined * a_step, 0, b_rest, 0, 1, rest * walk_.channels,
                           sums);
    }
  }

  /// One per channel.
  const A* sums(Index slot) const { return sums_.total(slot); }

  /// out = in * factors (+ offsets). Both are as wide as `row()`.
  void scale(Index block, const T* in, Index in_step, const A* factors, const A* offsets, T* out,
             Index out_step, bool stream) const {
    const Index count = walk_.end(block) - walk_.begin(block);
    if (walk_.planar) {
      const Index c = walk_.begin(block);
      return kernels_.scale_planes(in, in_step, factors + c, offsets ? offsets + c : nullptr, count,
                                   walk_.pixels, out, out_step, stream);
    }
    const Index joined = walk_.joined, rows = count / joined, rest = count % joined;
    kernels_.scale_rows(in, in_step * joined, factors, offsets, rows, walk_.row(), out,
                        out_step * joined, stream);
    if (rest > 0) {
      const Index done = rows * joined;
      kernels_.scale_rows(in + done * in_step, 0, factors, offsets, 1, rest * walk_.channels,
                          out + done * out_step, 0, stream);
    }
  }

 private:
  const Kernels<T>& kernels_;
  const Walk& walk_;
  BlockSums<A> sums_;
};

// Forward. ---------------------------------------------------------------------------------------

template <typename T, typename W>
class Forward {
 public:
  Forward(const Context& context, const SqueezeExciteForward& call, const Kernels<T>& images,
          const Kernels<W>& weights)
      : samples_(call.x.sizes[0]),
        walk_(walk_of({&call.x, &call.y})),
        plan_(context, samples_, walk_, sizeof(T), products_of(call)),
        x_(context, walk_, call.x, plan_.slots),
        y_(context, walk_, call.y, plan_.slots),
        passes_(context, images, walk_, plan_.slots),
        gates_(context, call, weights, walk_, plan_),
        stream_(worth_streaming(call.y, y_.native())) {
    drive(context, plan_, walk_, samples_, *this);
  }

  void first(Index n, Index slot, Index b) const {
    x_.gather(n, slot, b);
    passes_.reduce(slot, b, x_.block(n, slot, b), x_.step(), nullptr, 0);
  }

  template <typename Loop>
  void middle(Index n, Index slot, Index samples, const Loop& loop) const {
    gates_.compute(n, slot, samples, loop, [&](Index slot) { return passes_.sums(slot); });
  }

  void last(Index n, Index slot, Index b) const {
    passes_.scale(b, x_.block(n, slot, b), x_.step(), gates_.of(n, slot), nullptr,
                  y_.block(n, slot, b), y_.step(), stream_);
    y_.scatter(n, slot, b);
  }

 private:
  const Index samples_;
  const Walk walk_;
  const Plan plan_;
  const Image<T> x_, y_;
  const Passes<T> passes_;
  const Gates<W> gates_;
  const bool stream_;
};

// Backward. --------------------------------------------------------------------------------------

template <typename T, typename W>
class Backward {
 public:
  Backward(const Context& context, const SqueezeExciteBackward& call, const Kernels<T>& images,
           const Kernels<W>& weights)
      : want_dx_(call.dx.defined()),
        samples_(call.x.sizes[0]),
        walk_(walk_of({&call.x, &call.dy, &call.dx})),
        plan_(context, samples_, walk_, sizeof(T), products_of(call)),
        x_(context, walk_, call.x, plan_.slots),
        dy_(context, walk_, call.dy, plan_.slots),
        dx_(context, walk_, call.dx, plan_.slots),
        passes_(context, images, walk_, plan_.slots),
        gradients_(context, call, weights, walk_, plan_, want_dx_),
        stream_(worth_streaming(call.dx, dx_.native())) {
    if (!gradients_.wanted()) return;
    drive(context, plan_, walk_, samples_, *this);
    gradients_.store(context);
  }

  void first(Index n, Index slot, Index b) const {
    x_.gather(n, slot, b);
    dy_.gather(n, slot, b);
    passes_.reduce(slot, b, dy_.block(n, slot, b), dy_.step(), x_.block(n, slot, b), x_.step());
  }

  template <typename Loop>
  void middle(Index n, Index slot, Index samples, const Loop& loop) const {
    gradients_.compute(n, slot, samples, loop, [&](Index slot) { return passes_.sums(slot); });
  }

  void last(Index n, Index slot, Index b) const {
    if (!want_dx_) return;
    passes_.scale(b, dy_.block(n, slot, b), dy_.step(), gradients_.gates(n, slot),
                  gradients_.dp(n, slot), dx_.block(n, slot, b), dx_.step(), stream_);
    dx_.scatter(n, slot, b);
  }

 private:
  const bool want_dx_;
  const Index samples_;
  const Walk walk_;
  const Plan plan_;
  const Image<T> x_, dy_, dx_;
  const Passes<T> passes_;
  const GateGradients<W> gradients_;
  const bool stream_;
};

// The list of implementations. -------------------------------------------------------------------

template <template <typename, typename> class Operation, typename Call>
void run(const KernelSet& kernels, const Context& context, const Call& call) {
  const bool same = call.w1.dtype == call.x.dtype;
  switch (call.x.dtype) {
    case DType::f32:
      Operation<float, float>(context, call, kernels.f32, kernels.f32);
      return;
    case DType::f64:
      Operation<double, double>(context, call, kernels.f64, kernels.f64);
      return;
    case DType::f16:
      if (same)
        Operation<F16, F16>(context, call, kernels.f16, kernels.f16);
      else
        Operation<F16, float>(context, call, kernels.f16, kernels.f32);
      return;
    case DType::bf16:
      if (same)
        Operation<BF16, BF16>(context, call, kernels.bf16, kernels.bf16);
      else
        Operation<BF16, float>(context, call, kernels.bf16, kernels.f32);
      return;
    case DType::u8:
    case DType::b8:
    case DType::i64:
      return;
  }
}

template <const KernelSet& kKernels>
void forward(const Context& context, const SqueezeExciteForward& call) {
  run<Forward>(kKernels, context, call);
}

template <const KernelSet& kKernels>
void backward(const Context& context, const SqueezeExciteBackward& call) {
  run<Backward>(kKernels, context, call);
}

constexpr Implementation<SqueezeExciteForward> kForward[] = {
    {"avx512", needs_avx512, forward<avx512::kernels>},
    {"avx2", needs_avx2, forward<avx2::kernels>},
    {"portable", needs_nothing, forward<portable::kernels>},
};

constexpr Implementation<SqueezeExciteBackward> kBackward[] = {
    {"avx512", needs_avx512, backward<avx512::kernels>},
    {"avx2", needs_avx2, backward<avx2::kernels>},
    {"portable", needs_nothing, backward<portable::kernels>},
};

}  // namespace

Implementations<SqueezeExciteForward> squeeze_excite_forward() { return kForward; }
Implementations<SqueezeExciteBackward> squeeze_excite_backward() { return kBackward; }

}  // namespace fusewise::cpu

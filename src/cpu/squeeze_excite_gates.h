#pragma once

// The gates of Squeeze-and-Excitation from sums over pixels, and the gradients of its weights: two
// small GEMMs for a few samples at a time. Bound by reading the weights.

#include "common/math.h"
#include "cpu/squeeze_excite_kernels.h"
#include "cpu/squeeze_excite_plan.h"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cpu::squeeze_excite {

/// Multiplications of a sample outside of its image.
template <typename Call>
Index products_of(const Call& call) {
  return 2 * call.x.sizes[1] * call.w1.sizes[0];
}

template <typename W, typename A = AccumulatorOf<W>>
class Gates {
 public:
  Gates(const Context& context, const SqueezeExciteForward& call, const Kernels<W>& weights,
        const Walk& walk, const Plan& plan)
      : call_(call),
        weights_(weights),
        walk_(walk),
        channels_(walk.channels),
        reduced_(call.w1.sizes[0]),
        pooled_(context, call.pooled, call.x.sizes[0], channels_),
        hidden_(context, call.hidden, call.x.sizes[0], reduced_),
        gates_(context, call.gates, call.x.sizes[0], channels_),
        active_(context, plan.slots, reduced_),
        wide_gates_(context, walk.joined > 1 ? plan.slots : 0, walk.row()) {}

  /// The gates of some samples. sums_of(slot): the sums over a sample's pixels.
  template <typename Loop, typename Sums>
  void compute(Index n, Index slot, Index samples, const Loop& loop, const Sums& sums_of) const {
    for (Index j = 0; j < samples; ++j) {
      const A* sums = sums_of(slot + j);
      for (Index c = 0; c < channels_; ++c) pooled_[n + j][c] = sums[c] / A(walk_.pixels);
    }
    loop(reduced_, channels_ * samples, [&](Index begin, Index end) {
      weights_.multiply_transposed(weight(call_.w1) + begin * channels_, bias(call_.b1, begin),
                                   end - begin, channels_, pooled_[n], pooled_.stride(), samples,
                                   hidden_[n] + begin, hidden_.stride());
      for (Index j = 0; j < samples; ++j) {
        for (Index r = begin; r < end; ++r) {
          active_[slot + j][r] = math::activate(call_.activation, hidden_[n + j][r]);
        }
      }
    });
    loop(channels_, reduced_ * samples, [&](Index begin, Index end) {
      weights_.multiply_transposed(weight(call_.w2) + begin * reduced_, bias(call_.b2, begin),
                                   end - begin, reduced_, active_[slot], active_.stride(), samples,
                                   gates_[n] + begin, gates_.stride());
      for (Index j = 0; j < samples; ++j) {
        A* gates = gates_[n + j];
        for (Index c = begin; c < end; ++c) gates[c] = math::open_gate(call_.gate, gates[c]);
      }
    });
    if (walk_.joined == 1) return;
    for (Index j = 0; j < samples; ++j) widen(walk_, gates_[n + j], wide_gates_[slot + j]);
  }

  /// Of a sample in progress, as wide as `row()`.
  const A* of(Index n, Index slot) const {
    return walk_.joined > 1 ? wide_gates_[slot] : gates_[n];
  }

 private:
  static const W* weight(const TensorView& t) { return static_cast<const W*>(t.data); }
  static const W* bias(const TensorView& t, Index begin) {
    return t.defined() ? weight(t) + begin : nullptr;
  }

  const SqueezeExciteForward& call_;
  const Kernels<W>& weights_;
  const Walk& walk_;
  const Index channels_, reduced_;
  const SampleSums<A> pooled_, hidden_, gates_, active_, wide_gates_;
};

/// The gradients of the gates' inputs and of the weights. `want_dp`: of the pooled values too.
template <typename W, typename A = AccumulatorOf<W>>
class GateGradients {
 public:
  GateGradients(const Context& context, const SqueezeExciteBackward& call,
                const Kernels<W>& weights, const Walk& walk, const Plan& plan, bool want_dp)
      : call_(call),
        weights_(weights),
        walk_(walk),
        want_dp_(want_dp),
        want_dz_(want_dp || call.dw1.defined() || call.db1.defined()),
        samples_(call.x.sizes[0]),
        channels_(walk.channels),
        reduced_(call.w1.sizes[0]),
        pooled_(context, call.pooled, samples_, channels_),
        hidden_(context, call.hidden, samples_, reduced_),
        gates_(context, call.gates, samples_, channels_),
        dz2_(context, samples_, channels_),
        dz_(context, want_dz_ ? samples_ : 0, reduced_),
        dp_(context, want_dp ? samples_ : 0, channels_),
        wide_gates_(context, want_dp && walk.joined > 1 ? plan.slots : 0, walk.row()),
        wide_dp_(context, want_dp && walk.joined > 1 ? plan.slots : 0, walk.row()) {}

  bool wanted() const { return want_dz_ || call_.dw2.defined() || call_.db2.defined(); }

  /// For some samples. sums_of(slot): the sums over a sample's pixels of dy * x.
  template <typename Loop, typename Sums>
  void compute(Index n, Index slot, Index samples, const Loop& loop, const Sums& sums_of) const {
    for (Index j = 0; j < samples; ++j) {
      const A* sums = sums_of(slot + j);
      for (Index c = 0; c < channels_; ++c) {
        dz2_[n + j][c] = math::gate_gradient(call_.gate, gates_[n + j][c], sums[c]);
      }
    }
    if (!want_dz_) return;
    loop(reduced_, channels_ * samples, [&](Index begin, Index end) {
      weights_.multiply(dz2_[n], dz2_.stride(), samples, weight(call_.w2) + begin, reduced_,
                        channels_, end - begin, dz_[n] + begin, dz_.stride());
      for (Index j = 0; j < samples; ++j) {
        A* dz = dz_[n + j];
        for (Index r = begin; r < end; ++r) {
          dz[r] = math::activation_gradient(call_.activation, hidden_[n + j][r], dz[r]);
        }
      }
    });
    if (!want_dp_) return;
    loop(channels_, reduced_ * samples, [&](Index begin, Index end) {
      weights_.multiply(dz_[n], dz_.stride(), samples, weight(call_.w1) + begin, channels_,
                        reduced_, end - begin, dp_[n] + begin, dp_.stride());
      for (Index j = 0; j < samples; ++j) {
        for (Index c = begin; c < end; ++c) dp_[n + j][c] /= A(walk_.pixels);
      }
    });
    for (Index j = 0; j < samples; ++j) repeat(n + j, slot + j);
  }

  const A* gates(Index n) const { return gates_[n]; }
  /// (dz W1) / HW of a sample.
  const A* dp(Index n) const { return dp_[n]; }

  /// Prepares a slot for a sample whose gradients are known.
  void repeat(Index n, Index slot) const {
    if (walk_.joined == 1) return;
    widen(walk_, gates_[n], wide_gates_[slot]);
    widen(walk_, dp_[n], wide_dp_[slot]);
  }
  /// The same, as wide as `row()`.
  const A* gates(Index n, Index slot) const {
    return walk_.joined > 1 ? wide_gates_[slot] : gates_[n];
  }
  const A* dp(Index n, Index slot) const { return walk_.joined > 1 ? wide_dp_[slot] : dp_[n]; }

  /// Writes the gradients of the weights: sums over the samples, in their order.
  void store(const Context& context) const {
    const AllThreads loop{context};
    if (call_.dw2.defined()) {
      const SampleSums<A> active(context, samples_, reduced_);
      for (Index n = 0; n < samples_; ++n) {
        for (Index r = 0; r < reduced_; ++r) {
          active[n][r] = math::activate(call_.activation, hidden_[n][r]);
        }
      }
      products(loop, dz2_, active, channels_, reduced_, weight(call_.dw2));
    }
    if (call_.dw1.defined()) {
      products(loop, dz_, pooled_, reduced_, channels_, weight(call_.dw1));
    }
    if (call_.db2.defined()) add_samples(dz2_, channels_, weight(call_.db2));
    if (call_.db1.defined()) add_samples(dz_, reduced_, weight(call_.db1));
  }

 private:
  static W* weight(const TensorView& t) { return static_cast<W*>(t.data); }

  void products(const AllThreads& loop, const SampleSums<A>& a, const SampleSums<A>& b, Index rows,
                Index columns, W* out) const {
    loop(rows, samples_ * columns, [&](Index begin, Index end) {
      weights_.outer_products(a[0] + begin, a.stride(), b[0], b.stride(), samples_, end - begin,
                              columns, out + begin * columns, columns);
    });
  }

  void add_samples(const SampleSums<A>& rows, Index columns, W* out) const {
    const A one = 1;
    weights_.outer_products(&one, 0, rows[0], rows.stride(), samples_, 1, columns, out, columns);
  }

  const SqueezeExciteBackward& call_;
  const Kernels<W>& weights_;
  const Walk& walk_;
  const bool want_dp_, want_dz_;
  const Index samples_, channels_, reduced_;
  const SampleSums<A> pooled_, hidden_, gates_, dz2_, dz_, dp_, wide_gates_, wide_dp_;
};

}  // namespace fusewise::cpu::squeeze_excite

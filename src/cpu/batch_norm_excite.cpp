// BatchNorm + activation + Squeeze-and-Excitation on the CPU.
// Forward reads x twice: for BatchNorm's statistics, then a few samples at a time, whose activated
// values stay in the caches until their gates are known. Backward reads dy and x twice: the sums of
// the first pass give all gradients of parameters, the second pass writes dx. Without training one
// read is enough in both directions. Bound by memory bandwidth and, for SiLU, by its exponential.

#include "fusewise/batch_norm_excite.h"

#include "common/batch_norm_excite.h"
#include "common/implementation.h"
#include "common/operators.h"
#include "cpu/batch_norm_excite_kernels.h"
#include "cpu/batch_norm_passes.h"
#include "cpu/instruction_sets.h"
#include "cpu/squeeze_excite_gates.h"

namespace fusewise::cpu {
namespace {

using namespace squeeze_excite;
using batch_norm::Parameters;

struct Sets {
  const KernelSet& excite;
  const BatchNormExciteKernelSet& both;
};

/// The kernels for a type.
template <typename T, typename Set>
const auto& kernels_of(const Set& set) {
  if constexpr (std::is_same_v<T, float>) return set.f32;
  if constexpr (std::is_same_v<T, double>) return set.f64;
  if constexpr (std::is_same_v<T, F16>) return set.f16;
  if constexpr (std::is_same_v<T, BF16>) return set.bf16;
}

/// Runs BatchNorm's forward without y: mean and 1 / sqrt(var + eps), in the caller's memory or in
/// scratch.
template <typename T, typename W>
class Statistics {
  using A = AccumulatorOf<T>;

 public:
  Statistics(const Context& context, const BatchNormExciteForward& call,
             const BatchNormKernels<T>& kernels, const BatchNormKernels<W>& weights)
      : own_(context, call.mean.defined() ? 0 : 2 * call.x.sizes[1]) {
    BatchNormActForward norm = norm_of(call);
    if (!call.mean.defined()) {
      const Index channels = call.x.sizes[1];
      const DType dtype = sizeof(A) == 8 ? DType::f64 : DType::f32;
      norm.mean = {own_.data(), dtype, {}, {channels}};
      norm.inverse_deviation = {own_.data() + channels, dtype, {}, {channels}};
    }
    batch_norm::Forward<T, W>(context, norm, kernels, weights);
    mean = static_cast<const A*>(norm.mean.data);
    inverse_deviation = static_cast<const A*>(norm.inverse_deviation.data);
  }

  const A *mean, *inverse_deviation;

 private:
  Scratch<A> own_;
};

/// Values per channel, as wide as a row of the kernels.
template <typename A>
class PerChannel {
 public:
  PerChannel(const Context& context, const Walk& walk)
      : walk_(walk), values_(context, walk.row()) {}

  A& operator[](Index c) const { return values_.data()[c]; }
  /// Must follow the last change.
  void repeat() const { widen(walk_, values_.data(), values_.data()); }
  const A* data() const { return values_.data(); }

 private:
  const Walk& walk_;
  Scratch<A> values_;
};

/// The rows of x with what normalises them.
template <typename T, typename W>
class Normalizer {
  using A = AccumulatorOf<T>;

 public:
  template <typename Call>
  Normalizer(const Context& context, const Walk& walk, const BatchNormKernels<W>& weights,
             const Call& call, const A* mean, const A* inverse_deviation)
      : activation_(call.activation),
        mean_(context, walk),
        scale_(context, walk),
        shift_(context, walk) {
    const Parameters<W> weight(context, weights, call.weight), bias(context, weights, call.bias);
    for (Index c = 0; c < walk.channels; ++c) {
      mean_[c] = mean[c];
      scale_[c] = inverse_deviation[c] * weight.get(c, 1);
      shift_[c] = bias.get(c, 0);
    }
    for (const auto* values : {&mean_, &scale_, &shift_}) values->repeat();
  }

  NormalizedRows<T> rows(Rows<const T> x, Index channel) const {
    return {x, mean_.data() + channel, scale_.data() + channel, shift_.data() + channel,
            activation_};
  }

 private:
  const Activation activation_;
  const PerChannel<A> mean_, scale_, shift_;
};

/// Rows of block b, from so many pixels on.
template <typename T>
Rows<T> rows_of(const Walk& walk, const Image<T>& image, Index n, Index slot, Index b,
                Index offset) {
  return {image.block(n, slot, b) + offset * image.step(), image.step() * walk.joined};
}

// Forward. ---------------------------------------------------------------------------------------

// Chosen by measurement on two Xeon cores with 2 MB of L2 each.
constexpr Index kActivatedBytes = 1 << 20;  // of the samples that share one read of the weights

template <typename T, typename W>
class Forward {
  using A = AccumulatorOf<T>;

 public:
  Forward(const Context& context, const BatchNormExciteForward& call,
          const BatchNormKernels<T>& norm_kernels, const BatchNormKernels<W>& norm_weights,
          const Sets& sets)
      : excite_(excite_of(call)),
        kernels_(kernels_of<T>(sets.both)),
        samples_(call.x.sizes[0]),
        walk_(walk_of({&call.x, &call.y})),
        plan_(context, samples_, walk_, sizeof(A), products_of(call), kActivatedBytes),
        statistics_(context, call, norm_kernels, norm_weights),
        normalizer_(context, walk_, norm_weights, call, statistics_.mean,
                    statistics_.inverse_deviation),
        x_(context, walk_, call.x, plan_.slots),
        y_(context, walk_, call.y, plan_.slots),
        stream_(worth_streaming(call.y, y_.native())),
        in_place_(std::is_same_v<T, A> && y_.native() && !stream_),
        activated_(context, in_place_ ? 0 : plan_.slots * walk_.volume()),
        sums_(context, walk_, plan_.slots),
        gates_(context, excite_, kernels_of<W>(sets.excite), walk_, plan_) {
    drive(context, plan_, walk_, samples_, *this);
  }

  void first(Index n, Index slot, Index b) const {
    x_.gather(n, slot, b);
    sums_.clear(slot, b);
    walk_.each_matrix(b, [&](const ExciteShape& shape, Index channel, Index offset) {
      const Rows<T> x = rows_of(walk_, x_, n, slot, b, offset);
      kernels_.activate(shape, normalizer_.rows({x.data, x.stride}, channel),
                        activated(n, slot, b, shape, offset), sums_.of(slot, b));
    });
  }

  template <typename Loop>
  void middle(Index n, Index slot, Index samples, const Loop& loop) const {
    gates_.compute(n, slot, samples, loop, [&](Index slot) { return sums_.total(slot); });
  }

  void last(Index n, Index slot, Index b) const {
    walk_.each_matrix(b, [&](const ExciteShape& shape, Index channel, Index offset) {
      const Rows<A> a = activated(n, slot, b, shape, offset);
      kernels_.gate(shape, {a.data, a.stride}, gates_.of(n, slot) + channel,
                    rows_of(walk_, y_, n, slot, b, offset), stream_);
    });
    y_.scatter(n, slot, b);
  }

 private:
  /// act(v): in y's memory, or dense copies of some samples.
  Rows<A> activated(Index n, Index slot, Index b, const ExciteShape& shape, Index offset) const {
    if constexpr (std::is_same_v<T, A>) {
      if (in_place_) return rows_of(walk_, y_, n, slot, b, offset);
    }
    const Index step = walk_.planar ? walk_.pixels : walk_.channels;
    return {activated_.data() + slot * walk_.volume() + (walk_.begin(b) + offset) * step,
            shape.columns};
  }

  const SqueezeExciteForward excite_;
  const BatchNormExciteKernels<T>& kernels_;
  const Index samples_;
  const Walk walk_;
  const Plan plan_;
  const Statistics<T, W> statistics_;
  const Normalizer<T, W> normalizer_;
  const Image<T> x_, y_;
  const bool stream_, in_place_;
  const Scratch<A> activated_;
  const BlockSums<A> sums_;
  const Gates<W> gates_;
};

// Backward. --------------------------------------------------------------------------------------

// The order of GateSums.
constexpr Index kA = 0, kOpen = 1, kOpenCentered = 2, kPassed = 3, kPassedCentered = 4, kKinds = 5;

template <typename T, typename W>
class Backward {
  using A = AccumulatorOf<T>;

 public:
  Backward(const Context& context, const BatchNormExciteBackward& call, const BatchNormKernels<T>&,
           const BatchNormKernels<W>& norm_weights, const Sets& sets)
      : excite_(excite_of(call)),
        kernels_(kernels_of<T>(sets.both)),
        want_sums_(call.dweight.defined() || call.dbias.defined() ||
                   (call.dx.defined() && call.training)),
        at_once_(call.dx.defined() && !call.training),
        samples_(call.x.sizes[0]),
        walk_(walk_of({&call.x, &call.dy, &call.dx})),
        plan_(context, samples_, walk_, sizeof(T), products_of(call)),
        inverse_deviation_(static_cast<const A*>(call.inverse_deviation.data)),
        normalizer_(context, walk_, norm_weights, call, static_cast<const A*>(call.mean.data),
                    inverse_deviation_),
        x_(context, walk_, call.x, plan_.slots),
        dy_(context, walk_, call.dy, plan_.slots),
        dx_(context, walk_, call.dx, plan_.slots),
        sums_(context, walk_, plan_.slots, want_sums_ ? kKinds : 1),
        totals_(context, want_sums_ ? samples_ * kKinds : 0, walk_.channels),
        added_up_(context, want_sums_ ? samples_ : 0),
        gradients_(context, excite_, kernels_of<W>(sets.excite), walk_, plan_,
                   want_sums_ || at_once_),
        weight_(context, norm_weights, call.weight),
        dweight_(context, norm_weights, call.dweight, false),
        dbias_(context, norm_weights, call.dbias, false),
        slope_(context, walk_),
        offset_(context, walk_),
        stream_(worth_streaming(call.dx, dx_.native())) {
    if (!gradients_.wanted()) return;
    drive(context, plan_, walk_, samples_, *this);
    gradients_.store(context);
    if (!want_sums_) return;
    for (Index n = 0; n < samples_; ++n) {
      if (!added_up_.data()[n]) add_pixels(context, n);
    }
    AllThreads{context}(walk_.channels, 2 * kKinds * samples_,
                        [&](Index begin, Index end) { add_samples(begin, end); });
    dweight_.store();
    dbias_.store();
    if (!call.dx.defined() || at_once_) return;
    for (const auto* values : {&slope_, &offset_}) values->repeat();
    each_block(
        context, plan_, walk_, samples_, [&](Index n, Index slot) { gradients_.repeat(n, slot); },
        [&](Index n, Index slot, Index b) {
          x_.gather(n, slot, b);
          dy_.gather(n, slot, b);
          differentiate(n, slot, b);
        });
  }

  void first(Index n, Index slot, Index b) const {
    x_.gather(n, slot, b);
    dy_.gather(n, slot, b);
    sums_.clear(slot, b);
    const auto sums = [&](Index kind) { return want_sums_ ? sums_.of(slot, b, kind) : nullptr; };
    const GateSums<A> to{sums_.of(slot, b, kA), sums(kOpen), sums(kOpenCentered), sums(kPassed),
                         sums(kPassedCentered)};
    walk_.each_matrix(b, [&](const ExciteShape& shape, Index channel, Index offset) {
      kernels_.gate_sums(shape, normalized(n, slot, b, channel, offset),
                         gradient(n, slot, b, offset), to);
    });
  }

  template <typename Loop>
  void middle(Index n, Index slot, Index samples, const Loop& loop) const {
    gradients_.compute(n, slot, samples, loop, [&](Index slot) { return sums_.total(slot); });
    if (!want_sums_) return;
    for (Index j = 0; j < samples; ++j) {
      for (Index kind = kOpen; kind < kKinds; ++kind) {
        std::copy_n(sums_.total(slot + j, kind), walk_.channels, total(n + j, kind));
      }
      bool finite = true;
      for (Index c = 0; c < walk_.channels; ++c) finite &= gradient_of(n + j, c).is_finite();
      added_up_.data()[n + j] = finite;
    }
  }

  void last(Index n, Index slot, Index b) const {
    if (at_once_) differentiate(n, slot, b);
  }

 private:
  NormalizedRows<T> normalized(Index n, Index slot, Index b, Index channel, Index offset) const {
    const Rows<T> x = rows_of(walk_, x_, n, slot, b, offset);
    return normalizer_.rows({x.data, x.stride}, channel);
  }
  Rows<const T> gradient(Index n, Index slot, Index b, Index offset) const {
    const Rows<T> dy = rows_of(walk_, dy_, n, slot, b, offset);
    return {dy.data, dy.stride};
  }
  /// Without slope and offset.
  GatedGradient<T> gated(Index n, Index slot, Index b, Index channel, Index offset) const {
    return {gradient(n, slot, b, offset), gradients_.gates(n, slot) + channel,
            gradients_.dp(n, slot) + channel};
  }
  void differentiate(Index n, Index slot, Index b) const {
    walk_.each_matrix(b, [&](const ExciteShape& shape, Index channel, Index offset) {
      GatedGradient<T> in = gated(n, slot, b, channel, offset);
      if (!at_once_) in.slope = slope_.data() + channel, in.offset = offset_.data() + channel;
      kernels_.differentiate(shape, normalized(n, slot, b, channel, offset), in,
                             rows_of(walk_, dx_, n, slot, b, offset), stream_);
    });
    dx_.scatter(n, slot, b);
  }

  A* total(Index n, Index kind) const { return totals_[n * kKinds + kind]; }

  /// The sums of dv and of dv * (x - mean) over the pixels of a sample and channel.
  struct ChannelGradient {
    double dv, dv_centered;
    bool is_finite() const { return (dv - dv) + (dv_centered - dv_centered) == 0; }
  };
  ChannelGradient gradient_of(Index n, Index c) const {
    const double gate = gradients_.gates(n)[c], dp = gradients_.dp(n)[c];
    return {gate * total(n, kPassed)[c] + dp * total(n, kOpen)[c],
            gate * total(n, kPassedCentered)[c] + dp * total(n, kOpenCentered)[c]};
  }
  /// Adds up dv itself. If something is not finite, sums without gates and dp do not say whether
  /// infinities of both signs meet, or a 0 and an infinity, and at which pixels the activation is
  /// closed, which lets not even NaN pass.
  void add_pixels(const Context& context, Index n) const {
    const Index slot = 0;
    gradients_.repeat(n, slot);
    AllThreads{context}(walk_.blocks, kWorthThreads, [&](Index begin, Index end) {
      for (Index b = begin; b < end; ++b) {
        x_.gather(n, slot, b);
        dy_.gather(n, slot, b);
        sums_.clear(slot, b);
        walk_.each_matrix(b, [&](const ExciteShape& shape, Index channel, Index offset) {
          kernels_.gradient_sums(shape, normalized(n, slot, b, channel, offset),
                                 gated(n, slot, b, channel, offset), sums_.of(slot, b, kPassed),
                                 sums_.of(slot, b, kPassedCentered));
        });
      }
    });
    for (const Index kind : {kPassed, kPassedCentered}) {
      std::copy_n(sums_.total(slot, kind), walk_.channels, total(n, kind));
    }
  }
  /// The gradients of BatchNorm's parameters for some channels, and what dx needs of them.
  void add_samples(Index begin, Index end) const {
    const auto values = static_cast<double>(samples_ * walk_.pixels);
    for (Index c = begin; c < end; ++c) {
      double dbias = 0, products = 0;
      for (Index n = 0; n < samples_; ++n) {
        const ChannelGradient sample =
            added_up_.data()[n]
                ? gradient_of(n, c)
                : ChannelGradient{total(n, kPassed)[c], total(n, kPassedCentered)[c]};
        dbias += sample.dv;
        products += sample.dv_centered;
      }
      const double inverse = inverse_deviation_[c], dweight = products * inverse;
      if (dweight_.defined()) dweight_[c] = static_cast<A>(dweight);
      if (dbias_.defined()) dbias_[c] = static_cast<A>(dbias);
      const double scale = -inverse * weight_.get(c, 1) / values;
      slope_[c] = static_cast<A>(scale * inverse * dweight);
      offset_[c] = static_cast<A>(scale * dbias);
    }
  }

  const SqueezeExciteBackward excite_;
  const BatchNormExciteKernels<T>& kernels_;
  const bool want_sums_, at_once_;
  const Index samples_;
  const Walk walk_;
  const Plan plan_;
  const A* inverse_deviation_;
  const Normalizer<T, W> normalizer_;
  const Image<T> x_, dy_, dx_;
  const BlockSums<A> sums_;
  const SampleSums<A> totals_;
  const Scratch<bool> added_up_;  // by sample: whether the totals give its gradients
  const GateGradients<W> gradients_;
  const Parameters<W> weight_, dweight_, dbias_;
  const PerChannel<A> slope_, offset_;
  const bool stream_;
};

// The list of implementations. -------------------------------------------------------------------

template <const BatchNormKernelSet& kNorm, const Sets& kSets>
void forward(const Context& context, const BatchNormExciteForward& call) {
  batch_norm::run<Forward>(kNorm, context, call, call.w1.dtype, kSets);
}

template <const BatchNormKernelSet& kNorm, const Sets& kSets>
void backward(const Context& context, const BatchNormExciteBackward& call) {
  batch_norm::run<Backward>(kNorm, context, call, call.w1.dtype, kSets);
}

constexpr Sets kAvx512{avx512::kernels, avx512::batch_norm_excite_kernels};
constexpr Sets kAvx2{avx2::kernels, avx2::batch_norm_excite_kernels};
constexpr Sets kPortable{portable::kernels, portable::batch_norm_excite_kernels};

constexpr Implementation<BatchNormExciteForward> kForward[] = {
    {"avx512", needs_avx512, forward<avx512::batch_norm_kernels, kAvx512>},
    {"avx2", needs_avx2, forward<avx2::batch_norm_kernels, kAvx2>},
    {"portable", needs_nothing, forward<portable::batch_norm_kernels, kPortable>},
};

constexpr Implementation<BatchNormExciteBackward> kBackward[] = {
    {"avx512", needs_avx512, backward<avx512::batch_norm_kernels, kAvx512>},
    {"avx2", needs_avx2, backward<avx2::batch_norm_kernels, kAvx2>},
    {"portable", needs_nothing, backward<portable::batch_norm_kernels, kPortable>},
};

}  // namespace

Implementations<BatchNormExciteForward> batch_norm_excite_forward() { return kForward; }
Implementations<BatchNormExciteBackward> batch_norm_excite_backward() { return kBackward; }

}  // namespace fusewise::cpu

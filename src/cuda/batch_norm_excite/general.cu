// BatchNorm, activation and Squeeze-and-Excitation in passes over x: any GPU, type, strides, size.
// Memory: forward reads x for its statistics (not in inference), for the pooled values and for y,
// which it writes. Backward reads dy and x twice and writes dx. Each pass begins with what the one
// before read last, which is still in L2. Bound by memory bandwidth when large, by its launches
// when small: six or, with batched GEMMs, seven forward, and six backward.
//
// Backward needs one pass for all sums: dv = (dy * g + o) * act'(v), where the gates g and the
// offsets o have one value for each sample and channel. So the sums of dv over a sample follow from
// sums without g and o.

#include "cuda/batch_norm_excite/general.cuh"

#include "common/batch_norm_excite.h"
#include "common/divide.h"
#include "common/scratch.h"
#include "cuda/batch_norm/activation.cuh"
#include "cuda/batch_norm/coefficients.cuh"
#include "cuda/batch_norm/two_pass.cuh"
#include "cuda/image_passes.cuh"
#include "cuda/squeeze_excite/batched.cuh"
#include "cuda/squeeze_excite/excitation.cuh"

namespace fusewise::cuda {
namespace {

using passes::Index;
using passes::kThreads;

constexpr int kResident = 2;

/// The values of an Op: those of BatchNorm, then its own.
enum Value { kMean, kScale, kShift, kNormValues };

template <typename A>
__device__ __forceinline__ void norm_values(const Coefficients<A>& from, A* to) {
  to[kMean] = from.mean;
  to[kScale] = from.scale;
  to[kShift] = from.shift;
}
template <typename A, typename Values>
__device__ __forceinline__ A normalized(const Values& values, int k, A x) {
  return Coefficients<A>{values(kMean, k), values(kScale, k), values(kShift, k), A(0)}(x);
}

// ---- Forward.

/// Sums of act(v).
template <typename T>
struct SumOfActivated {
  using A = Accumulator<T>;
  static constexpr int kImages = 1, kValues = kNormValues, kSums = 1, kResident = cuda::kResident;
  const Coefficients<A>* coefficients;  ///< [C]
  Activation activation;

  __device__ __forceinline__ void values(Index, Index channel, A (&to)[kValues]) const {
    norm_values(coefficients[channel], to);
  }
  template <typename Values, int kCount, int kWidth>
  __device__ __forceinline__ void add(const Values& values, const A (&x)[kCount],
                                      const A (&)[kCount], A (&sums)[1][kWidth]) const {
    A v[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) v[k] = normalized(values, k, x[k]);
    activate_all<T>(activation, v);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sums[0][k % kWidth] += v[k];
  }
};

/// act(v) * g.
template <typename T>
struct GatedActivated {
  using A = Accumulator<T>;
  enum { kGate = kNormValues, kAll };
  static constexpr int kImages = 1, kValues = kAll, kResident = cuda::kResident;
  const Coefficients<A>* coefficients;  ///< [C]
  const A* gates;                       ///< [N, C]
  Index c;
  Activation activation;

  __device__ __forceinline__ void values(Index sample, Index channel, A (&to)[kValues]) const {
    norm_values(coefficients[channel], to);
    to[kGate] = gates[sample * c + channel];
  }
  template <typename Values, int kCount>
  __device__ __forceinline__ void map(const Values& values, const A (&x)[kCount],
                                      const A (&)[kCount], A (&y)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) y[k] = normalized(values, k, x[k]);
    activate_all<T>(activation, y);
#pragma unroll
    for (int k = 0; k < kCount; ++k) y[k] *= values(kGate, k);
  }
};

// ---- Backward.

/// Of each sample and channel, with s = act'(v): the sums of dy * act(v), dy * s and s, and of the
/// last two times x - mean.
enum GradientSum { kOfGate, kOfGated, kOfOffset, kOfGatedCentred, kOfOffsetCentred, kGradientSums };

template <typename T>
struct SumsOfGradients {
  using A = Accumulator<T>;
  static constexpr int kImages = 2, kValues = kNormValues, kSums = kGradientSums,
                       kResident = cuda::kResident;
  BackwardChannels channels;
  Activation activation;

  __device__ __forceinline__ void values(Index, Index channel, A (&to)[kValues]) const {
    norm_values(saved_coefficients<T>(channels, channel), to);
  }
  template <typename Values, int kCount, int kWidth>
  __device__ __forceinline__ void add(const Values& values, const A (&x)[kCount],
                                      const A (&dy)[kCount], A (&sums)[kSums][kWidth]) const {
    A activated[kCount], slope[kCount], gated[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      activated[k] = normalized(values, k, x[k]);
      slope[k] = A(1);
      gated[k] = dy[k];
    }
    with_activation<Kinds::all>(activation, [&](auto tag) {
      constexpr Activation kKind = decltype(tag)::kKind;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const A v = activated[k];
        activated[k] = act_with_slope<kKind, T>(v, slope[k]);
        // Where the activation is closed, NaN in dy must not pass, as it would in a product.
        // silu never is closed.
        if constexpr (kKind == Activation::silu) {
          gated[k] = dy[k] * slope[k];
        } else {
          gated[k] = act_gradient<kKind, T>(v, dy[k]);
        }
      }
    });
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const A centred = x[k] - values(kMean, k);
      sums[kOfGate][k % kWidth] += dy[k] * activated[k];
      sums[kOfGated][k % kWidth] += gated[k];
      sums[kOfOffset][k % kWidth] += slope[k];
      sums[kOfGatedCentred][k % kWidth] += gated[k] * centred;
      sums[kOfOffsetCentred][k % kWidth] += slope[k] * centred;
    }
  }
};

/// dx from x and dy.
template <typename T>
struct Gradient {
  using A = Accumulator<T>;
  enum { kGate = kNormValues, kOffset, kCorrection, kSlope, kAll };
  static constexpr int kImages = 2, kValues = kAll, kResident = cuda::kResident;
  const Coefficients<A>* coefficients;  ///< [C]
  const Corrections<A>* corrections;    ///< [C]
  const A *gates, *offsets;             ///< [N, C]
  Index c;
  Activation activation;
  bool training;

  __device__ __forceinline__ void values(Index sample, Index channel, A (&to)[kValues]) const {
    norm_values(coefficients[channel], to);
    to[kGate] = gates[sample * c + channel];
    to[kOffset] = offsets[sample * c + channel];
    const Corrections<A> correction = corrections[channel];
    to[kCorrection] = correction.offset;
    to[kSlope] = correction.slope;
  }
  template <typename Values, int kCount>
  __device__ __forceinline__ void map(const Values& values, const A (&x)[kCount],
                                      const A (&dy)[kCount], A (&dx)[kCount]) const {
    A v[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      v[k] = normalized(values, k, x[k]);
      dx[k] = dy[k] * values(kGate, k) + values(kOffset, k);
    }
    differentiate_all<T>(activation, v, dx);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (training) dx[k] -= values(kCorrection, k) + (x[k] - values(kMean, k)) * values(kSlope, k);
      dx[k] *= values(kScale, k);
    }
  }
};

// ---- Between the passes.

/// For each sample and channel, with `lanes` threads: finish(index, sum over the chunks of their
/// first sum).
template <typename A, typename Finish>
__device__ __forceinline__ void sum_chunks(const A* sums, const passes::Shape& s, int kinds,
                                           int lanes, Finish finish) {
  const Index thread = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  const Index at = thread / lanes;
  const bool inside = at < s.n * s.c;
  A sum = 0;
  if (inside) {
    const Index sample = at / s.c, channel = at - sample * s.c;
    const A* const own = sums + sample * s.chunks * kinds * s.c + channel;
#pragma unroll 4
    for (Index k = thread % lanes; k < s.chunks; k += lanes) sum += own[k * kinds * s.c];
  }
  sum = warp_sum(sum, lanes);
  if (inside && thread % lanes == 0) finish(at, sum);
}

/// means = sums / HW.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const A* sums, const passes::Shape s, int lanes, A* means) {
  wait_for_previous_kernel();
  allow_next_kernel();
  sum_chunks(sums, s, 1, lanes, [&](Index at, A sum) { means[at] = sum / static_cast<A>(s.hw); });
}

/// dz2, the gradient before the gate.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    gate_gradients_kernel(const A* sums, const passes::Shape s, int lanes, const A* gates,
                          Gate gate, A* dz2) {
  static_assert(kOfGate == 0);
  wait_for_previous_kernel();
  allow_next_kernel();
  sum_chunks(sums, s, kGradientSums, lanes,
             [&](Index at, A sum) { dz2[at] = math::gate_gradient(gate, gates[at], sum); });
}

/// Sums of dv and of dv * (x - mean).
struct ChannelGradient {
  double dv, dvx;

  __device__ __forceinline__ void add(const ChannelGradient& other) {
    dv += other.dv;
    dvx += other.dvx;
  }
};

/// The sums of the first pass, a row for each chunk of a sample's pixels, and what they come from.
template <typename T>
struct GradientRows {
  using A = Accumulator<T>;
  const A *sums, *gates, *offsets;
  passes::Shape shape;
  passes::Image<const T> x, dy;
  Activation activation;

  __device__ __forceinline__ Index count() const { return shape.n * shape.chunks; }

  __device__ __forceinline__ ChannelGradient gradient(Index row, Index sample,
                                                      Index channel) const {
    const Index at = sample * shape.c + channel;
    const A* const own = sums + row * kGradientSums * shape.c + channel;
    const double g = gates[at], o = offsets[at];
    return {g * own[kOfGated * shape.c] + o * own[kOfOffset * shape.c],
            g * own[kOfGatedCentred * shape.c] + o * own[kOfOffsetCentred * shape.c]};
  }
  /// From dv itself, not from the sums.
  __device__ __forceinline__ ChannelGradient gradient_of_pixels(
      Index sample, Index chunk, Index channel, const Coefficients<A>& coefficients) const {
    const A g = gates[sample * shape.c + channel], o = offsets[sample * shape.c + channel];
    const Index end = min((chunk + 1) * shape.chunk, shape.hw);
    ChannelGradient sum{};
    for (Index pixel = chunk * shape.chunk; pixel < end; ++pixel) {
      const A value = to_accumulator<A>(*x.at(sample, channel, pixel, shape.width));
      const A v[1] = {coefficients(value)};
      A dv[1] = {to_accumulator<A>(*dy.at(sample, channel, pixel, shape.width)) * g + o};
      differentiate_all<T>(activation, v, dv);
      sum.add({dv[0], static_cast<double>(dv[0]) * (value - coefficients.mean)});
    }
    return sum;
  }
};

/// The gradient from every `step`-th row, if something is not finite. Sums without g and o do not
/// tell whether infinities of both signs meet, or a 0 and an infinity, nor at which pixels the
/// activation is closed, where not even NaN passes. So rows whose gradient is not finite are added
/// up from their pixels. A sum that is NaN stays so, whatever follows.
template <typename T>
__device__ __noinline__ ChannelGradient gradient_not_finite(const GradientRows<T>& rows, Index row,
                                                            int step, Index channel,
                                                            Coefficients<Accumulator<T>> c) {
  const auto settled = [](double own, double sum) { return isfinite(own) || isnan(sum); };
  ChannelGradient sum{};
  for (; row < rows.count(); row += step) {
    const Index sample = row / rows.shape.chunks;
    ChannelGradient own = rows.gradient(row, sample, channel);
    if (!settled(own.dv, sum.dv) || !settled(own.dvx, sum.dvx)) {
      own = rows.gradient_of_pixels(sample, row - sample * rows.shape.chunks, channel, c);
    }
    sum.add(own);
  }
  return sum;
}

/// Channels of a block of combine_kernel: few, so that many threads share the samples of each.
constexpr int kCombined = 8;

/// dweight, dbias and what dx needs, from the sums of all samples.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const BackwardChannels b, const __grid_constant__ GradientRows<T> rows,
                   Coefficients<Accumulator<T>>* out,
                   Corrections<Accumulator<T>>* out_corrections) {
  using A = Accumulator<T>;
  constexpr int kStrands = kThreads / kCombined;
  __shared__ ChannelGradient parts[kStrands][kCombined];
  wait_for_previous_kernel();
  allow_next_kernel();
  const passes::Shape& s = rows.shape;
  const int lane = threadIdx.x % kCombined, strand = threadIdx.x / kCombined;
  const Index channel = static_cast<Index>(blockIdx.x) * kCombined + lane;
  Coefficients<A> coefficients{};
  ChannelGradient sum{};
  if (channel < s.c) {
    coefficients = saved_coefficients<T>(b, channel);
    // The sample of each row, without a division in the loop.
    const auto chunks = static_cast<unsigned>(s.chunks);
    const unsigned samples = kStrands / chunks, rest = kStrands % chunks;
    unsigned chunk = strand % chunks;
    Index sample = strand / chunks;
#pragma unroll 4
    for (Index row = strand; row < rows.count(); row += kStrands) {
      sum.add(rows.gradient(row, sample, channel));
      chunk += rest;
      const bool wraps = chunk >= chunks;
      chunk -= wraps ? chunks : 0;
      sample += samples + wraps;
    }
    if (!isfinite(sum.dv) || !isfinite(sum.dvx)) {
      sum = gradient_not_finite(rows, strand, kStrands, channel, coefficients);
    }
  }
  parts[strand][lane] = sum;
  __syncthreads();
  if (strand > 0 || channel >= s.c) return;
  for (int other = 1; other < kStrands; ++other) sum.add(parts[other][lane]);
  const GradientSums<A> all{static_cast<double>(s.n * s.hw), static_cast<A>(sum.dv),
                            static_cast<A>(sum.dvx)};
  const Corrections<A> own = finish_gradient<T>(b, channel, all, coefficients.inverse, true);
  out[channel] = coefficients;
  out_corrections[channel] = own;
}

// ---- Host.

template <typename... Parameters, typename... Arguments>
void launch(const Context& context, const char* what, Index blocks, void (*kernel)(Parameters...),
            Arguments... arguments) {
  launch_kernel(
      {.context = context, .blocks = blocks, .threads = kThreads, .overlaps_previous = true}, what,
      kernel, arguments...);
}

/// Threads that share the chunks of a sample and channel.
int chunk_lanes(const passes::Shape& s) {
  int lanes = 1;
  while (lanes < 32 && 4 * lanes < s.chunks) lanes *= 2;
  return lanes;
}

template <typename A>
A* data_of(const TensorView& t) {
  return static_cast<A*>(t.data);
}

/// Memory of a tensor of the call, or of its own where that is absent.
template <typename A>
class OwnOr {
 public:
  OwnOr(const Context& context, const TensorView& t, Index count)
      : own_(context, t.defined() ? 0 : count), data_(t.defined() ? data_of<A>(t) : own_.data()) {}
  A* data() const { return data_; }

 private:
  Scratch<A> own_;
  A* data_;
};

template <typename T>
void coefficients_of(const Context& context, const BatchNormActForward& norm,
                     Coefficients<Accumulator<T>>* out) {
  const ForwardChannels f = channels_of(norm);
  if constexpr (sizeof(T) < 8) {
    if (f.own() && two_pass_declines(context, norm).empty()) {
      return two_pass_coefficients(context, norm.x, norm.blanked, f, out);
    }
  }
  general_coefficients<T>(context, norm.x, norm.blanked, f, out);
}

}  // namespace

void general_run(const Context& context, const BatchNormExciteForward& call) {
  const passes::Plan plan = passes::plan_for(context, {&call.x, &call.y}, kResident);
  const passes::Shape& s = plan.shape;
  const SqueezeExciteForward excitation = excite_of(call);
  dispatch_dtype(call.x.dtype, [&]<typename T>(T) {
    using A = Accumulator<T>;
    const Scratch<Coefficients<A>> coefficients(context, s.c);
    const Scratch<A> sums(context, s.n * s.chunks * s.c);
    const OwnOr<A> gates(context, call.gates, s.n * s.c);
    coefficients_of<T>(context, norm_of(call), coefficients.data());
    passes::sum_images<T>(
        {.context = context, .plan = plan, .a = call.x, .b = call.x, .reversed = true},
        "pooling activations", SumOfActivated<T>{coefficients.data(), call.activation},
        sums.data());
    if constexpr (sizeof(T) < 8) {
      if (batched_products_take(call.x, call.w1)) {
        const OwnOr<A> pooled(context, call.pooled, s.n * s.c);
        const int lanes = chunk_lanes(s);
        launch(context, "pooling", divide_up(s.n * s.c * lanes, kThreads), pool_kernel<A>,
               sums.data(), s, lanes, pooled.data());
        batched_products(context, excitation, pooled.data(), gates.data());
      } else {
        excite(context, excitation, {sums.data(), s.chunks, s.c}, gates.data());
      }
    } else {
      excite(context, excitation, {sums.data(), s.chunks, s.c}, gates.data());
    }
    passes::map_images<T>(
        {.context = context, .plan = plan, .a = call.x, .b = call.x}, "scaling activations",
        GatedActivated<T>{coefficients.data(), gates.data(), s.c, call.activation}, call.y);
  });
}

void general_run(const Context& context, const BatchNormExciteBackward& call) {
  const bool want_dx = call.dx.defined();
  const bool want_norm = want_dx || call.dweight.defined() || call.dbias.defined();
  const passes::Plan plan =
      want_dx ? passes::plan_for(context, {&call.x, &call.dy, &call.dx}, kResident)
              : passes::plan_for(context, {&call.x, &call.dy}, kResident);
  const passes::Shape& s = plan.shape;
  const SqueezeExciteBackward excitation = excite_of(call);
  const BackwardChannels channels = channels_of(norm_of(call));
  const bool batched = batched_products_take(call.x, call.w1);
  // dz2, and for the plain kernels also dz1 and the kernel of the weights' gradients.
  const WeightGradientVectors vectors(context, excitation, /*always=*/true);
  dispatch_dtype(call.x.dtype, [&]<typename T>(T) {
    using A = Accumulator<T>;
    const Scratch<Coefficients<A>> coefficients(context, s.c);
    const Scratch<Corrections<A>> corrections(context, s.c);
    const Scratch<A> sums(context, s.n * s.chunks * kGradientSums * s.c);
    const Scratch<A> offsets(context, s.n * s.c);
    passes::sum_images<T>(
        {.context = context, .plan = plan, .a = call.x, .b = call.dy, .follows = false},
        "summing gradients", SumsOfGradients<T>{channels, call.activation}, sums.data());
    if constexpr (sizeof(T) < 8) {
      if (batched) {
        const int lanes = chunk_lanes(s);
        launch(context, "computing the gates' gradients", divide_up(s.n * s.c * lanes, kThreads),
               gate_gradients_kernel<A>, sums.data(), s, lanes, data_of<A>(call.gates), call.gate,
               vectors.dz2<A>());
        batched_products(context, excitation, vectors.dz2<A>(), offsets.data());
      }
    }
    if (!batched) {
      excite(context, excitation, {sums.data(), s.chunks, kGradientSums * s.c}, vectors,
             want_norm ? offsets.data() : nullptr);
      vectors.run(context, excitation);
    }
    if (!want_norm) return;
    const GradientRows<T> rows{sums.data(),           data_of<A>(call.gates), offsets.data(), s,
                               {call.x, plan.layout}, {call.dy, plan.layout}, call.activation};
    launch(context, "combining gradients", divide_up(s.c, kCombined), combine_kernel<T>, channels,
           rows, coefficients.data(), corrections.data());
    if (!want_dx) return;
    passes::map_images<T>(
        {.context = context, .plan = plan, .a = call.x, .b = call.dy, .reversed = true},
        "computing gradients",
        Gradient<T>{coefficients.data(), corrections.data(), data_of<A>(call.gates), offsets.data(),
                    s.c, call.activation, call.training},
        call.dx);
  });
}

}  // namespace fusewise::cuda

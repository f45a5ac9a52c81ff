// BatchNorm, residual and activation as plain kernels: any GPU, any type, any strides, any size.
// Memory: forward reads x twice (once in inference), the residual once, and writes y. Backward
// reads dy, x and what else dv needs twice (once if no sums are needed) and writes dx and
// dresidual. Single elements at a time, so it is bound by the instructions that find their
// addresses, and by its three launches when small.

#include "cuda/batch_norm/general.cuh"

#include <algorithm>

#include "common/divide.h"
#include "cuda/batch_norm/activation.cuh"
#include "cuda/batch_norm/coefficients.cuh"
#include "cuda/batch_norm/divisor.cuh"
#include "cuda/batch_norm/finish.cuh"
#include "cuda/batch_norm/image.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Arguments {
  Image x, residual, y;     // residual may be absent
  Image dy, dx, dresidual;  // backward; dx and dresidual may be absent
  const bool* blanked;      // [S, N], may be null
  unsigned char* passes;    // may be null
  bool adjacent;            // the bits' order is S, N, H, W, C
  Activation activation;
  Index total, streams;
  Divisor samples, channels, pixels, width;
  // The first pass.
  int lanes;  // neighbouring channels of a block, a power of two up to 32
  int slabs;
  Index per_slab;  // pixels of all samples

  __device__ __forceinline__ bool is_blank(const Place& p) const {
    return blanked != nullptr && blanked[p.s * samples.value() + p.n];
  }
  /// The place of the value with this bit.
  __device__ __forceinline__ Place place(Index bit) const {
    Place p{};
    Index rest = bit, pixel = 0;
    if (adjacent) {
      p.c = channels.split(rest);
      pixel = pixels.split(rest);
    } else {
      pixel = pixels.split(rest);
      p.c = channels.split(rest);
    }
    p.n = samples.split(rest);
    p.s = rest;
    p.w = width.split(pixel);
    p.h = pixel;
    return p;
  }
  __device__ __forceinline__ Index bit_of(const Place& p) const {
    const Index sample = p.s * samples.value() + p.n, pixel = p.h * width.value() + p.w;
    if (adjacent) return (sample * pixels.value() + pixel) * channels.value() + p.c;
    return (sample * channels.value() + p.c) * pixels.value() + pixel;
  }
  /// dv from dy.
  template <typename T>
  __device__ __forceinline__ Accumulator<T> gradient(const Place& p, Index bit,
                                                     Accumulator<T> x_value,
                                                     const Coefficients<Accumulator<T>>& k) const {
    using A = Accumulator<T>;
    A d[1] = {dy.get<T>(p)};
    if (passes != nullptr) {
      keep_passing(passes[bit / 8] >> bit % 8, d);
    } else {
      A v[1] = {k(x_value)};
      if (residual.data != nullptr) v[0] += residual.get<T>(p);
      differentiate_all<T>(activation, v, d);
    }
    return d[0];
  }
};

/// A block's part of the first pass: a slab of pixels of up to `lanes` channels.
struct Part {
  int lane, strand, strands;
  Index tile, slab, stream, channel, begin, end;

  __device__ explicit Part(const Arguments& a) {
    const Index tiles = (a.channels.value() + a.lanes - 1) / a.lanes;
    lane = threadIdx.x % a.lanes;
    strand = threadIdx.x / a.lanes;
    strands = kThreads / a.lanes;
    tile = blockIdx.x % tiles;
    slab = blockIdx.x / tiles % a.slabs;
    stream = blockIdx.x / tiles / a.slabs;
    channel = tile * a.lanes + lane;
    begin = slab * a.per_slab;
    end = min(begin + a.per_slab, a.samples.value() * a.pixels.value());
    if (channel >= a.channels.value()) end = begin;
  }
  __device__ __forceinline__ Place place(const Arguments& a, Index pixel) const {
    Place place{stream, pixel, channel, 0, 0};
    place.h = a.pixels.split(place.n);
    place.w = a.width.split(place.h);
    return place;
  }
  /// Calls body(place) for this thread's values that are not blanked.
  template <typename Body>
  __device__ __forceinline__ void each(const Arguments& a, Body body) const {
#pragma unroll 4
    for (Index p = begin + strand; p < end; p += strands) {
      const Place at = place(a, p);
      if (!a.is_blank(at)) body(at);
    }
  }
  /// The middle one of this thread's first, last and a value between. Blanked ones are left out;
  /// NaN if all are.
  template <typename T>
  __device__ __forceinline__ Accumulator<T> typical(const Arguments& a) const {
    using A = Accumulator<T>;
    A few[3] = {A(NAN), A(NAN), A(NAN)};  // fmin and fmax ignore NaN
    const Index first = begin + strand;
    if (first < end) {
      const Index last = (end - 1 - first) / strands;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const Place at = place(a, first + last * i / 2 * strands);
        if (!a.is_blank(at)) few[i] = a.x.get<T>(at);
      }
    }
    return fmax(fmin(few[0], few[1]), fmin(fmax(few[0], few[1]), few[2]));
  }
  /// Adds over the strands in a fixed order. Threads of strand 0 get the sum of their channel.
  template <typename Sums>
  __device__ __forceinline__ Sums total(const Arguments& a, Sums sums, Sums (*shared)[32]) const {
    for (int offset = 16; offset >= a.lanes; offset /= 2) sums.add_lane(offset);
    if (threadIdx.x % 32 < a.lanes) shared[threadIdx.x / 32][lane] = sums;
    __syncthreads();
    if (strand == 0) {
      sums = shared[0][lane];
      for (int w = 1; w < kWarps; ++w) sums.add(shared[w][lane]);
    }
    return sums;
  }
  /// The index of this channel's part among those of all blocks.
  __device__ __forceinline__ Index at(const Arguments& a) const {
    return (stream * a.slabs + slab) * a.channels.value() + channel;
  }
  __device__ __forceinline__ bool writes(const Arguments& a) const {
    return strand == 0 && channel < a.channels.value();
  }
};

struct LaneMoments : Moments {
  __device__ __forceinline__ void add_lane(int offset) {
    count += __shfl_xor_sync(0xffffffffu, count, offset);
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  }
};

/// Mean and squares of the slabs. Each thread shifts its values by a typical one, so that their
/// squares do not cancel.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    moments_kernel(const __grid_constant__ Arguments a, const MomentParts<Accumulator<T>> parts,
                   const Counter counter) {
  using A = Accumulator<T>;
  __shared__ double counts[kThreads], means[kThreads];
  __shared__ LaneMoments rows[kWarps][32];
  allow_next_kernel();
  const Part part(a);
  Index count = 0;
  A shift = part.typical<T>(a), sum = 0, squares = 0;
  part.each(a, [&](const Place& place) {
    const A x = a.x.get<T>(place);
    if (count++ == 0 && shift != shift) shift = x;
    const A d = x - shift;
    sum += d;
    squares += d * d;
  });
  Moments own;
  own.count = static_cast<double>(count);
  own.sum = static_cast<double>(sum);
  own.squares = static_cast<double>(squares);
  const double mean = own.mean(static_cast<double>(shift));
  counts[threadIdx.x] = own.count;
  means[threadIdx.x] = mean;
  __syncthreads();
  int first = part.lane;
  while (first + a.lanes < kThreads && counts[first] == 0) first += a.lanes;
  const double reference = means[first];
  LaneMoments sums;
  if (count > 0) sums.Moments::add(own.count, mean, own.central(), reference);
  sums = part.total(a, sums, rows);
  if (part.tile == 0 && part.slab == 0 && threadIdx.x < 32) {
    const Index samples = a.total > 0 ? a.samples.value() : 0;
    count_call(counter, part.stream, a.blanked, samples, a.pixels.value());
  }
  if (!part.writes(a)) return;
  const Index at = part.at(a);
  parts.means[at] = sums.mean(reference);
  parts.squares[at] = static_cast<A>(sums.central());
  if (part.channel == 0) parts.counts[part.stream * a.slabs + part.slab] = sums.count;
}

template <typename A>
struct LaneGradientSums : GradientSums<A> {
  __device__ __forceinline__ void add_lane(int offset) {
    this->count += __shfl_xor_sync(0xffffffffu, this->count, offset);
    this->dv += __shfl_xor_sync(0xffffffffu, this->dv, offset);
    this->dvx += __shfl_xor_sync(0xffffffffu, this->dvx, offset);
  }
};

/// Sums of dv and dv * (x - mean) of the slabs.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    gradient_sums_kernel(const __grid_constant__ Arguments a, const BackwardChannels b,
                         const GradientParts<Accumulator<T>> parts) {
  using A = Accumulator<T>;
  __shared__ LaneGradientSums<A> rows[kWarps][32];
  allow_next_kernel();
  const Part part(a);
  const Index channel = min(part.channel, a.channels.value() - 1);
  const auto k = saved_coefficients<T>(b, part.stream * a.channels.value() + channel);
  LaneGradientSums<A> sums;
  Index count = 0;
  part.each(a, [&](const Place& place) {
    const A x = a.x.get<T>(place);
    const Index bit = a.passes != nullptr ? a.bit_of(place) : 0;
    const A d = a.gradient<T>(place, bit, x, k);
    ++count;
    sums.dv += d;
    sums.dvx += d * (x - k.mean);
  });
  sums.count = static_cast<double>(count);
  sums = part.total(a, sums, rows);
  if (!part.writes(a)) return;
  const Index at = part.at(a);
  parts.dv[at] = sums.dv;
  parts.dvx[at] = sums.dvx;
  if (part.channel == 0) parts.counts[part.stream * a.slabs + part.slab] = sums.count;
}

/// The second pass. Lanes have neighbouring values in the order of the bits, so that a warp writes
/// whole bytes of them.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    normalize_kernel(const __grid_constant__ Arguments a,
                     const Coefficients<Accumulator<T>>* coefficients) {
  using A = Accumulator<T>;
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  const Index stride = static_cast<Index>(gridDim.x) * kThreads;
  for (Index base = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x - lane; base < a.total;
       base += stride) {
    const Index i = base + lane;
    bool passes = false;
    if (i < a.total) {
      const Place p = a.place(i);
      if (a.is_blank(p)) {
        a.y.set<T>(p, A(0));
      } else {
        A v[1] = {coefficients[p.s * a.channels.value() + p.c](a.x.get<T>(p))};
        if (a.residual.data != nullptr) v[0] += a.residual.get<T>(p);
        passes = passing<T>(a.activation, v) != 0;
        activate_all<T>(a.activation, v);
        a.y.set<T>(p, v[0]);
      }
    }
    if (a.passes == nullptr) continue;
    const unsigned bits = __ballot_sync(0xffffffffu, passes);
    if (lane % 8 == 0 && i < a.total) a.passes[i / 8] = static_cast<unsigned char>(bits >> lane);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    gradients_kernel(const __grid_constant__ Arguments a, bool training,
                     const Coefficients<Accumulator<T>>* coefficients,
                     const Corrections<Accumulator<T>>* corrections) {
  using A = Accumulator<T>;
  wait_for_previous_kernel();
  const Index stride = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < a.total;
       i += stride) {
    const Place p = a.place(i);
    A d = 0, dx = 0;
    if (!a.is_blank(p)) {
      const Index channel = p.s * a.channels.value() + p.c;
      const Coefficients<A> k = coefficients[channel];
      const A x = a.x.get<T>(p);
      d = dx = a.gradient<T>(p, i, x, k);
      if (training) {
        const Corrections<A> other = corrections[channel];
        dx -= other.offset + (x - k.mean) * other.slope;
      }
      dx *= k.scale;
    }
    if (a.dresidual.data != nullptr) a.dresidual.set<T>(p, d);
    if (a.dx.data != nullptr) a.dx.set<T>(p, dx);
  }
}

// ---- host

Arguments arguments(const Context& context, const TensorView& x, const TensorView& blanked,
                    const TensorView& passes, Activation activation) {
  const int r = x.rank;
  const Index streams = r == 5 ? x.sizes[0] : 1, samples = x.sizes[r - 4], c = x.sizes[r - 3];
  const Index pixels = x.sizes[r - 2] * x.sizes[r - 1];
  const Index total = streams * samples * c * pixels;
  const bool wide = total >= Index{1} << 31;
  Arguments a{.x = image(x),
              .residual = {},
              .y = {},
              .dy = {},
              .dx = {},
              .dresidual = {},
              .blanked = static_cast<const bool*>(blanked.data),
              .passes = static_cast<unsigned char*>(passes.data),
              .adjacent = has_adjacent_channels(x),
              .activation = activation,
              .total = total,
              .streams = streams,
              .samples = Divisor(std::max<Index>(samples, 1), wide),
              .channels = Divisor(c, wide),
              .pixels = Divisor(pixels, wide),
              .width = Divisor(x.sizes[r - 1], wide),
              .lanes = 1,
              .slabs = 1,
              .per_slab = 0};
  while (a.adjacent && a.lanes < 32 && a.lanes < c) a.lanes *= 2;
  // Enough blocks to fill the GPU, each with a few values per thread. Not so many values per thread
  // that the rounding errors of its sum grow.
  constexpr Index kMostSteps = 512, kFewestSteps = 4;
  const Index values = samples * pixels, strands = kThreads / a.lanes;
  const Index wanted = Index{limits_of(context.device).multiprocessors} * 8;
  const Index least = std::max<Index>(divide_up(values, strands * kMostSteps), 1);
  const Index most = std::max<Index>(divide_up(values, strands * kFewestSteps), 1);
  const Index slabs =
      std::clamp<Index>(divide_up(wanted, streams * divide_up(c, a.lanes)), least, most);
  a.per_slab = divide_up(values, slabs);
  a.slabs = static_cast<int>(values > 0 ? divide_up(values, a.per_slab) : 1);
  return a;
}

Launch first_pass(const Context& context, const Arguments& a, Index channels) {
  return {context, a.streams * a.slabs * divide_up(channels, a.lanes), kThreads};
}

Launch second_pass(const Context& context, const Arguments& a) {
  const Index most = Index{limits_of(context.device).multiprocessors} * 16;
  return {.context = context,
          .blocks = std::min<Index>(divide_up(a.total, kThreads), most),
          .threads = kThreads,
          .overlaps_previous = true};
}

}  // namespace

template <typename T>
void general_coefficients(const Context& context, const TensorView& x, const TensorView& blanked,
                          const ForwardChannels& f, Coefficients<Accumulator<T>>* out) {
  using A = Accumulator<T>;
  const Arguments a = arguments(context, x, blanked, {}, Activation::identity);
  const PartMemory<A> memory(context, f.streams, f.own() ? a.slabs : 0, f.channels);
  const MomentParts<A> parts = memory.moments();
  if (f.own()) {
    launch_kernel(first_pass(context, a, f.channels), "computing moments", moments_kernel<T>, a,
                  parts, f.advanced());
  }
  launch_finish<T>(context, f, parts, out);
}

#define FUSEWISE_INSTANTIATE(T)                                                               \
  template void general_coefficients<T>(const Context&, const TensorView&, const TensorView&, \
                                        const ForwardChannels&, Coefficients<Accumulator<T>>*)
FUSEWISE_INSTANTIATE(float);
FUSEWISE_INSTANTIATE(double);
FUSEWISE_INSTANTIATE(__half);
FUSEWISE_INSTANTIATE(__nv_bfloat16);
#undef FUSEWISE_INSTANTIATE

void general_run(const Context& context, const BatchNormActForward& call) {
  Arguments a = arguments(context, call.x, call.blanked, call.passes, call.activation);
  a.residual = image(call.residual);
  a.y = image(call.y);
  const ForwardChannels f = channels_of(call);
  dispatch_dtype(call.x.dtype, [&]<typename T>(T) {
    const Scratch<Coefficients<Accumulator<T>>> coefficients(context, f.streams * f.channels);
    general_coefficients<T>(context, call.x, call.blanked, f, coefficients.data());
    launch_kernel(second_pass(context, a), "normalizing", normalize_kernel<T>, a,
                  coefficients.data());
  });
}

void general_run(const Context& context, const BatchNormStatistics& call) {
  const ForwardChannels f = channels_of(call);
  dispatch_dtype(call.x.dtype, [&]<typename T>(T) {
    const Scratch<Coefficients<Accumulator<T>>> coefficients(context, f.streams * f.channels);
    general_coefficients<T>(context, call.x, call.blanked, f, coefficients.data());
  });
}

void general_run(const Context& context, const BatchNormActBackward& call) {
  Arguments a = arguments(context, call.x, call.blanked, call.passes, call.activation);
  a.residual = image(call.residual);
  a.dy = image(call.dy);
  a.dx = image(call.dx);
  a.dresidual = image(call.dresidual);
  const BackwardChannels b = channels_of(call);
  const BackwardNeeds needs = needs_of(call);
  dispatch_dtype(call.x.dtype, [&]<typename T>(T) {
    using A = Accumulator<T>;
    const Scratch<Coefficients<A>> coefficients(context, b.streams * b.channels);
    const Scratch<Corrections<A>> corrections(context, b.streams * b.channels);
    const PartMemory<A> memory(context, b.streams, needs.sums ? a.slabs : 0, b.channels);
    const GradientParts<A> parts = memory.gradients();
    if (needs.sums) {
      launch_kernel(first_pass(context, a, b.channels), "summing gradients",
                    gradient_sums_kernel<T>, a, b, parts);
    }
    launch_finish<T>(context, b, parts, coefficients.data(), corrections.data());
    if (!needs.images) return;
    launch_kernel(second_pass(context, a), "computing gradients", gradients_kernel<T>, a,
                  b.training, coefficients.data(), corrections.data());
  });
}

}  // namespace fusewise::cuda

// The per-channel work of BatchNorm between its two passes, as kernels of their own.
// Memory: a few values per channel and slab. Bound by the latency of a launch and of two or three
// dependent loads.

#include "cuda/batch_norm/finish.cuh"

#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kFinishThreads = 256;
/// Channels of a block that combines parts. Few, so that many threads share the slabs of each.
constexpr int kFinishWidth = 8;

/// The coefficients of all channels in a kernel of its own. Memory: a few values per channel and
/// slab. Bound by the latency of its launch and of two or three dependent loads.
template <typename T>
__global__ void __launch_bounds__(kFinishThreads)
    finish_forward(const ForwardChannels f, const MomentParts<Accumulator<T>> parts,
                   Coefficients<Accumulator<T>>* out) {
  using A = Accumulator<T>;
  __shared__ Moments shared[kFinishThreads];
  wait_for_previous_kernel();
  allow_next_kernel();
  if (parts.slabs > 0) {  // the first pass has advanced the counter
    const long long tiles = (f.channels + kFinishWidth - 1) / kFinishWidth;
    const long long stream = blockIdx.x / tiles, first = blockIdx.x % tiles * kFinishWidth;
    const int width =
        static_cast<int>(min(static_cast<long long>(kFinishWidth), f.channels - first));
    const long long calls = calls_of(f.counter, stream);
    combine_moments(parts, stream, f.channels, first, width, shared,
                    [&](int k, double count, double mean, double variance) {
                      const long long at = stream * f.channels + first + k;
                      out[at] = finish_channel<T>(f, at, count, mean, variance, calls, true);
                    });
    return;
  }
  const long long total = f.streams * f.channels;
  const long long stride = static_cast<long long>(gridDim.x) * kFinishThreads;
  const long long mine = static_cast<long long>(blockIdx.x) * kFinishThreads + threadIdx.x;
  if (f.group == nullptr) {
    for (long long at = mine; at < total; at += stride) {
      out[at] = running_coefficients<T>(f, at, true);
    }
    return;
  }
  // A single block: nobody else reads the counters that it advances.
  const A* const all = static_cast<const A*>(f.group);
  const Counter counter = f.advanced();
  for (long long s = threadIdx.x; counter.calls != nullptr && s < f.streams; s += kFinishThreads) {
    if (counter.per_stream ? all[3 * s * f.channels] > A(1) : s == 0) ++counter.calls[s];
  }
  __syncthreads();
  for (long long at = mine; at < total; at += stride) {
    const long long s = at / f.channels;
    const A* group = all + 2 * s * f.channels + at;
    out[at] = finish_channel<T>(
        f, at, static_cast<double>(group[0]), static_cast<double>(group[f.channels]),
        static_cast<double>(group[2 * f.channels]), calls_of(f.counter, s), true);
  }
}

/// The same in backward. `parts` may be empty: then dweight and dbias are not wanted.
template <typename T>
__global__ void __launch_bounds__(kFinishThreads)
    finish_backward(const BackwardChannels b, const GradientParts<Accumulator<T>> parts,
                    Coefficients<Accumulator<T>>* out,
                    Corrections<Accumulator<T>>* out_corrections) {
  using A = Accumulator<T>;
  __shared__ GradientSums<A> shared[kFinishThreads];
  wait_for_previous_kernel();
  allow_next_kernel();
  const long long tiles = (b.channels + kFinishWidth - 1) / kFinishWidth;
  const long long stream = blockIdx.x / tiles, first = blockIdx.x % tiles * kFinishWidth;
  const int width = static_cast<int>(min(static_cast<long long>(kFinishWidth), b.channels - first));
  const auto finish = [&](int k, const GradientSums<A>& sums, bool write) {
    const long long at = stream * b.channels + first + k;
    const Coefficients<A> coefficients = saved_coefficients<T>(b, at);
    Corrections<A> own = finish_gradient<T>(b, at, sums, coefficients.inverse, write);
    if (b.group != nullptr) own = group_corrections<T>(b, at, coefficients.inverse);
    out[at] = coefficients;
    out_corrections[at] = own;
  };
  if (parts.slabs > 0) {
    combine_gradients(parts, stream, b.channels, first, width, shared,
                      [&](int k, const GradientSums<A>& sums) { finish(k, sums, true); });
  } else if (threadIdx.x < width) {
    finish(threadIdx.x, {}, false);
  }
}

__global__ void count_kernel(const Counter counter, const bool* blanked, long long samples,
                             long long pixels) {
  count_call(counter, blockIdx.x, blanked, samples, pixels);
}

}  // namespace

void count_calls(const Context& context, const Counter& counter, const TensorView& x,
                 const TensorView& blanked) {
  if (counter.calls == nullptr) return;
  launch_kernel({context, streams_of(x), 32}, "counting calls", count_kernel, counter,
                static_cast<const bool*>(blanked.data), dimension(x, 4),
                dimension(x, 2) * dimension(x, 1));
}

template <typename T>
void launch_finish(const Context& context, const ForwardChannels& f,
                   const MomentParts<Accumulator<T>>& parts, Coefficients<Accumulator<T>>* out) {
  const std::int64_t blocks = parts.slabs > 0 ? f.streams * divide_up(f.channels, kFinishWidth)
                              : f.group != nullptr
                                  ? 1
                                  : divide_up(f.streams * f.channels, kFinishThreads);
  launch_kernel({.context = context,
                 .blocks = blocks,
                 .threads = kFinishThreads,
                 .overlaps_previous = parts.slabs > 0},
                "finishing the statistics", finish_forward<T>, f, parts, out);
}

template <typename T>
void launch_finish(const Context& context, const BackwardChannels& b,
                   const GradientParts<Accumulator<T>>& parts, Coefficients<Accumulator<T>>* out,
                   Corrections<Accumulator<T>>* out_corrections) {
  launch_kernel({.context = context,
                 .blocks = b.streams * divide_up(b.channels, kFinishWidth),
                 .threads = kFinishThreads,
                 .overlaps_previous = parts.slabs > 0},
                "finishing the gradients", finish_backward<T>, b, parts, out, out_corrections);
}

template void launch_finish<float>(const Context&, const ForwardChannels&,
                                   const MomentParts<float>&, Coefficients<float>*);
template void launch_finish<float>(const Context&, const BackwardChannels&,
                                   const GradientParts<float>&, Coefficients<float>*,
                                   Corrections<float>*);
template void launch_finish<double>(const Context&, const ForwardChannels&,
                                    const MomentParts<double>&, Coefficients<double>*);
template void launch_finish<double>(const Context&, const BackwardChannels&,
                                    const GradientParts<double>&, Coefficients<double>*,
                                    Corrections<double>*);
template void launch_finish<__half>(const Context&, const ForwardChannels&,
                                    const MomentParts<float>&, Coefficients<float>*);
template void launch_finish<__half>(const Context&, const BackwardChannels&,
                                    const GradientParts<float>&, Coefficients<float>*,
                                    Corrections<float>*);
template void launch_finish<__nv_bfloat16>(const Context&, const ForwardChannels&,
                                           const MomentParts<float>&, Coefficients<float>*);
template void launch_finish<__nv_bfloat16>(const Context&, const BackwardChannels&,
                                           const GradientParts<float>&, Coefficients<float>*,
                                           Corrections<float>*);

}  // namespace fusewise::cuda

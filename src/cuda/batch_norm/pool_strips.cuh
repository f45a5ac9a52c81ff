#pragma once

// How BatchNorm + activation + max-pool is shared among threads: a thread has a strip, which is a
// few windows of one column, one below the other, for one or several channels. Both sets of kernels
// (pool_channels_last.cu, pool_general.cu) take these arguments.

#include <algorithm>

#include "common/batch_norm.h"
#include "common/divide.h"
#include "cuda/batch_norm/activation.cuh"
#include "cuda/batch_norm/coefficients.cuh"
#include "cuda/batch_norm/finish.cuh"
#include "cuda/batch_norm/image.cuh"
#include "cuda/batch_norm/two_pass.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda::pool {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
/// Windows of a strip. Long strips read fewer rows of x twice: 17 for 16 in forward.
constexpr int kStrip = 8;
/// Blocks per SM of the kernels that have several channels per thread: 128 registers per thread.
constexpr int kWideBlocks = 2;

/// The windows in rows [begin, end) of a column, and their first channel.
struct Strip {
  Index s, n, c, column, begin, end;
};

struct Arguments {
  Image x, y;  // backward: y is dy
  Image dx;    // backward; may be absent
  unsigned char* choices;
  const bool* blanked;  // [S, N], may be null
  Activation activation;
  bool adjacent;  // x's channels, and so the order of the choices and of the threads
  Index height, width, channels;
  Index rows;                       // of the output
  Divisor columns;                  // of the output
  Divisor strips, samples, groups;  // groups: of the channels of one thread
  Index total;                      // strips of all streams, samples and groups
  // The sums of backward.
  int lanes;  // neighbouring groups of a block, a power of two up to 32
  int slabs;
  Index streams, per_slab;  // strips of all samples

  __device__ __forceinline__ bool is_blank(const Strip& p) const {
    return blanked != nullptr && blanked[p.s * samples.value() + p.n];
  }
  /// Where the choices of the strip's channels and column are, in row 0 of the output.
  __device__ __forceinline__ unsigned char* choices_of(const Strip& p) const {
    const Index image = p.s * samples.value() + p.n, across = columns.value();
    return choices + (adjacent ? (image * rows * across + p.column) * channels + p.c
                               : (image * channels + p.c) * rows * across + p.column);
  }
  /// From a choice to the one below it, and to the one on its right.
  __device__ __forceinline__ Index down() const { return right() * columns.value(); }
  __device__ __forceinline__ Index right() const { return adjacent ? channels : 1; }

  /// The strip of a thread that has `width` channels.
  __device__ __forceinline__ Strip strip(Index item, int width) const {
    Strip p{};
    if (adjacent) p.c = groups.split(item) * width;
    p.column = columns.split(item);
    p.begin = strips.split(item) * kStrip;
    p.end = min(p.begin + kStrip, rows);
    if (!adjacent) p.c = groups.split(item) * width;
    p.n = samples.split(item);
    p.s = item;
    return p;
  }
  /// The pixels of x that belong to the strip: two rows and two columns per window.
  __device__ __forceinline__ int pixels(const Strip& p) const {
    return static_cast<int>((min(2 * p.end, height) - 2 * p.begin) *
                            (2 * p.column + 1 < width ? 2 : 1));
  }
};

/// What a block of the first pass of backward has: a slab of strips of all samples of a stream.
struct Slab {
  int lane, strand, strands;
  Index stream, slab, channel, group;
  Index begin, end;  // strips; none if there is no such group
  bool present;

  __device__ __forceinline__ Slab(const Arguments& a, int width) {
    const Index tiles = (a.groups.value() + a.lanes - 1) / a.lanes;
    lane = threadIdx.x % a.lanes;
    strand = threadIdx.x / a.lanes;
    strands = kThreads / a.lanes;
    const Index tile = blockIdx.x % tiles;
    slab = blockIdx.x / tiles % a.slabs;
    stream = blockIdx.x / tiles / a.slabs;
    group = tile * a.lanes + lane;
    present = group < a.groups.value();
    channel = (present ? group : 0) * width;
    const Index all = a.samples.value() * a.strips.value() * a.columns.value();
    begin = slab * a.per_slab;
    end = present ? min(begin + a.per_slab, all) : begin;
  }
  __device__ __forceinline__ Strip strip(const Arguments& a, Index i) const {
    Strip p{stream, i, channel, 0, 0, 0};
    p.column = a.columns.split(p.n);
    p.begin = a.strips.split(p.n) * kStrip;
    p.end = min(p.begin + kStrip, a.rows);
    return p;
  }
  /// Adds the sums of the strands in a fixed order and writes them.
  template <typename A, int kWidth>
  __device__ __forceinline__ void write(const Arguments& a, const GradientParts<A>& parts,
                                        A (&dv)[kWidth], A (&dvx)[kWidth], int count) const {
    __shared__ A shared[2][kWarps][32];
    __shared__ double shared_counts[kWarps][32];
    const int warp = threadIdx.x / 32;
    const Index row = stream * a.slabs + slab;
    double values = static_cast<double>(count);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      for (int offset = 16; offset >= a.lanes; offset /= 2) {
        dv[k] += __shfl_xor_sync(0xffffffffu, dv[k], offset);
        dvx[k] += __shfl_xor_sync(0xffffffffu, dvx[k], offset);
        if (k == 0) values += __shfl_xor_sync(0xffffffffu, values, offset);
      }
      __syncthreads();
      if (threadIdx.x % 32 < a.lanes) {
        shared[0][warp][lane] = dv[k];
        shared[1][warp][lane] = dvx[k];
        if (k == 0) shared_counts[warp][lane] = values;
      }
      __syncthreads();
      if (strand != 0 || !present) continue;
      A sum = 0, products = 0;
      double all = 0;
      for (int w = 0; w < kWarps; ++w) {
        sum += shared[0][w][lane];
        products += shared[1][w][lane];
        all += shared_counts[w][lane];
      }
      parts.dv[row * a.channels + channel + k] = sum;
      parts.dvx[row * a.channels + channel + k] = products;
      if (k == 0 && group == 0) parts.counts[row] = all;
    }
  }
};

// ---- Host.

/// `width`: channels of a thread.
template <typename Call>
Arguments arguments(const Context& context, const Call& call, const TensorView& y, int width) {
  const TensorView& x = call.x;
  const Index streams = streams_of(x), samples = dimension(x, 4), channels = dimension(x, 3);
  const Index rows = divide_up(dimension(x, 2), 2), columns = divide_up(dimension(x, 1), 2);
  const Index groups = channels / width, strips = divide_up(rows, kStrip);
  const bool wide = x.numel() >= Index{1} << 31;
  Arguments a{.x = image(x),
              .y = image(y),
              .dx = {},
              .choices = static_cast<unsigned char*>(call.choices.data),
              .blanked = static_cast<const bool*>(call.blanked.data),
              .activation = call.activation,
              .adjacent = has_adjacent_channels(x),
              .height = dimension(x, 2),
              .width = dimension(x, 1),
              .channels = channels,
              .rows = rows,
              .columns = Divisor(columns, wide),
              .strips = Divisor(strips, wide),
              .samples = Divisor(std::max<Index>(samples, 1), wide),
              .groups = Divisor(groups, wide),
              .total = streams * samples * strips * columns * groups,
              .lanes = 1,
              .slabs = 1,
              .streams = streams,
              .per_slab = 0};
  while (a.adjacent && a.lanes < 32 && a.lanes < groups) a.lanes *= 2;
  // As many blocks as the GPU runs at once, where the strips of a thread are not so many then that
  // the rounding errors of its sum grow.
  constexpr Index kMostStrips = 16;
  const Index all = samples * strips * columns, strands = kThreads / a.lanes;
  const Index room =
      Index{limits_of(context.device).multiprocessors} * (width > 1 ? kWideBlocks : 4);
  const Index blocks = streams * divide_up(groups, a.lanes) * divide_up(all, strands);
  const Index per_slab = strands * std::clamp<Index>(divide_up(blocks, room), 1, kMostStrips);
  a.per_slab = all > 0 ? per_slab : 0;
  a.slabs = static_cast<int>(std::max<Index>(divide_up(all, per_slab), 1));
  return a;
}

inline Launch over(const Context& context, const Arguments& a) {
  const Index most = Index{limits_of(context.device).multiprocessors} * 16;
  return {.context = context,
          .blocks = std::min<Index>(divide_up(a.total, kThreads), most),
          .threads = kThreads,
          .overlaps_previous = true};
}

template <typename T>
using ForwardKernel = void (*)(Arguments, const Coefficients<Accumulator<T>>*);

template <typename T>
void run(const Context& context, const BatchNormActPoolForward& call, int width,
         ForwardKernel<T> kernel) {
  using A = Accumulator<T>;
  const Arguments a = arguments(context, call, call.y, width);
  const ForwardChannels f = channels_of(without_pool(call));
  const Scratch<Coefficients<A>> coefficients(context, f.streams * f.channels);
  bool dense = false;
  if constexpr (sizeof(T) < 8) {
    dense = f.own() && dense_decline({&call.x}, false).empty();
    if (dense) {
      two_pass_coefficients(context, call.x, call.blanked, f, coefficients.data());
    }
  }
  if (!dense) general_coefficients<T>(context, call.x, call.blanked, f, coefficients.data());
  launch_kernel(over(context, a), "pooling", kernel, a, coefficients.data());
}

template <typename T>
struct BackwardKernels {
  using A = Accumulator<T>;
  void (*sums)(Arguments, BackwardChannels, GradientParts<A>);
  void (*gradients)(Arguments, bool training, const Coefficients<A>*, const Corrections<A>*);
};

template <typename T>
void run(const Context& context, const BatchNormActPoolBackward& call, int width,
         const BackwardKernels<T>& kernels) {
  using A = Accumulator<T>;
  Arguments a = arguments(context, call, call.dy, width);
  a.dx = image(call.dx);
  const BatchNormActBackward norm = without_pool(call);
  const BackwardChannels b = channels_of(norm);
  const BackwardNeeds needs = needs_of(norm);
  const Scratch<Coefficients<A>> coefficients(context, b.streams * b.channels);
  const Scratch<Corrections<A>> corrections(context, b.streams * b.channels);
  const PartMemory<A> memory(context, b.streams, needs.sums ? a.slabs : 0, b.channels);
  const GradientParts<A> parts = memory.gradients();
  if (needs.sums) {
    const Index blocks = a.streams * a.slabs * divide_up(a.channels / width, a.lanes);
    launch_kernel({context, blocks, kThreads}, "summing gradients", kernels.sums, a, b, parts);
  }
  launch_finish<T>(context, b, parts, coefficients.data(), corrections.data());
  if (!needs.images) return;
  launch_kernel(over(context, a), "computing gradients", kernels.gradients, a, call.training,
                coefficients.data(), corrections.data());
}

}  // namespace fusewise::cuda::pool

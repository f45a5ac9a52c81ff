// BatchNorm, residual and activation in one kernel, for small channels-last images with any number
// of channels. A block has all values of up to 32 neighbouring channels, and keeps them in
// registers. Memory: each byte crosses it once, one value per access. Bound by latency: a launch, a
// load, two sums over the block (one in backward) and a store.

#include "cuda/batch_norm/columns.cuh"

#include <algorithm>

#include "common/divide.h"
#include "cuda/batch_norm/finish.cuh"
#include "cuda/batch_norm/units.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kMostThreads = 512, kMostWarps = kMostThreads / 32;
constexpr int kMostLanes = 32;
/// Images of at most so many values may be read in pieces of two channels. In larger ones, reading
/// each 32-byte sector several times would cost more than the blocks gain.
constexpr std::int64_t kNarrowValues = 1 << 17;
/// Values of an image that a thread keeps. Kernels with few of them are shorter, so they start
/// sooner.
constexpr int kFewValues = 4, kMostValues = 16;

struct ColumnCut {
  int lanes;    // neighbouring channels of a block, a power of two
  int strands;  // pixels side by side in a block
  int channels;
  unsigned pixels;             // of all samples of a stream
  ShortDivisor tiles;          // blocks of a stream
  ShortDivisor sample_pixels;  // of a sample
  int samples;
  double share;         // 1 / pixels
  const bool* blanked;  // [S, N], may be null
};

/// The values of a thread: every `strands`-th pixel of one channel.
struct Column {
  const ColumnCut& cut;
  int stream, lane, strand, channel;
  bool is_channel;  // false in the last block's lanes behind the last channel

  __device__ explicit Column(const ColumnCut& cut) : cut(cut) {
    unsigned block = blockIdx.x;
    const int tile = static_cast<int>(cut.tiles.split(block));
    stream = static_cast<int>(block);
    lane = static_cast<int>(threadIdx.x) & (cut.lanes - 1);
    strand = static_cast<int>(threadIdx.x) / cut.lanes;
    channel = tile * cut.lanes + lane;
    is_channel = channel < cut.channels;
    channel = min(channel, cut.channels - 1);
  }
  /// The index of the channel among those of all streams.
  __device__ __forceinline__ Index at() const {
    return static_cast<Index>(stream) * cut.channels + channel;
  }
  __device__ __forceinline__ unsigned pixel(int step) const { return strand + step * cut.strands; }
  __device__ __forceinline__ bool has(int step) const {
    return is_channel && pixel(step) < cut.pixels;
  }
  /// Of the last pixel if the thread has no value in this step: then it may load without a branch.
  __device__ __forceinline__ Index offset(int step) const {
    const unsigned inside = min(pixel(step), cut.pixels - 1);
    return (static_cast<Index>(stream) * cut.pixels + inside) * cut.channels + channel;
  }
  __device__ __forceinline__ bool is_blank(int step) const {
    return cut.blanked != nullptr &&
           cut.blanked[stream * Index{cut.samples} + cut.sample_pixels.quotient(pixel(step))];
  }
  /// Whether this thread writes the results of its channel.
  __device__ __forceinline__ bool finishes() const { return strand == 0 && is_channel; }
  /// Values of the channel that are not blanked.
  __device__ __forceinline__ double count() const {
    if (cut.blanked == nullptr) return cut.pixels;
    int present = 0;
    for (int n = threadIdx.x % 32; n < cut.samples; n += 32) {
      present += !cut.blanked[stream * Index{cut.samples} + n];
    }
    return static_cast<double>(warp_sum(present)) * cut.sample_pixels.value();
  }
  __device__ __forceinline__ double share(double count) const {
    if (cut.blanked == nullptr) return cut.share;
    return count > 0 ? 1 / count : 0.0;
  }

  /// Replaces `values` by their sums over all threads of the channel, in a fixed order.
  template <int kCount, typename A>
  __device__ __forceinline__ void sum(A (&values)[kCount],
                                      A (&rows)[kMostWarps][kMostLanes][kCount]) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      for (int distance = 16; distance >= cut.lanes; distance /= 2) {
        values[i] += __shfl_xor_sync(0xffffffffu, values[i], distance);
      }
      if (threadIdx.x % 32 < cut.lanes) rows[warp][lane][i] = values[i];
      values[i] = 0;
    }
    __syncthreads();
#pragma unroll 4
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] += rows[w][lane][i];
    }
  }
};

/// The values of a thread. All loads are issued before the first value is used.
template <typename T, int kValues>
struct Loaded {
  T values[kValues];

  __device__ __forceinline__ void load(const Column& column, const void* image) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = static_cast<const T*>(image)[column.offset(i)];
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    return to_accumulator<float>(values[i]);
  }
};

template <typename T>
__device__ __forceinline__ void store(void* image, Index at, float value) {
  static_cast<T*>(image)[at] = from_accumulator<T>(value);
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kMostThreads)
    forward_kernel(const __grid_constant__ ColumnCut cut,
                   const __grid_constant__ NormalizeArguments a) {
  __shared__ float first_rows[kMostWarps][kMostLanes][1];
  __shared__ double second_rows[kMostWarps][kMostLanes][2];
  const Column column(cut);
  const ForwardChannels& f = a.channels;
  Loaded<T, kValues> x, residual;
  x.load(column, a.x);
  if (a.residual != nullptr) residual.load(column, a.residual);
  float weight_and_bias[2] = {1, 0};
  parameters<T>({f.weight, f.bias}, f.wide, column.at(), weight_and_bias);
  RunningStatistics<float> before;
  if (column.finishes()) before = running_statistics<T>(f, column.at());
  const double count = column.count(), share = column.share(count);
  float v[kValues];
  bool present[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    present[i] = column.has(i) && !column.is_blank(i);
    v[i] = present[i] ? x[i] : 0.0f;
  }

  // A value near the mean: the squares of the differences from it do not cancel.
  float near[1] = {0};
#pragma unroll
  for (int i = 0; i < kValues; ++i) near[0] = fmaf(v[i], static_cast<float>(share), near[0]);
  column.sum(near, first_rows);
  float sums[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const float d = present[i] ? v[i] - near[0] : 0.0f;
    sums[0] += d;
    sums[1] = fmaf(d, d, sums[1]);
  }
  double totals[2] = {sums[0], sums[1]};
  column.sum(totals, second_rows);
  const double mean = count > 0 ? near[0] + totals[0] * share : 0.0;
  const double variance = above_0(totals[1] - totals[0] * totals[0] * share) * share;
  const float inverse = inverse_deviation(static_cast<float>(variance), static_cast<float>(f.eps));
  const Coefficients<float> coefficients{static_cast<float>(mean), inverse * weight_and_bias[0],
                                         weight_and_bias[1], inverse};

#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    v[i] = coefficients(v[i]);
    if (a.residual != nullptr) v[i] += residual[i];
  }
  if (a.passes != nullptr) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float one[1] = {v[i]};
      const unsigned votes =
          __ballot_sync(0xffffffffu, present[i] && passing<T>(a.activation, one) != 0);
      if (column.has(i) && column.lane % 8 == 0) {
        a.passes[column.offset(i) / 8] = static_cast<unsigned char>(votes >> (threadIdx.x & 24));
      }
    }
  }
  activate_all<T>(a.activation, v);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (column.has(i)) store<T>(a.y, column.offset(i), present[i] ? v[i] : 0.0f);
  }

  // Last, because nobody waits for it.
  const bool cumulative = f.momentum < 0;  // count_calls has counted
  if (!cumulative && blockIdx.x % cut.tiles.value() == 0 && threadIdx.x < 32) {
    count_call(f.advanced(), column.stream, cut.blanked, cut.samples, cut.sample_pixels.value());
  }
  if (column.finishes()) {
    const long long calls = cumulative ? calls_of(f.counter, column.stream) : 1;
    save_channel<T>(f, column.at(), count, mean, variance, inverse, calls, before);
  }
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kMostThreads)
    backward_kernel(const __grid_constant__ ColumnCut cut,
                    const __grid_constant__ GradientArguments a) {
  __shared__ double rows[kMostWarps][kMostLanes][2];
  const Column column(cut);
  const BackwardChannels& b = a.channels;
  const bool has_bits = a.passes != nullptr;
  const bool reads_residual =
      a.residual != nullptr && !has_bits && a.activation != Activation::identity;
  Loaded<T, kValues> x, dy, residual;
  unsigned char bits[kValues];
  x.load(column, a.x);
  dy.load(column, a.dy);
  if (reads_residual) residual.load(column, a.residual);
  if (has_bits) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) bits[i] = a.passes[column.offset(i) / 8];
  }
  const Coefficients<float> saved = saved_coefficients<T>(b, column.at());
  const double count = column.count();
  float d[kValues], centred[kValues];
  bool present[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    present[i] = column.has(i) && !column.is_blank(i);
    d[i] = present[i] ? dy[i] : 0.0f;
    centred[i] = present[i] ? x[i] - saved.mean : 0.0f;
    if (has_bits && (bits[i] >> column.offset(i) % 8 & 1) == 0) d[i] = 0;
  }
  if (!has_bits) {
    float v[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      v[i] = fmaf(centred[i], saved.scale, saved.shift);
      if (reads_residual) v[i] += residual[i];
    }
    differentiate_all<T>(a.activation, v, d);
  }
  float sums[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (!present[i]) d[i] = 0;
    sums[0] += d[i];
    sums[1] = fmaf(d[i], centred[i], sums[1]);
  }
  double totals[2] = {sums[0], sums[1]};
  column.sum(totals, rows);
  const GradientSums<float> all{count, static_cast<float>(totals[0]),
                                static_cast<float>(totals[1])};
  Corrections<float> value =
      finish_gradient<T>(b, column.at(), all, saved.inverse, column.finishes());
  if (b.group != nullptr) value = group_corrections<T>(b, column.at(), saved.inverse);
  if (!b.training) value = {0, 0};
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (!column.has(i)) continue;
    const Index at = column.offset(i);
    if (a.dresidual != nullptr) store<T>(a.dresidual, at, d[i]);
    if (a.dx == nullptr) continue;
    const float dx = fmaf(-centred[i], value.slope, d[i] - value.offset) * saved.scale;
    store<T>(a.dx, at, present[i] ? dx : 0.0f);
  }
}

// ---- Host.

struct Plan {
  ColumnCut cut;
  std::int64_t blocks;
  int threads, values;  // values of a thread
};

/// Whether the channels of a pixel fill vectors of 16 bytes, and bytes of bits.
bool is_aligned(const TensorView& x, bool with_bits) {
  return folded_pixels(x, {}, with_bits) == 1;
}

Plan plan(const Context& context, const TensorView& x, const TensorView& blanked, bool with_bits) {
  const std::int64_t channels = dimension(x, 3), samples = dimension(x, 4);
  const std::int64_t sample_pixels = dimension(x, 2) * dimension(x, 1);
  const std::int64_t pixels = samples * sample_pixels;
  const bool narrow = !is_aligned(x, with_bits) && !with_bits && x.numel() <= kNarrowValues;
  const int least_lanes = narrow ? 2 : 8;  // 8 lanes write a byte of bits
  const std::int64_t wanted_blocks = limits_of(context.device).multiprocessors * 3 / 4;
  const auto is_enough = [&](int lanes) {
    return streams_of(x) * divide_up(channels, lanes) >= wanted_blocks &&
           !(narrow && lanes * pixels > kMostThreads * kFewValues);
  };
  int lanes = kMostLanes;
  while (lanes > least_lanes && !is_enough(lanes)) lanes /= 2;
  const std::int64_t wanted = divide_up(lanes * divide_up(pixels, kFewValues), 32) * 32;
  const int threads = static_cast<int>(std::min<std::int64_t>(wanted, kMostThreads));
  const std::int64_t tiles = divide_up(channels, lanes);
  return {.cut = {.lanes = lanes,
                  .strands = threads / lanes,
                  .channels = static_cast<int>(channels),
                  .pixels = static_cast<unsigned>(pixels),
                  .tiles = ShortDivisor(tiles),
                  .sample_pixels = ShortDivisor(sample_pixels),
                  .samples = static_cast<int>(samples),
                  .share = 1.0 / static_cast<double>(pixels),
                  .blanked = static_cast<const bool*>(blanked.data)},
          .blocks = streams_of(x) * tiles,
          .threads = threads,
          .values = static_cast<int>(divide_up(pixels, threads / lanes))};
}

template <typename Call>
Plan plan_of(const Context& context, const Call& call) {
  return plan(context, call.x, call.blanked, call.passes.defined());
}

std::string declines(const Context& context, std::initializer_list<const TensorView*> images,
                     const TensorView& blanked, bool with_bits) {
  std::string reason = image_decline(images);
  if (!reason.empty()) return reason;
  const TensorView& x = **images.begin();
  if (!has_adjacent_channels(x)) return "it takes channels-last images";
  if (with_bits && dimension(x, 3) % 8 != 0) return "the bits of relu do not fill bytes";
  const Plan p = plan(context, x, blanked, with_bits);
  if (p.values > kMostValues) return "a channel has more values than a block can keep";
  if (p.values > kFewValues && is_aligned(x, with_bits)) {
    return "'resident' is faster from a few values per thread on";
  }
  return {};
}

/// Calls body(T, values) with a value of x's type and a constant: the values of a thread.
template <typename Body>
void dispatch(const TensorView& x, const Plan& p, Body&& body) {
  dispatch_short_dtype(x.dtype, [&]<typename T>(T) {
    if (p.values <= kFewValues) return body(T{}, std::integral_constant<int, kFewValues>{});
    body(T{}, std::integral_constant<int, kMostValues>{});
  });
}

}  // namespace

std::string columns_declines(const Context& context, const BatchNormActForward& call) {
  if (!channels_of(call).own()) return "the statistics are given, so one pass is enough";
  return declines(context, {&call.x, &call.y, &call.residual}, call.blanked, call.passes.defined());
}

std::string columns_declines(const Context& context, const BatchNormActBackward& call) {
  const BackwardNeeds needs = needs_of(call);
  if (!needs.sums || !needs.images) return "one pass is enough for these gradients";
  return declines(context, {&call.x, &call.dy, &call.residual, &call.dx, &call.dresidual},
                  call.blanked, call.passes.defined());
}

void columns_run(const Context& context, const BatchNormActForward& call) {
  const Plan p = plan_of(context, call);
  const NormalizeArguments a = arguments_of(call);
  if (a.channels.momentum < 0) count_calls(context, a.channels.advanced(), call.x, call.blanked);
  dispatch(call.x, p, [&]<typename T>(T, auto values) {
    launch_kernel({context, p.blocks, p.threads}, "normalizing", forward_kernel<T, values()>, p.cut,
                  a);
  });
}

void columns_run(const Context& context, const BatchNormActBackward& call) {
  const Plan p = plan_of(context, call);
  const GradientArguments a = arguments_of(call);
  dispatch(call.x, p, [&]<typename T>(T, auto values) {
    launch_kernel({context, p.blocks, p.threads}, "computing gradients",
                  backward_kernel<T, values()>, p.cut, a);
  });
}

}  // namespace fusewise::cuda

// BatchNorm, residual and activation in one kernel, for NCHW images of any size. A cluster of
// blocks has all planes of a channel in its shared memory. Its blocks sum, exchange their sums
// through shared memory, and normalise. Memory: each byte once. Forward reads x and the residual
// and writes y; backward reads dy, x and what else dv needs, and writes dx and dresidual. Bound by
// memory bandwidth when large, by the latency of a cluster's stages when small.

#include "cuda/batch_norm/planes.cuh"

#include <algorithm>
#include <optional>

#include "cuda/batch_norm/units.cuh"
#include "cuda/cluster.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kMostThreads = 512, kMostBlocks = 8;  // of a block, of a cluster
/// Steps that copies run ahead of their use.
constexpr int kAhead = 8;

/// How a channel is cut. A unit is an aligned vector of 16 bytes with values of the plane. The
/// first and the last of a plane may also have values of its neighbours in memory.
struct PlaneCut {
  int channels, samples, pixels;
  Index total;               // values of all images
  ShortDivisor plane_units;  // the most that a plane can have
  unsigned units, per_block;
  int cluster;          // blocks per channel
  const bool* blanked;  // [S, N], may be null
};

/// A unit: the values from `low` to `high` of the vector at `at`. None if high is 0.
struct Piece {
  Index at = 0;
  int low = 0, high = 0;
  bool blank = false;
  bool follows = false;  // the unit before it is of the same plane

  template <int kVector>
  __device__ __forceinline__ bool is_whole() const {
    return high - low == kVector;
  }
  __device__ __forceinline__ bool has(int k) const { return k >= low && k < high; }
};

/// A block's part of its channel.
template <typename T>
struct PlanePart {
  static constexpr int kVector = Vector<T>::kSize;

  const PlaneCut& cut;
  int rank, stream, channel;
  unsigned begin, end;
  int steps;     // the same for all threads
  Index origin;  // of the first sample's plane
  Index stride;  // from a sample's plane to the next

  __device__ explicit PlanePart(const PlaneCut& cut) : cut(cut) {
    const int group = static_cast<int>(blockIdx.x) / cut.cluster;
    rank = static_cast<int>(blockIdx.x) - group * cut.cluster;
    stream = group / cut.channels;
    channel = group - stream * cut.channels;
    begin = min(rank * cut.per_block, cut.units);
    end = min(begin + cut.per_block, cut.units);
    steps = static_cast<int>((end - begin + blockDim.x - 1) / blockDim.x);
    stride = static_cast<Index>(cut.channels) * cut.pixels;
    origin = (static_cast<Index>(stream) * cut.samples * cut.channels + channel) * cut.pixels;
  }
  __device__ __forceinline__ bool is_blank(int sample) const {
    return cut.blanked != nullptr && cut.blanked[static_cast<Index>(stream) * cut.samples + sample];
  }
  __device__ __forceinline__ Piece piece(int step) const {
    const unsigned unit = begin + slot(step);
    if (unit >= end) return {};
    const int sample = static_cast<int>(cut.plane_units.quotient(unit));
    const int in_plane =
        static_cast<int>(unit) - sample * static_cast<int>(cut.plane_units.value());
    const Index start = origin + sample * stride;
    const int place = in_plane * kVector - static_cast<int>(start & (kVector - 1));  // in the plane
    if (place >= cut.pixels) return {};
    return {start + place, max(0, -place), min(kVector, cut.pixels - place), is_blank(sample),
            in_plane > 0};
  }
  /// A thread's own place in shared memory. Nobody else uses it, so it needs no barriers.
  __device__ __forceinline__ unsigned slot(int step) const {
    return step * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ Index at() const {
    return static_cast<Index>(stream) * cut.channels + channel;
  }
  /// A value near the mean, see Shifts. The same one in all blocks of the cluster.
  __device__ float shift(const T* x) const {
    // Uneven, so that they are not the same pixel of several images.
    constexpr Index kParts[] = {7, 13, 19, 29};
    float few[4] = {};  // 0 if all is blanked
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int sample = next_present(static_cast<int>(cut.samples * kParts[i] / 32));
      if (sample == cut.samples) sample = next_present(0);
      const Index pixel = cut.pixels * kParts[3 - i] / 32;
      if (sample < cut.samples) {
        few[i] = to_accumulator<float>(x[origin + sample * stride + pixel]);
      }
    }
    return middle(few[0], few[1], few[2], few[3]);
  }
  __device__ int next_present(int sample) const {
    while (sample < cut.samples && is_blank(sample)) ++sample;
    return sample;
  }
  /// Values of the channel that are not blanked. For a whole warp.
  __device__ double count() const {
    int present = cut.samples;
    if (cut.blanked != nullptr) {
      present = 0;
      for (int n = threadIdx.x % 32; n < cut.samples; n += 32) present += !is_blank(n);
      present = warp_sum(present);
    }
    return static_cast<double>(present) * cut.pixels;
  }
  /// Starts the copies of a vector of each image, to the same slot of each image in shared memory.
  /// Behind the images there is nothing to read.
  template <typename... Images>
  __device__ __forceinline__ void copy(unsigned char* shared, Index at, Images... images) const {
    const Index left = cut.total - at;
    const int real = left < kVector ? static_cast<int>(left * sizeof(T)) : 16;
    std::uint32_t to = shared_address(shared);
    const auto copy_one = [&](const void* image) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                   "l"(static_cast<const T*>(image) + at), "r"(real)
                   : "memory");
      to += cut.per_block * 16;
    };
    (copy_one(images), ...);
  }
};

/// Calls use(step) for all steps. copy(step) starts the copies of a step, kAhead steps before its
/// use. It is called for `copies` steps, at least as many, and wait_for_copies waits for the rest.
template <typename Copy, typename Use>
__device__ __forceinline__ void copy_and_use(int steps, int copies, Copy copy, Use use) {
#pragma unroll 1
  for (int j = 0; j < kAhead; ++j) {
    if (j < copies) copy(j);
    commit_copies();
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_for_all_but<kAhead - 1>();
    use(step);
    if (step + kAhead < copies) copy(step + kAhead);
    commit_copies();
  }
#pragma unroll 1
  for (int j = steps + kAhead; j < copies; ++j) copy(j);
}

/// Shared memory for what threads and blocks tell each other.
struct Exchange {
  float2 warps[kMostThreads / 32];
  double2 blocks[kMostBlocks];
  float rows[kSlope + 1];
};

/// The values of a channel, by Row.
struct ChannelRows {
  float rows[kSlope + 1];

  template <int kVector>
  __device__ __forceinline__ void get(int row, int, float (&values)[kVector]) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) values[k] = rows[row];
  }
};

/// Called by all threads at the start, before sum_over_cluster.
__device__ __forceinline__ void enter_cluster(int cluster) {
#if __CUDA_ARCH__ >= 900
  if (cluster > 1) arrive_in_cluster();
#endif
}

/// Adds the values of all threads of the cluster in a fixed order. The first thread of each block
/// gets the sums. Those of a thread are of less than 32 vectors, so float32 keeps their digits.
template <int kVector>
__device__ double2 sum_over_cluster(int cluster, int rank, float (&first)[kVector],
                                    float (&second)[kVector], Exchange& exchange) {
  const int lane = threadIdx.x % 32, warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll
  for (int width = kVector / 2; width > 0; width /= 2) {
#pragma unroll
    for (int k = 0; k < width; ++k) {
      first[k] += first[k + width];
      second[k] += second[k + width];
    }
  }
  const float2 own = make_float2(warp_sum(first[0]), warp_sum(second[0]));
  if (lane == 0) exchange.warps[threadIdx.x / 32] = own;
  __syncthreads();
  double2 sums{};
  if (threadIdx.x < 32) {
    const float2 part = lane < warps ? exchange.warps[lane] : make_float2(0, 0);
    sums.x = warp_sum(static_cast<double>(part.x));
    sums.y = warp_sum(static_cast<double>(part.y));
  }
#if __CUDA_ARCH__ >= 900
  if (cluster == 1) return sums;
  wait_for_cluster();  // all blocks have started
  if (static_cast<int>(threadIdx.x) < cluster) {
    asm volatile(
        "{\n"
        ".reg .b32 place;\n"
        "mapa.shared::cluster.u32 place, %0, %1;\n"
        "st.shared::cluster.v2.f64 [place], {%2, %3};\n"
        "}" ::"r"(shared_address(&exchange.blocks[rank])),
        "r"(threadIdx.x), "d"(sums.x), "d"(sums.y)
        : "memory");
  }
  arrive_in_cluster();
  wait_for_cluster();
  if (threadIdx.x == 0) {
    sums = exchange.blocks[0];
    for (int block = 1; block < cluster; ++block) {
      sums.x += exchange.blocks[block].x;
      sums.y += exchange.blocks[block].y;
    }
  }
#endif
  return sums;
}

/// Stores the piece's values of a vector.
template <typename T>
__device__ __forceinline__ void store_piece(T* to, const Piece& piece, const Packed<T>& vector) {
  to += piece.at;
  if (piece.is_whole<Packed<T>::kSize>()) return vector.store(to, false);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      if (piece.has(i)) reinterpret_cast<unsigned*>(to)[i] = vector.words[i];
    } else {
      const bool low = piece.has(2 * i), high = piece.has(2 * i + 1);
      auto* const halves = reinterpret_cast<unsigned short*>(to) + 2 * i;
      if (low && high) {
        *reinterpret_cast<unsigned*>(halves) = vector.words[i];
      } else if (low) {
        halves[0] = static_cast<unsigned short>(vector.words[i]);
      } else if (high) {
        halves[1] = static_cast<unsigned short>(vector.words[i] >> 16);
      }
    }
  }
}

/// Stores the piece's bits. Called by whole warps. Planes of other blocks may share its first and
/// its last byte: there each sets and clears its own bits, so the order does not matter.
template <int kVector>
__device__ __forceinline__ void store_bits(unsigned char* passes, const Piece& piece,
                                           unsigned bits) {
  unsigned own = (1u << piece.high) - (1u << piece.low);
  bits &= own;
  const Index byte = piece.at / 8;
  if constexpr (kVector == 4) {  // two neighbouring lanes may share a byte
    const bool is_second = piece.at % 8 != 0;
    const int lane = threadIdx.x % 32, shift = is_second ? 4 : 0;
    own <<= shift;
    bits <<= shift;
    const unsigned next = __shfl_down_sync(0xffffffffu, piece.follows ? own << 8 | bits : 0u, 1);
    if (is_second && piece.follows && lane > 0) return;  // the previous lane stores them
    if (!is_second && lane < 31) {
      own |= next >> 8;
      bits |= next & 0xff;
    }
  }
  if (own == 0xff) {
    passes[byte] = static_cast<unsigned char>(bits);
  } else if (own != 0) {
    auto* const word = reinterpret_cast<unsigned*>(passes) + byte / 4;
    const int shift = static_cast<int>(byte % 4) * 8;
    if (bits != own) atomicAnd(word, ~((own & ~bits) << shift));
    if (bits != 0) atomicOr(word, bits << shift);
  }
}

template <typename T, Kinds kKinds, bool kResidual>
__global__ void __launch_bounds__(kMostThreads, 2)
    forward_kernel(const __grid_constant__ PlaneCut cut,
                   const __grid_constant__ NormalizeArguments a) {
#if __CUDA_ARCH__ >= 800
  constexpr int kVector = Vector<T>::kSize;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Exchange exchange;
  enter_cluster(cut.cluster);
  const PlanePart<T> part(cut);
  unsigned char* const residuals = memory + cut.per_block * 16;
  // Small loads first: behind the copies they would wait for them.
  const float shift = part.shift(static_cast<const T*>(a.x));
  float weight = 1, bias = 0;
  if (threadIdx.x == 0) {
    weight = parameter<T>(a.channels.weight, a.channels.wide, part.at(), 1.0f);
    bias = parameter<T>(a.channels.bias, a.channels.wide, part.at(), 0.0f);
  }
  float sum[kVector] = {}, squares[kVector] = {}, shifts[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) shifts[k] = shift;
  const auto copy = [&](int step) {
    const bool second = kResidual && step >= part.steps;
    if (second) step -= part.steps;
    const Piece piece = part.piece(step);
    if (piece.high == 0) return;
    part.copy((second ? residuals : memory) + part.slot(step) * 16, piece.at,
              second ? a.residual : a.x);
  };
  copy_and_use(part.steps, kResidual ? 2 * part.steps : part.steps, copy, [&](int step) {
    const Piece piece = part.piece(step);
    if (piece.high == 0 || piece.blank) return;
    Packed<T> values;
    values.load_shared(memory + part.slot(step) * 16);
    float v[kVector];
    values.unpack(v);
    if (!piece.is_whole<kVector>()) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) v[k] = piece.has(k) ? v[k] : shift;
    }
    add_moments(v, shifts, sum, squares);
  });
  const double count = part.count();
  const double2 sums = sum_over_cluster(cut.cluster, part.rank, sum, squares, exchange);
  double mean = 0, variance = 0;
  if (threadIdx.x == 0) {
    Moments all;
    all.count = count;
    all.sum = sums.x;
    all.squares = sums.y;
    mean = all.mean(shift);
    variance = count > 0 ? all.central() / count : 0.0;
    const float eps = static_cast<float>(a.channels.eps);
    exchange.rows[kMean] = static_cast<float>(mean);
    exchange.rows[kScale] = inverse_deviation(static_cast<float>(variance), eps) * weight;
    exchange.rows[kShift] = bias;
  }
  __syncthreads();
  const ChannelRows channel{
      {exchange.rows[kMean], exchange.rows[kScale], exchange.rows[kShift], 0, 0}};
  wait_for_copies();
#pragma unroll 1
  for (int step = 0; step < part.steps; ++step) {
    const Piece piece = part.piece(step);
    float v[kVector] = {};
    Packed<T> values, added;
    if (piece.high > 0) {
      values.load_shared(memory + part.slot(step) * 16);
      if constexpr (kResidual) added.load_shared(residuals + part.slot(step) * 16);
      normalize<kResidual>(channel, 0, values, added, v);
    }
    if (kResidual && a.passes != nullptr) {
      store_bits<kVector>(a.passes, piece, piece.blank ? 0 : passing<T>(a.activation, v));
    }
    if (piece.high == 0) continue;
    activate_all<T, kKinds>(a.activation, v);
#pragma unroll
    for (int k = 0; k < kVector; ++k) v[k] = piece.blank ? 0.0f : v[k];
    values.pack(v);
    store_piece(static_cast<T*>(a.y), piece, values);
  }
  // Last, because nobody waits for it.
  if (part.rank > 0) return;
  const ForwardChannels& f = a.channels;
  const bool cumulative = f.momentum < 0;  // count_kernel has counted
  if (part.channel == 0 && threadIdx.x < 32 && !cumulative) {
    count_call(f.advanced(), part.stream, cut.blanked, cut.samples, cut.pixels);
  }
  if (threadIdx.x == 0) {
    const long long calls = cumulative ? calls_of(f.counter, part.stream) : 1;
    finish_channel<T>(f, part.at(), count, mean, variance, calls, true);
  }
#endif
}

/// The cumulative average needs the number of calls with this one, in all channels.
__global__ void count_kernel(const Counter counter, const bool* blanked, int samples, int pixels) {
  count_call(counter, blockIdx.x, blanked, samples, pixels);
}

template <typename T, Kinds kKinds, bool kResidual>
__global__ void __launch_bounds__(kMostThreads, 2)
    backward_kernel(const __grid_constant__ PlaneCut cut,
                    const __grid_constant__ GradientArguments a) {
#if __CUDA_ARCH__ >= 800
  constexpr int kVector = Vector<T>::kSize;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Exchange exchange;
  enter_cluster(cut.cluster);
  const PlanePart<T> part(cut);
  const unsigned image = cut.per_block * 16;
  unsigned char* const words = memory + (kResidual ? 3 : 2) * image;
  // Small loads first: behind the copies they would wait for them.
  const Coefficients<float> saved = saved_coefficients<T>(a.channels, part.at());
  ChannelRows channel{{saved.mean, saved.scale, saved.shift, 0, 0}};
  const Index bit_bytes = (cut.total + 7) / 8;
  const auto copy = [&](int step) {
    const Piece piece = part.piece(step);
    if (piece.high == 0) return;
    unsigned char* const to = memory + part.slot(step) * 16;
    if constexpr (kResidual) return part.copy(to, piece.at, a.dy, a.x, a.residual);
    part.copy(to, piece.at, a.dy, a.x);
    if (a.passes == nullptr) return;
    const Index byte = piece.at / 32 * 4;
    copy_word(words + part.slot(step) * 4, a.passes + byte,
              static_cast<int>(min(Index{4}, bit_bytes - byte)));
  };
  /// dv, and x without its mean.
  const auto gradient = [&](int step, const Piece& piece, float (&d)[kVector],
                            float (&centred)[kVector]) {
    const unsigned char* const from = memory + part.slot(step) * 16;
    GradientVectors<T, kResidual, kKinds> vectors;
    vectors.dy.load_shared(from);
    vectors.x.load_shared(from + image);
    if constexpr (kResidual) vectors.residual.load_shared(from + 2 * image);
    if (!kResidual && a.passes != nullptr) {
      vectors.bits =
          *reinterpret_cast<const unsigned*>(words + part.slot(step) * 4) >> piece.at % 32;
    }
    vectors.gradient(a, channel, 0, d, centred);
  };
  float sum[kVector] = {}, products[kVector] = {};
  copy_and_use(part.steps, part.steps, copy, [&](int step) {
    const Piece piece = part.piece(step);
    if (piece.high == 0 || piece.blank) return;
    float d[kVector], centred[kVector];
    gradient(step, piece, d, centred);
    if (!piece.is_whole<kVector>()) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        d[k] = piece.has(k) ? d[k] : 0.0f;
        centred[k] = piece.has(k) ? centred[k] : 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      sum[k] += d[k];
      products[k] = fmaf(d[k], centred[k], products[k]);
    }
  });
  const double count = part.count();
  const double2 sums = sum_over_cluster(cut.cluster, part.rank, sum, products, exchange);
  if (threadIdx.x == 0) {
    const GradientSums<float> all{count, static_cast<float>(sums.x), static_cast<float>(sums.y)};
    Corrections<float> value =
        finish_gradient<T>(a.channels, part.at(), all, saved.inverse, part.rank == 0);
    if (a.channels.group != nullptr) {
      value = group_corrections<T>(a.channels, part.at(), saved.inverse);
    }
    exchange.rows[kOffset] = value.offset;
    exchange.rows[kSlope] = value.slope;
  }
  __syncthreads();
  channel.rows[kOffset] = exchange.rows[kOffset];
  channel.rows[kSlope] = exchange.rows[kSlope];
#pragma unroll 1
  for (int step = 0; step < part.steps; ++step) {
    const Piece piece = part.piece(step);
    if (piece.high == 0) continue;
    float d[kVector], centred[kVector];
    gradient(step, piece, d, centred);
    const auto store = [&](void* to) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) d[k] = piece.blank ? 0.0f : d[k];
      Packed<T> out;
      out.pack(d);
      store_piece(static_cast<T*>(to), piece, out);
    };
    if (a.dresidual != nullptr) store(a.dresidual);
    if (a.dx == nullptr) continue;
    differentiate_norm(a, channel, 0, centred, d);
    store(a.dx);
  }
#endif
}

// ---- Host.

struct Plan {
  PlaneCut cut;
  int threads;
  std::size_t shared_bytes;
};

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
/// The most aligned vectors that a plane has values in.
constexpr std::int64_t plane_units(std::int64_t pixels, int vector) {
  const int step = gcd(vector, static_cast<int>(pixels % vector));  // planes start at its multiples
  return (pixels + vector - step + vector - 1) / vector;
}
static_assert(plane_units(64, 8) == 8 && plane_units(196, 8) == 25 && plane_units(49, 8) == 7);
static_assert(plane_units(1, 8) == 1 && plane_units(2, 8) == 1 && plane_units(3, 8) == 2);

/// The cut that is expected to be fastest. Its cost is in bytes of shared memory that an SM fills:
/// those of its blocks, more if it has only one at a time, because that either loads or stores, and
/// more for the barriers of a cluster.
std::optional<Plan> plan(const Context& context, const TensorView& x, const TensorView& blanked,
                         int unit_bytes) {
  const DeviceLimits& limits = limits_of(context.device);
  const int vector = static_cast<int>(16 / size_of(x.dtype));
  const std::int64_t pixels = dimension(x, 2) * dimension(x, 1);
  const std::int64_t channels = dimension(x, 3), samples = dimension(x, 4);
  const std::int64_t in_plane = plane_units(pixels, vector), units = samples * in_plane;
  const std::int64_t room = limits.block_shared_memory - 1024;  // without the Exchange
  std::int64_t least = 0, per_block = 0;
  int cluster = 0;
  for (int blocks = 1; blocks <= (limits.capability >= 90 ? kMostBlocks : 1); blocks *= 2) {
    // Whole warps: then no two of them share a byte of bits in planes that do not.
    const std::int64_t each = divide_up(units, 32 * blocks) * 32, bytes = each * unit_bytes;
    if (bytes > room) continue;
    const std::int64_t per_sm =
        divide_up(streams_of(x) * channels * blocks, limits.multiprocessors);
    const bool alone = per_sm == 1 || 2 * (bytes + 2048) > limits.shared_memory;
    std::int64_t cost = per_sm * bytes;
    if (alone) cost += cost / 5;
    if (blocks > 1) cost += 8 << 10;
    if (cluster > 0 && cost >= least) continue;
    least = cost;
    per_block = each;
    cluster = blocks;
  }
  if (cluster == 0) return std::nullopt;
  int threads = 128;
  while (threads < kMostThreads && per_block > 4 * threads) threads *= 2;
  return Plan{.cut = {.channels = static_cast<int>(channels),
                      .samples = static_cast<int>(samples),
                      .pixels = static_cast<int>(pixels),
                      .total = x.numel(),
                      .plane_units = ShortDivisor(in_plane),
                      .units = static_cast<unsigned>(units),
                      .per_block = static_cast<unsigned>(per_block),
                      .cluster = cluster,
                      .blanked = static_cast<const bool*>(blanked.data)},
              .threads = threads,
              .shared_bytes = static_cast<std::size_t>(per_block * unit_bytes)};
}

std::optional<Plan> plan(const Context& context, const BatchNormActForward& call) {
  return plan(context, call.x, call.blanked, call.residual.defined() ? 32 : 16);
}
std::optional<Plan> plan(const Context& context, const BatchNormActBackward& call) {
  const int bytes = reads_residual(call) ? 48 : call.passes.defined() ? 36 : 32;
  return plan(context, call.x, call.blanked, bytes);
}

template <typename Call>
std::string declines(const Context& context, const Call& call) {
  if (limits_of(context.device).capability < 80) {
    return "asynchronous copies need compute capability 8.0";
  }
  if (has_adjacent_channels(call.x)) return "it takes NCHW images";
  if (reinterpret_cast<std::uintptr_t>(call.passes.data) % 4 != 0) {
    return "the bits of relu do not start on a 4-byte boundary";
  }
  if (!plan(context, call)) return "a channel does not fit in the shared memory of a cluster";
  return {};
}

Launch launch_of(const Context& context, const TensorView& x, const Plan& plan) {
  return {.context = context,
          .blocks = streams_of(x) * plan.cut.channels * plan.cut.cluster,
          .threads = plan.threads,
          .shared_bytes = plan.shared_bytes,
          .cluster = plan.cut.cluster};
}

/// Calls body(T, kinds, residual) with a value of x's type and constants of Kinds and bool.
template <typename Call, typename Body>
void dispatch(const Call& call, bool residual, Body&& body) {
  dispatch_short_dtype(call.x.dtype, [&]<typename T>(T) {
    const auto choose = [&](auto kinds) {
      if (residual) return body(T{}, kinds, std::true_type{});
      body(T{}, kinds, std::false_type{});
    };
    if (kinds_of(call.activation) == Kinds::smooth) {
      return choose(std::integral_constant<Kinds, Kinds::smooth>{});
    }
    choose(std::integral_constant<Kinds, Kinds::piecewise>{});
  });
}

}  // namespace

std::string planes_declines(const Context& context, const BatchNormActForward& call) {
  std::string reason = image_decline({&call.x, &call.y, &call.residual});
  if (!reason.empty()) return reason;
  if (!channels_of(call).own()) return "the statistics are given, so one pass is enough";
  if (call.passes.defined() && call.x.numel() % 32 != 0) {
    return "the bits of relu do not fill 4-byte words";  // atomic operations take whole words
  }
  return declines(context, call);
}

std::string planes_declines(const Context& context, const BatchNormActBackward& call) {
  std::string reason =
      image_decline({&call.x, &call.dy, &call.residual, &call.dx, &call.dresidual});
  if (!reason.empty()) return reason;
  const BackwardNeeds needs = needs_of(call);
  if (!needs.sums || !needs.images) return "one pass is enough for these gradients";
  return declines(context, call);
}

void planes_run(const Context& context, const BatchNormActForward& call) {
  const Plan p = *plan(context, call);
  const NormalizeArguments a{.x = call.x.data,
                             .residual = call.residual.data,
                             .y = call.y.data,
                             .passes = static_cast<unsigned char*>(call.passes.data),
                             .channels = channels_of(call),
                             .parts = {},
                             .coefficients = nullptr,
                             .activation = call.activation,
                             .streaming = false};
  if (a.channels.momentum < 0 && a.channels.advanced().calls != nullptr) {
    launch_kernel({context, streams_of(call.x), 32}, "counting calls", count_kernel,
                  a.channels.advanced(), p.cut.blanked, p.cut.samples, p.cut.pixels);
  }
  dispatch(call, call.residual.defined(), [&]<typename T>(T, auto kinds, auto residual) {
    launch_kernel(launch_of(context, call.x, p), "normalizing",
                  forward_kernel<T, kinds(), residual()>, p.cut, a);
  });
}

void planes_run(const Context& context, const BatchNormActBackward& call) {
  const Plan p = *plan(context, call);
  const GradientArguments a{.dy = call.dy.data,
                            .x = call.x.data,
                            .residual = call.residual.data,
                            .passes = static_cast<const unsigned char*>(call.passes.data),
                            .dx = call.dx.data,
                            .dresidual = call.dresidual.data,
                            .channels = channels_of(call),
                            .parts = {},
                            .corrections = nullptr,
                            .activation = call.activation,
                            .streaming = false};
  dispatch(call, reads_residual(call), [&]<typename T>(T, auto kinds, auto residual) {
    launch_kernel(launch_of(context, call.x, p), "computing gradients",
                  backward_kernel<T, kinds(), residual()>, p.cut, a);
  });
}

}  // namespace fusewise::cuda

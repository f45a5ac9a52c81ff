// BatchNorm, residual and activation in one kernel, for NCHW images of any size. A cluster of
// blocks has all planes of a channel in its shared memory. Its blocks sum, exchange their sums
// through shared memory, and normalise. In forward the residual only passes through a ring. Memory:
// each byte once. Forward reads x and the residual and writes y; backward reads dy, x and what else
// dv needs, and writes dx and dresidual. Bound by memory bandwidth when large, by the latency of a
// cluster's stages when small.

#include "cuda/batch_norm/planes.cuh"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "cuda/batch_norm/finish.cuh"
#include "cuda/batch_norm/units.cuh"
#include "cuda/cluster.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kMostThreads = 512, kMostBlocks = 16;  // of a block, of a cluster
/// Steps that copies run ahead of their use. Less with a residual, because its ring needs room.
constexpr int kAhead = 8, kAheadResidual = 6;

/// Forward has the running statistics before the call, backward those that forward saved.
enum Parameter { kWeight, kBias, kMeanBefore, kDeviationBefore };

/// How a channel is cut. A unit is an aligned vector of 16 bytes with values of the plane. The
/// first and the last of a plane may also have values of its neighbours in memory.
struct PlaneCut {
  ShortDivisor channels;
  unsigned samples;
  int pixels;
  Index stride;              // from a sample's plane to the next
  Index total;               // values of all images
  bool is_ragged;            // the last vector has fewer values
  double share;              // 1 / values of a channel
  ShortDivisor plane_units;  // the most that a plane can have
  int plane_values;          // of these units
  Index step_stride;         // from a thread's unit to its next: whole planes,
  int step_values;           // and values
  unsigned units, per_block;
  int steps;         // of a thread, at most
  int cluster_bits;  // a channel has 1 << cluster_bits blocks
  bool has_blanked;
  const bool* blanked;  // [S, N], may be null
  /// By Parameter, may be null.
  const void* parameters[4];

  __host__ __device__ int cluster() const { return 1 << cluster_bits; }
};

/// The values of the vector at `at` that are of the plane.
template <int kVector>
struct Piece {
  Index at;
  int place, pixels;  // of the vector's first value in the plane, of the plane
  bool exists;        // else the plane has no such vector
  bool follows;       // the unit before it is of the same plane

  __device__ __forceinline__ bool is_whole() const {
    return place >= 0 && place <= pixels - kVector;
  }
  /// A bit for each value.
  __device__ __forceinline__ unsigned mask() const {
    unsigned mask = (1u << kVector) - 1;
    if (!exists) return 0;
    if (place < 0) mask &= mask << -place;
    if (place > pixels - kVector) mask &= (1u << (pixels - place)) - 1;
    return mask;
  }
};

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>;

/// Reads `count` values into words of zeros: the end of an array, which fills its last vector in
/// part. An asynchronous copy could leave out the rest too, but memcheck reports the whole vector.
template <typename U, int kWords>
__device__ __forceinline__ void gather_words(unsigned (&words)[kWords], const void* from,
                                             int count) {
  constexpr int kEach = 4 / sizeof(U);
#pragma unroll
  for (int i = 0; i < kWords * kEach; ++i) {
    if (i >= count) continue;
    const unsigned value = static_cast<const U*>(from)[i];
    words[i / kEach] |= value << i % kEach * 8 * sizeof(U);
  }
}

/// A block's part of its channel.
template <typename T>
struct PlanePart {
  static constexpr int kVector = Vector<T>::kSize;

  const PlaneCut& cut;
  int rank, stream, channel;
  unsigned begin, end;
  Index origin;  // of the first sample's plane

  __device__ explicit PlanePart(const PlaneCut& cut) : cut(cut) {
    const int channels = static_cast<int>(cut.channels.value());
    const unsigned group = blockIdx.x >> cut.cluster_bits;
    rank = static_cast<int>(blockIdx.x & (cut.cluster() - 1));
    stream = static_cast<int>(cut.channels.quotient(group));
    channel = static_cast<int>(group) - stream * channels;
    begin = min(rank * cut.per_block, cut.units);
    end = min(begin + cut.per_block, cut.units);
    origin = (static_cast<Index>(stream) * cut.samples * channels + channel) * cut.pixels;
  }
  __device__ __forceinline__ bool is_sample_blank(unsigned sample) const {
    return cut.blanked[static_cast<Index>(stream) * cut.samples + sample];
  }
  /// Whether the sample of this thread's unit is blanked.
  __device__ __forceinline__ bool is_blank(int step) const {
    if (!cut.has_blanked) return false;
    const unsigned unit = begin + slot(step);
    return unit < end && is_sample_blank(cut.plane_units.quotient(unit));
  }
  /// A thread's own place in shared memory. Nobody else uses it, so it needs no barriers.
  __device__ __forceinline__ unsigned slot(int step) const {
    return step * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ Index at() const { return stream * cut.channels.value() + channel; }
  /// Starts to load one of four values of the channel, by lane.
  __device__ __forceinline__ T load_few(const T* x) const {
    // Uneven, so that they are not the same pixel of several images.
    const auto part = [](int i) { return i == 3 ? 29 : 7 + 6 * i; };
    const int i = threadIdx.x % 4;
    unsigned sample = cut.samples * part(i) / 32u;  // a channel fits in a cluster: no overflow
    const unsigned pixel = cut.pixels * part(3 - i) / 32u;
    if (cut.has_blanked) {
      sample = next_present(sample);
      if (sample == cut.samples) sample = next_present(0);
      if (sample == cut.samples) return T(0.0f);
    }
    return x[origin + sample * cut.stride + pixel];
  }
  /// A value near the mean, see Shifts. The same one in all blocks of the cluster.
  static __device__ __forceinline__ float shift(T few) {
    const float own = to_accumulator<float>(few);
    const auto of_lane = [&](int lane) { return __shfl_sync(0xffffffffu, own, lane); };
    return middle(of_lane(0), of_lane(1), of_lane(2), of_lane(3));
  }
  __device__ unsigned next_present(unsigned sample) const {
    while (sample < cut.samples && is_sample_blank(sample)) ++sample;
    return sample;
  }
  /// Values of the channel that are not blanked. For a whole warp.
  __device__ __forceinline__ double count() const {
    int present = static_cast<int>(cut.samples);
    if (cut.has_blanked) {
      present = 0;
      for (unsigned n = threadIdx.x % 32; n < cut.samples; n += 32) present += !is_sample_blank(n);
      present = warp_sum(present);
    }
    return static_cast<double>(present) * cut.pixels;
  }
  /// 1 / count, or 0. A division is long, and rarely needed.
  __device__ __forceinline__ double share(double count) const {
    if (!cut.has_blanked) return cut.share;
    return count > 0 ? 1 / count : 0.0;
  }
  /// Starts to copy a vector of an image. Behind the image there is nothing to read.
  __device__ __forceinline__ void copy(unsigned shared, const void* image, Index at) const {
    const T* const from = static_cast<const T*>(image) + at;
    if (cut.is_ragged && cut.total - at < kVector) {
      unsigned words[4] = {};
      gather_words<Bits<T>>(words, from, static_cast<int>(cut.total - at));
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]),
                   "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
      return;
    }
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  }
};

/// The thread's address in shared memory. The compiler would compute it again for each access.
__device__ __forceinline__ unsigned own_address(const void* memory) {
  unsigned address = shared_address(memory) + threadIdx.x * 16;
  asm volatile("" : "+r"(address));
  return address;
}
template <typename T>
__device__ __forceinline__ Packed<T> load_own(unsigned address) {
  Packed<T> vector;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vector.words[0]), "=r"(vector.words[1]), "=r"(vector.words[2]),
                 "=r"(vector.words[3])
               : "r"(address)
               : "memory");
  return vector;
}

/// A channel's parameters, each in a lane. Nothing waits for them before `get`: with a conversion
/// beside each load, the next one and the copies would start later.
template <typename T>
class LaneParameters {
 public:
  /// The first `narrow` ones are of x's type T, the others float32.
  __device__ __forceinline__ LaneParameters(const PlaneCut& cut, Index at, int narrow)
      : is_narrow_(sizeof(T) == 2 && static_cast<int>(threadIdx.x % 4) < narrow) {
    const void* const data = cut.parameters[threadIdx.x % 4];
    if (data == nullptr) {
      is_narrow_ = false;
      wide_ = threadIdx.x % 4 == kWeight ? 1.0f : 0.0f;
    } else if (is_narrow_) {
      narrow_ = static_cast<const T*>(data)[at];
    } else {
      wide_ = static_cast<const float*>(data)[at];
    }
  }
  /// For a whole warp.
  __device__ __forceinline__ float get(int which) const {
    return __shfl_sync(0xffffffffu, is_narrow_ ? to_accumulator<float>(narrow_) : wide_, which);
  }

 private:
  float wide_ = 0;
  T narrow_{};
  bool is_narrow_;
};

/// A thread's units, one step after the other.
template <typename T>
class Walk {
  static constexpr int kVector = Vector<T>::kSize;

 public:
  __device__ __forceinline__ explicit Walk(const PlanePart<T>& part) {
    const unsigned unit = part.begin + threadIdx.x;
    const unsigned sample = part.cut.plane_units.quotient(unit);
    const unsigned width = static_cast<unsigned>(part.cut.plane_units.value());
    left_ = static_cast<int>(part.end - part.begin) - static_cast<int>(threadIdx.x);
    start_ = part.origin + sample * part.cut.stride;
    place_ = static_cast<int>(unit - sample * width) * kVector;
  }
  __device__ __forceinline__ Piece<kVector> piece(const PlanePart<T>& part) const {
    const int place = place_ - (static_cast<int>(start_) & (kVector - 1));
    return {start_ + place, place, part.cut.pixels, left_ > 0 && place < part.cut.pixels,
            place_ > 0};
  }
  __device__ __forceinline__ void next(const PlanePart<T>& part) {
    left_ -= static_cast<int>(blockDim.x);
    place_ += part.cut.step_values;
    start_ += part.cut.step_stride;
    if (place_ >= part.cut.plane_values) {
      place_ -= part.cut.plane_values;
      start_ += part.cut.stride;
    }
  }

 private:
  Index start_;  // of the plane
  int place_;    // of the unit, from the vector with the plane's first value
  int left_;     // units of the block from this one on
};

/// Shared memory for what threads and blocks tell each other.
struct Exchange {
  float2 warps[kMostThreads / 32];
  double2 blocks[kMostBlocks];
  ByteBarrier arrived;  // of the values in `blocks`
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
__device__ __forceinline__ void enter_cluster(int cluster, Exchange& exchange) {
#if __CUDA_ARCH__ >= 900
  if (cluster == 1) return;
  if (threadIdx.x == 0) {
    exchange.arrived.init(1);
    exchange.arrived.expect(cluster * sizeof(double2));
    ByteBarrier::publish();
  }
  // The barrier has been published. A release would wait for more.
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

/// Adds the values of all threads of the cluster in a fixed order. The first thread of each block
/// gets the sums. Those of a thread are of at most 32 vectors, so float32 keeps their digits.
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
  if (threadIdx.x >= 32) return sums;
  if (lane < cluster) {  // needs no fence, see send_to_block
    asm volatile(
        "{\n"
        ".reg .b32 place, bar;\n"
        "mapa.shared::cluster.u32 place, %0, %2;\n"
        "mapa.shared::cluster.u32 bar, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [place], {%3, %4}, "
        "[bar];\n"
        "}" ::"r"(shared_address(&exchange.blocks[rank])),
        "r"(shared_address(&exchange.arrived)), "r"(lane), "l"(__double_as_longlong(sums.x)),
        "l"(__double_as_longlong(sums.y))
        : "memory");
  }
  exchange.arrived.wait(0);
  const double2 part = lane < cluster ? exchange.blocks[lane] : make_double2(0, 0);
  sums.x = warp_sum(part.x);
  sums.y = warp_sum(part.y);
  if (lane == 0) exchange.arrived.invalidate();
#endif
  return sums;
}

/// Stores the piece's values of a vector. `pairs`: planes start at even places.
template <typename T>
__device__ __forceinline__ void store_piece(T* to, const Piece<Packed<T>::kSize>& piece,
                                            const Packed<T>& vector, bool pairs) {
  to += piece.at;
  if (piece.is_whole()) {  // in assembly, because the compiler would split it
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(vector.words[0]),
                 "r"(vector.words[1]), "r"(vector.words[2]), "r"(vector.words[3])
                 : "memory");
    return;
  }
  const unsigned mask = piece.mask();
  constexpr int kInWord = 4 / sizeof(T);
  if (kInWord == 1 || pairs) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (mask >> kInWord * i & 1) reinterpret_cast<unsigned*>(to)[i] = vector.words[i];
    }
  } else {
    auto* const halves = reinterpret_cast<unsigned short*>(to);
#pragma unroll
    for (int k = 0; k < Packed<T>::kSize; ++k) {
      if (mask >> k & 1) {
        halves[k] = static_cast<unsigned short>(vector.words[k / kInWord] >> k % kInWord * 16);
      }
    }
  }
}

/// Stores the piece's bits. Called by whole warps. Planes of other blocks may share its first and
/// its last byte: there each sets and clears its own bits, so the order does not matter.
template <int kVector>
__device__ __forceinline__ void store_bits(unsigned char* passes, const Piece<kVector>& piece,
                                           unsigned bits) {
  unsigned own = piece.mask();
  bits &= own;
  const Index byte = piece.at >> 3;
  if constexpr (kVector == 4) {  // two neighbouring lanes may share a byte
    const bool is_second = (piece.at & 7) != 0;
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
    auto* const word = reinterpret_cast<unsigned*>(passes) + (byte >> 2);
    const int shift = static_cast<int>(byte & 3) * 8;
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
  enter_cluster(cut.cluster(), exchange);
  const PlanePart<T> part(cut);
  // Small loads first: behind the copies they would wait for them.
  const T few = part.load_few(static_cast<const T*>(a.x));
  const LaneParameters<T> parameters(cut, part.at(), a.channels.wide ? 0 : 4);
  // The residual passes through a ring of kSlots steps behind x. Its copies follow those of x, so
  // its first steps arrive while the blocks exchange their sums.
  constexpr int kSlots = kResidual ? kAheadResidual : kAhead;
  const unsigned own_x = own_address(memory), ring = own_x + cut.per_block * 16;
  const unsigned step_bytes = blockDim.x * 16;
  Walk<T> ahead(part);
  int copied = 0;     // steps of x
  unsigned slot = 0;  // bytes in the ring
  const auto copy_residual = [&](int step) {
    if (step < cut.steps) {
      const Piece piece = ahead.piece(part);
      if (piece.exists) part.copy(ring + slot, a.residual, piece.at);
      ahead.next(part);
    }
    slot = slot == (kSlots - 1) * step_bytes ? 0 : slot + step_bytes;
  };
  const auto copy_next = [&] {
    if (copied < cut.steps) {
      const Piece piece = ahead.piece(part);
      if (piece.exists) part.copy(own_x + copied * step_bytes, a.x, piece.at);
      ahead.next(part);
    } else if constexpr (kResidual) {
      if (copied == cut.steps) ahead = Walk<T>(part);
      copy_residual(copied - cut.steps);
    }
    ++copied;
    commit_copies();
  };
#pragma unroll 1
  for (int j = 0; j < kSlots; ++j) copy_next();
  const float shift = part.shift(few);
  float sum[kVector] = {}, squares[kVector] = {}, shifts[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) shifts[k] = shift;
  Walk<T> walk(part);
#pragma unroll 1
  for (int step = 0; step < cut.steps; ++step) {
    wait_for_all_but<kSlots - 1>();
    const Piece piece = walk.piece(part);
    if (piece.exists && !part.is_blank(step)) {
      const Packed<T> values = load_own<T>(own_x + step * step_bytes);
      float v[kVector];
      values.unpack(v);
      if (!piece.is_whole()) {
        const unsigned mask = piece.mask();
#pragma unroll
        for (int k = 0; k < kVector; ++k) v[k] = (mask >> k & 1) != 0 ? v[k] : shift;
      }
      add_moments(v, shifts, sum, squares);
    }
    walk.next(part);
    copy_next();
  }
  const double count = part.count();
  const double2 sums = sum_over_cluster(cut.cluster(), part.rank, sum, squares, exchange);
  double mean = 0, variance = 0;
  const float weight = parameters.get(kWeight), bias = parameters.get(kBias);
  if (threadIdx.x == 0) {
    const double share = part.share(count);
    mean = count > 0 ? shift + sums.x * share : 0.0;
    variance = above_0(sums.y - sums.x * (sums.x * share)) * share;
    const float eps = static_cast<float>(a.channels.eps);
    exchange.rows[kMean] = static_cast<float>(mean);
    exchange.rows[kScale] = inverse_deviation(static_cast<float>(variance), eps) * weight;
    exchange.rows[kShift] = bias;
  }
  __syncthreads();
  const ChannelRows channel{
      {exchange.rows[kMean], exchange.rows[kScale], exchange.rows[kShift], 0, 0}};
  walk = Walk<T>(part);
#pragma unroll 1
  for (int step = 0; step < cut.steps; ++step) {
    if constexpr (kResidual) wait_for_all_but<kSlots - 1>();
    const Piece piece = walk.piece(part);
    const bool blank = part.is_blank(step);
    float v[kVector] = {};
    Packed<T> values, added;
    if (piece.exists) {
      values = load_own<T>(own_x + step * step_bytes);
      if constexpr (kResidual) added = load_own<T>(ring + slot);
      normalize<kResidual>(channel, 0, values, added, v);
    }
    if constexpr (kResidual) {
      copy_residual(step + kSlots);  // to the slot that is free now
      commit_copies();
      if (a.passes != nullptr) {
        store_bits<kVector>(a.passes, piece, blank ? 0 : passing<T>(a.activation, v));
      }
    }
    walk.next(part);
    if (!piece.exists) continue;
    activate_all<T, kKinds>(a.activation, v);
    values.pack(v);
    if (blank) values = {};
    store_piece(static_cast<T*>(a.y), piece, values, cut.pixels % 2 == 0);
  }
  // Last, because nobody waits for it.
  if (part.rank > 0) return;
  const ForwardChannels& f = a.channels;
  const bool cumulative = f.momentum < 0;  // count_calls has counted
  if (part.channel == 0 && threadIdx.x < 32 && !cumulative) {
    count_call(f.advanced(), part.stream, cut.blanked, cut.samples, cut.pixels);
  }
  const RunningStatistics<float> running{parameters.get(kMeanBefore),
                                         parameters.get(kDeviationBefore)};
  if (threadIdx.x == 0) {
    const long long calls = cumulative ? calls_of(f.counter, part.stream) : 1;
    const float inverse =
        inverse_deviation(static_cast<float>(variance), static_cast<float>(f.eps));
    save_channel<T>(f, part.at(), count, mean, variance, inverse, calls, running);
  }
#endif
}

template <typename T, Kinds kKinds, bool kResidual>
__global__ void __launch_bounds__(kMostThreads, 2)
    backward_kernel(const __grid_constant__ PlaneCut cut,
                    const __grid_constant__ GradientArguments a) {
#if __CUDA_ARCH__ >= 800
  constexpr int kVector = Vector<T>::kSize;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Exchange exchange;
  enter_cluster(cut.cluster(), exchange);
  const PlanePart<T> part(cut);
  // Small loads first: behind the copies they would wait for them.
  const LaneParameters<T> parameters(cut, part.at(), a.channels.wide ? 0 : kMeanBefore);
  const unsigned image = cut.per_block * 16;
  const unsigned step_bytes = blockDim.x * 16;
  const unsigned own = own_address(memory);
  const unsigned words = own + 2 * image - threadIdx.x * 12;  // 4 bytes of a thread, not 16
  const Index bit_bytes = (cut.total + 7) / 8;
  Walk<T> ahead(part);
  int copied = 0;  // steps
  const auto copy_next = [&] {
    if (copied < cut.steps) {
      const Piece piece = ahead.piece(part);
      if (piece.exists) {
        const unsigned to = own + copied * step_bytes;
        part.copy(to, a.dy, piece.at);
        part.copy(to + image, a.x, piece.at);
        if constexpr (kResidual) {
          part.copy(to + 2 * image, a.residual, piece.at);
        } else if (a.passes != nullptr) {
          const Index byte = (piece.at >> 5) * 4;
          const unsigned to_word = words + copied * (step_bytes / 4);
          if (bit_bytes - byte < 4) {
            unsigned word[1] = {};
            gather_words<std::uint8_t>(word, a.passes + byte, static_cast<int>(bit_bytes - byte));
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(to_word), "r"(word[0]) : "memory");
          } else {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to_word),
                         "l"(a.passes + byte)
                         : "memory");
          }
        }
      }
      ahead.next(part);
    }
    ++copied;
    commit_copies();
  };
#pragma unroll 1
  for (int j = 0; j < kAhead; ++j) copy_next();
  const float inverse = parameters.get(kDeviationBefore);
  ChannelRows channel{{parameters.get(kMeanBefore), inverse * parameters.get(kWeight),
                       parameters.get(kBias), 0, 0}};
  /// dv, and x without its mean.
  const auto gradient = [&](int step, const Piece<kVector>& piece, float (&d)[kVector],
                            float (&centred)[kVector]) {
    const unsigned from = own + step * step_bytes;
    GradientVectors<T, kResidual, kKinds> vectors;
    vectors.dy = load_own<T>(from);
    vectors.x = load_own<T>(from + image);
    if constexpr (kResidual) vectors.residual = load_own<T>(from + 2 * image);
    if (!kResidual && a.passes != nullptr) {
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(vectors.bits)
                   : "r"(words + step * (step_bytes / 4))
                   : "memory");
      vectors.bits >>= piece.at & 31;
    }
    vectors.gradient(a, channel, 0, d, centred);
  };
  float sum[kVector] = {}, products[kVector] = {};
  Walk<T> walk(part);
#pragma unroll 1
  for (int step = 0; step < cut.steps; ++step) {
    wait_for_all_but<kAhead - 1>();
    const Piece piece = walk.piece(part);
    if (piece.exists && !part.is_blank(step)) {
      float d[kVector], centred[kVector];
      gradient(step, piece, d, centred);
      if (!piece.is_whole()) {
        const unsigned mask = piece.mask();
        keep_passing(mask, d);
        keep_passing(mask, centred);
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        sum[k] += d[k];
        products[k] = fmaf(d[k], centred[k], products[k]);
      }
    }
    walk.next(part);
    copy_next();
  }
  const double count = part.count();
  const double2 sums = sum_over_cluster(cut.cluster(), part.rank, sum, products, exchange);
  if (threadIdx.x == 0) {
    const GradientSums<float> all{count, static_cast<float>(sums.x), static_cast<float>(sums.y)};
    Corrections<float> value =
        finish_gradient<T>(a.channels, part.at(), all, inverse, part.rank == 0);
    if (a.channels.group != nullptr) {
      value = group_corrections<T>(a.channels, part.at(), inverse);
    }
    exchange.rows[kOffset] = value.offset;
    exchange.rows[kSlope] = value.slope;
  }
  __syncthreads();
  channel.rows[kOffset] = exchange.rows[kOffset];
  channel.rows[kSlope] = exchange.rows[kSlope];
  walk = Walk<T>(part);
#pragma unroll 1
  for (int step = 0; step < cut.steps; ++step) {
    const Piece piece = walk.piece(part);
    walk.next(part);
    if (!piece.exists) continue;
    const bool blank = part.is_blank(step);
    float d[kVector], centred[kVector];
    gradient(step, piece, d, centred);
    const auto store = [&](void* to) {
      Packed<T> out;
      out.pack(d);
      if (blank) out = {};
      store_piece(static_cast<T*>(to), piece, out, cut.pixels % 2 == 0);
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

/// Bytes of shared memory: of a unit, and more of a thread.
struct Needs {
  int unit, thread;
};
Needs needs_of_shared(const BatchNormActForward& call) {
  return {16, call.residual.defined() ? kAheadResidual * 16 : 0};
}
Needs needs_of_shared(const BatchNormActBackward& call) {
  return {reads_residual(call) ? 48 : call.passes.defined() ? 36 : 32, 0};
}

/// Bytes of an SM's shared memory for a block.
constexpr std::int64_t in_sm(std::int64_t dynamic) { return dynamic + sizeof(Exchange) + 1024; }

/// The cut that is expected to be fastest. Its cost is in bytes that an SM loads. Blocks that run
/// together hide each other's latencies: one loads while another stores. Threads hide those of
/// instructions. A block costs its start, a cluster its barriers.
template <typename Call>
std::optional<Plan> plan(const Context& context, const Call& call) {
  const TensorView& x = call.x;
  const DeviceLimits& limits = limits_of(context.device);
  const Needs needs = needs_of_shared(call);
  const int vector = static_cast<int>(16 / size_of(x.dtype));
  const std::int64_t pixels = dimension(x, 2) * dimension(x, 1);
  const std::int64_t channels = dimension(x, 3), samples = dimension(x, 4);
  const std::int64_t in_plane = plane_units(pixels, vector), units = samples * in_plane;
  constexpr std::int64_t kThreadsOfSm = 1024;  // with 64 registers
  double least = 0;
  std::int64_t per_block = 0, dynamic = 0;
  int cluster_bits = 0, threads = 0;
  const auto consider = [&](int bits, int size) {
    const int blocks = 1 << bits;
    // Whole warps: then no two of them share a byte of bits in planes that do not.
    const std::int64_t each = divide_up(units, 32 * blocks) * 32;
    const std::int64_t bytes = each * needs.unit + size * needs.thread;
    if (in_sm(bytes) - 1024 > limits.block_shared_memory || each >= 32 * size) return;
    if (size > 64 && size / 2 >= each) return;  // half of the threads would have no unit
    const std::int64_t fit = std::min(limits.shared_memory / in_sm(bytes), kThreadsOfSm / size);
    // Clusters of more than 8 need enough SMs side by side, and not all GPUs have them.
    if (blocks > 8 && (fit < 2 || limits.gpu_capability >= 120)) return;
    const std::int64_t per_sm =
        divide_up(streams_of(x) * channels * blocks, limits.multiprocessors);
    const double together = static_cast<double>(std::min(per_sm, fit));
    double cost = static_cast<double>(per_sm * (each * needs.unit + 2048));
    cost *= (1 + 1 / (together * (together + 1))) * (1 + 128 / (together * size));
    // More than 8 blocks must find room side by side at once, so they wait longer.
    if (blocks > 1) cost += cost * (blocks > 8 ? 0.3 : 0.06) + 8192;
    if (threads > 0 && cost >= least) return;
    least = cost;
    per_block = each;
    dynamic = bytes;
    cluster_bits = bits;
    threads = size;
  };
  for (int bits = 0; 1 << bits <= (limits.capability >= 90 ? kMostBlocks : 1); ++bits) {
    for (int size = 64; size <= kMostThreads; size *= 2) consider(bits, size);
  }
  if (threads == 0) return std::nullopt;
  return Plan{.cut = {.channels = ShortDivisor(channels),
                      .samples = static_cast<unsigned>(samples),
                      .pixels = static_cast<int>(pixels),
                      .stride = channels * pixels,
                      .total = x.numel(),
                      .is_ragged = x.numel() % vector != 0,
                      .share = 1.0 / static_cast<double>(samples * pixels),
                      .plane_units = ShortDivisor(in_plane),
                      .plane_values = static_cast<int>(in_plane * vector),
                      .step_stride = threads / in_plane * channels * pixels,
                      .step_values = static_cast<int>(threads % in_plane * vector),
                      .units = static_cast<unsigned>(units),
                      .per_block = static_cast<unsigned>(per_block),
                      .steps = static_cast<int>(divide_up(per_block, threads)),
                      .cluster_bits = cluster_bits,
                      .has_blanked = call.blanked.data != nullptr,
                      .blanked = static_cast<const bool*>(call.blanked.data),
                      .parameters = {}},
              .threads = threads,
              .shared_bytes = static_cast<std::size_t>(dynamic)};
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
          .blocks = streams_of(x) * dimension(x, 3) * plan.cut.cluster(),
          .threads = plan.threads,
          .shared_bytes = plan.shared_bytes,
          .cluster = plan.cut.cluster()};
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
  reason = declines(context, call);
  if (!reason.empty()) return reason;
  const std::int64_t in_block = in_sm(plan(context, call)->shared_bytes);
  if (2 * in_block > limits_of(context.device).shared_memory) {
    return "an SM has room for one block only, which either loads or stores";
  }
  return {};
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
  Plan p = *plan(context, call);
  const NormalizeArguments a = arguments_of(call);
  std::ranges::copy(
      std::initializer_list<const void*>{a.channels.weight, a.channels.bias,
                                         a.channels.running_mean, a.channels.running_var},
      p.cut.parameters);
  if (a.channels.momentum < 0) count_calls(context, a.channels.advanced(), call.x, call.blanked);
  dispatch(call, call.residual.defined(), [&]<typename T>(T, auto kinds, auto residual) {
    launch_kernel(launch_of(context, call.x, p), "normalizing",
                  forward_kernel<T, kinds(), residual()>, p.cut, a);
  });
}

void planes_run(const Context& context, const BatchNormActBackward& call) {
  Plan p = *plan(context, call);
  const GradientArguments a = arguments_of(call);
  std::ranges::copy(std::initializer_list<const void*>{a.channels.weight, a.channels.bias,
                                                       a.channels.mean, a.channels.inverse},
                    p.cut.parameters);
  dispatch(call, reads_residual(call), [&]<typename T>(T, auto kinds, auto residual) {
    launch_kernel(launch_of(context, call.x, p), "computing gradients",
                  backward_kernel<T, kinds(), residual()>, p.cut, a);
  });
}

}  // namespace fusewise::cuda

// BatchNorm, residual and activation in two passes over dense images, with 16-byte accesses.
// Memory: forward reads x twice (once in inference), the residual once, and writes y. Backward
// reads dy, x and what else dv needs twice and writes dx and dresidual. The second pass goes in the
// opposite direction, so that it finds in L2 what the first one read last. Bound by memory
// bandwidth when large; by the start of the second kernel and the exchange of sums when small.

#include "cuda/batch_norm/two_pass.cuh"

#include <algorithm>

#include "common/divide.h"
#include "cuda/batch_norm/activation.cuh"
#include "cuda/batch_norm/divisor.cuh"
#include "cuda/batch_norm/finish.cuh"
#include "cuda/batch_norm/packed.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace fusewise::cuda {
namespace {

/// Two blocks fill the registers of an SM: 80 per thread.
constexpr int kThreads = 384, kBlocks = 2;
/// Vectors that a thread has in flight: 48 KB per SM and more.
constexpr int kInFlight = 4;
/// A block of channels that has at most so many parts combines them itself. Otherwise a kernel
/// between the passes does: each block would read all parts of its channels.
constexpr Index kMostOwnParts = 4608;
constexpr int kMostLanes = 64;

/// How images are cut into blocks. A unit is a vector of each of `lanes` groups of channels: a
/// pixel's in channels-last images, a vector of pixels of one channel in NCHW images. A block has a
/// slab of units of one stream.
struct Cut {
  int channels, lanes, tiles, slabs;
  unsigned units, per_slab;  // of a stream
  Divisor sample_units;      // of a sample
  int samples;
  const bool* blanked;  // [S, N], may be null

  Index blocks(Index streams) const { return streams * tiles * slabs; }
};

template <typename T, bool kPlanar>
struct Tile {
  static constexpr int kVector = Vector<T>::kSize;

  const Cut& cut;
  int stream, slab, first, width;  // width: channels of this block
  int lanes, strands, strand, lane;
  unsigned begin, end;
  int steps;  // units of this thread

  __device__ Tile(const Cut& cut, unsigned block) : cut(cut) {
    const int tile = static_cast<int>(block % cut.tiles);
    slab = static_cast<int>(block / cut.tiles % cut.slabs);
    stream = static_cast<int>(block / cut.tiles / cut.slabs);
    first = kPlanar ? tile : tile * cut.lanes * kVector;
    width = kPlanar ? 1 : min(cut.lanes * kVector, cut.channels - first);
    lanes = kPlanar ? 1 : width / kVector;
    strands = kThreads / lanes;
    strand = threadIdx.x / lanes;
    lane = threadIdx.x - strand * lanes;
    begin = slab * cut.per_slab;
    end = min(begin + cut.per_slab, cut.units);
    const int left = static_cast<int>(end - begin) - strand;
    steps = strand < strands && left > 0 ? (left + strands - 1) / strands : 0;
  }
  template <bool kReverse>
  __device__ __forceinline__ unsigned unit(int step) const {
    return begin + strand + (kReverse ? steps - 1 - step : step) * strands;
  }
  /// Where the thread's vector of a unit is. It is also 8 times the place of its bits.
  __device__ __forceinline__ Index offset(unsigned unit) const {
    if constexpr (kPlanar) {
      const Index sample = cut.sample_units.quotient(unit), in_plane = cut.sample_units.value();
      const Index plane =
          (static_cast<Index>(stream) * cut.samples + sample) * cut.channels + first;
      return (plane * in_plane + (unit - sample * in_plane)) * kVector;
    } else {
      return (static_cast<Index>(stream) * cut.units + unit) * cut.channels + first +
             lane * kVector;
    }
  }
  __device__ __forceinline__ bool is_blank(unsigned unit) const {
    return cut.blanked != nullptr &&
           cut.blanked[static_cast<Index>(stream) * cut.samples + cut.sample_units.quotient(unit)];
  }
  /// The first unit that is not blanked, or `end`.
  __device__ unsigned first_present() const {
    unsigned unit = begin;
    while (unit < end && is_blank(unit)) {
      const Index next = (cut.sample_units.quotient(unit) + 1) * cut.sample_units.value();
      unit = static_cast<unsigned>(min(next, static_cast<Index>(end)));
    }
    return unit;
  }
  /// Values per channel of this slab that are not blanked. For a whole warp.
  __device__ double count() const {
    Index present = 0;
    if (cut.blanked == nullptr) {
      present = end - begin;
    } else if (begin < end) {
      const int last = static_cast<int>(cut.sample_units.quotient(end - 1));
      for (int n = static_cast<int>(cut.sample_units.quotient(begin)) + threadIdx.x % 32; n <= last;
           n += 32) {
        const Index from = n * cut.sample_units.value(), to = from + cut.sample_units.value();
        if (!cut.blanked[static_cast<Index>(stream) * cut.samples + n]) {
          present += min(to, static_cast<Index>(end)) - max(from, static_cast<Index>(begin));
        }
      }
      present = warp_sum(present);
    }
    return static_cast<double>(present * (kPlanar ? kVector : 1));
  }
  __device__ __forceinline__ Index channel(int k) const {
    return static_cast<Index>(stream) * cut.channels + first + k;
  }
  /// Where this slab's part of channel k is.
  __device__ __forceinline__ Index part(int k) const {
    return (static_cast<Index>(stream) * cut.slabs + slab) * cut.channels + first + k;
  }
};

/// Per-channel values in shared memory, `rows` for each channel, so that a thread loads those of
/// its vector with 16-byte accesses and without bank conflicts.
template <typename T, bool kPlanar>
struct Table {
  static constexpr int kVector = Vector<T>::kSize;
  float* data;
  int lanes;

  __device__ __forceinline__ float& at(int row, int k) const {
    if constexpr (kPlanar) return data[row];
    const int lane = k / kVector, i = k % kVector;
    return data[((row * (kVector / 4) + i / 4) * lanes + lane) * 4 + i % 4];
  }
  /// The values of a thread's vector. Volatile: they would not all fit in registers otherwise.
  __device__ __forceinline__ void get(int row, int lane, float (&values)[kVector]) const {
    if constexpr (kPlanar) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) values[k] = data[row];
    } else {
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float* from = data + ((row * (kVector / 4) + i / 4) * lanes + lane) * 4;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(values[i]), "=f"(values[i + 1]), "=f"(values[i + 2]),
                       "=f"(values[i + 3])
                     : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from))));
      }
    }
  }
};

enum Row { kMean, kScale, kShift, kOffset, kSlope };

/// Floats of shared memory for `rows` values of each channel of a block.
__host__ __device__ constexpr int table_floats(int rows, int width) {
  return (rows * width + 3) / 4 * 4;
}

/// Adds two values of each channel over the block and calls finish(k, first, second) for k < width.
/// `shared`: sum_floats. Ends with a barrier.
template <typename T, bool kPlanar, typename Finish>
__device__ __forceinline__ void sum_over_block(const Tile<T, kPlanar>& tile,
                                               float (&first)[Vector<T>::kSize],
                                               float (&second)[Vector<T>::kSize], float* shared,
                                               Finish finish) {
  constexpr int kVector = Vector<T>::kSize;
  const int width = 2 * tile.width;
  int rows = tile.strands;
  if constexpr (kPlanar) {
    rows = kThreads / 32;
#pragma unroll
    for (int k = 1; k < kVector; ++k) {
      first[0] += first[k];
      second[0] += second[k];
    }
    first[0] = warp_sum(first[0]);
    second[0] = warp_sum(second[0]);
    if (threadIdx.x % 32 == 0) {
      shared[threadIdx.x / 32 * 2] = first[0];
      shared[threadIdx.x / 32 * 2 + 1] = second[0];
    }
  } else if (tile.strand < tile.strands) {
    float* row = shared + tile.strand * width + tile.lane * kVector;
#pragma unroll
    for (int k = 0; k < kVector; k += 4) {
      *reinterpret_cast<float4*>(row + k) =
          make_float4(first[k], first[k + 1], first[k + 2], first[k + 3]);
      *reinterpret_cast<float4*>(row + tile.width + k) =
          make_float4(second[k], second[k + 1], second[k + 2], second[k + 3]);
    }
  }
  __syncthreads();
  float* const scratch = shared + rows * width;
  float* const totals = scratch + max(kThreads, width);
  block_sum_rows(shared, rows, width, scratch, [&](int k, float sum) { totals[k] = sum; });
  for (int k = threadIdx.x; k < tile.width; k += kThreads) {
    finish(k, totals[k], totals[tile.width + k]);
  }
  __syncthreads();
}
/// For the widest tile: all rows of all threads, the scratch of block_sum_rows, and the totals.
__host__ __device__ constexpr int sum_floats(int width, int vector) {
  return 2 * kThreads * vector + (kThreads > 2 * width ? kThreads : 2 * width) + 2 * width;
}

// ---- Forward.

/// Mean and squares of the slabs, shifted by a mean of a few values. Memory: x once.
template <typename T, bool kPlanar>
__global__ void __launch_bounds__(kThreads, kBlocks)
    moments_kernel(const __grid_constant__ Cut cut, const T* x, const MomentParts<float> parts,
                   long long* tracked) {
  constexpr int kVector = Vector<T>::kSize, kBatch = kInFlight + 2;
  extern __shared__ __align__(16) float shared[];
  allow_next_kernel();
  if (tracked != nullptr && blockIdx.x == 0 && threadIdx.x == 0) ++*tracked;
  const Tile<T, kPlanar> tile(cut, blockIdx.x);
  Packed<T> batch[kBatch];
  bool present[kBatch];
  const auto load = [&](int step) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const unsigned unit = tile.template unit<false>(step + j);
      present[j] = step + j < tile.steps && !tile.is_blank(unit);
      if (present[j]) batch[j].load(x + tile.offset(unit));
    }
  };
  load(0);
  const Table<T, kPlanar> shifts{shared, tile.lanes};
  float* const rows = shared + table_floats(1, tile.width);
  if (threadIdx.x < tile.lanes) {
    const unsigned from = tile.first_present();
    // Pixels of one sample, so none of them is blanked.
    const int sample_left =
        static_cast<int>((cut.sample_units.quotient(from) + 1) * cut.sample_units.value() - from);
    const int count = min(kPlanar ? 1 : 4, min(static_cast<int>(tile.end - from), sample_left));
    float sums[kVector] = {};
    for (int i = 0; i < count; ++i) {
      const Vector<T> v = load_vector(x + tile.offset(from + i));
#pragma unroll
      for (int k = 0; k < kVector; ++k) sums[k] += v[k];
    }
    if constexpr (kPlanar) {
#pragma unroll
      for (int k = 1; k < kVector; ++k) sums[0] += sums[k];
      shifts.at(0, 0) = sums[0] / kVector;
    } else {
      const float each = 1.0f / static_cast<float>(max(count, 1));
#pragma unroll
      for (int k = 0; k < kVector; ++k) shifts.at(0, tile.lane * kVector + k) = sums[k] * each;
    }
  }
  __syncthreads();
  float sum[kVector] = {}, squares[kVector] = {};
  for (int step = 0; step < tile.steps; step += kBatch) {
    if (step > 0) load(step);
    float shift[kVector];
    shifts.get(0, tile.lane, shift);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!present[j]) continue;
      float values[kVector];
      batch[j].unpack(values);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float d = values[k] - shift[k];
        sum[k] += d;
        squares[k] = fmaf(d, d, squares[k]);
      }
    }
  }
  const double count = tile.count();
  if (tile.first == 0 && threadIdx.x == 0) {
    parts.counts[static_cast<Index>(tile.stream) * cut.slabs + tile.slab] = count;
  }
  sum_over_block(tile, sum, squares, rows, [&](int k, float total, float total_squares) {
    Moments own;
    own.count = count;
    own.sum = total;
    own.squares = total_squares;
    parts.means[tile.part(k)] = own.mean(shifts.at(0, k));
    parts.squares[tile.part(k)] = static_cast<float>(own.central());
  });
}

struct NormalizeArguments {
  const void *x, *residual;
  void* y;
  unsigned char* passes;
  ForwardChannels channels;
  MomentParts<float> parts;                 // combined here if there are any
  const Coefficients<float>* coefficients;  // else these, or the running statistics if null
  Activation activation;
  bool streaming;  // y does not stay in L2
};

/// Memory: x and the residual once, y once, and a bit per value.
template <typename T, bool kPlanar, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBlocks)
    normalize_kernel(const __grid_constant__ Cut cut,
                     const __grid_constant__ NormalizeArguments a) {
  constexpr int kVector = Vector<T>::kSize, kBatch = kInFlight / (kResidual ? 2 : 1);
  extern __shared__ __align__(16) float shared[];
  const Tile<T, kPlanar> tile(cut, gridDim.x - 1 - blockIdx.x);
  const T* x = static_cast<const T*>(a.x);
  const T* residual = static_cast<const T*>(a.residual);
  Packed<T> batch[kBatch], others[kResidual ? kBatch : 1];
  const auto load = [&](int step) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (step + j >= tile.steps) break;
      const Index at = tile.offset(tile.template unit<true>(step + j));
      batch[j].load(x + at);
      if constexpr (kResidual) others[j].load(residual + at);
    }
  };
  load(0);
  wait_for_previous_kernel();

  const Table<T, kPlanar> table{shared, tile.lanes};
  const bool writes = tile.slab == 0;
  const auto set = [&](int k, const Coefficients<float>& value) {
    table.at(kMean, k) = value.mean;
    table.at(kScale, k) = value.scale;
    table.at(kShift, k) = value.shift;
  };
  if (a.parts.slabs > 0) {
    const long long calls = tracked_calls(a.channels, true);
    combine_moments(a.parts, tile.stream, cut.channels, tile.first, tile.width,
                    shared + table_floats(3, tile.width),
                    [&](int k, double count, double mean, double variance) {
                      set(k, finish_channel<T>(a.channels, tile.channel(k), count, mean, variance,
                                               calls, writes));
                    });
  } else {
    for (int k = threadIdx.x; k < tile.width; k += kThreads) {
      const Index at = tile.channel(k);
      set(k, a.coefficients != nullptr ? a.coefficients[at]
                                       : running_coefficients<T>(a.channels, at, writes));
    }
    __syncthreads();
  }

  for (int step = 0; step < tile.steps; step += kBatch) {
    if (step > 0) load(step);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (step + j >= tile.steps) break;
      const unsigned unit = tile.template unit<true>(step + j);
      const Index at = tile.offset(unit);
      float v[kVector], mean[kVector], scale[kVector], shift[kVector];
      batch[j].unpack(v);
      table.get(kMean, tile.lane, mean);
      table.get(kScale, tile.lane, scale);
      table.get(kShift, tile.lane, shift);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        v[k] = Coefficients<float>{mean[k], scale[k], shift[k], 0}(v[k]);
      }
      if constexpr (kResidual) {
        float other[kVector];
        others[j].unpack(other);
#pragma unroll
        for (int k = 0; k < kVector; ++k) v[k] += other[k];
      }
      const bool blank = tile.is_blank(unit);
      if (kResidual && a.passes != nullptr) {
        unsigned bits = blank ? 0 : passing(a.activation, v);
        if constexpr (kVector == 4) {  // two neighbouring lanes share a byte
          bits |= __shfl_xor_sync(3u << (threadIdx.x & 30), bits, 1) << 4;
        }
        if (kVector == 8 || threadIdx.x % 2 == 0) {
          a.passes[at / 8] = static_cast<unsigned char>(bits);
        }
      }
      activate_all<T>(a.activation, v);
#pragma unroll
      for (int k = 0; k < kVector; ++k) v[k] = blank ? 0.0f : v[k];
      Packed<T> y;
      y.pack(v);
      y.store(static_cast<T*>(a.y) + at, a.streaming);
    }
  }
}

// ---- Backward.

struct GradientArguments {
  const void *dy, *x, *residual;
  const unsigned char* passes;
  void *dx, *dresidual;
  BackwardChannels channels;
  GradientParts<float> parts;             // the second pass: combined here if there are any
  const Corrections<float>* corrections;  // else these, the group's if null, none without a group
  Activation activation;
  bool streaming;
};

/// The vectors of a unit that dv depends on.
template <typename T, bool kResidual>
struct GradientVectors {
  static constexpr int kVector = Vector<T>::kSize;
  Packed<T> dy, x, residual;  // the residual only if kResidual
  unsigned bits;

  __device__ __forceinline__ void load(const GradientArguments& a, Index at) {
    dy.load(static_cast<const T*>(a.dy) + at);
    x.load(static_cast<const T*>(a.x) + at);
    if constexpr (kResidual) residual.load(static_cast<const T*>(a.residual) + at);
    if (!kResidual && a.passes != nullptr) bits = a.passes[at / 8] >> at % 8;
  }

  /// dv, and x without its mean.
  template <bool kPlanar>
  __device__ __forceinline__ void gradient(const GradientArguments& a,
                                           const Table<T, kPlanar>& table, int lane,
                                           float (&d)[kVector], float (&centred)[kVector]) const {
    float mean[kVector];
    dy.unpack(d);
    x.unpack(centred);
    table.get(kMean, lane, mean);
#pragma unroll
    for (int k = 0; k < kVector; ++k) centred[k] -= mean[k];
    if (!kResidual && a.passes != nullptr) return keep_passing(bits, d);
    if (a.activation == Activation::identity) return;
    float scale[kVector], v[kVector];
    table.get(kScale, lane, scale);
    table.get(kShift, lane, v);
#pragma unroll
    for (int k = 0; k < kVector; ++k) v[k] = fmaf(centred[k], scale[k], v[k]);
    if constexpr (kResidual) {
      residual.unpack(mean);
#pragma unroll
      for (int k = 0; k < kVector; ++k) v[k] += mean[k];
    }
    differentiate_all<T>(a.activation, v, d);
  }
};

template <typename T, bool kPlanar>
__device__ __forceinline__ float fill_saved(const Tile<T, kPlanar>& tile,
                                            const Table<T, kPlanar>& table,
                                            const BackwardChannels& channels, int k) {
  const Coefficients<float> saved = saved_coefficients<T>(channels, tile.channel(k));
  table.at(kMean, k) = saved.mean;
  table.at(kScale, k) = saved.scale;
  table.at(kShift, k) = saved.shift;
  return saved.inverse;
}

/// Sums of dv and dv * (x - mean) of the slabs. Memory: dy, x and what else dv needs once.
template <typename T, bool kPlanar, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gradient_sums_kernel(const __grid_constant__ Cut cut,
                         const __grid_constant__ GradientArguments a,
                         const GradientParts<float> parts) {
  constexpr int kVector = Vector<T>::kSize, kBatch = kInFlight / 2;
  extern __shared__ __align__(16) float shared[];
  allow_next_kernel();
  const Tile<T, kPlanar> tile(cut, blockIdx.x);
  GradientVectors<T, kResidual> batch[kBatch];
  bool present[kBatch];
  const auto load = [&](int step) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const unsigned unit = tile.template unit<false>(step + j);
      present[j] = step + j < tile.steps && !tile.is_blank(unit);
      if (present[j]) batch[j].load(a, tile.offset(unit));
    }
  };
  load(0);
  const Table<T, kPlanar> table{shared, tile.lanes};
  float* const rows = shared + table_floats(3, tile.width);
  for (int k = threadIdx.x; k < tile.width; k += kThreads) fill_saved(tile, table, a.channels, k);
  __syncthreads();
  float sum[kVector] = {}, products[kVector] = {};
  for (int step = 0; step < tile.steps; step += kBatch) {
    if (step > 0) load(step);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!present[j]) continue;
      float d[kVector], centred[kVector];
      batch[j].gradient(a, table, tile.lane, d, centred);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        sum[k] += d[k];
        products[k] = fmaf(d[k], centred[k], products[k]);
      }
    }
  }
  const double count = tile.count();
  if (tile.first == 0 && threadIdx.x == 0) {
    parts.counts[static_cast<Index>(tile.stream) * cut.slabs + tile.slab] = count;
  }
  sum_over_block(tile, sum, products, rows, [&](int k, float dv, float dvx) {
    parts.dv[tile.part(k)] = dv;
    parts.dvx[tile.part(k)] = dvx;
  });
}

/// Memory: dy, x and what else dv needs once, dx and dresidual once.
template <typename T, bool kPlanar, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gradients_kernel(const __grid_constant__ Cut cut, const __grid_constant__ GradientArguments a) {
  constexpr int kVector = Vector<T>::kSize, kBatch = kInFlight / 2;
  extern __shared__ __align__(16) float shared[];
  const Tile<T, kPlanar> tile(cut, gridDim.x - 1 - blockIdx.x);
  GradientVectors<T, kResidual> batch[kBatch];
  const auto load = [&](int step) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (step + j < tile.steps) batch[j].load(a, tile.offset(tile.template unit<true>(step + j)));
    }
  };
  load(0);
  wait_for_previous_kernel();

  const Table<T, kPlanar> table{shared, tile.lanes};
  const auto set = [&](int k, const Corrections<float>& value) {
    table.at(kOffset, k) = value.offset;
    table.at(kSlope, k) = value.slope;
  };
  if (a.parts.slabs > 0) {
    combine_gradients(
        a.parts, tile.stream, cut.channels, tile.first, tile.width,
        shared + table_floats(5, tile.width), [&](int k, const GradientSums<float>& sums) {
          const Index at = tile.channel(k);
          const float inverse = fill_saved(tile, table, a.channels, k);
          const auto own = finish_gradient<T>(a.channels, at, sums, inverse, tile.slab == 0);
          set(k, a.channels.group == nullptr ? own : group_corrections<T>(a.channels, at, inverse));
        });
  } else {
    for (int k = threadIdx.x; k < tile.width; k += kThreads) {
      const Index at = tile.channel(k);
      const float inverse = fill_saved(tile, table, a.channels, k);
      if (a.corrections != nullptr) {
        set(k, a.corrections[at]);
      } else if (a.channels.group != nullptr) {
        set(k, group_corrections<T>(a.channels, at, inverse));
      }
    }
    __syncthreads();
  }

  for (int step = 0; step < tile.steps; step += kBatch) {
    if (step > 0) load(step);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (step + j >= tile.steps) break;
      const unsigned unit = tile.template unit<true>(step + j);
      const Index at = tile.offset(unit);
      float d[kVector], centred[kVector];
      batch[j].gradient(a, table, tile.lane, d, centred);
      const bool blank = tile.is_blank(unit);
      const auto store = [&](void* to) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) d[k] = blank ? 0.0f : d[k];
        Packed<T> out;
        out.pack(d);
        out.store(static_cast<T*>(to) + at, a.streaming);
      };
      if (a.dresidual != nullptr) store(a.dresidual);
      if (a.dx == nullptr) continue;
      float row[kVector];
      if (a.channels.training) {
        table.get(kOffset, tile.lane, row);
#pragma unroll
        for (int k = 0; k < kVector; ++k) d[k] -= row[k];
        table.get(kSlope, tile.lane, row);
#pragma unroll
        for (int k = 0; k < kVector; ++k) d[k] = fmaf(-centred[k], row[k], d[k]);
      }
      table.get(kScale, tile.lane, row);
#pragma unroll
      for (int k = 0; k < kVector; ++k) d[k] *= row[k];
      store(a.dx);
    }
  }
}

// ---- Host.

std::int64_t dimension(const TensorView& t, int from_end) { return t.sizes[t.rank - from_end]; }

/// Dense in the order S, N, H, W, C or S, N, C, H, W.
bool is_dense(const TensorView& t, bool channels_last) {
  const int r = t.rank;
  const int last[] = {r - 3, r - 1, r - 2, r - 4, r - 5};
  const int planar[] = {r - 1, r - 2, r - 3, r - 4, r - 5};
  std::int64_t stride = 1;
  for (const int d : channels_last ? last : planar) {
    if (d < 0) continue;
    if (t.sizes[d] != 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

std::string declines(std::initializer_list<const TensorView*> images, bool with_bits) {
  const TensorView& x = **images.begin();
  if (x.dtype == DType::f64) return "it has no float64 kernels";
  if (x.numel() == 0) return "the batch is empty";
  const bool channels_last = has_adjacent_channels(x);
  for (const TensorView* image : images) {
    if (!image->defined()) continue;
    if (!is_dense(*image, channels_last)) {
      return "it takes dense NCHW or channels-last images, all in one layout";
    }
    if (reinterpret_cast<std::uintptr_t>(image->data) % 16 != 0) {
      return "an image does not start on a 16-byte boundary";
    }
  }
  const std::int64_t channels = dimension(x, 3), pixels = dimension(x, 2) * dimension(x, 1);
  const std::int64_t inner = channels_last ? channels : pixels;
  if (inner * size_of(x.dtype) % 16 != 0) {
    return channels_last ? "the channels of a pixel are not a multiple of 16 bytes"
                         : "the pixels of a channel are not a multiple of 16 bytes";
  }
  if (with_bits && inner % 8 != 0) return "the bits of relu do not fill bytes";
  const std::int64_t most = std::int64_t{1} << 30;
  if (channels >= most || dimension(x, 4) * pixels >= most || (x.rank == 5 && x.sizes[0] >= most)) {
    return "a dimension is too large for its 32-bit indices";
  }
  return {};
}

/// Lanes side by side: 128 bytes or more of a pixel, an even number that divides the row, so that
/// blocks do not share 32-byte sectors and have equal work.
int choose_lanes(int vectors) {
  for (int lanes = 8; lanes <= 24; lanes += 2) {
    if (vectors % lanes == 0) return lanes;
  }
  if (vectors <= kMostLanes) return vectors;
  const int tiles = static_cast<int>(divide_up(vectors, 16));
  return static_cast<int>(divide_up(vectors, 2 * tiles)) * 2;
}

Cut cut_of(const Context& context, const TensorView& x, const TensorView& blanked) {
  const int vector = static_cast<int>(16 / size_of(x.dtype));
  const std::int64_t streams = x.rank == 5 ? x.sizes[0] : 1, samples = dimension(x, 4);
  const std::int64_t channels = dimension(x, 3), pixels = dimension(x, 2) * dimension(x, 1);
  const bool channels_last = has_adjacent_channels(x);
  const int vectors = static_cast<int>(channels / vector);
  const int lanes = channels_last ? choose_lanes(vectors) : 1;
  const std::int64_t tiles = channels_last ? divide_up(vectors, lanes) : channels;
  const std::int64_t sample_units = channels_last ? pixels : pixels / vector;
  const std::int64_t units = samples * sample_units;
  // As many blocks as fit at once, but not more than have a vector for each thread.
  const std::int64_t resident = kBlocks * limits_of(context.device).multiprocessors;
  const std::int64_t most = divide_up(units, kThreads / lanes);
  const std::int64_t slabs =
      std::clamp<std::int64_t>(resident / (streams * tiles), 1, std::max<std::int64_t>(most, 1));
  // Even: two vectors of four values share a byte of bits, and it must not be two blocks' byte.
  const std::int64_t per_slab = divide_up(units, 2 * slabs) * 2;
  return {.channels = static_cast<int>(channels),
          .lanes = lanes,
          .tiles = static_cast<int>(tiles),
          .slabs = static_cast<int>(divide_up(units, per_slab)),
          .units = static_cast<unsigned>(units),
          .per_slab = static_cast<unsigned>(per_slab),
          .sample_units = Divisor(sample_units, false),
          .samples = static_cast<int>(samples),
          .blanked = static_cast<const bool*>(blanked.data)};
}

/// The plan of a call and its launches.
struct Passes {
  const Context& context;
  Cut cut;
  std::int64_t streams;
  int width, vector;  // channels per block, values per 16 bytes
  bool channels_last, streaming;

  Passes(const Context& context, const TensorView& x, const TensorView& blanked)
      : context(context),
        cut(cut_of(context, x, blanked)),
        streams(x.rank == 5 ? x.sizes[0] : 1),
        vector(static_cast<int>(16 / size_of(x.dtype))),
        channels_last(has_adjacent_channels(x)),
        streaming(2 * x.numel() * size_of(x.dtype) > limits_of(context.device).l2_cache) {
    width = channels_last ? cut.lanes * vector : 1;
  }

  bool combines() const { return Index{cut.slabs} * width <= kMostOwnParts; }
  Launch first(int rows) const {
    return {context, cut.blocks(streams), kThreads,
            sizeof(float) * (table_floats(rows, width) + sum_floats(width, vector))};
  }
  /// `follows`: it comes after a kernel of this call. Otherwise it must not load before the kernel
  /// that writes its input is done.
  template <typename Result>
  Launch second(int rows, bool follows) const {
    return {.context = context,
            .blocks = cut.blocks(streams),
            .threads = kThreads,
            .shared_bytes =
                sizeof(float) * table_floats(rows, width) + combine_bytes<Result>(kThreads, width),
            .overlaps_previous = follows};
  }
};

/// Calls body(T, planar, residual) with a value of x's type and two std::bool_constant.
template <typename Body>
void dispatch(const TensorView& x, bool with_residual, Body&& body) {
  dispatch_short_dtype(x.dtype, [&]<typename T>(T) {
    const auto choose = [&](auto planar) {
      if (with_residual) return body(T{}, planar, std::true_type{});
      return body(T{}, planar, std::false_type{});
    };
    if (has_adjacent_channels(x)) return choose(std::false_type{});
    return choose(std::true_type{});
  });
}

}  // namespace

std::string two_pass_declines(const Context&, const BatchNormActForward& call) {
  return declines({&call.x, &call.y, &call.residual}, call.passes.defined());
}

std::string two_pass_declines(const Context&, const BatchNormActBackward& call) {
  return declines({&call.x, &call.dy, &call.residual, &call.dx, &call.dresidual},
                  call.passes.defined());
}

void two_pass_run(const Context& context, const BatchNormActForward& call) {
  const ForwardChannels f = channels_of(call);
  const Passes p(context, call.x, call.blanked);
  const bool own = f.own(), between = f.group != nullptr || (own && !p.combines());
  const PartMemory<float> memory(context, f.streams, own ? p.cut.slabs : 0, f.channels);
  const Scratch<Coefficients<float>> coefficients(context, between ? f.streams * f.channels : 0);
  NormalizeArguments a{.x = call.x.data,
                       .residual = call.residual.data,
                       .y = call.y.data,
                       .passes = static_cast<unsigned char*>(call.passes.data),
                       .channels = f,
                       .parts = memory.moments(),
                       .coefficients = coefficients.data(),
                       .activation = call.activation,
                       .streaming = p.streaming};
  dispatch(call.x, call.residual.defined(), [&]<typename T>(T, auto planar, auto residual) {
    if (own) {
      launch_kernel(p.first(1), "computing moments", moments_kernel<T, planar()>, p.cut,
                    static_cast<const T*>(call.x.data), a.parts, f.training ? f.tracked : nullptr);
    }
    if (between) {
      launch_finish<T>(context, f, a.parts, coefficients.data());
      a.parts.slabs = 0;
    }
    launch_kernel(p.second<Moments>(3, own || between), "normalizing",
                  normalize_kernel<T, planar(), residual()>, p.cut, a);
  });
}

void two_pass_run(const Context& context, const BatchNormActBackward& call) {
  const BackwardChannels b = channels_of(call);
  const BackwardNeeds needs = needs_of(call);
  const Passes p(context, call.x, call.blanked);
  const bool between = needs.sums && !(needs.images && p.combines());
  const std::int64_t all = between ? b.streams * b.channels : 0;
  const PartMemory<float> memory(context, b.streams, needs.sums ? p.cut.slabs : 0, b.channels);
  const Scratch<Coefficients<float>> coefficients(context, all);
  const Scratch<Corrections<float>> corrections(context, all);
  GradientArguments a{.dy = call.dy.data,
                      .x = call.x.data,
                      .residual = call.residual.data,
                      .passes = static_cast<const unsigned char*>(call.passes.data),
                      .dx = call.dx.data,
                      .dresidual = call.dresidual.data,
                      .channels = b,
                      .parts = memory.gradients(),
                      .corrections = corrections.data(),
                      .activation = call.activation,
                      .streaming = p.streaming};
  // Bits stand for the residual.
  const bool reads_residual = call.residual.defined() && !call.passes.defined();
  dispatch(call.x, reads_residual, [&]<typename T>(T, auto planar, auto residual) {
    if (needs.sums) {
      launch_kernel(p.first(3), "summing gradients", gradient_sums_kernel<T, planar(), residual()>,
                    p.cut, a, a.parts);
    }
    if (between) {
      launch_finish<T>(context, b, a.parts, coefficients.data(), corrections.data());
      a.parts.slabs = 0;
    }
    if (!needs.images) return;
    launch_kernel(p.second<GradientSums<float>>(5, needs.sums), "computing gradients",
                  gradients_kernel<T, planar(), residual()>, p.cut, a);
  });
}

}  // namespace fusewise::cuda

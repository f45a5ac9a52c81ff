#pragma once

// How the kernels with 16-byte accesses share dense images: the vectors of a block and of a thread,
// per-channel values in shared memory, and sums over a block.

#include <algorithm>
#include <cstdint>

#include "common/divide.h"
#include "cuda/batch_norm/channels.cuh"
#include "cuda/batch_norm/divisor.cuh"
#include "cuda/reduce.cuh"

namespace fusewise::cuda {

/// How images are cut into blocks. A unit is a vector of each of `lanes` groups of channels: a
/// pixel's in channels-last images, a vector of pixels of one channel in NCHW images. A block has a
/// slab of units of one stream. Where the channels of a channels-last pixel do not fill vectors,
/// `folded` neighbouring pixels count as one with so many times the channels.
struct Cut {
  int channels;  // of a unit
  int folded;
  ShortDivisor image_channels;
  ShortDivisor lanes, tiles, slabs;
  ShortDivisor strands;       // units that a block's threads have side by side
  unsigned units, per_slab;   // of a stream
  double share;               // 1 / the values per channel of a stream
  ShortDivisor sample_units;  // of a sample, rounded down; exact where some are blanked
  int samples;
  const bool* blanked;  // [S, N], may be null

  Index blocks(Index streams) const { return streams * tiles.value() * slabs.value(); }
};

/// For blocks of `threads`. `lanes` and `folded` are 1 for NCHW images.
inline Cut make_cut(const TensorView& x, const TensorView& blanked, int threads, int lanes,
                    std::int64_t slabs, std::int64_t folded) {
  const std::int64_t vector = 16 / size_of(x.dtype), channels = dimension(x, 3) * folded;
  const std::int64_t pixels = dimension(x, 2) * dimension(x, 1), samples = dimension(x, 4);
  const bool channels_last = has_adjacent_channels(x);
  const std::int64_t unit_pixels = channels_last ? folded : vector;
  const std::int64_t units = samples * pixels / unit_pixels;
  // Even: two vectors of four values share a byte of bits, and it must not be two blocks' byte.
  const std::int64_t per_slab = divide_up(units, 2 * slabs) * 2;
  return {.channels = static_cast<int>(channels),
          .folded = static_cast<int>(folded),
          .image_channels = ShortDivisor(dimension(x, 3)),
          .lanes = ShortDivisor(lanes),
          .tiles = ShortDivisor(channels_last ? divide_up(channels / vector, lanes) : channels),
          .slabs = ShortDivisor(divide_up(units, per_slab)),
          .strands = ShortDivisor(threads / lanes),
          .units = static_cast<unsigned>(units),
          .per_slab = static_cast<unsigned>(per_slab),
          .share = 1.0 / static_cast<double>(samples * pixels),
          .sample_units = ShortDivisor(std::max<std::int64_t>(pixels / unit_pixels, 1)),
          .samples = static_cast<int>(samples),
          .blanked = static_cast<const bool*>(blanked.data)};
}

template <typename T, bool kPlanar>
struct Tile {
  static constexpr int kVector = Vector<T>::kSize;

  const Cut& cut;
  int stream, slab, first, width;  // width: channels of this block
  int lanes, strands, strand, lane;
  bool has_vectors;  // whether this thread is one of the lanes and strands
  unsigned begin, end;
  int steps;  // units of this thread

  __device__ Tile(const Cut& cut, unsigned block) : cut(cut) {
    const int tile = static_cast<int>(cut.tiles.split(block));
    slab = static_cast<int>(cut.slabs.split(block));
    stream = static_cast<int>(block);
    first = kPlanar ? tile : tile * cut.lanes.value() * kVector;
    width = kPlanar ? 1 : min(cut.lanes.value() * kVector, cut.channels - first);
    lanes = kPlanar ? 1 : width / kVector;
    strands = cut.strands.value();
    unsigned thread = threadIdx.x;
    lane = static_cast<int>(cut.lanes.split(thread));
    strand = static_cast<int>(thread);
    has_vectors = strand < strands && lane < lanes;
    begin = slab * cut.per_slab;
    end = min(begin + cut.per_slab, cut.units);
    const int left = static_cast<int>(end - begin) - strand;
    steps = has_vectors && left > 0
                ? static_cast<int>(cut.strands.quotient(static_cast<unsigned>(left + strands - 1)))
                : 0;
  }
  template <bool kReverse>
  __device__ __forceinline__ unsigned unit(int step) const {
    return begin + strand + (kReverse ? steps - 1 - step : step) * strands;
  }
  /// From a thread's vector to that of its next step, in channels-last images.
  __device__ __forceinline__ int stride() const { return strands * cut.channels; }
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
  /// The first unit from `unit` on that is not blanked, or `end`.
  __device__ unsigned next_present(unsigned unit, unsigned end) const {
    while (unit < end && is_blank(unit)) {
      const Index next = (cut.sample_units.quotient(unit) + Index{1}) * cut.sample_units.value();
      unit = static_cast<unsigned>(min(next, static_cast<Index>(end)));
    }
    return unit;
  }
  /// Values per channel of these units of the stream that are not blanked. For a whole warp.
  __device__ double count(unsigned begin, unsigned end) const {
    Index present = 0;
    if (cut.blanked == nullptr) {
      present = end - begin;
    } else if (begin < end) {
      const int last = static_cast<int>(cut.sample_units.quotient(end - 1));
      for (int n = static_cast<int>(cut.sample_units.quotient(begin)) + threadIdx.x % 32; n <= last;
           n += 32) {
        const Index from = Index{n} * cut.sample_units.value(),
                    to = from + cut.sample_units.value();
        if (!cut.blanked[static_cast<Index>(stream) * cut.samples + n]) {
          present += min(to, static_cast<Index>(end)) - max(from, static_cast<Index>(begin));
        }
      }
      present = warp_sum(present);
    }
    return static_cast<double>(present * pixels());
  }
  /// 1 / count of the whole stream, or 0. A division is long, and rarely needed.
  __device__ __forceinline__ double share(double count) const {
    if (cut.blanked == nullptr) return cut.share;
    return count > 0 ? 1 / count : 0.0;
  }
  /// Advances the counter of this block's stream, if it is the first block of it.
  __device__ __forceinline__ void count_call(const Counter& counter) const {
    if (first > 0 || slab > 0 || threadIdx.x >= 32) return;
    const Index sample_pixels = cut.units * pixels() / cut.samples;
    cuda::count_call(counter, stream, cut.blanked, cut.samples, sample_pixels);
  }
  /// Pixels of a unit.
  __device__ __forceinline__ Index pixels() const { return kPlanar ? kVector : cut.folded; }
  /// The image's channel of this block's channel k.
  __device__ __forceinline__ int image_channel(int k) const {
    unsigned channel = first + k;
    return kPlanar ? first : static_cast<int>(cut.image_channels.split(channel));
  }
  /// The same, among the channels of all streams.
  __device__ __forceinline__ Index channel(int k) const {
    return static_cast<Index>(stream) * cut.image_channels.value() + image_channel(k);
  }
  /// Whether this block writes the results of channel k.
  __device__ __forceinline__ bool writes(int k) const {
    return slab == 0 && first + k < cut.image_channels.value();
  }
  /// Where this slab's part of channel k is.
  __device__ __forceinline__ Index part(int k) const {
    return (static_cast<Index>(stream) * cut.slabs.value() + slab) * cut.channels + first + k;
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
                     : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from)))
                     : "memory");
      }
    }
  }
};

/// The first rows of a table in registers, for kernels that have enough of them.
template <typename T, int kRows>
struct Held {
  static constexpr int kVector = Vector<T>::kSize;
  float rows[kRows][kVector];

  __device__ __forceinline__ Held(const Table<T, false>& table, int lane) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) table.get(row, lane, rows[row]);
  }
  __device__ __forceinline__ void get(int row, int, float (&values)[kVector]) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) values[k] = rows[row][k];
  }
};

enum Row { kMean, kScale, kShift, kOffset, kSlope };

/// Floats of shared memory for `rows` values of each channel of a block.
__host__ __device__ constexpr int table_floats(int rows, int width) {
  return (rows * width + 3) / 4 * 4;
}

/// Adds two values of each channel over the block, in float64, and calls finish(k, sum) for
/// k < width, and with k + width for the second ones. `shared`: sum_floats. Ends with a barrier.
template <typename T, bool kPlanar, typename Finish>
__device__ __forceinline__ void sum_over_block(const Tile<T, kPlanar>& tile,
                                               float (&first)[Vector<T>::kSize],
                                               float (&second)[Vector<T>::kSize], float* shared,
                                               Finish finish) {
  constexpr int kVector = Vector<T>::kSize;
  const int width = 2 * tile.width;
  int rows = tile.strands;
  if constexpr (kPlanar) {
    rows = static_cast<int>(blockDim.x) / 32;
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
  } else if (tile.has_vectors) {
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
  block_sum_rows(shared, rows, width, reinterpret_cast<double*>(shared + rows * width), finish);
}
/// For the widest tile: all rows of all threads, and the scratch of block_sum_rows.
__host__ __device__ constexpr int sum_floats(int threads, int width, int vector) {
  return 2 * threads * vector + 2 * (threads > 2 * width ? threads : 2 * width);
}

}  // namespace fusewise::cuda

#pragma once

// Passes over the pixels of images in any layout, for operators with values for each sample and
// channel: sums over the pixels, and maps from images to an image. What is summed or written is an
// `Op`, a struct of kernel arguments with these members:
//
//   kImages     how many images it reads, one or two
//   kValues     how many values it needs of each sample and channel
//   kResident   how many blocks of it an SM runs at once, for channels-last images
//   values(sample, channel, to)      loads the values
//
//   Sums:  kSums                     how many sums it makes of each sample and channel
//          add(values, a, b, sums)   adds the terms of some elements to sums[j][k % kWidth]
//   Maps:  map(values, a, b, out)    the results of some elements
//
// values(i, k) is the i-th value of the channel of the k-th element.
//
// Images are older than the previous kernel of the stream, so the channels-last passes load their
// first pixels before that kernel is done. Everything else may come from it.

#include <algorithm>
#include <type_traits>

#include "cuda/image_passes.h"
#include "cuda/launch.cuh"
#include "cuda/packed.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda::passes {

template <typename T>
struct Image {
  T* data = nullptr;
  Index n = 0, c = 0, h = 0, w = 0;  ///< strides; if H and W collapse, w is between pixels

  Image() = default;
  Image(const TensorView& t, ImageLayout layout)
      : data(static_cast<T*>(t.data)),
        n(t.strides[0]),
        c(t.strides[1]),
        h(t.strides[2]),
        w(layout == ImageLayout::strided ? t.strides[3] : pixel_stride(t)) {}

  __device__ T* at(Index sample, Index channel) const { return data + sample * n + channel * c; }
  __device__ T* at(Index sample, Index channel, Index pixel, Index width) const {
    return at(sample, channel) + pixel / width * h + pixel % width * w;
  }
};

/// The arguments that all kernels share.
template <typename T>
struct Arguments {
  Image<const T> a, b;
  Shape shape;
  int columns, tiles, lanes;  ///< as in Plan
  /// From the last block and pixel to the first: then a pass begins with what the previous one read
  /// last, which is still in L2.
  bool reversed;
  bool streaming;  ///< the result is larger than L2

  __device__ __forceinline__ unsigned block() const {
    return reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  }
};

/// A single element, with the members of Packed.
template <typename T>
struct Single {
  static constexpr int kSize = 1;
  T value;
  __device__ __forceinline__ void load(const T* from) { value = *from; }
  __device__ __forceinline__ void load_shared(const T* from) { value = *from; }
  __device__ __forceinline__ void store_shared(T* to) const { *to = value; }
  __device__ __forceinline__ void store(T* to, bool) const { *to = value; }
  __device__ __forceinline__ void unpack(Accumulator<T> (&to)[1]) const {
    to[0] = to_accumulator<Accumulator<T>>(value);
  }
  __device__ __forceinline__ void pack(const Accumulator<T> (&from)[1]) {
    value = from_accumulator<T>(from[0]);
  }
};
template <typename T, int kCount>
using Elements = std::conditional_t<kCount == 1, Single<T>, Packed<T>>;

/// Of kCount neighbouring channels, or of one.
template <typename A, int kValues, int kCount>
struct Values {
  A value[kValues > 0 ? kValues : 1][kCount];
  __device__ __forceinline__ A operator()(int i, int k) const {
    return value[i][kCount == 1 ? 0 : k];
  }
};

template <typename Op, typename T, int kCount, typename Channels, typename Sums>
__device__ __forceinline__ void add_elements(const Op& op, const Channels& values,
                                             const Elements<T, kCount>& a,
                                             const Elements<T, kCount>& b, Sums& sums) {
  Accumulator<T> x[kCount], y[kCount];
  a.unpack(x);
  if constexpr (Op::kImages == 2) b.unpack(y);
  op.add(values, x, y, sums);
}

template <typename Op, typename T, int kCount, typename Channels>
__device__ __forceinline__ void map_elements(const Op& op, const Channels& values,
                                             const Elements<T, kCount>& a,
                                             const Elements<T, kCount>& b, T* to, bool streaming) {
  Accumulator<T> x[kCount], y[kCount], result[kCount];
  a.unpack(x);
  if constexpr (Op::kImages == 2) b.unpack(y);
  op.map(values, x, y, result);
  Elements<T, kCount> out;
  out.pack(result);
  out.store(to, streaming);
}

// ---- Channels-last images.

/// A block's part: a chunk of the pixels of a sample, for some vectors of channels. A thread has
/// one vector of every few pixels.
template <int kVector>
struct PixelTile {
  Index sample, chunk, first;
  int width, lanes, strands, strand, lane;
  Index begin;  ///< the thread's first pixel
  int count;    ///< of the thread's pixels

  template <typename T>
  __device__ PixelTile(const Arguments<T>& a, unsigned block) {
    const Shape& s = a.shape;
    const unsigned task = block / a.tiles;
    chunk = task % static_cast<unsigned>(s.chunks);
    sample = task / static_cast<unsigned>(s.chunks);
    first = static_cast<Index>(block - task * a.tiles) * a.columns * kVector;
    width = static_cast<int>(min(static_cast<Index>(a.columns) * kVector, s.c - first));
    lanes = width / kVector;
    strands = kThreads / lanes;
    strand = threadIdx.x / lanes;
    lane = threadIdx.x - strand * lanes;
    begin = chunk * s.chunk + strand;
    const Index end = min((chunk + 1) * s.chunk, s.hw);
    count = strand < strands && begin < end
                ? static_cast<int>((end - begin + strands - 1) / strands)
                : 0;
  }
};

/// The pixels of a thread. The next ones are on their way while some are used.
template <int kVector, typename T, typename Op>
struct Pixels {
  static constexpr bool kTwo = Op::kImages == 2;
  static constexpr int kLoads = kTwo ? 2 : 4;
  using Own = Elements<T, kVector>;

  const T *from_a, *from_b;
  Index first, step, step_a, step_b;
  int left;
  Own a[kLoads], b[kTwo ? kLoads : 1];

  __device__ __forceinline__ Pixels(const PixelTile<kVector>& tile, const Arguments<T>& arguments) {
    left = tile.count;
    step = arguments.reversed ? -tile.strands : tile.strands;
    first = tile.begin;
    if (arguments.reversed) first += static_cast<Index>(max(left - 1, 0)) * tile.strands;
    const Index channel = tile.lane * kVector;
    from_a = arguments.a.at(tile.sample, tile.first) + channel + first * arguments.a.w;
    step_a = step * arguments.a.w;
    if constexpr (kTwo) {
      from_b = arguments.b.at(tile.sample, tile.first) + channel + first * arguments.b.w;
      step_b = step * arguments.b.w;
    }
    load(a, b, left);
  }
  __device__ __forceinline__ void load(Own (&to_a)[kLoads], Own (&to_b)[kTwo ? kLoads : 1],
                                       int count) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (j < count) {
        to_a[j].load(from_a);
        if constexpr (kTwo) to_b[j].load(from_b);
      }
      from_a += step_a;
      if constexpr (kTwo) from_b += step_b;
    }
  }
  /// Calls body(i, a, b) for the i-th pixel of this thread.
  template <typename Body>
  __device__ __forceinline__ void each(Body body) {
#pragma unroll 1
    for (int i = 0; left > 0; left -= kLoads, i += kLoads) {
      Own next_a[kLoads], next_b[kTwo ? kLoads : 1];
      load(next_a, next_b, left - kLoads);
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (j < left) body(i + j, a[j], b[kTwo ? j : 0]);
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        a[j] = next_a[j];
        if constexpr (kTwo) b[j] = next_b[j];
      }
    }
  }
};

/// The place of the tile's k-th channel in a row of shared memory. Vectors of 32 bytes would cause
/// bank conflicts: threads access 16 bytes at a time, at a stride of 32. So the two halves of a
/// vector are exchanged in every second group of four vectors.
template <typename A, int kVector>
__device__ __forceinline__ int swizzled(int k) {
  return sizeof(A) * kVector == 32 ? k ^ (k >> 3 & 4) : k;
}

/// Loads the values of the block's channels into shared memory, a row of each. Called by the whole
/// block; ends with a barrier if there are values.
template <typename A, int kVector, typename Op>
__device__ __forceinline__ void fill_table(const PixelTile<kVector>& tile, const Op& op, A* table) {
  if constexpr (Op::kValues > 0) {
    for (int k = threadIdx.x; k < tile.width; k += kThreads) {
      A own[Op::kValues];
      op.values(tile.sample, tile.first + k, own);
#pragma unroll
      for (int i = 0; i < Op::kValues; ++i) {
        table[i * tile.width + swizzled<A, kVector>(k)] = own[i];
      }
    }
    __syncthreads();
  }
}

/// Stores the values of a lane's channels in a row.
template <typename A, int kVector>
__device__ __forceinline__ void store_row(A* row, int lane, const A (&values)[kVector]) {
  constexpr int kPart = kVector == 1 ? 1 : 16 / sizeof(A);
#pragma unroll
  for (int k = 0; k < kVector; k += kPart) {
    Elements<A, kPart> part;
    A own[kPart];
#pragma unroll
    for (int j = 0; j < kPart; ++j) own[j] = values[k + j];
    part.pack(own);
    part.store_shared(row + swizzled<A, kVector>(lane * kVector + k));
  }
}

/// The values of the channels of a lane.
template <typename A, int kVector, typename Op>
__device__ __forceinline__ Values<A, Op::kValues, kVector> read_table(
    const PixelTile<kVector>& tile, int lane, const A* table) {
  constexpr int kPart = kVector == 1 ? 1 : 16 / sizeof(A);
  Values<A, Op::kValues, kVector> values{};
#pragma unroll
  for (int i = 0; i < Op::kValues; ++i) {
#pragma unroll
    for (int k = 0; k < kVector; k += kPart) {
      Elements<A, kPart> part;
      A unpacked[kPart];
      part.load_shared(table + i * tile.width + swizzled<A, kVector>(lane * kVector + k));
      part.unpack(unpacked);
#pragma unroll
      for (int j = 0; j < kPart; ++j) values.value[i][k + j] = unpacked[j];
    }
  }
  return values;
}

/// Sizes of the values' table and, later in the same shared memory, of the rows of sums.
template <typename Op>
constexpr int table_values(int columns, int vector) {
  return Op::kValues * columns * vector;
}
template <typename Op>
constexpr int row_values(int vector) {
  return Op::kSums * kThreads * vector;
}

/// Values and sums of its channels that a thread can keep in registers, beside the pixels that are
/// on their way. If they are more, it reads the values from shared memory for each pixel. That
/// costs less than spilled registers or fewer loads in flight.
constexpr int kMostKept = 48;

/// Hides from the compiler where a value of 32 bits comes from. What follows from it is then read
/// or computed again, not kept in registers.
template <typename Value>
__device__ __forceinline__ Value opaque(Value value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// sums[sample][chunk][j][c]
template <typename T, int kVector, typename Op>
__global__ void __launch_bounds__(kThreads, Op::kResident)
    sum_pixels(const __grid_constant__ Arguments<T> a, const __grid_constant__ Op op,
               Accumulator<T>* sums) {
  using A = Accumulator<T>;
  constexpr bool kKept = (Op::kValues + Op::kSums) * kVector <= kMostKept;
  extern __shared__ __align__(16) unsigned char shared[];
  A *const table = reinterpret_cast<A*>(shared), *const rows = table;
  const Shape& s = a.shape;
  const PixelTile<kVector> tile(a, a.block());
  Pixels<kVector, T, Op> pixels(tile, a);
  wait_for_previous_kernel();
  allow_next_kernel();
  fill_table<A>(tile, op, table);
  auto values = read_table<A, kVector, Op>(tile, tile.lane, table);
  A total[Op::kSums][kVector] = {};
  pixels.each([&](int, const auto& x, const auto& y) {
    if constexpr (!kKept) values = read_table<A, kVector, Op>(tile, opaque(tile.lane), table);
    add_elements<Op, T, kVector>(op, values, x, y, total);
  });
  if constexpr (Op::kValues > 0) __syncthreads();  // the rows take the place of the table
  // The tile is computed again: kept, it would take registers in the loop.
  const PixelTile<kVector> own(a, opaque(a.block()));
  if (own.strand < own.strands) {
#pragma unroll
    for (int j = 0; j < Op::kSums; ++j) {
      store_row(rows + (own.strand * Op::kSums + j) * own.width, own.lane, total[j]);
    }
  }
  __syncthreads();
  // All sums are rows at once, which takes fewer barriers than one after the other.
  A* const to = sums + (own.sample * s.chunks + own.chunk) * Op::kSums * s.c + own.first;
  block_sum_rows(rows, own.strands, Op::kSums * own.width, rows, [&](int k, A sum) {
    const int j = k / own.width;
    to[j * s.c + swizzled<A, kVector>(k - j * own.width)] = sum;
  });
}

template <typename T, int kVector, typename Op>
__global__ void __launch_bounds__(kThreads, Op::kResident)
    map_pixels(const __grid_constant__ Arguments<T> a, const Image<T> out,
               const __grid_constant__ Op op) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const PixelTile<kVector> tile(a, a.block());
  Pixels<kVector, T, Op> pixels(tile, a);
  wait_for_previous_kernel();
  allow_next_kernel();
  A* const table = reinterpret_cast<A*>(shared);
  fill_table(tile, op, table);
  const auto values = read_table<A, kVector, Op>(tile, tile.lane, table);
  T* const to = out.at(tile.sample, tile.first) + tile.lane * kVector + pixels.first * out.w;
  const Index step = pixels.step * out.w;
  pixels.each([&](int i, const auto& x, const auto& y) {
    map_elements<Op, T, kVector>(op, values, x, y, to + i * step, a.streaming);
  });
}

// ---- Images in which the pixels of a channel are contiguous (kLayout planar), or of any strides.

/// A group of `lanes` threads has a chunk of the pixels of a channel.
struct PlaneTask {
  Index sample, channel, chunk, begin, count;
  int lane, lanes;

  template <typename T>
  __device__ explicit PlaneTask(const Arguments<T>& a) {
    const Shape& s = a.shape;
    const Index threads = static_cast<Index>(a.block()) * kThreads + threadIdx.x;
    lanes = a.lanes;
    lane = static_cast<int>(threads & (lanes - 1));  // a power of two
    const Index index = threads >> (__ffs(lanes) - 1);
    if (index <= 0xffffffff && s.c <= 0xffffffff) {  // short divisions
      const auto small = static_cast<unsigned>(index), c = static_cast<unsigned>(s.c);
      const auto chunks = static_cast<unsigned>(s.chunks);
      channel = small % c;
      chunk = small / c % chunks;
      sample = small / c / chunks;
    } else {
      channel = index % s.c;
      chunk = index / s.c % s.chunks;
      sample = index / s.c / s.chunks;
    }
    begin = chunk * s.chunk;
    count = sample < s.n ? min(s.chunk, s.hw - begin) : 0;
  }

  template <typename A, typename Op>
  __device__ __forceinline__ Values<A, Op::kValues, 1> values(const Op& op) const {
    Values<A, Op::kValues, 1> result{};
    if constexpr (Op::kValues > 0) {
      A own[Op::kValues];
      op.values(sample, channel, own);
#pragma unroll
      for (int i = 0; i < Op::kValues; ++i) result.value[i][0] = own[i];
    }
    return result;
  }
  /// Calls one(i) for single elements up to a 16-byte boundary and after the last one, and
  /// many(i, present) for two vectors at a time between them, the second of which may be absent.
  /// `misaligned`: number of elements from the previous boundary to the start, or -1 for no vectors
  /// at all.
  template <int kVector, typename One, typename Many>
  __device__ __forceinline__ void visit(int misaligned, One one, Many many) const {
    Index first = count, last = count;
    if (misaligned >= 0) {
      first = min(static_cast<Index>((kVector - misaligned) % kVector), count);
      last = first + (count - first) / kVector * kVector;
    }
    for (Index i = lane; i < first; i += lanes) one(i);
    const int step = lanes * kVector;
#pragma unroll 1
    for (Index i = first + lane * kVector; i < last; i += 2 * step) many(i, i + step, last);
    for (Index i = last + lane; i < count; i += lanes) one(i);
  }
};

/// Elements from the previous 16-byte boundary to the address.
template <typename T>
__device__ __forceinline__ int misalignment(const T* address) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(address) % 16 / sizeof(T));
}

/// Calls body(i, a, b) for this thread's elements of planar images: with two vectors loaded at a
/// time, or with single elements where the images are not aligned alike. `alike`: whether they are.
template <typename T, typename Op, typename Body>
__device__ __forceinline__ void each_in_plane(const PlaneTask& task, const T* a, const T* b,
                                              bool alike, const Op&, Body body) {
  constexpr int kVector = Packed<T>::kSize;
  constexpr bool kTwo = Op::kImages == 2;
  task.visit<kVector>(
      alike ? misalignment(a) : -1,
      [&](Index i) {
        Single<T> x, y;
        x.load(a + i);
        if constexpr (kTwo) y.load(b + i);
        body(i, x, y);
      },
      [&](Index i, Index second, Index last) {
        Packed<T> x[2], y[kTwo ? 2 : 1];
        x[0].load(a + i);
        if constexpr (kTwo) y[0].load(b + i);
        if (second < last) {
          x[1].load(a + second);
          if constexpr (kTwo) y[1].load(b + second);
        }
        body(i, x[0], y[0]);
        if (second < last) body(second, x[1], y[kTwo ? 1 : 0]);
      });
}

template <typename T, ImageLayout kLayout, typename Op>
__global__ void __launch_bounds__(kThreads)
    sum_planes(const __grid_constant__ Arguments<T> a, const __grid_constant__ Op op,
               Accumulator<T>* sums) {
  using A = Accumulator<T>;
  constexpr bool kTwo = Op::kImages == 2;
  const Shape& s = a.shape;
  const PlaneTask task(a);
  wait_for_previous_kernel();
  allow_next_kernel();
  A total[Op::kSums][2] = {};
  if (task.count > 0) {
    const auto values = task.values<A>(op);
    if constexpr (kLayout == ImageLayout::planar) {
      const T* const from_a = a.a.at(task.sample, task.channel) + task.begin;
      const T* const from_b = kTwo ? a.b.at(task.sample, task.channel) + task.begin : from_a;
      each_in_plane(task, from_a, from_b, misalignment(from_a) == misalignment(from_b), op,
                    [&](Index, const auto& x, const auto& y) {
                      constexpr int kCount = std::remove_cvref_t<decltype(x)>::kSize;
                      add_elements<Op, T, kCount>(op, values, x, y, total);
                    });
    } else {
      for (Index i = task.begin + task.lane; i < task.begin + task.count; i += task.lanes) {
        Single<T> x, y;
        x.load(a.a.at(task.sample, task.channel, i, s.width));
        if constexpr (kTwo) y.load(a.b.at(task.sample, task.channel, i, s.width));
        add_elements<Op, T, 1>(op, values, x, y, total);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < Op::kSums; ++j) {
    const A sum = warp_sum(total[j][0] + total[j][1], task.lanes);
    if (task.count > 0 && task.lane == 0) {
      sums[((task.sample * s.chunks + task.chunk) * Op::kSums + j) * s.c + task.channel] = sum;
    }
  }
}

template <typename T, ImageLayout kLayout, typename Op>
__global__ void __launch_bounds__(kThreads)
    map_planes(const __grid_constant__ Arguments<T> a, const Image<T> out,
               const __grid_constant__ Op op) {
  using A = Accumulator<T>;
  constexpr bool kTwo = Op::kImages == 2;
  const Shape& s = a.shape;
  const PlaneTask task(a);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (task.count == 0) return;
  const auto values = task.values<A>(op);
  if constexpr (kLayout == ImageLayout::planar) {
    const T* const from_a = a.a.at(task.sample, task.channel) + task.begin;
    const T* const from_b = kTwo ? a.b.at(task.sample, task.channel) + task.begin : from_a;
    T* const to = out.at(task.sample, task.channel) + task.begin;
    const int apart = misalignment(from_a);
    each_in_plane(task, from_a, from_b, apart == misalignment(from_b) && apart == misalignment(to),
                  op, [&](Index i, const auto& x, const auto& y) {
                    constexpr int kCount = std::remove_cvref_t<decltype(x)>::kSize;
                    map_elements<Op, T, kCount>(op, values, x, y, to + i, a.streaming);
                  });
  } else {
    for (Index i = task.begin + task.lane; i < task.begin + task.count; i += task.lanes) {
      Single<T> x, y;
      x.load(a.a.at(task.sample, task.channel, i, s.width));
      if constexpr (kTwo) y.load(a.b.at(task.sample, task.channel, i, s.width));
      map_elements<Op, T, 1>(op, values, x, y, out.at(task.sample, task.channel, i, s.width),
                             a.streaming);
    }
  }
}

// ---- Host.

/// Which images a pass reads, and how.
struct Pass {
  const Context& context;
  const Plan& plan;
  const TensorView &a, &b;  ///< b is not read where the Op has one image
  bool reversed = false;
  /// Whether a kernel of this call comes before. Otherwise the pass must not start early.
  bool follows = true;

  template <typename T>
  Arguments<T> arguments(bool streaming) const {
    return {.a = Image<const T>(a, plan.layout),
            .b = Image<const T>(b, plan.layout),
            .shape = plan.shape,
            .columns = plan.columns,
            .tiles = plan.tiles,
            .lanes = plan.lanes,
            .reversed = reversed,
            .streaming = streaming};
  }
  template <typename T>
  Launch launch(int shared_values = 0) const {
    return {.context = context,
            .blocks = plan.blocks(),
            .threads = kThreads,
            .shared_bytes = sizeof(Accumulator<T>) * shared_values,
            .overlaps_previous = follows};
  }
};

/// sums[n][chunk][Op::kSums][c].
template <typename T, typename Op>
void sum_images(const Pass& pass, const char* what, const Op& op, Accumulator<T>* sums) {
  const Plan& p = pass.plan;
  const Arguments<T> arguments = pass.arguments<T>(false);
  if (p.layout == ImageLayout::channels_last) {
    const auto run = [&](auto* kernel, int vector) {
      const int shared = std::max(table_values<Op>(p.columns, vector), row_values<Op>(vector));
      launch_kernel(pass.launch<T>(shared), what, kernel, arguments, op, sums);
    };
    constexpr int kVector = Packed<T>::kSize;
    return p.vectors ? run(sum_pixels<T, kVector, Op>, kVector) : run(sum_pixels<T, 1, Op>, 1);
  }
  launch_kernel(pass.launch<T>(), what,
                p.layout == ImageLayout::planar ? sum_planes<T, ImageLayout::planar, Op>
                                                : sum_planes<T, ImageLayout::strided, Op>,
                arguments, op, sums);
}

template <typename T, typename Op>
void map_images(const Pass& pass, const char* what, const Op& op, const TensorView& result) {
  const Plan& p = pass.plan;
  const bool streaming =
      2 * result.numel() * size_of(result.dtype) > limits_of(pass.context.device).l2_cache;
  const Arguments<T> arguments = pass.arguments<T>(streaming);
  const Image<T> out(result, p.layout);
  if (p.layout == ImageLayout::channels_last) {
    const auto run = [&](auto* kernel, int vector) {
      launch_kernel(pass.launch<T>(table_values<Op>(p.columns, vector)), what, kernel, arguments,
                    out, op);
    };
    constexpr int kVector = Packed<T>::kSize;
    return p.vectors ? run(map_pixels<T, kVector, Op>, kVector) : run(map_pixels<T, 1, Op>, 1);
  }
  launch_kernel(pass.launch<T>(), what,
                p.layout == ImageLayout::planar ? map_planes<T, ImageLayout::planar, Op>
                                                : map_planes<T, ImageLayout::strided, Op>,
                arguments, out, op);
}

}  // namespace fusewise::cuda::passes

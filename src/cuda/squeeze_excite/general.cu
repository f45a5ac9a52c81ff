// Squeeze-and-Excitation as a sequence of plain kernels: any GPU, any type, any strides, any size.
// Memory: forward reads x twice and writes y; backward reads dy twice, x once and writes dx. The
// second pass reads from L2 if the tensor fits there.
// Bound by memory bandwidth when large, by its four (backward: five) launches when small.

#include "cuda/squeeze_excite/general.cuh"

#include <algorithm>

#include "common/math.h"
#include "common/scratch.h"
#include "cuda/cuda_error.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/squeeze_excite/weight_gradients.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

using Index = long long;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// The memory layout of all images of a call.
enum class ImageLayout {
  planar,         ///< the pixels of a channel are contiguous
  channels_last,  ///< the channels of a pixel are contiguous
  strided,        ///< anything else, element by element
};

struct Shape {
  Index n, c, hw, r;
  Index width;   ///< of a row of pixels, to separate h and w
  Index chunks;  ///< number of chunks of a channel's pixels; each has its own sum
  Index chunk;   ///< pixels per chunk
};

template <typename T>
struct Image {
  T* data;
  Index n, c, h, w;  ///< strides; if H and W collapse, w is the stride between pixels

  __device__ T* at(Index sample, Index channel) const { return data + sample * n + channel * c; }
  __device__ T* at(Index sample, Index channel, Index pixel, Index width) const {
    return at(sample, channel) + pixel / width * h + pixel % width * w;
  }
};

template <typename T>
Image<T> image(const TensorView& t) {
  return {static_cast<T*>(t.data), t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
}

/// Visits [0, count) of arrays with equal alignment: single elements up to a 16-byte boundary, then
/// vectors. `misaligned`: number of elements from the previous boundary to the start, or -1 for no
/// vectors at all.
template <int kVector, typename One, typename Many>
__device__ void visit(Index count, int misaligned, int lane, int lanes, One one, Many many) {
  Index first = count, last = count;
  if (misaligned >= 0) {
    first = min(static_cast<Index>((kVector - misaligned) % kVector), count);
    last = first + (count - first) / kVector * kVector;
  }
  for (Index i = lane; i < first; i += lanes) one(i);
#pragma unroll 4
  for (Index i = first + static_cast<Index>(lane) * kVector; i < last; i += lanes * kVector)
    many(i);
  for (Index i = last + lane; i < count; i += lanes) one(i);
}

template <typename T>
__device__ int misalignment(const T* address) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(address) % 16 / sizeof(T));
}

/// sums[n][chunk][c] = sum over the chunk's pixels of a, or of a * b. `lanes` threads per sum.
template <typename T, ImageLayout kLayout, bool kProduct, typename A>
__global__ void __launch_bounds__(kThreads)
    sum_planes(Image<const T> a, Image<const T> b, Shape s, int lanes, A* sums) {
  const Index task = (static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x) / lanes;
  const int lane = threadIdx.x % lanes;
  const bool inside = task < s.n * s.chunks * s.c;
  A sum = 0;
  if (inside) {
    const Index channel = task % s.c, chunk = task / s.c % s.chunks, sample = task / s.c / s.chunks;
    const Index begin = chunk * s.chunk, count = min(s.chunk, s.hw - begin);
    if constexpr (kLayout == ImageLayout::planar) {
      const T* pa = a.at(sample, channel) + begin;
      const T* pb = kProduct ? b.at(sample, channel) + begin : pa;
      const int apart = misalignment(pa);
      visit<Vector<T>::kSize>(
          count, apart == misalignment(pb) ? apart : -1, lane, lanes,
          [&](Index i) {
            const A value = to_accumulator<A>(pa[i]);
            sum += kProduct ? value * to_accumulator<A>(pb[i]) : value;
          },
          [&](Index i) {
            const Vector<T> va = load_vector(pa + i);
            A part = 0;
            if constexpr (kProduct) {
              const Vector<T> vb = load_vector(pb + i);
#pragma unroll
              for (int k = 0; k < Vector<T>::kSize; ++k) part += va[k] * vb[k];
            } else {
#pragma unroll
              for (int k = 0; k < Vector<T>::kSize; ++k) part += va[k];
            }
            sum += part;
          });
    } else {
      for (Index i = begin + lane; i < begin + count; i += lanes) {
        const A value = to_accumulator<A>(*a.at(sample, channel, i, s.width));
        sum += kProduct ? value * to_accumulator<A>(*b.at(sample, channel, i, s.width)) : value;
      }
    }
  }
  sum = warp_sum(sum, lanes);
  if (inside && lane == 0) sums[task] = sum;
}

/// The same for channels-last images. A block has `columns` vectors of channels of one chunk.
template <typename T, int kVector, bool kProduct, typename A>
__global__ void __launch_bounds__(kThreads)
    sum_pixels(Image<const T> a, Image<const T> b, Shape s, int columns, int tiles, A* sums) {
  extern __shared__ __align__(16) unsigned char shared[];
  A* const rows = reinterpret_cast<A*>(shared);
  A* const scratch = rows + kThreads * kVector;
  const Index tile = blockIdx.x % tiles, task = blockIdx.x / tiles;
  const Index chunk = task % s.chunks, sample = task / s.chunks;
  const Index first = tile * columns * kVector;
  const int width = static_cast<int>(min(static_cast<Index>(columns) * kVector, s.c - first));
  const int lanes = width / kVector, strands = kThreads / lanes;
  const int strand = threadIdx.x / lanes, lane = threadIdx.x - strand * lanes;
  if (strand < strands) {
    const Index end = min((chunk + 1) * s.chunk, s.hw);
    A sum[kVector] = {};
#pragma unroll 4
    for (Index p = chunk * s.chunk + strand; p < end; p += strands) {
      const T* pa = a.at(sample, first) + p * a.w + lane * kVector;
      const T* pb = kProduct ? b.at(sample, first) + p * b.w + lane * kVector : pa;
      if constexpr (kVector == 1) {
        const A value = to_accumulator<A>(*pa);
        sum[0] += kProduct ? value * to_accumulator<A>(*pb) : value;
      } else {
        const Vector<T> va = load_vector(pa);
        if constexpr (kProduct) {
          const Vector<T> vb = load_vector(pb);
#pragma unroll
          for (int k = 0; k < kVector; ++k) sum[k] += va[k] * vb[k];
        } else {
#pragma unroll
          for (int k = 0; k < kVector; ++k) sum[k] += va[k];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) rows[strand * width + lane * kVector + k] = sum[k];
  }
  __syncthreads();
  block_sum_rows(rows, strands, width, scratch,
                 [&](int c, A sum) { sums[task * s.c + first + c] = sum; });
}

template <typename A>
__device__ A sum_chunks(const A* sums, const Shape& s, Index sample, Index channel) {
  A sum = 0;
#pragma unroll 4
  for (Index k = 0; k < s.chunks; ++k) sum += sums[(sample * s.chunks + k) * s.c + channel];
  return sum;
}

/// For each tile of channels: calls stage(c), which returns the channel's value, then use(first,
/// count) with the tile in `values`. Called by the whole block.
constexpr int kTile = 1024;
template <typename A, typename Stage, typename Use>
__device__ void by_tiles(Index channels, A* values, Stage stage, Use use) {
  for (Index first = 0; first < channels; first += kTile) {
    const int count = static_cast<int>(min(static_cast<Index>(kTile), channels - first));
    __syncthreads();
    for (int c = threadIdx.x; c < count; c += kThreads) values[c] = stage(first + c);
    __syncthreads();
    use(first, count);
  }
}

/// z = W1 p + b1. A block has a few hidden units of a sample, and a warp has kRows of them. Also
/// writes p if backward needs it.
constexpr int kRows = 2;
template <typename W, typename A>
__global__ void __launch_bounds__(kThreads)
    compute_hidden(const A* sums, const W* w1, const W* b1, Shape s, Activation activation,
                   A* pooled, A* hidden, A* activated) {
  __shared__ A values[kTile];
  const Index tiles = (s.r + kWarps * kRows - 1) / (kWarps * kRows);
  const Index sample = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const Index row = (tile * kWarps + threadIdx.x / 32) * kRows;
  const int lane = threadIdx.x % 32;
  A sum[kRows] = {};
  by_tiles(
      s.c, values,
      [&](Index c) {
        const A p = sum_chunks(sums, s, sample, c) / static_cast<A>(s.hw);
        if (pooled && tile == 0) pooled[sample * s.c + c] = p;
        return p;
      },
      [&](Index first, int count) {
#pragma unroll 4
        for (int c = lane; c < count; c += 32) {
#pragma unroll
          for (int k = 0; k < kRows; ++k) {
            if (row + k < s.r) {
              sum[k] += to_accumulator<A>(w1[(row + k) * s.c + first + c]) * values[c];
            }
          }
        }
      });
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    A z = warp_sum(sum[k]);
    if (lane != 0 || row + k >= s.r) continue;
    if (b1) z += to_accumulator<A>(b1[row + k]);
    if (hidden) hidden[sample * s.r + row + k] = z;
    activated[sample * s.r + row + k] = math::activate(activation, z);
  }
}

/// g = gate(W2 h + b2), with eight lanes per channel.
template <typename W, typename A>
__global__ void __launch_bounds__(kThreads)
    open_gates(const A* activated, const W* w2, const W* b2, Shape s, Gate gate, A* gates) {
  constexpr int kLanes = 8;
  const Index task = (static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const bool inside = task < s.n * s.c;
  const Index sample = task / s.c, c = task % s.c;
  A sum = 0;
  if (inside) {
    for (Index r = threadIdx.x % kLanes; r < s.r; r += kLanes) {
      sum += to_accumulator<A>(w2[c * s.r + r]) * activated[sample * s.r + r];
    }
  }
  sum = warp_sum(sum, kLanes);
  if (!inside || threadIdx.x % kLanes != 0) return;
  gates[task] = math::open_gate(gate, b2 ? sum + to_accumulator<A>(b2[c]) : sum);
}

/// dz2 = dg * gate', dz1 = (dz2 W2) * act'. A block has 32 hidden units of a sample.
template <typename W, typename A>
__global__ void __launch_bounds__(kThreads)
    hidden_gradients(const A* sums, const W* w2, const A* gates, const A* hidden, Shape s,
                     Activation activation, Gate gate, A* dz2, A* dz1) {
  __shared__ A values[kTile];
  __shared__ A parts[kWarps][32];
  const Index tiles = (s.r + 31) / 32;
  const Index sample = blockIdx.x / tiles, first_row = blockIdx.x % tiles * 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index r = first_row + lane;
  A sum = 0;
  by_tiles(
      s.c, values,
      [&](Index c) {
        const A dg = sum_chunks(sums, s, sample, c);
        const A value = math::gate_gradient(gate, gates[sample * s.c + c], dg);
        if (first_row == 0) dz2[sample * s.c + c] = value;
        return value;
      },
      [&](Index first, int count) {
        if (r >= s.r) return;
#pragma unroll 8
        for (int c = warp; c < count; c += kWarps) {
          sum += values[c] * to_accumulator<A>(w2[(first + c) * s.r + r]);
        }
      });
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || r >= s.r) return;
  sum = 0;
  for (int k = 0; k < kWarps; ++k) sum += parts[k][lane];
  dz1[sample * s.r + r] = math::activation_gradient(activation, hidden[sample * s.r + r], sum);
}

/// offsets = (dz1 W1) / HW, one thread per channel.
template <typename W, typename A>
__global__ void __launch_bounds__(kThreads)
    compute_offsets(const A* dz1, const W* w1, Shape s, A* offsets) {
  const Index task = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (task >= s.n * s.c) return;
  const Index sample = task / s.c, c = task % s.c;
  A sum = 0;
#pragma unroll 8
  for (Index r = 0; r < s.r; ++r) sum += dz1[sample * s.r + r] * to_accumulator<A>(w1[r * s.c + c]);
  offsets[task] = sum / static_cast<A>(s.hw);
}

/// out = in * gate + offset (offsets may be null), with `lanes` threads per chunk of a plane.
template <typename T, ImageLayout kLayout, typename A>
__global__ void __launch_bounds__(kThreads)
    scale_planes(Image<const T> in, Image<T> out, const A* gates, const A* offsets, Shape s,
                 int lanes) {
  const Index task = (static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x) / lanes;
  if (task >= s.n * s.chunks * s.c) return;
  const int lane = threadIdx.x % lanes;
  const Index channel = task % s.c, chunk = task / s.c % s.chunks, sample = task / s.c / s.chunks;
  const Index begin = chunk * s.chunk, count = min(s.chunk, s.hw - begin);
  const A g = gates[sample * s.c + channel];
  const A o = offsets ? offsets[sample * s.c + channel] : A(0);
  // Not simply in * g + 0: that would turn -0 into 0.
  const auto apply = [&](A value) { return offsets ? value * g + o : value * g; };
  if constexpr (kLayout == ImageLayout::planar) {
    const T* from = in.at(sample, channel) + begin;
    T* to = out.at(sample, channel) + begin;
    const int apart = misalignment(from);
    visit<Vector<T>::kSize>(
        count, apart == misalignment(to) ? apart : -1, lane, lanes,
        [&](Index i) { to[i] = from_accumulator<T>(apply(to_accumulator<A>(from[i]))); },
        [&](Index i) {
          Vector<T> v = load_vector(from + i);
#pragma unroll
          for (int k = 0; k < Vector<T>::kSize; ++k) v.set(k, apply(v[k]));
          store_vector(to + i, v);
        });
  } else {
    for (Index i = begin + lane; i < begin + count; i += lanes) {
      const A value = to_accumulator<A>(*in.at(sample, channel, i, s.width));
      *out.at(sample, channel, i, s.width) = from_accumulator<T>(apply(value));
    }
  }
}

/// The same for channels-last images, with the grid of sum_pixels.
template <typename T, int kVector, typename A>
__global__ void __launch_bounds__(kThreads)
    scale_pixels(Image<const T> in, Image<T> out, const A* gates, const A* offsets, Shape s,
                 int columns, int tiles) {
  const Index tile = blockIdx.x % tiles, task = blockIdx.x / tiles;
  const Index chunk = task % s.chunks, sample = task / s.chunks;
  const Index first = tile * columns * kVector;
  const int width = static_cast<int>(min(static_cast<Index>(columns) * kVector, s.c - first));
  const int lanes = width / kVector, strands = kThreads / lanes;
  const int strand = threadIdx.x / lanes, lane = threadIdx.x - strand * lanes;
  if (strand >= strands) return;
  A g[kVector], o[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const Index at = sample * s.c + first + lane * kVector + k;
    g[k] = gates[at];
    o[k] = offsets ? offsets[at] : A(0);
  }
  const Index end = min((chunk + 1) * s.chunk, s.hw);
#pragma unroll 4
  for (Index p = chunk * s.chunk + strand; p < end; p += strands) {
    const T* from = in.at(sample, first) + p * in.w + lane * kVector;
    T* to = out.at(sample, first) + p * out.w + lane * kVector;
    if constexpr (kVector == 1) {
      const A value = to_accumulator<A>(*from);
      *to = from_accumulator<T>(offsets ? value * g[0] + o[0] : value * g[0]);
    } else {
      Vector<T> v = load_vector(from);
#pragma unroll
      for (int k = 0; k < kVector; ++k) v.set(k, offsets ? v[k] * g[k] + o[k] : v[k] * g[k]);
      store_vector(to, v);
    }
  }
}

// ---- host

Index divide_up(Index a, Index b) { return (a + b - 1) / b; }

bool pixels_collapse(const TensorView& t) {
  return t.sizes[2] == 1 || t.sizes[3] == 1 || t.strides[2] == t.sizes[3] * t.strides[3];
}

/// The stride between neighbouring pixels, if H and W collapse into one dimension.
Index pixel_stride(const TensorView& t) { return t.sizes[3] == 1 ? t.strides[2] : t.strides[3]; }

ImageLayout layout_of(std::initializer_list<const TensorView*> images) {
  const bool one_pixel = (*images.begin())->sizes[2] * (*images.begin())->sizes[3] == 1;
  const bool one_channel = (*images.begin())->sizes[1] == 1;
  bool planar = true, channels_last = true;
  for (const TensorView* t : images) {
    planar = planar && pixels_collapse(*t) && (one_pixel || pixel_stride(*t) == 1);
    channels_last = channels_last && pixels_collapse(*t) && (one_channel || t->strides[1] == 1);
  }
  // An image of one pixel is both. Then its channels are contiguous.
  if (channels_last && (one_pixel || !planar)) return ImageLayout::channels_last;
  return planar ? ImageLayout::planar : ImageLayout::strided;
}

/// One plan for the two passes over the images of a call.
struct Passes {
  ImageLayout layout;
  Shape shape;
  int lanes = 32;        // planar, strided: threads per chunk
  int columns = 0;       // channels-last: vectors of channels per block
  int tiles = 0;         // channels-last: blocks side by side
  bool vectors = false;  // channels-last: 16 bytes at a time
};

Passes plan_passes(const Context& context, std::initializer_list<const TensorView*> images,
                   Index r) {
  const TensorView& x = **images.begin();
  Passes p{layout_of(images),
           {x.sizes[0], x.sizes[1], x.sizes[2] * x.sizes[3], r, x.sizes[3], 1, 0}};
  Shape& s = p.shape;
  const Index vector = 16 / size_of(x.dtype);
  const Index wanted = Index{limits_of(context.device).multiprocessors} * 8;  // blocks, to fill it
  // A chunk is short enough that rounding errors of a thread's sum stay small.
  constexpr Index kMostSteps = 512;
  if (p.layout == ImageLayout::channels_last) {
    p.vectors = s.c % vector == 0;
    for (const TensorView* t : images) {
      const bool aligned = reinterpret_cast<std::uintptr_t>(t->data) % 16 == 0 &&
                           t->strides[0] % vector == 0 &&
                           (s.hw == 1 || pixel_stride(*t) % vector == 0);
      p.vectors = p.vectors && aligned;
    }
    const Index columns = s.c / (p.vectors ? vector : 1);
    p.tiles = static_cast<int>(divide_up(columns, kThreads));
    p.columns = static_cast<int>(divide_up(columns, p.tiles));
    p.tiles = static_cast<int>(divide_up(columns, p.columns));
    const Index strands = kThreads / p.columns;
    const Index least = divide_up(s.hw, strands * kMostSteps), most = divide_up(s.hw, strands * 4);
    s.chunks = std::clamp(divide_up(wanted, std::max<Index>(s.n * p.tiles, 1)), least, most);
  } else {
    while (p.lanes > 4 && p.lanes * vector > s.hw) p.lanes /= 2;
    const Index least = divide_up(s.hw, 32 * vector * kMostSteps);
    const Index most = divide_up(s.hw, 32 * vector * 4);
    const Index blocks = std::max<Index>(s.n * s.c * p.lanes / kThreads, 1);
    s.chunks = std::clamp(divide_up(wanted * 2, blocks), least, most);
  }
  s.chunk = divide_up(s.hw, s.chunks);
  s.chunks = divide_up(s.hw, s.chunk);
  return p;
}

template <typename... Parameters, typename... Arguments>
void launch(const Context& context, const char* what, void (*kernel)(Parameters...), Index blocks,
            std::size_t shared, Arguments... arguments) {
  launch_kernel({context, blocks, kThreads, shared}, what, kernel, arguments...);
}

template <typename T>
Image<T> collapsed(const TensorView& t, ImageLayout layout) {
  Image<T> result = image<T>(t);
  if (layout != ImageLayout::strided) result.w = pixel_stride(t);
  return result;
}

template <typename T, bool kProduct, typename A>
void sum_images(const Context& context, const Passes& p, const TensorView& a, const TensorView& b,
                A* sums) {
  const Shape& s = p.shape;
  const auto ia = collapsed<const T>(a, p.layout), ib = collapsed<const T>(b, p.layout);
  constexpr const char* what = "summing over pixels";
  if (p.layout == ImageLayout::channels_last) {
    constexpr int kVector = Vector<T>::kSize;
    const Index blocks = s.n * s.chunks * p.tiles;
    const auto shared = [](int vector) { return sizeof(A) * 2 * kThreads * vector; };
    if (p.vectors) {
      launch(context, what, sum_pixels<T, kVector, kProduct, A>, blocks, shared(kVector), ia, ib, s,
             p.columns, p.tiles, sums);
    } else {
      launch(context, what, sum_pixels<T, 1, kProduct, A>, blocks, shared(1), ia, ib, s, p.columns,
             p.tiles, sums);
    }
    return;
  }
  const Index blocks = divide_up(s.n * s.chunks * s.c * p.lanes, kThreads);
  auto* kernel = p.layout == ImageLayout::planar ? sum_planes<T, ImageLayout::planar, kProduct, A>
                                                 : sum_planes<T, ImageLayout::strided, kProduct, A>;
  launch(context, what, kernel, blocks, 0, ia, ib, s, p.lanes, sums);
}

template <typename T, typename A>
void scale_images(const Context& context, const Passes& p, const TensorView& in,
                  const TensorView& out, const A* gates, const A* offsets) {
  const Shape& s = p.shape;
  const auto from = collapsed<const T>(in, p.layout);
  const auto to = collapsed<T>(out, p.layout);
  constexpr const char* what = "scaling";
  if (p.layout == ImageLayout::channels_last) {
    const Index blocks = s.n * s.chunks * p.tiles;
    auto* kernel = p.vectors ? scale_pixels<T, Vector<T>::kSize, A> : scale_pixels<T, 1, A>;
    launch(context, what, kernel, blocks, 0, from, to, gates, offsets, s, p.columns, p.tiles);
    return;
  }
  const Index blocks = divide_up(s.n * s.chunks * s.c * p.lanes, kThreads);
  auto* kernel = p.layout == ImageLayout::planar ? scale_planes<T, ImageLayout::planar, A>
                                                 : scale_planes<T, ImageLayout::strided, A>;
  launch(context, what, kernel, blocks, 0, from, to, gates, offsets, s, p.lanes);
}

/// Calls `body` with x's type and the weights' type.
template <typename Body>
void dispatch_types(const TensorView& x, const TensorView& w1, Body&& body) {
  dispatch_dtype(x.dtype, [&]<typename T>(T) {
    if (w1.dtype == x.dtype) {
      body(T{}, T{});
    } else if constexpr (sizeof(T) == 2) {
      body(T{}, float{});
    }
  });
}

template <typename A>
A* data_of(const TensorView& t) {
  return static_cast<A*>(t.data);
}

}  // namespace

void general_run(const Context& context, const SqueezeExciteForward& call) {
  const Passes p = plan_passes(context, {&call.x, &call.y}, call.w1.sizes[0]);
  const Shape& s = p.shape;
  dispatch_types(call.x, call.w1, [&]<typename T, typename W>(T, W) {
    using A = Accumulator<T>;
    const Scratch<A> sums(context, s.n * s.chunks * s.c), activated(context, s.n * s.r);
    const Scratch<A> own_gates(context, call.gates.defined() ? 0 : s.n * s.c);
    A* const gates = call.gates.defined() ? data_of<A>(call.gates) : own_gates.data();
    sum_images<T, false>(context, p, call.x, call.x, sums.data());
    launch(context, "computing the hidden layer", compute_hidden<W, A>,
           s.n * divide_up(s.r, kWarps * kRows), 0, sums.data(), data_of<W>(call.w1),
           data_of<W>(call.b1), s, call.activation, data_of<A>(call.pooled),
           data_of<A>(call.hidden), activated.data());
    launch(context, "opening the gates", open_gates<W, A>, divide_up(s.n * s.c * 8, kThreads), 0,
           activated.data(), data_of<W>(call.w2), data_of<W>(call.b2), s, call.gate, gates);
    scale_images<T>(context, p, call.x, call.y, gates, static_cast<const A*>(nullptr));
  });
}

void general_run(const Context& context, const SqueezeExciteBackward& call) {
  const bool want_dx = call.dx.defined();
  const Passes p = want_dx ? plan_passes(context, {&call.x, &call.dy, &call.dx}, call.w1.sizes[0])
                           : plan_passes(context, {&call.x, &call.dy}, call.w1.sizes[0]);
  const Shape& s = p.shape;
  const WeightGradientVectors vectors(context, call, /*always=*/true);
  dispatch_types(call.x, call.w1, [&]<typename T, typename W>(T, W) {
    using A = Accumulator<T>;
    const Scratch<A> sums(context, s.n * s.chunks * s.c);
    sum_images<T, true>(context, p, call.dy, call.x, sums.data());
    launch(context, "computing the hidden gradients", hidden_gradients<W, A>,
           s.n * divide_up(s.r, 32), 0, sums.data(), data_of<W>(call.w2), data_of<A>(call.gates),
           data_of<A>(call.hidden), s, call.activation, call.gate, vectors.dz2<A>(),
           vectors.dz1<A>());
    if (want_dx) {
      const Scratch<A> offsets(context, s.n * s.c);
      launch(context, "computing the offsets", compute_offsets<W, A>,
             divide_up(s.n * s.c, kThreads), 0, vectors.dz1<A>(), data_of<W>(call.w1), s,
             offsets.data());
      scale_images<T>(context, p, call.dy, call.dx, data_of<A>(call.gates), offsets.data());
    }
  });
  vectors.run(context, call);
}

}  // namespace fusewise::cuda

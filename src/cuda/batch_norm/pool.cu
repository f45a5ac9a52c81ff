// BatchNorm, activation and a max-pool of 3 x 3 values with stride 2 and padding 1.
// Memory: forward reads x twice (once in inference) and writes a quarter of it and a byte per
// output. Backward reads x, dy and the choices twice (once if no sums are needed) and writes dx.
// Windows overlap: what neighbouring threads read again comes from L1 or L2. Bound by memory
// bandwidth with 16-byte accesses, otherwise by the instructions that find addresses.
//
// Backward gathers. A thread has the four pixels of x that only its own window and the next ones
// to the right and below can have chosen, so nothing is scattered and no sum depends on timing.

#include "cuda/batch_norm/pool.cuh"

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

namespace fusewise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
/// Output rows of a thread in forward. It keeps the row of x that two windows share.
constexpr int kStrip = 4;

struct Arguments {
  Image x, y;  // backward: y is dy
  Image dx;    // backward; may be absent
  unsigned char* choices;
  const bool* blanked;  // [S, N], may be null
  Activation activation;
  bool adjacent;  // x's channels, and so the order of the choices and of the threads
  Index height, width, channels;
  Divisor samples, groups;  // groups of kWidth channels
  Divisor rows, columns;    // of the output
  Divisor strips;
  // The sums of backward.
  int lanes;  // neighbouring groups of a block, a power of two up to 32
  int slabs;
  Index streams, per_slab;  // windows of all samples

  __device__ __forceinline__ bool is_blank(Index s, Index n) const {
    return blanked != nullptr && blanked[s * samples.value() + n];
  }
  __device__ __forceinline__ Index choice(Index s, Index n, Index c, Index i, Index j) const {
    const Index image = s * samples.value() + n;
    if (adjacent) {
      return ((image * rows.value() + i) * columns.value() + j) * channels + c;
    }
    return ((image * channels + c) * rows.value() + i) * columns.value() + j;
  }
  /// Splits the number of a thread into a place: `vertical` is the divisor of h. c is a channel.
  template <int kWidth>
  __device__ __forceinline__ Place place(Index rest, const Divisor& vertical) const {
    Place p{};
    if (adjacent) {
      p.c = groups.split(rest) * kWidth;
      p.w = columns.split(rest);
      p.h = vertical.split(rest);
    } else {
      p.w = columns.split(rest);
      p.h = vertical.split(rest);
      p.c = groups.split(rest) * kWidth;
    }
    p.n = samples.split(rest);
    p.s = rest;
    return p;
  }
};

/// kWidth neighbouring channels of one pixel.
template <typename T, int kWidth, typename A>
__device__ __forceinline__ void load(const Image& image, const Place& p, A (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    values[0] = image.get<T>(p);
  } else {
    const Vector<T> vector = load_vector(image.at<const T>(p));
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = vector[k];
  }
}
template <typename T, int kWidth, typename A>
__device__ __forceinline__ void store(const Image& image, const Place& p,
                                      const A (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    image.set<T>(p, values[0]);
  } else {
    Vector<T> vector;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) vector.set(k, values[k]);
    *reinterpret_cast<uint4*>(image.at<T>(p)) = reinterpret_cast<const uint4&>(vector);
  }
}

/// The bytes of kWidth choices, in one access.
template <int kWidth>
struct Bytes {
  static constexpr int kWords = (kWidth + 3) / 4;
  unsigned words[kWords];

  __device__ __forceinline__ void load(const unsigned char* from) {
    if constexpr (kWidth == 1) {
      words[0] = *from;
    } else if constexpr (kWidth == 4) {
      words[0] = *reinterpret_cast<const unsigned*>(from);
    } else {
      const uint2 both = *reinterpret_cast<const uint2*>(from);
      words[0] = both.x;
      words[1] = both.y;
    }
  }
  __device__ __forceinline__ void store(unsigned char* to) const {
    if constexpr (kWidth == 1) {
      *to = static_cast<unsigned char>(words[0]);
    } else if constexpr (kWidth == 4) {
      *reinterpret_cast<unsigned*>(to) = words[0];
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
  }
  __device__ __forceinline__ unsigned get(int k) const { return words[k / 4] >> k % 4 * 8 & 0xff; }
};

template <typename T, int kWidth>
struct Channels {
  Coefficients<Accumulator<T>> of[kWidth];

  /// act(v) of one pixel, as it would be stored.
  template <typename A>
  __device__ __forceinline__ void activated(const Arguments& a, const Place& p,
                                            A (&u)[kWidth]) const {
    load<T>(a.x, p, u);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) u[k] = of[k](u[k]);
    activate_all<T>(a.activation, u);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) u[k] = to_accumulator<A>(from_accumulator<T>(u[k]));
  }
};

// ---- Forward.

/// The largest of up to three values, and which.
template <typename A, int kWidth>
struct Largest {
  A value[kWidth];
  unsigned place[kWidth];

  __device__ __forceinline__ void start(unsigned first) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      value[k] = -INFINITY;
      place[k] = first;
    }
  }
  /// The first of equal values stays, the last NaN wins.
  __device__ __forceinline__ void take(const A (&other)[kWidth], unsigned at) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (other[k] > value[k] || other[k] != other[k]) {
        value[k] = other[k];
        place[k] = at;
      }
    }
  }
  __device__ __forceinline__ void take(const Largest& row, unsigned first) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (row.value[k] > value[k] || row.value[k] != row.value[k]) {
        value[k] = row.value[k];
        place[k] = first + row.place[k];
      }
    }
  }
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const __grid_constant__ Arguments a, Index total,
                const Coefficients<Accumulator<T>>* coefficients) {
  using A = Accumulator<T>;
  using Row = Largest<A, kWidth>;
  wait_for_previous_kernel();
  const Index stride = static_cast<Index>(gridDim.x) * kThreads;
  for (Index item = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; item < total;
       item += stride) {
    const Place p = a.place<kWidth>(item, a.strips);
    const Index begin = p.h * kStrip, end = min(begin + kStrip, a.rows.value());
    const bool blank = a.is_blank(p.s, p.n);
    Channels<T, kWidth> channels;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      channels.of[k] = coefficients[p.s * a.channels + p.c + k];
    }
    const int left = p.w == 0 ? 1 : 0;
    const auto row_at = [&](Index h, Row& row) {
      row.start(left);
#pragma unroll
      for (int t = 0; t < 3; ++t) {
        const Index w = 2 * p.w - 1 + t;
        if (w < 0 || w >= a.width) continue;
        A u[kWidth];
        channels.activated(a, {p.s, p.n, p.c, h, w}, u);
        row.take(u, t);
      }
    };
    Row above, best;
    if (!blank && begin > 0) row_at(2 * begin - 1, above);
    for (Index i = begin; i < end; ++i) {
      if (blank) {
        best.start(0);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) best.value[k] = A(0);
      } else {
        Row row;
        row_at(2 * i, row);
        if (i > 0) {
          best = above;
          best.take(row, 3);
        } else {
          best.start(3 + left);
          best.take(row, 3);
        }
        if (2 * i + 1 < a.height) {
          row_at(2 * i + 1, above);
          best.take(above, 6);
        }
      }
      store<T>(a.y, {p.s, p.n, p.c, i, p.w}, best.value);
      if (a.choices == nullptr) continue;
      Bytes<kWidth> bytes{};
#pragma unroll
      for (int k = 0; k < kWidth; ++k) bytes.words[k / 4] |= best.place[k] << k % 4 * 8;
      bytes.store(a.choices + a.choice(p.s, p.n, p.c, i, p.w));
    }
  }
}

// ---- Backward.

/// The four pixels of x from (2 i, 2 j) on: the gradient of act(v), then of v.
template <typename T, int kWidth>
struct Cell {
  using A = Accumulator<T>;
  A d[4][kWidth];

  __device__ __forceinline__ static Place pixel(const Place& p, int q) {
    return {p.s, p.n, p.c, 2 * p.h + q / 2, 2 * p.w + q % 2};
  }
  __device__ __forceinline__ static bool is_inside(const Arguments& a, const Place& p, int q) {
    return 2 * p.h + q / 2 < a.height && 2 * p.w + q % 2 < a.width;
  }
  /// p: the window with the number of the cell.
  __device__ __forceinline__ Cell(const Arguments& a, const Place& p) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) d[q][k] = A(0);
    }
#pragma unroll
    for (int down = 0; down < 2; ++down) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const Place window{p.s, p.n, p.c, p.h + down, p.w + right};
        if (window.h >= a.rows.value() || window.w >= a.columns.value()) continue;
        A dy[kWidth];
        load<T>(a.y, window, dy);
        Bytes<kWidth> bytes;
        bytes.load(a.choices + a.choice(p.s, p.n, p.c, window.h, window.w));
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          // Where the pixel is in the window.
          const int row = q / 2 + 1 - 2 * down, column = q % 2 + 1 - 2 * right;
          if (row < 0 || column < 0) continue;
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            if (bytes.get(k) == static_cast<unsigned>(3 * row + column)) d[q][k] += dy[k];
          }
        }
      }
    }
  }
  /// d becomes the gradient of v at one of the pixels.
  __device__ __forceinline__ void differentiate(const Arguments& a, int q,
                                                const Channels<T, kWidth>& channels,
                                                const A (&x)[kWidth]) {
    A v[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) v[k] = channels.of[k](x[k]);
    differentiate_all<T>(a.activation, v, d[q]);
  }
};

/// Sums of dv and dv * (x - mean) of the slabs.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kWidth > 1 ? 2 : 3)
    pool_sums_kernel(const __grid_constant__ Arguments a, const BackwardChannels b,
                     const GradientParts<Accumulator<T>> parts) {
  using A = Accumulator<T>;
  __shared__ A shared[2][kWarps][32];
  __shared__ double shared_counts[kWarps][32];
  allow_next_kernel();
  const Index tiles = (a.groups.value() + a.lanes - 1) / a.lanes;
  const int lane = threadIdx.x % a.lanes, strand = threadIdx.x / a.lanes;
  const Index tile = blockIdx.x % tiles, slab = blockIdx.x / tiles % a.slabs;
  const Index stream = blockIdx.x / tiles / a.slabs, group = tile * a.lanes + lane;
  const bool present = group < a.groups.value();
  const Index channel = (present ? group : 0) * kWidth, first = stream * a.channels + channel;
  const Index begin = slab * a.per_slab;
  const Index end =
      present ? min(begin + a.per_slab, a.samples.value() * a.rows.value() * a.columns.value())
              : begin;
  Channels<T, kWidth> channels;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) channels.of[k] = saved_coefficients<T>(b, first + k);
  A dv[kWidth] = {}, dvx[kWidth] = {};
  int count = 0;
  for (Index i = begin + strand; i < end; i += kThreads / a.lanes) {
    Place p{stream, i, channel, 0, 0};
    p.w = a.columns.split(p.n);
    p.h = a.rows.split(p.n);
    if (a.is_blank(p.s, p.n)) continue;
    Cell<T, kWidth> cell(a, p);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (!cell.is_inside(a, p, q)) continue;
      A x[kWidth];
      load<T>(a.x, cell.pixel(p, q), x);
      cell.differentiate(a, q, channels, x);
      ++count;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        dv[k] += cell.d[q][k];
        dvx[k] += cell.d[q][k] * (x[k] - channels.of[k].mean);
      }
    }
  }
  // Over the strands, in a fixed order.
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

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    unpool_kernel(const __grid_constant__ Arguments a, Index total, bool training,
                  const Coefficients<Accumulator<T>>* coefficients,
                  const Corrections<Accumulator<T>>* corrections) {
  using A = Accumulator<T>;
  wait_for_previous_kernel();
  const Index stride = static_cast<Index>(gridDim.x) * kThreads;
  for (Index item = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; item < total;
       item += stride) {
    const Place p = a.place<kWidth>(item, a.rows);
    const bool blank = a.is_blank(p.s, p.n);
    const Index first = p.s * a.channels + p.c;
    Channels<T, kWidth> channels;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) channels.of[k] = coefficients[first + k];
    Cell<T, kWidth> cell(a, p);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (!cell.is_inside(a, p, q)) continue;
      const Place pixel = cell.pixel(p, q);
      A x[kWidth], dx[kWidth];
      load<T>(a.x, pixel, x);
      cell.differentiate(a, q, channels, x);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        A d = cell.d[q][k];
        if (training) {
          const Corrections<A> other = corrections[first + k];
          d -= other.offset + (x[k] - channels.of[k].mean) * other.slope;
        }
        dx[k] = blank ? A(0) : d * channels.of[k].scale;
      }
      store<T>(a.dx, pixel, dx);
    }
  }
}

// ---- Host.

template <typename Call>
Arguments arguments(const Context& context, const Call& call, const TensorView& y, int width) {
  const TensorView& x = call.x;
  const Index streams = streams_of(x), samples = dimension(x, 4), channels = dimension(x, 3);
  const Index rows = divide_up(dimension(x, 2), 2), columns = divide_up(dimension(x, 1), 2);
  const Index groups = channels / width;
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
              .samples = Divisor(std::max<Index>(samples, 1), wide),
              .groups = Divisor(groups, wide),
              .rows = Divisor(rows, wide),
              .columns = Divisor(columns, wide),
              .strips = Divisor(divide_up(rows, kStrip), wide),
              .lanes = 1,
              .slabs = 1,
              .streams = streams,
              .per_slab = 0};
  while (a.adjacent && a.lanes < 32 && a.lanes < groups) a.lanes *= 2;
  // Enough blocks to fill the GPU, each with a few windows per thread. Not so many that the
  // rounding errors of a thread's sum grow.
  constexpr Index kMostSteps = 128, kFewestSteps = 2;
  const Index windows = samples * rows * columns, strands = kThreads / a.lanes;
  const Index wanted = Index{limits_of(context.device).multiprocessors} * 8;
  const Index least = std::max<Index>(divide_up(windows, strands * kMostSteps), 1);
  const Index most = std::max<Index>(divide_up(windows, strands * kFewestSteps), 1);
  const Index slabs =
      std::clamp<Index>(divide_up(wanted, streams * divide_up(groups, a.lanes)), least, most);
  a.per_slab = divide_up(windows, slabs);
  a.slabs = static_cast<int>(windows > 0 ? divide_up(windows, a.per_slab) : 1);
  return a;
}

Launch over(const Context& context, Index total) {
  const Index most = Index{limits_of(context.device).multiprocessors} * 16;
  return {.context = context,
          .blocks = std::min<Index>(divide_up(total, kThreads), most),
          .threads = kThreads,
          .overlaps_previous = true};
}

template <typename T, int kWidth>
void run(const Context& context, const BatchNormActPoolForward& call) {
  using A = Accumulator<T>;
  const Arguments a = arguments(context, call, call.y, kWidth);
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
  const Index total = a.streams * dimension(call.x, 4) * divide_up(divide_up(a.height, 2), kStrip) *
                      divide_up(a.width, 2) * (a.channels / kWidth);
  launch_kernel(over(context, total), "pooling", pool_kernel<T, kWidth>, a, total,
                coefficients.data());
}

template <typename T, int kWidth>
void run(const Context& context, const BatchNormActPoolBackward& call) {
  using A = Accumulator<T>;
  Arguments a = arguments(context, call, call.dy, kWidth);
  a.dx = image(call.dx);
  const BatchNormActBackward norm = without_pool(call);
  const BackwardChannels b = channels_of(norm);
  const BackwardNeeds needs = needs_of(norm);
  const Scratch<Coefficients<A>> coefficients(context, b.streams * b.channels);
  const Scratch<Corrections<A>> corrections(context, b.streams * b.channels);
  const PartMemory<A> memory(context, b.streams, needs.sums ? a.slabs : 0, b.channels);
  const GradientParts<A> parts = memory.gradients();
  if (needs.sums) {
    const Index blocks = a.streams * a.slabs * divide_up(a.channels / kWidth, a.lanes);
    launch_kernel({context, blocks, kThreads}, "summing gradients", pool_sums_kernel<T, kWidth>, a,
                  b, parts);
  }
  launch_finish<T>(context, b, parts, coefficients.data(), corrections.data());
  if (!needs.images) return;
  const Index total = a.streams * dimension(call.x, 4) * divide_up(a.height, 2) *
                      divide_up(a.width, 2) * (a.channels / kWidth);
  launch_kernel(over(context, total), "computing gradients", unpool_kernel<T, kWidth>, a, total,
                call.training, coefficients.data(), corrections.data());
}

/// Why 16 bytes of neighbouring channels cannot be accessed at once, or empty.
std::string declines(std::initializer_list<const TensorView*> images, const TensorView& choices) {
  const TensorView& x = **images.begin();
  if (x.dtype == DType::f64) return "it has no float64 kernels";
  if (!has_adjacent_channels(x)) return "it takes channels-last images";
  const Index width = static_cast<Index>(16 / size_of(x.dtype));
  if (dimension(x, 3) % width != 0) {
    return "the channels of a pixel are not a multiple of 16 bytes";
  }
  for (const TensorView* t : images) {
    if (!t->defined()) continue;
    if (t->strides[t->rank - 3] != 1) return "it takes channels-last images";
    for (int d = 0; d < t->rank; ++d) {
      if (d != t->rank - 3 && t->sizes[d] > 1 && t->strides[d] % width != 0) {
        return "a pixel does not start on a 16-byte boundary";
      }
    }
    if (reinterpret_cast<std::uintptr_t>(t->data) % 16 != 0) {
      return "an image does not start on a 16-byte boundary";
    }
  }
  if (reinterpret_cast<std::uintptr_t>(choices.data) % width != 0) {
    return "the choices do not start on a boundary of as many bytes as 16 bytes have values";
  }
  return {};
}

template <typename Call>
void run_channels_last(const Context& context, const Call& call) {
  dispatch_short_dtype(call.x.dtype, [&]<typename T>(T) { run<T, 16 / sizeof(T)>(context, call); });
}
template <typename Call>
void run_general(const Context& context, const Call& call) {
  dispatch_dtype(call.x.dtype, [&]<typename T>(T) { run<T, 1>(context, call); });
}

}  // namespace

std::string pool_channels_last_declines(const Context&, const BatchNormActPoolForward& call) {
  return declines({&call.x, &call.y}, call.choices);
}
std::string pool_channels_last_declines(const Context&, const BatchNormActPoolBackward& call) {
  return declines({&call.x, &call.dy, &call.dx}, call.choices);
}
void pool_channels_last_run(const Context& context, const BatchNormActPoolForward& call) {
  run_channels_last(context, call);
}
void pool_channels_last_run(const Context& context, const BatchNormActPoolBackward& call) {
  run_channels_last(context, call);
}
void pool_general_run(const Context& context, const BatchNormActPoolForward& call) {
  run_general(context, call);
}
void pool_general_run(const Context& context, const BatchNormActPoolBackward& call) {
  run_general(context, call);
}

}  // namespace fusewise::cuda

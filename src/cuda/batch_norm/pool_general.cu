// BatchNorm, activation and a max-pool of 3 x 3 values with stride 2 and padding 1, for images with
// any strides: a thread has one channel.
// Memory: forward reads x twice (once in inference) and writes a quarter of it and a byte per
// output. Backward reads x, dy and the choices twice (once if no sums are needed) and writes dx.
// Windows overlap: what neighbouring threads read again comes from L1 or L2. Bound by the
// instructions that find addresses.

#include "cuda/batch_norm/pool.cuh"
#include "cuda/batch_norm/pool_strips.cuh"

namespace fusewise::cuda {
namespace {

using namespace pool;

// ---- Forward.

/// The largest of a few values, and which.
template <typename A>
struct Largest {
  A value;
  unsigned place;

  /// The first of equal values stays, the last NaN wins.
  __device__ __forceinline__ void take(A other, unsigned at) {
    if (other > value || other != other) {
      value = other;
      place = at;
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const __grid_constant__ Arguments a,
                const Coefficients<Accumulator<T>>* coefficients) {
  using A = Accumulator<T>;
  using Row = Largest<A>;
  wait_for_previous_kernel();
  const Index stride = static_cast<Index>(gridDim.x) * kThreads;
  for (Index item = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; item < a.total;
       item += stride) {
    const Strip p = a.strip(item, 1);
    const bool blank = a.is_blank(p);
    const Coefficients<A> channel = coefficients[p.s * a.channels + p.c];
    const unsigned left = p.column == 0 ? 1 : 0;
    const auto row_at = [&](Index h) {
      Row row{-INFINITY, left};
      for (int t = 0; t < 3; ++t) {
        const Index w = 2 * p.column - 1 + t;
        if (w < 0 || w >= a.width) continue;
        A u[1] = {channel(a.x.get<T>({p.s, p.n, p.c, h, w}))};
        activate_all<T>(a.activation, u);
        row.take(to_accumulator<A>(from_accumulator<T>(u[0])), t);  // as it would be stored
      }
      return row;
    };
    Row above{};
    if (!blank && p.begin > 0) above = row_at(2 * p.begin - 1);
    for (Index i = p.begin; i < p.end; ++i) {
      Row best{A(0), 0};
      if (!blank) {
        const Row row = row_at(2 * i);
        best = i > 0 ? above : Row{-INFINITY, 3 + left};
        best.take(row.value, 3 + row.place);
        if (2 * i + 1 < a.height) {
          above = row_at(2 * i + 1);
          best.take(above.value, 6 + above.place);
        }
      }
      a.y.set<T>({p.s, p.n, p.c, i, p.column}, best.value);
      if (a.choices == nullptr) continue;
      a.choices_of(p)[i * a.down()] = static_cast<unsigned char>(best.place);
    }
  }
}

// ---- Backward gathers: of the four pixels of x from (2 i, 2 j) on, only four windows can have
// taken one. So nothing is scattered, and no sum depends on timing.

/// Calls body(pixel, dv, x) for each of the four pixels of window i of a strip.
template <typename T, typename A, typename Body>
__device__ __forceinline__ void each_pixel(const Arguments& a, const Strip& p, Index i,
                                           const Coefficients<A>& channel, Body body) {
  A d[4] = {};
#pragma unroll
  for (int window = 0; window < 4; ++window) {
    const int down = window / 2, right = window % 2;
    if (i + down >= a.rows || p.column + right >= a.columns.value()) continue;
    const A dy = a.y.get<T>({p.s, p.n, p.c, i + down, p.column + right});
    const int choice = a.choices_of(p)[(i + down) * a.down() + right * a.right()];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      // Where the pixel is in the window.
      const int row = q / 2 + 1 - 2 * down, column = q % 2 + 1 - 2 * right;
      if (row >= 0 && column >= 0 && choice == 3 * row + column) d[q] += dy;
    }
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const Place pixel{p.s, p.n, p.c, 2 * i + q / 2, 2 * p.column + q % 2};
    if (pixel.h >= a.height || pixel.w >= a.width) continue;
    const A x = a.x.get<T>(pixel);
    A v[1] = {channel(x)}, dv[1] = {d[q]};
    differentiate_all<T>(a.activation, v, dv);
    body(pixel, dv[0], x);
  }
}

/// Sums of dv and dv * (x - mean) of the slabs.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sums_kernel(const __grid_constant__ Arguments a, const BackwardChannels b,
                const GradientParts<Accumulator<T>> parts) {
  using A = Accumulator<T>;
  allow_next_kernel();
  const Slab slab(a, 1);
  const Coefficients<A> channel = saved_coefficients<T>(b, slab.stream * a.channels + slab.channel);
  A dv[1] = {}, dvx[1] = {};
  int count = 0;
  for (Index item = slab.begin + slab.strand; item < slab.end; item += slab.strands) {
    const Strip p = slab.strip(a, item);
    if (a.is_blank(p)) continue;
    count += a.pixels(p);
    for (Index i = p.begin; i < p.end; ++i) {
      each_pixel<T>(a, p, i, channel, [&](const Place&, A d, A x) {
        dv[0] += d;
        dvx[0] += d * (x - channel.mean);
      });
    }
  }
  slab.write(a, parts, dv, dvx, count);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    unpool_kernel(const __grid_constant__ Arguments a, bool training,
                  const Coefficients<Accumulator<T>>* coefficients,
                  const Corrections<Accumulator<T>>* corrections) {
  using A = Accumulator<T>;
  wait_for_previous_kernel();
  const Index stride = static_cast<Index>(gridDim.x) * kThreads;
  for (Index item = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; item < a.total;
       item += stride) {
    const Strip p = a.strip(item, 1);
    const bool blank = a.is_blank(p);
    const Index at = p.s * a.channels + p.c;
    const Coefficients<A> channel = coefficients[at];
    const Corrections<A> other = training ? corrections[at] : Corrections<A>{};
    for (Index i = p.begin; i < p.end; ++i) {
      each_pixel<T>(a, p, i, channel, [&](const Place& pixel, A d, A x) {
        if (training) d -= other.offset + (x - channel.mean) * other.slope;
        a.dx.set<T>(pixel, blank ? A(0) : d * channel.scale);
      });
    }
  }
}

}  // namespace

void pool_general_run(const Context& context, const BatchNormActPoolForward& call) {
  dispatch_dtype(call.x.dtype, [&]<typename T>(T) { run<T>(context, call, 1, pool_kernel<T>); });
}
void pool_general_run(const Context& context, const BatchNormActPoolBackward& call) {
  dispatch_dtype(call.x.dtype, [&]<typename T>(T) {
    run<T>(context, call, 1, BackwardKernels<T>{sums_kernel<T>, unpool_kernel<T>});
  });
}

}  // namespace fusewise::cuda

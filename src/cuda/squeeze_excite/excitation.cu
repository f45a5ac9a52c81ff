// The small layers of Squeeze-and-Excitation as plain kernels: any GPU, any type, any size.
// Memory: each sample reads all weights, from L2, and its own sums once.
// Bound by the launches, two in each direction, when there are few samples; else by L2.

#include "cuda/squeeze_excite/excitation.cuh"

#include "common/divide.h"
#include "common/math.h"
#include "common/scratch.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

using Index = long long;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Shape {
  Index n, c, hw, r;
};

/// ImageSums with its type.
template <typename A>
struct Sums {
  const A* data;
  Index chunks, stride;

  __device__ A operator()(Index sample, Index channel) const {
    A sum = 0;
#pragma unroll 4
    for (Index k = 0; k < chunks; ++k) sum += data[(sample * chunks + k) * stride + channel];
    return sum;
  }
};

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
    compute_hidden(const Sums<A> sums, const W* w1, const W* b1, Shape s, Activation activation,
                   A* pooled, A* hidden, A* activated) {
  __shared__ A values[kTile];
  wait_for_previous_kernel();
  allow_next_kernel();
  const Index tiles = (s.r + kWarps * kRows - 1) / (kWarps * kRows);
  const Index sample = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const Index row = (tile * kWarps + threadIdx.x / 32) * kRows;
  const int lane = threadIdx.x % 32;
  A sum[kRows] = {};
  by_tiles(
      s.c, values,
      [&](Index c) {
        const A p = sums(sample, c) / static_cast<A>(s.hw);
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
  wait_for_previous_kernel();
  allow_next_kernel();
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
    hidden_gradients(const Sums<A> sums, const W* w2, const A* gates, const A* hidden, Shape s,
                     Activation activation, Gate gate, A* dz2, A* dz1) {
  __shared__ A values[kTile];
  __shared__ A parts[kWarps][32];
  wait_for_previous_kernel();
  allow_next_kernel();
  const Index tiles = (s.r + 31) / 32;
  const Index sample = blockIdx.x / tiles, first_row = blockIdx.x % tiles * 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index r = first_row + lane;
  A sum = 0;
  by_tiles(
      s.c, values,
      [&](Index c) {
        const A dg = sums(sample, c);
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
  wait_for_previous_kernel();
  allow_next_kernel();
  const Index task = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (task >= s.n * s.c) return;
  const Index sample = task / s.c, c = task % s.c;
  A sum = 0;
#pragma unroll 8
  for (Index r = 0; r < s.r; ++r) sum += dz1[sample * s.r + r] * to_accumulator<A>(w1[r * s.c + c]);
  offsets[task] = sum / static_cast<A>(s.hw);
}

// ---- host

template <typename... Parameters, typename... Arguments>
void launch(const Context& context, const char* what, void (*kernel)(Parameters...), Index blocks,
            Arguments... arguments) {
  launch_kernel(
      {.context = context, .blocks = blocks, .threads = kThreads, .overlaps_previous = true}, what,
      kernel, arguments...);
}

template <typename Call>
Shape shape_of(const Call& call) {
  const TensorView& x = call.x;
  return {x.sizes[0], x.sizes[1], x.sizes[2] * x.sizes[3], call.w1.sizes[0]};
}

template <typename A>
Sums<A> typed(const ImageSums& sums) {
  return {static_cast<const A*>(sums.data), sums.chunks, sums.stride};
}

template <typename T>
T* data_of(const TensorView& t) {
  return static_cast<T*>(t.data);
}

}  // namespace

void excite(const Context& context, const SqueezeExciteForward& call, const ImageSums& sums,
            void* gates) {
  const Shape s = shape_of(call);
  dispatch_dtype(call.w1.dtype, [&]<typename W>(W) {
    using A = Accumulator<W>;
    const Scratch<A> activated(context, s.n * s.r);
    launch(context, "computing the hidden layer", compute_hidden<W, A>,
           s.n * divide_up(s.r, kWarps * kRows), typed<A>(sums), data_of<W>(call.w1),
           data_of<W>(call.b1), s, call.activation, data_of<A>(call.pooled),
           data_of<A>(call.hidden), activated.data());
    launch(context, "opening the gates", open_gates<W, A>, divide_up(s.n * s.c * 8, kThreads),
           activated.data(), data_of<W>(call.w2), data_of<W>(call.b2), s, call.gate,
           static_cast<A*>(gates));
  });
}

void excite(const Context& context, const SqueezeExciteBackward& call, const ImageSums& sums,
            const WeightGradientVectors& vectors, void* offsets) {
  const Shape s = shape_of(call);
  dispatch_dtype(call.w1.dtype, [&]<typename W>(W) {
    using A = Accumulator<W>;
    launch(context, "computing the hidden gradients", hidden_gradients<W, A>,
           s.n * divide_up(s.r, 32), typed<A>(sums), data_of<W>(call.w2), data_of<A>(call.gates),
           data_of<A>(call.hidden), s, call.activation, call.gate, vectors.dz2<A>(),
           vectors.dz1<A>());
    if (offsets == nullptr) return;
    launch(context, "computing the offsets", compute_offsets<W, A>, divide_up(s.n * s.c, kThreads),
           vectors.dz1<A>(), data_of<W>(call.w1), s, static_cast<A*>(offsets));
  });
}

}  // namespace fusewise::cuda

// dW1 = dz1^T p, db1 = sum dz1, dW2 = dz2^T h, db2 = sum dz2, sums over the samples in order.
// Memory: reads the [N, C] and [N, R] vectors, writes each gradient once; a few megabytes at most.
// Bound by latency: a thread owns one channel and a few hidden units and walks over the samples.

#include "common/math.h"
#include "cuda/launch.cuh"
#include "cuda/squeeze_excite/weight_gradients.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kChannels = 64;  // of a block
constexpr int kStrands = 4;    // threads that share a channel, each with every fourth sample
constexpr int kHidden = 8;     // hidden units of a thread
constexpr int kSamples = 64;   // samples whose hidden vectors are staged at a time
constexpr int kThreads = kChannels * kStrands;

template <typename A>
struct Vectors {
  const A *dz2, *dz1, *pooled, *hidden;
  long long n, c, r;
  Activation activation;
};

template <typename W, typename A>
__global__ void __launch_bounds__(kThreads)
    weight_gradients(Vectors<A> v, W* dw1, W* db1, W* dw2, W* db2) {
  __shared__ A dz1[kSamples][kHidden], h[kSamples][kHidden];
  __shared__ A others[kStrands - 1][2 * kHidden + 1][kChannels];
  // Channels fastest, so that the grid has one dimension and no limit of 65535.
  const long long tiles = (v.c + kChannels - 1) / kChannels;
  const long long row = blockIdx.x / tiles, column = blockIdx.x - row * tiles;
  const int lane = threadIdx.x % kChannels, strand = threadIdx.x / kChannels;
  const long long c = column * kChannels + lane, first = row * kHidden;
  const int hidden = static_cast<int>(min(static_cast<long long>(kHidden), v.r - first));
  wait_for_previous_kernel();

  // dW1, dW2 and db2, in this order. Summed up by stages first, which keeps rounding errors small
  // in large batches.
  A sums[2 * kHidden + 1] = {}, bias1 = 0;
  for (long long begin = 0; begin < v.n; begin += kSamples) {
    const int samples = static_cast<int>(min(static_cast<long long>(kSamples), v.n - begin));
    __syncthreads();
    for (int i = threadIdx.x; i < samples * kHidden; i += kThreads) {
      const int s = i / kHidden, k = i % kHidden;
      const long long at = (begin + s) * v.r + first + k;
      dz1[s][k] = k < hidden ? v.dz1[at] : A(0);
      h[s][k] = k < hidden ? math::activate(v.activation, v.hidden[at]) : A(0);
    }
    __syncthreads();
    if (c < v.c) {
      A stage[2 * kHidden + 1] = {};
#pragma unroll 8
      for (int s = strand; s < samples; s += kStrands) {
        const long long at = (begin + s) * v.c + c;
        const A p = v.pooled[at], dz2 = v.dz2[at];
#pragma unroll
        for (int k = 0; k < kHidden; ++k) {
          stage[k] += dz1[s][k] * p;
          stage[kHidden + k] += dz2 * h[s][k];
        }
        stage[2 * kHidden] += dz2;
      }
#pragma unroll
      for (int k = 0; k < 2 * kHidden + 1; ++k) sums[k] += stage[k];
    }
    if (column == 0 && threadIdx.x < kHidden) {
      A stage = 0;
      for (int s = 0; s < samples; ++s) stage += dz1[s][threadIdx.x];
      bias1 += stage;
    }
  }

  if (strand > 0) {
#pragma unroll
    for (int k = 0; k < 2 * kHidden + 1; ++k) others[strand - 1][k][lane] = sums[k];
  }
  __syncthreads();
  if (db1 && column == 0 && static_cast<int>(threadIdx.x) < hidden) {
    db1[first + threadIdx.x] = from_accumulator<W>(bias1);
  }
  if (strand > 0 || c >= v.c) return;
#pragma unroll
  for (int k = 0; k < 2 * kHidden + 1; ++k) {
#pragma unroll
    for (int other = 0; other < kStrands - 1; ++other) sums[k] += others[other][k][lane];
  }
  if (db2 && row == 0) db2[c] = from_accumulator<W>(sums[2 * kHidden]);
#pragma unroll
  for (int k = 0; k < kHidden; ++k) {
    if (k >= hidden) break;
    if (dw1) dw1[(first + k) * v.c + c] = from_accumulator<W>(sums[k]);
    if (dw2) {
      dw2[c * v.r + first + k] = from_accumulator<W>(sums[kHidden + k]);
    }
  }
}

bool any_wanted(const SqueezeExciteBackward& call) {
  return call.dw1.defined() || call.db1.defined() || call.dw2.defined() || call.db2.defined();
}

}  // namespace

WeightGradientVectors::WeightGradientVectors(const Context& context,
                                             const SqueezeExciteBackward& call, bool always) {
  if (!always && !any_wanted(call)) return;
  const std::int64_t n = call.x.sizes[0], c = call.x.sizes[1], r = call.w1.sizes[0];
  const std::int64_t bytes = size_of(call.pooled.dtype);
  dz2_bytes_ = n * c * bytes;
  memory_.emplace(context, dz2_bytes_ + n * r * bytes);
}

void WeightGradientVectors::run(const Context& context, const SqueezeExciteBackward& call) const {
  if (!any_wanted(call)) return;
  dispatch_dtype(call.w1.dtype, [&]<typename W>(W) {
    using A = Accumulator<W>;
    const Vectors<A> vectors{dz2<A>(),
                             dz1<A>(),
                             static_cast<const A*>(call.pooled.data),
                             static_cast<const A*>(call.hidden.data),
                             call.x.sizes[0],
                             call.x.sizes[1],
                             call.w1.sizes[0],
                             call.activation};
    const std::int64_t blocks =
        (vectors.c + kChannels - 1) / kChannels * ((vectors.r + kHidden - 1) / kHidden);
    launch_kernel({context, blocks, kThreads, 0, true}, "computing the weight gradients",
                  weight_gradients<W, A>, vectors, static_cast<W*>(call.dw1.data),
                  static_cast<W*>(call.db1.data), static_cast<W*>(call.dw2.data),
                  static_cast<W*>(call.db2.data));
  });
}

}  // namespace fusewise::cuda

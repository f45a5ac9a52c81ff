// dW1 = dz1^T p, db1 = sum dz1, dW2 = dz2^T h, db2 = sum dz2, sums over the samples in order.
// Memory: reads the [N, C] and [N, R] vectors, writes each gradient once; a few megabytes at most.
// Bound by latency: a thread owns one channel and a few hidden units and walks over the samples.

#include "common/math.h"
#include "cuda/launch.cuh"
#include "cuda/squeeze_excite/weight_gradients.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kChannels = 128;  // threads of a block, one channel each
constexpr int kHidden = 8;      // hidden units of a thread
constexpr int kSamples = 64;    // samples whose hidden vectors are staged at a time

template <typename A>
struct Vectors {
  const A *dz2, *dz1, *pooled, *hidden;
  int n, c, r;
  Activation activation;
};

template <typename W, typename A>
__global__ void __launch_bounds__(kChannels)
    weight_gradients(Vectors<A> v, W* dw1, W* db1, W* dw2, W* db2) {
  __shared__ A dz1[kSamples][kHidden], h[kSamples][kHidden];
  // Channels fastest, so that the grid has one dimension and no limit of 65535.
  const int tiles = (v.c + kChannels - 1) / kChannels;
  const int row = blockIdx.x / tiles, column = blockIdx.x - row * tiles;
  const int c = column * kChannels + threadIdx.x;
  const int first = row * kHidden;
  wait_for_previous_kernel();
  A sum1[kHidden] = {}, sum2[kHidden] = {}, bias1 = 0, bias2 = 0;

  for (int begin = 0; begin < v.n; begin += kSamples) {
    const int samples = min(kSamples, v.n - begin);
    __syncthreads();
    for (int i = threadIdx.x; i < samples * kHidden; i += kChannels) {
      const int s = i / kHidden, k = i % kHidden;
      const bool inside = first + k < v.r;
      const long long at = static_cast<long long>(begin + s) * v.r + first + k;
      dz1[s][k] = inside ? v.dz1[at] : A(0);
      h[s][k] = inside ? math::activate(v.activation, v.hidden[at]) : A(0);
    }
    __syncthreads();
    if (c < v.c) {
#pragma unroll 8
      for (int s = 0; s < samples; ++s) {
        const long long at = static_cast<long long>(begin + s) * v.c + c;
        const A p = v.pooled[at], dz2 = v.dz2[at];
        bias2 += dz2;
#pragma unroll
        for (int k = 0; k < kHidden; ++k) {
          sum1[k] += dz1[s][k] * p;
          sum2[k] += dz2 * h[s][k];
        }
      }
    }
    if (column == 0 && threadIdx.x < kHidden) {
      for (int s = 0; s < samples; ++s) bias1 += dz1[s][threadIdx.x];
    }
  }

  const int hidden = min(kHidden, v.r - first);
  if (db1 && column == 0 && static_cast<int>(threadIdx.x) < hidden) {
    db1[first + threadIdx.x] = from_accumulator<W>(bias1);
  }
  if (c >= v.c) return;
  if (db2 && row == 0) db2[c] = from_accumulator<W>(bias2);
#pragma unroll
  for (int k = 0; k < kHidden; ++k) {
    if (k >= hidden) break;
    if (dw1) dw1[static_cast<long long>(first + k) * v.c + c] = from_accumulator<W>(sum1[k]);
    if (dw2) dw2[static_cast<long long>(c) * v.r + first + k] = from_accumulator<W>(sum2[k]);
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
                             static_cast<int>(call.x.sizes[0]),
                             static_cast<int>(call.x.sizes[1]),
                             static_cast<int>(call.w1.sizes[0]),
                             call.activation};
    const std::int64_t blocks = std::int64_t{(vectors.c + kChannels - 1) / kChannels} *
                                ((vectors.r + kHidden - 1) / kHidden);
    launch_kernel({context, blocks, kChannels, 0, true}, "computing the weight gradients",
                  weight_gradients<W, A>, vectors, static_cast<W*>(call.dw1.data),
                  static_cast<W*>(call.db1.data), static_cast<W*>(call.dw2.data),
                  static_cast<W*>(call.db2.data));
  });
}

}  // namespace fusewise::cuda

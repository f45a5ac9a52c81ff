// dW1 = dz1^T p, db1 = sum dz1, dW2 = dz2^T h, db2 = sum dz2, summed over the samples in order.
// Memory: reads the [N, C] and [N, R] vectors, writes each gradient once; a few megabytes at most.
// Bound by latency: a thread has one channel and a few hidden units and loops over the samples.

#include "common/math.h"
#include "cuda/launch.cuh"
#include "cuda/squeeze_excite/weight_gradients.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kChannels = 64;  // per block
constexpr int kStrands = 4;    // threads that share a channel, each with every fourth sample
constexpr int kHidden = 8;     // hidden units per thread
constexpr int kThreads = kChannels * kStrands;
constexpr int kSamples = kThreads / kHidden;  // per stage: a thread loads one unit of one sample
constexpr int kMine = kSamples / kStrands;    // samples per thread

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
  __shared__ A parts[kStrands][2 * kHidden + 1][kChannels], bias_parts[kThreads / 32][kHidden];
  // Channels vary fastest, so that the grid has one dimension and no limit of 65535.
  const long long tiles = (v.c + kChannels - 1) / kChannels;
  const long long row = blockIdx.x / tiles, column = blockIdx.x - row * tiles;
  const int lane = threadIdx.x % kChannels, strand = threadIdx.x / kChannels;
  const long long c = column * kChannels + lane, first = row * kHidden;
  const int fetched_sample = threadIdx.x / kHidden, fetched_unit = threadIdx.x % kHidden;

  // dW1, dW2 and db2, in this order. Each stage is summed separately first, which keeps rounding
  // errors small for large batches.
  A sums[2 * kHidden + 1] = {}, bias1 = 0;
  for (long long begin = 0; begin < v.n; begin += kSamples) {
    const int samples = static_cast<int>(min(static_cast<long long>(kSamples), v.n - begin));
    const bool fetches = fetched_sample < samples && first + fetched_unit < v.r;
    const long long hidden_at = (begin + fetched_sample) * v.r + first + fetched_unit;
    // Forward's saved tensors can be read before the previous kernel is done.
    A pooled[kMine], dz2[kMine];
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int s = strand + j * kStrands;
      pooled[j] = c < v.c && s < samples ? v.pooled[(begin + s) * v.c + c] : A(0);
    }
    const A z1 = fetches ? v.hidden[hidden_at] : A(0);
    if (begin == 0) wait_for_previous_kernel();
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int s = strand + j * kStrands;
      dz2[j] = c < v.c && s < samples ? v.dz2[(begin + s) * v.c + c] : A(0);
    }
    const A fetched = fetches ? v.dz1[hidden_at] : A(0);
    bias1 += fetched;
    __syncthreads();
    dz1[fetched_sample][fetched_unit] = fetched;
    h[fetched_sample][fetched_unit] = fetches ? math::activate(v.activation, z1) : A(0);
    __syncthreads();
    A stage[2 * kHidden + 1] = {};
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int s = strand + j * kStrands;
#pragma unroll
      for (int k = 0; k < kHidden; ++k) {
        stage[k] += dz1[s][k] * pooled[j];
        stage[kHidden + k] += dz2[j] * h[s][k];
      }
      stage[2 * kHidden] += dz2[j];
    }
#pragma unroll
    for (int k = 0; k < 2 * kHidden + 1; ++k) sums[k] += stage[k];
  }
  if (v.n == 0) wait_for_previous_kernel();
  allow_next_kernel();

#pragma unroll
  for (int k = 0; k < 2 * kHidden + 1; ++k) parts[strand][k][lane] = sums[k];
#pragma unroll
  for (int offset = kHidden; offset < 32; offset *= 2) {
    bias1 += __shfl_xor_sync(0xffffffffu, bias1, offset);
  }
  if (threadIdx.x % 32 < kHidden) bias_parts[threadIdx.x / 32][threadIdx.x % 32] = bias1;
  __syncthreads();
  if (db1 && column == 0 && threadIdx.x < kHidden && first + threadIdx.x < v.r) {
    A sum = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += bias_parts[warp][threadIdx.x];
    db1[first + threadIdx.x] = from_accumulator<W>(sum);
  }
  if (c >= v.c) return;
  const auto total = [&](int k) {
    A sum = 0;
#pragma unroll
    for (int other = 0; other < kStrands; ++other) sum += parts[other][k][lane];
    return from_accumulator<W>(sum);
  };
  if (db2 && row == 0 && strand == 0) db2[c] = total(2 * kHidden);
  // Each strand writes some of the hidden units.
#pragma unroll
  for (int j = 0; j < kHidden / kStrands; ++j) {
    const int k = strand * (kHidden / kStrands) + j;
    if (first + k >= v.r) break;
    if (dw1) dw1[(first + k) * v.c + c] = total(k);
    if (dw2) dw2[c * v.r + first + k] = total(kHidden + k);
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

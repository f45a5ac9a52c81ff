// The passes of Squeeze-and-Excitation over channels-last images: sums over pixels, and scaling.
// Memory: forward reads x twice and writes y; backward reads dy twice, x once and writes dx. The
// second pass starts with what the first one read last, which is still in L2.
// Bound by memory bandwidth. A thread has 8 channels of every few pixels, with 8 loads in flight.

#include <type_traits>

#include "common/math.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/squeeze_excite/batched_kernels.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda::batched {
namespace {

constexpr int kImageThreads = kBatchedImageThreads;
constexpr int kVector = 8;  // channels of a thread
constexpr int kBatch = 8;   // loads that a thread has in flight

/// A block's part of a sample: a range of channels of every pixel.
struct Part {
  int columns;          ///< vectors of channels
  int strands, strand;  ///< threads that share a column's pixels
  int lane;             ///< of the thread in a row of columns
  long long channel;    ///< of the block's first, in an array of [N, C]
  long long start;      ///< of the thread's vector of the sample's first pixel
  int end;              ///< of the thread's pixels

  __device__ Part(const Arguments& a, const BatchedImages& cut, unsigned block) {
    const unsigned sample = block / cut.blocks;
    const int first = static_cast<int>(block - sample * cut.blocks) * cut.columns;
    columns = min(cut.columns, a.c / kVector - first);
    strands = kImageThreads / columns;
    strand = threadIdx.x / columns;
    lane = threadIdx.x - strand * columns;
    channel = static_cast<long long>(sample) * a.c + first * kVector;
    start = static_cast<long long>(sample) * a.hw * a.c + (first + lane) * kVector;
    end = strand < strands ? a.hw : 0;
  }
};

/// For data that is not read again soon: evicted from L2 first.
template <typename T>
__device__ __forceinline__ Vector<T> load_streaming(const T* address) {
  const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(address));
  return reinterpret_cast<const Vector<T>&>(bits);
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kImageThreads, 3) sum_kernel(Arguments a, BatchedImages cut) {
  __shared__ float rows[kImageThreads * kVector];
  const Part part(a, cut, blockIdx.x);
  const T* const kept = static_cast<const T*>(a.kept) + part.start;
  const T* const extra = static_cast<const T*>(a.extra) + (kBackward ? part.start : 0);
  wait_for_previous_kernel();
  allow_next_kernel();

  // The first sum of each batch is separate, which keeps rounding errors small.
  constexpr int kLoads = kBackward ? kBatch / 2 : kBatch;
  float total[kVector] = {};
  for (int first = part.strand; first < part.end; first += kLoads * part.strands) {
    Vector<T> v[kLoads], w[kBackward ? kLoads : 1];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int p = first + j * part.strands;
      const long long at = static_cast<long long>(p) * a.c;
      v[j] = p < part.end ? load_vector(kept + at) : Vector<T>{};
      if constexpr (kBackward) w[j] = p < part.end ? load_streaming(extra + at) : Vector<T>{};
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if constexpr (kBackward) {
          sum += v[j][k] * w[j][k];
        } else {
          sum += v[j][k];
        }
      }
      total[k] += sum;
    }
  }
  if (part.strand < part.strands) {
    float4* const row = reinterpret_cast<float4*>(rows + threadIdx.x * kVector);
    row[0] = make_float4(total[0], total[1], total[2], total[3]);
    row[1] = make_float4(total[4], total[5], total[6], total[7]);
  }
  __syncthreads();
  const int channels = part.columns * kVector;
  for (int c = threadIdx.x; c < channels; c += kImageThreads) {
    float sum = 0;
#pragma unroll 4
    for (int strand = 0; strand < part.strands; ++strand) sum += rows[strand * channels + c];
    if (kBackward) {
      a.dz2[part.channel + c] = math::gate_gradient(a.gate, a.gates[part.channel + c], sum);
    } else {
      a.pooled[part.channel + c] = sum * a.inverse_hw;
    }
  }
}

/// Eight values of an array of [N, C].
struct Values {
  float v[kVector];
  __device__ explicit Values(const float* from) {
    const float4 first = reinterpret_cast<const float4*>(from)[0];
    const float4 second = reinterpret_cast<const float4*>(from)[1];
    v[0] = first.x, v[1] = first.y, v[2] = first.z, v[3] = first.w;
    v[4] = second.x, v[5] = second.y, v[6] = second.z, v[7] = second.w;
  }
};

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kImageThreads) scale_kernel(Arguments a, BatchedImages cut) {
  const Part part(a, cut, gridDim.x - 1 - blockIdx.x);
  const T* const kept = static_cast<const T*>(a.kept) + part.start;
  T* const out = static_cast<T*>(a.out) + part.start;
  Vector<T> batch[kBatch];
  const auto load = [&](int first) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int p = first + j * part.strands;
      if (p < part.end) batch[j] = load_vector(kept + static_cast<long long>(p) * a.c);
    }
  };
  load(part.strand);  // the image is older than the previous kernel
  wait_for_previous_kernel();
  allow_next_kernel();
  if (part.end == 0) return;
  const long long channel = part.channel + part.lane * kVector;
  const Values gates(a.gates + channel), offsets((kBackward ? a.offsets : a.gates) + channel);
  for (int first = part.strand; first < part.end; first += kBatch * part.strands) {
    if (first != part.strand) load(first);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int p = first + j * part.strands;
      if (p >= part.end) break;
      Vector<T>& v = batch[j];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        v.set(k, kBackward ? fmaf(v[k], gates.v[k], offsets.v[k]) : v[k] * gates.v[k]);
      }
      store_streaming(out + static_cast<long long>(p) * a.c, v);
    }
  }
}

/// Calls `body` with a value of the half-precision type.
template <typename Body>
void dispatch_half(DType dtype, Body body) {
  if (dtype == DType::f16) {
    body(__half{});
  } else {
    body(__nv_bfloat16{});
  }
}

template <typename... Parameters>
void launch(const Context& context, const char* what, void (*kernel)(Parameters...),
            const Arguments& a) {
  const BatchedImages cut = batched_images(a.n, a.c, limits_of(context.device).multiprocessors);
  const Launch launch{context, std::int64_t{a.n} * cut.blocks, kImageThreads, 0,
                      /*overlaps_previous=*/true};
  launch_kernel(launch, what, kernel, a, cut);
}

}  // namespace

void sum_images(const Context& context, DType images, const Arguments& a, bool backward) {
  dispatch_half(images, [&]<typename T>(T) {
    launch(context, "summing over pixels", backward ? sum_kernel<T, true> : sum_kernel<T, false>,
           a);
  });
}

void scale_images(const Context& context, DType images, const Arguments& a, bool backward) {
  dispatch_half(images, [&]<typename T>(T) {
    launch(context, "scaling", backward ? scale_kernel<T, true> : scale_kernel<T, false>, a);
  });
}

}  // namespace fusewise::cuda::batched

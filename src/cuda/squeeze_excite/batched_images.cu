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
  int left;             ///< how many pixels the thread has

  __device__ Part(const Arguments& a, const BatchedImages& cut, unsigned block) {
    const unsigned sample = block / cut.blocks;
    const int first = static_cast<int>(block - sample * cut.blocks) * cut.columns;
    columns = min(cut.columns, a.c / kVector - first);
    strands = kImageThreads / columns;
    strand = threadIdx.x / columns;
    lane = threadIdx.x - strand * columns;
    channel = static_cast<long long>(sample) * a.c + first * kVector;
    start = static_cast<long long>(sample) * a.hw * a.c + (first + lane) * kVector;
    left = strand < strands ? (a.hw - strand + strands - 1) / strands : 0;
  }
};

/// Loads a vector, or gives zeros. The zeros are written first: with a choice after the load, the
/// compiler waits for some loads before it issues the others. `kLast`: evicted from L2 first.
template <bool kLast, typename T>
__device__ __forceinline__ Vector<T> load_or_zeros(const T* address, bool real) {
  uint4 bits;
  if constexpr (kLast) {
    asm volatile(
        "{\n"
        ".reg .pred real;\n"
        "setp.ne.b32 real, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@real ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "=&r"(bits.x), "=&r"(bits.y), "=&r"(bits.z), "=&r"(bits.w)
        : "l"(address), "r"(static_cast<int>(real)));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred real;\n"
        "setp.ne.b32 real, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@real ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "=&r"(bits.x), "=&r"(bits.y), "=&r"(bits.z), "=&r"(bits.w)
        : "l"(address), "r"(static_cast<int>(real)));
  }
  return reinterpret_cast<const Vector<T>&>(bits);
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kImageThreads, kBatchedImageBlocks)
    sum_kernel(Arguments a, BatchedImages cut) {
  __shared__ __align__(16) float rows[kImageThreads * kVector];
  const Part part(a, cut, blockIdx.x);
  const T* const kept = static_cast<const T*>(a.kept) + part.start;
  const T* const extra = static_cast<const T*>(a.extra) + (kBackward ? part.start : 0);
  wait_for_previous_kernel();
  allow_next_kernel();

  // Each batch has a sum of its own, which keeps rounding errors small.
  constexpr int kLoads = kBackward ? kBatch / 2 : kBatch;
  float total[kVector] = {};
  const long long step = static_cast<long long>(part.strands) * a.c;
  long long at = static_cast<long long>(part.strand) * a.c;
#pragma unroll 1
  for (int left = part.left; left > 0; left -= kLoads, at += kLoads * step) {
    Vector<T> v[kLoads], w[kBackward ? kLoads : 1];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      v[j] = load_or_zeros<false>(kept + at + j * step, j < left);
      if constexpr (kBackward) w[j] = load_or_zeros<true>(extra + at + j * step, j < left);
    }
    float sum[kVector] = {};
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if constexpr (kBackward) {
          sum[k] += v[j][k] * w[j][k];
        } else {
          sum[k] += v[j][k];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) total[k] += sum[k];
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
__global__ void __launch_bounds__(kImageThreads, kBatchedImageBlocks)
    scale_kernel(Arguments a, BatchedImages cut) {
  const Part part(a, cut, gridDim.x - 1 - blockIdx.x);
  const T* const kept = static_cast<const T*>(a.kept) + part.start;
  T* const out = static_cast<T*>(a.out) + part.start;
  const long long step = static_cast<long long>(part.strands) * a.c;
  long long at = static_cast<long long>(part.strand) * a.c;
  Vector<T> batch[kBatch];
  const auto load = [&](int left) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (j < left) batch[j] = load_vector(kept + at + j * step);
    }
  };
  load(part.left);  // the image is older than the previous kernel
  wait_for_previous_kernel();
  allow_next_kernel();
  if (part.left <= 0) return;
  const long long channel = part.channel + part.lane * kVector;
  const Values gates(a.gates + channel), offsets((kBackward ? a.offsets : a.gates) + channel);
  for (int left = part.left;;) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (j >= left) break;
      Vector<T>& v = batch[j];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        v.set(k, kBackward ? fmaf(v[k], gates.v[k], offsets.v[k]) : v[k] * gates.v[k]);
      }
      store_streaming(out + at + j * step, v);
    }
    left -= kBatch;
    if (left <= 0) return;
    at += kBatch * step;
    load(left);
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

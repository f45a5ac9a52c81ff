// Reconstruction, latent vector or anomaly score of few rows, for any sizes that fit into shared
// memory. A block processes one to four rows. It reads every parameter from L2 once, and the basis
// a second time unless L1 still has it. One kernel instead of the seven of general.cu: bound by
// latency. Sums are float32, and nothing between input and output is rounded.

#include "common/divide.h"
#include "cuda/autoencoder/kernels.h"
#include "cuda/autoencoder/layer_norm.cuh"
#include "cuda/autoencoder/mma_registers.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kLanes = 4;  // that share a result of a Linear; each finishes one of as many segments

struct Arguments {
  AutoencoderTensors<const void*> parameters;
  AutoencoderSizes sizes;
  const void* x;
  void *out, *z;
  float *score, *projection;
  long long x_stride;
};

template <typename W>
__device__ __forceinline__ float load_one(const void* tensor, long long at) {
  return to_accumulator<float>(static_cast<const W*>(tensor)[at]);
}

/// LayerNorm of a segment in shared memory by one warp, with weight and bias.
template <typename W>
__device__ __forceinline__ void normalise_segment(float* values, int columns, const void* weight,
                                                  const void* bias) {
  const int lane = threadIdx.x % 32;
  float sum = 0, squares = 0;
  for (int i = lane; i < columns; i += 32) sum += values[i];
  const float mean = warp_sum(sum) / columns;
  for (int i = lane; i < columns; i += 32)
    squares = fmaf(values[i] - mean, values[i] - mean, squares);
  const float inverse = inverse_root(warp_sum(squares) / columns + 1e-5f);
  for (int i = lane; i < columns; i += 32) {
    values[i] = fmaf((values[i] - mean) * inverse, load_one<W>(weight, i), load_one<W>(bias, i));
  }
}

/// Calls finish(segment, output, value) for all results of a Linear of `segments` segments in
/// shared memory.
template <typename W, typename Finish>
__device__ __forceinline__ void linear(const void* weight, const void* bias, const float* in,
                                       int segments, int inputs, int outputs, Finish finish) {
  const int lane = threadIdx.x % kLanes;
  const int items = (segments + kLanes - 1) / kLanes * outputs;
  // All lanes of a warp take part in each sum, so the loop ends for all of them together.
  for (int first = 0; first < items; first += kThreads / kLanes) {
    const int item = min(first + static_cast<int>(threadIdx.x) / kLanes, items - 1);
    const int output = item % outputs, segment = item / outputs * kLanes;
    float sums[kLanes] = {};
#pragma unroll 4
    for (int k = lane; k < inputs; k += kLanes) {
      const float w = load_one<W>(weight, static_cast<long long>(output) * inputs + k);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        sums[i] = fmaf(w, in[min(segment + i, segments - 1) * inputs + k], sums[i]);
      }
    }
    float own = 0;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const float sum = warp_sum(sums[i], kLanes);
      if (i == lane) own = sum;
    }
    const bool real = first + static_cast<int>(threadIdx.x) / kLanes < items;
    if (!real || segment + lane >= segments) continue;
    finish(segment + lane, output, own + load_one<W>(bias, output));
  }
}

template <typename T, typename W, int kRows>
__global__ void __launch_bounds__(kThreads) any_size_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ float memory[];
  const auto& p = a.parameters;
  const AutoencoderSizes& s = a.sizes;
  const int width = s.frames * s.n_mels, hidden = s.frames * s.slice_latent, l = s.latent;
  float* const frames = memory;                    // [kRows, frames, n_mels], later squares
  float* const slices = frames + kRows * width;    // [kRows, frames, slice_latent]
  float* const latents = slices + kRows * hidden;  // [kRows, latent]: input of the bottleneck
  float* const scaled = latents + kRows * l;       // [kRows, latent]: z over the vectors' norms
  float* const inverse = scaled + kRows * l;       // [latent]: 1 / norm of a basis vector
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long first = static_cast<long long>(blockIdx.x) * kRows;
  const auto row_of = [&](int r) {
    return min(first + r, s.rows - 1ll);
  };  // past the end: the last

  for (int i = threadIdx.x; i < kRows * width; i += kThreads) {
    frames[i] = load_one<T>(a.x, row_of(i / width) * a.x_stride + i % width);
  }
  __syncthreads();
  for (int f = warp; f < kRows * s.frames; f += kWarps) {
    normalise_segment<W>(frames + f * s.n_mels, s.n_mels, p.norm_weight, p.norm_bias);
  }
  __syncthreads();
  linear<W>(p.encoder_weight, p.encoder_bias, frames, kRows * s.frames, s.n_mels, s.slice_latent,
            [&](int f, int output, float value) {
              slices[f * s.slice_latent + output] = gelu_of_any<ExactProducts::kGeluDegree>(value);
            });
  __syncthreads();

  // Projection onto the basis, one warp per vector.
  for (int v = warp; v < l; v += kWarps) {
    float sums[kRows] = {}, squares = 0;
#pragma unroll 4
    for (int k = lane; k < hidden; k += 32) {
      const float b = load_one<W>(p.basis, static_cast<long long>(v) * hidden + k);
      squares = fmaf(b, b, squares);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = fmaf(b, slices[r * hidden + k], sums[r]);
    }
    const float scale = inverse_norm(warp_sum(squares));
    if (lane == 0) inverse[v] = scale;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float value = warp_sum(sums[r]) * scale;
      if (lane > 0) continue;
      latents[r * l + v] = value;
      if (a.projection != nullptr && first + r < s.rows) a.projection[(first + r) * l + v] = value;
    }
  }
  __syncthreads();
  if (warp < kRows) {
    normalise_segment<W>(latents + warp * l, l, p.mid_norm_weight, p.mid_norm_bias);
  }
  __syncthreads();
  linear<W>(p.mid_weight, p.mid_bias, latents, kRows, l, l, [&](int r, int output, float value) {
    const float z = gelu_of_any<ExactProducts::kGeluDegree>(value);
    if (a.z != nullptr && first + r < s.rows) {
      static_cast<T*>(a.z)[(first + r) * l + output] = from_accumulator<T>(z);
    }
    scaled[r * l + output] = z * inverse[output];
  });
  if (a.out == nullptr && a.score == nullptr) return;
  __syncthreads();

  for (int k = threadIdx.x; k < hidden; k += kThreads) {
    float sums[kRows] = {};
#pragma unroll 8
    for (int v = 0; v < l; ++v) {
      const float b = load_one<W>(p.basis, static_cast<long long>(v) * hidden + k);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = fmaf(b, scaled[r * l + v], sums[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) slices[r * hidden + k] = sums[r];
  }
  __syncthreads();
  linear<W>(p.decoder_weight, p.decoder_bias, slices, kRows * s.frames, s.slice_latent, s.n_mels,
            [&](int f, int mel, float value) {
              const int r = f / s.frames, column = f % s.frames * s.n_mels + mel;
              if (a.out != nullptr && first + r < s.rows) {
                static_cast<T*>(a.out)[(first + r) * width + column] = from_accumulator<T>(value);
              }
              if (a.score == nullptr) return;
              const float difference = value - load_one<T>(a.x, row_of(r) * a.x_stride + column);
              frames[r * width + column] = difference * difference;
            });
  if (a.score == nullptr) return;
  __syncthreads();
  if (warp < kRows && first + warp < s.rows) {
    float sum = 0;
    for (int i = lane; i < width; i += 32) sum += frames[warp * width + i];
    sum = warp_sum(sum) / width;
    if (lane == 0) a.score[first + warp] = sum;
  }
}

}  // namespace

void run_any_size(const Context& context, const AutoencoderForwardArguments& call) {
  const Arguments a{call.parameters,
                    call.sizes,
                    call.x,
                    call.out,
                    call.z,
                    static_cast<float*>(call.score),
                    static_cast<float*>(call.projection),
                    call.x_stride};
  const std::int64_t rows = call.sizes.rows;
  const int each = any_size_rows(limits_of(context.device).multiprocessors, call.sizes);
  dispatch_short_dtypes(call.dtype, call.parameter_dtype, [&]<typename T, typename W>(T, W) {
    const auto launch = [&]<int kRows>(std::integral_constant<int, kRows>) {
      const auto bytes = static_cast<std::size_t>(any_size_bytes(call.sizes, kRows));
      launch_kernel({context, divide_up(rows, kRows), kThreads, bytes},
                    "running the autoencoder on few rows", any_size_kernel<T, W, kRows>, a);
    };
    if (each == 1) return launch(std::integral_constant<int, 1>{});
    if (each == 2) return launch(std::integral_constant<int, 2>{});
    launch(std::integral_constant<int, 4>{});
  });
}

}  // namespace fusewise::cuda::autoencoder

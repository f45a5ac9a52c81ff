// Reconstruction, latent vector or anomaly score of few rows, for any sizes that fit into shared
// memory. A block processes one to four rows, and copies every parameter once, from L2 into shared
// memory. One kernel instead of the seven of general.cu: bound by latency. Sums are float32, and
// nothing between input and output is rounded.

#include <cstdint>
#include <type_traits>

#include "common/divide.h"
#include "cuda/autoencoder/kernels.h"
#include "cuda/autoencoder/layer_norm.cuh"
#include "cuda/autoencoder/mma_registers.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

struct Arguments {
  AutoencoderTensors<const void*> parameters;
  AutoencoderSizes sizes;
  const void* x;
  void *out, *z;
  float *score, *projection;
  long long x_stride;
};

/// The same value of all rows of a block: one access to shared memory.
template <int kRows>
struct alignas(4 * kRows) Rows {
  float of[kRows];

  /// Adds weight * value.
  __device__ __forceinline__ void add(float weight, const Rows& value) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) of[r] = fmaf(weight, value.of[r], of[r]);
  }
};

/// Copies a matrix into shared memory at `free`, which moves on. The row stride is odd, so that
/// neighbouring rows are in different banks. Float32 is copied asynchronously.
template <typename W>
__device__ __forceinline__ const float* stage(const void* tensor, int rows, int columns,
                                              float*& free) {
  constexpr bool kAsync = std::is_same_v<W, float>;
  constexpr int kInFlight = kAsync ? 4 : 8;  // half precision waits for each batch
  const W* from = static_cast<const W*>(tensor);
  float* const to = free;
  const int stride = any_size_stride(columns), count = rows * columns;
  free += rows * stride;
  // Each tensor starts at another thread, so that not all short ones are copied by the first warps.
  const auto start = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(to) / sizeof(float));
  const int thread = (threadIdx.x - start) % kThreads;
  int row = thread / columns, column = thread % columns;
  const int next_row = kThreads / columns, next_column = kThreads % columns;
  for (int first = thread; first < count; first += kInFlight * kThreads) {
    W values[kInFlight];
    if constexpr (!kAsync) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) values[i] = from[min(first + i * kThreads, count - 1)];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + i * kThreads;
      if (at >= count) break;
      if constexpr (kAsync) {
        copy_float(to + row * stride + column, from + at);
      } else {
        to[row * stride + column] = to_accumulator<float>(values[i]);
      }
      row += next_row;
      column += next_column;
      if (column >= columns) column -= columns, ++row;
    }
  }
  return to;
}

/// LayerNorm of a segment of all rows by one warp, with weight and bias.
template <int kRows>
__device__ __forceinline__ void normalise_segment(Rows<kRows>* values, int columns,
                                                  const float* weight, const float* bias) {
  const int lane = threadIdx.x % 32;
  Rows<kRows> mean{}, inverse{};
  for (int i = lane; i < columns; i += 32) mean.add(1.f, values[i]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) mean.of[r] = warp_sum(mean.of[r]) / columns;
  for (int i = lane; i < columns; i += 32) {
    const Rows<kRows> value = values[i];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float d = value.of[r] - mean.of[r];
      inverse.of[r] = fmaf(d, d, inverse.of[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    inverse.of[r] = inverse_root(warp_sum(inverse.of[r]) / columns + 1e-5f);
  }
  for (int i = lane; i < columns; i += 32) {
    Rows<kRows> value = values[i];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      value.of[r] = fmaf((value.of[r] - mean.of[r]) * inverse.of[r], weight[i], bias[i]);
    }
    values[i] = value;
  }
}

/// Calls finish(segment, output, values of all rows) for all results of a Linear of `segments`
/// segments. Neighbouring threads have neighbouring outputs.
template <int kRows, typename Finish>
__device__ __forceinline__ void linear(const float* weight, const float* bias,
                                       const Rows<kRows>* in, int segments, int inputs, int outputs,
                                       Finish finish) {
  constexpr int kChains = 4;  // independent sums
  for (int item = threadIdx.x; item < segments * outputs; item += kThreads) {
    const int segment = item / outputs, output = item % outputs;
    const float* const w = weight + output * any_size_stride(inputs);
    const Rows<kRows>* const values = in + segment * inputs;
    Rows<kRows> sums[kChains] = {};
    int k = 0;
#pragma unroll 2
    for (; k + kChains <= inputs; k += kChains) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) sums[i].add(w[k + i], values[k + i]);
    }
    for (; k < inputs; ++k) sums[0].add(w[k], values[k]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[0].of[r] = (sums[0].of[r] + sums[1].of[r]) + (sums[2].of[r] + sums[3].of[r]);
      sums[0].of[r] += bias[output];
    }
    finish(segment, output, sums[0]);
  }
}

template <typename T, typename W, int kRows>
__global__ void __launch_bounds__(kThreads) any_size_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) float memory[];
  const auto& p = a.parameters;
  const AutoencoderSizes& s = a.sizes;
  const int m = s.n_mels, h = s.slice_latent, l = s.latent;
  const int width = s.frames * m, hidden = s.frames * h;
  auto* const frames = reinterpret_cast<Rows<kRows>*>(memory);  // [frames, n_mels], later squares
  Rows<kRows>* const slices = frames + width;                   // [frames, slice_latent]
  Rows<kRows>* const latents = slices + hidden;                 // [latent]: input of the bottleneck
  Rows<kRows>* const scaled = latents + l;                      // [latent]: z over vectors' norms
  float* const inverse = memory + kRows * (width + hidden + 2 * l);  // [latent]: 1 / vector's norm
  float* free = inverse + l;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long first = static_cast<long long>(blockIdx.x) * kRows;
  const T* const x = static_cast<const T*>(a.x);
  const auto load_x = [&](int r, int column) {  // past the end: the last row
    const long long row = min(first + r, s.rows - 1ll);
    return to_accumulator<float>(x[row * a.x_stride + column]);
  };

  const float* const norm_weight = stage<W>(p.norm_weight, 1, m, free);
  const float* const norm_bias = stage<W>(p.norm_bias, 1, m, free);
  const float* const encoder = stage<W>(p.encoder_weight, h, m, free);
  const float* const encoder_bias = stage<W>(p.encoder_bias, 1, h, free);
  for (int i = threadIdx.x; i < kRows * width; i += kThreads) {
    frames[i % width].of[i / width] = load_x(i / width, i % width);
  }
  wait_for_copies();
  __syncthreads();
  for (int f = warp; f < s.frames; f += kWarps) {
    normalise_segment(frames + f * m, m, norm_weight, norm_bias);
  }
  // These copies land while the encoder works.
  const float* const basis = stage<W>(p.basis, l, hidden, free);
  const float* const mid_norm_weight = stage<W>(p.mid_norm_weight, 1, l, free);
  const float* const mid_norm_bias = stage<W>(p.mid_norm_bias, 1, l, free);
  const float* const mid = stage<W>(p.mid_weight, l, l, free);
  const float* const mid_bias = stage<W>(p.mid_bias, 1, l, free);
  const float* const decoder = stage<W>(p.decoder_weight, m, h, free);
  const float* const decoder_bias = stage<W>(p.decoder_bias, 1, m, free);
  const int basis_stride = any_size_stride(hidden);
  __syncthreads();
  linear(encoder, encoder_bias, frames, s.frames, m, h, [&](int f, int output, Rows<kRows> value) {
#pragma unroll
    for (float& v : value.of) v = gelu_of_any<ExactProducts::kGeluDegree>(v);
    slices[f * h + output] = value;
  });
  wait_for_copies();
  __syncthreads();

  // Projection onto the basis, one warp per vector.
  for (int v = warp; v < l; v += kWarps) {
    Rows<kRows> sums{};
    float squares = 0;
#pragma unroll 4
    for (int k = lane; k < hidden; k += 32) {
      const float b = basis[v * basis_stride + k];
      squares = fmaf(b, b, squares);
      sums.add(b, slices[k]);
    }
    const float scale = inverse_norm(warp_sum(squares));
#pragma unroll
    for (float& sum : sums.of) sum = warp_sum(sum) * scale;
    if (lane > 0) continue;
    inverse[v] = scale;
    latents[v] = sums;
    if (a.projection == nullptr) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r < s.rows) a.projection[(first + r) * l + v] = sums.of[r];
    }
  }
  __syncthreads();
  if (warp == 0) normalise_segment(latents, l, mid_norm_weight, mid_norm_bias);
  __syncthreads();
  linear(mid, mid_bias, latents, 1, l, l, [&](int, int output, Rows<kRows> value) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float z = gelu_of_any<ExactProducts::kGeluDegree>(value.of[r]);
      if (a.z != nullptr && first + r < s.rows) {
        static_cast<T*>(a.z)[(first + r) * l + output] = from_accumulator<T>(z);
      }
      value.of[r] = z * inverse[output];
    }
    scaled[output] = value;
  });
  if (a.out == nullptr && a.score == nullptr) return;
  __syncthreads();

  for (int k = threadIdx.x; k < hidden; k += kThreads) {
    Rows<kRows> sums{};
#pragma unroll 8
    for (int v = 0; v < l; ++v) sums.add(basis[v * basis_stride + k], scaled[v]);
    slices[k] = sums;
  }
  __syncthreads();
  linear(decoder, decoder_bias, slices, s.frames, h, m, [&](int f, int mel, Rows<kRows> value) {
    const int column = f * m + mel;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (a.out != nullptr && first + r < s.rows) {
        static_cast<T*>(a.out)[(first + r) * width + column] = from_accumulator<T>(value.of[r]);
      }
      if (a.score == nullptr) continue;
      const float difference = value.of[r] - load_x(r, column);
      value.of[r] = difference * difference;
    }
    frames[column] = value;
  });
  if (a.score == nullptr) return;
  __syncthreads();
  if (warp < kRows && first + warp < s.rows) {
    float sum = 0;
    for (int i = lane; i < width; i += 32) sum += frames[i].of[warp];
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

// Reconstruction, latent vector or anomaly score of few rows, default sizes only. A block processes
// one to four rows, and its threads hold all parameters in registers. The parameters are read
// unpacked, so no packing kernel is needed. Each block reads them once, from L2. Bound by latency:
// the parameter loads overlap with normalising x. The GEMMs use float32 FMA units, because so few
// rows would leave most of a tensor core tile empty.

#include "cuda/autoencoder/kernels.h"
#include "cuda/autoencoder/warp_tile.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kMels = 64, kFrames = 5, kLatent = 32, kSlice = 64;
constexpr int kWidth = kFrames * kMels;
static_assert(kMels == kSlice, "a frame has as many values before the encoder as behind it");
constexpr int kMostRows = 4;                // per block
constexpr int kWarps = kWidth / 16;         // each has 16 columns of the basis
constexpr int kLinearThreads = 8 * kSlice;  // threads that compute encoder and decoder
constexpr int kMidStride = kLatent + 4;     // padded: neighbouring rows are in different banks

struct Arguments {
  AutoencoderTensors<const void*> parameters;
  const void* x;
  void *out, *z;
  float *score, *projection;
  long long rows, x_stride;
};

/// Parameters are converted only when they are used, so that nothing waits for the loads earlier.
template <typename W>
__device__ __forceinline__ Four<W> load_four(const void* tensor, int at) {
  Four<W> four;
  four.load(static_cast<const W*>(tensor) + at);
  return four;
}
template <typename W>
__device__ __forceinline__ float4 expand(const Four<W>& four) {
  return make_float4(four[0], four[1], four[2], four[3]);
}
template <typename W>
__device__ __forceinline__ float load_one(const void* tensor, int at) {
  return to_accumulator<float>(static_cast<const W*>(tensor)[at]);
}
__device__ __forceinline__ float dot(float4 a, float4 b) {
  return fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w);
}

/// For LayerNorm, a warp has a whole row.
__device__ __forceinline__ float row_sum_of_warp(float value) { return warp_sum(value); }

/// Sums each value over kLanes lanes that are kStride apart. Afterwards, lane i of them has the
/// sums of kCount / kLanes values, starting at value i * kCount / kLanes.
template <int kLanes, int kStride, int kCount, int kRoom>
__device__ __forceinline__ void sum_and_deal(float (&values)[kRoom]) {
  if constexpr (kLanes > 1) {
    constexpr int kHalf = kCount / 2, kOffset = kLanes / 2 * kStride;
    const bool upper = threadIdx.x & kOffset;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float sent = upper ? values[i] : values[i + kHalf];
      const float kept = upper ? values[i + kHalf] : values[i];
      values[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kOffset);
    }
    sum_and_deal<kLanes / 2, kStride, kHalf>(values);
  }
}

/// Encoder or decoder. 16 neighbouring lanes have two rows of its weights, four columns each.
template <typename W>
struct LinearRows {
  Four<W> weights[2];
  float bias;  // of the row whose result this lane writes

  static __device__ __forceinline__ int row() { return threadIdx.x / 16 * 2; }
  static __device__ __forceinline__ int finished_row() { return threadIdx.x / 8; }

  __device__ __forceinline__ void load(const void* weight, const void* biases) {
    const int column = threadIdx.x % 16 * 4;
    weights[0] = load_four<W>(weight, 64 * row() + column);
    weights[1] = load_four<W>(weight, 64 * (row() + 1) + column);
    bias = load_one<W>(biases, finished_row());
  }
  /// Calls finish(frame, value in finished_row()) for all kRows * kFrames frames, in eight lanes.
  template <int kRows, typename Finish>
  __device__ __forceinline__ void multiply(const float* frames, Finish finish) const {
    constexpr int kCount = kRows * kFrames, kEach = (kCount + 7) / 8;
    const float4 upper = expand(weights[0]), lower = expand(weights[1]);
    float sums[2 * 8 * kEach] = {};
#pragma unroll
    for (int f = 0; f < kCount; ++f) {
      const float4 value = *reinterpret_cast<const float4*>(frames + 64 * f + threadIdx.x % 16 * 4);
      sums[f] = dot(upper, value);
      sums[8 * kEach + f] = dot(lower, value);
    }
    sum_and_deal<16, 1, 16 * kEach>(sums);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int f = threadIdx.x % 8 * kEach + i;
      if (f < kCount) finish(f, sums[i] + bias);
    }
  }
};

template <typename T, typename W, int kRows>
__global__ void __launch_bounds__(32 * kWarps, 1)
    few_rows_kernel(const __grid_constant__ Arguments a) {
  __shared__ __align__(16) float frames[kRows * kWidth];  // the input of encoder and decoder
  __shared__ __align__(16) float slices[kRows * kWidth];  // the encoder's results
  __shared__ float original[kRows * kWidth];
  __shared__ float parts[kWarps][kRows + 1][kLatent];  // partial sums: projection, norms
  __shared__ __align__(16) float mid[kLatent * kMidStride];
  __shared__ __align__(16) float latents[kRows][kLatent];
  const auto& p = a.parameters;
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const long long first = static_cast<long long>(blockIdx.x) * kRows;

  // Load x first, because the longest dependency chain starts with it. A warp has a frame.
  const bool has_frame = warp < kRows * kFrames;
  const long long row = min(first + warp / kFrames, a.rows - 1);
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride + warp % kFrames * kMels;
  float frame[2] = {};
  if (has_frame) frame[0] = load_one<T>(x, lane), frame[1] = load_one<T>(x, lane + 32);
  const bool has_linear = threadIdx.x < kLinearThreads;
  LinearRows<W> encoder, decoder;
  if (has_linear) encoder.load(p.encoder_weight, p.encoder_bias);
  const float scale[2] = {load_one<W>(p.norm_weight, lane), load_one<W>(p.norm_weight, lane + 32)};
  const float shift[2] = {load_one<W>(p.norm_bias, lane), load_one<W>(p.norm_bias, lane + 32)};
  // A lane has four columns of four basis vectors.
  const int vector = lane / 4 * 4, column = 16 * warp + lane % 4 * 4;
  Four<W> basis_values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    basis_values[i] = load_four<W>(p.basis, (vector + i) * kWidth + column);
  }
  const bool has_mid = threadIdx.x < kLatent * kLatent / 4;
  Four<W> mid_values;
  if (has_mid) mid_values = load_four<W>(p.mid_weight, threadIdx.x * 4);
  if (has_linear) decoder.load(p.decoder_weight, p.decoder_bias);
  float mid_scale = 0.f, mid_shift = 0.f, mid_bias = 0.f;
  if (warp < kRows) {
    mid_scale = load_one<W>(p.mid_norm_weight, lane);
    mid_shift = load_one<W>(p.mid_norm_bias, lane);
    mid_bias = load_one<W>(p.mid_bias, lane);
  }

  if (has_frame) {
    const int at = warp * kMels + lane;
    original[at] = frame[0], original[at + 32] = frame[1];
    normalise_row<1, 2>([&](int, int i) -> float& { return frame[1 - i]; }, row_sum_of_warp, kMels);
    frames[at] = fmaf(frame[0], scale[0], shift[0]);
    frames[at + 32] = fmaf(frame[1], scale[1], shift[1]);
  }
  __syncthreads();

  const int output = LinearRows<W>::finished_row();
  if (has_linear) {
    encoder.multiply<kRows>(frames, [&](int f, float value) {
      slices[f * kSlice + output] = gelu<ExactProducts::kGeluDegree>(value);
    });
  }
  __syncthreads();

  // Projection onto the basis, which is not normalised yet. Each warp sums over its own columns;
  // then the warps' results are added.
  float4 basis[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) basis[i] = expand(basis_values[i]);
  if (has_mid) {
    float* at = mid + threadIdx.x / 8 * kMidStride + threadIdx.x % 8 * 4;
    *reinterpret_cast<float4*>(at) = expand(mid_values);
  }
  {
    float sums[4 * (kRows + 1)];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 slice = *reinterpret_cast<const float4*>(slices + r * kWidth + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i * (kRows + 1) + r] = dot(basis[i], slice);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i * (kRows + 1) + kRows] = dot(basis[i], basis[i]);
    sum_and_deal<4, 1, 4 * (kRows + 1)>(sums);
#pragma unroll
    for (int r = 0; r <= kRows; ++r) parts[warp][r][lane] = sums[r];
  }
  __syncthreads();

  // The bottleneck: one warp per row, one lane per basis vector.
  if (warp < kRows) {
    float value = 0.f, squares = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      value += parts[w][warp][lane];
      squares += parts[w][kRows][lane];
    }
    const float basis_scale = inverse_norm(squares);
    value *= basis_scale;
    const bool real = first + warp < a.rows;
    const long long at = (first + warp) * kLatent + lane;
    if (real && a.projection != nullptr) a.projection[at] = value;
    normalise_row<1, 1>([at = &value](int, int) -> float& { return *at; }, row_sum_of_warp,
                        kLatent);
    latents[warp][lane] = fmaf(value, mid_scale, mid_shift);
    __syncwarp();
    float sum = mid_bias;
#pragma unroll
    for (int k = 0; k < kLatent; k += 4) {
      sum += dot(*reinterpret_cast<const float4*>(mid + lane * kMidStride + k),
                 *reinterpret_cast<const float4*>(latents[warp] + k));
    }
    const float z = gelu_of_any<ExactProducts::kGeluDegree>(sum);
    if (real && a.z != nullptr) static_cast<T*>(a.z)[at] = from_accumulator<T>(z);
    __syncwarp();
    latents[warp][lane] = z * basis_scale;
  }
  if (a.out == nullptr && a.score == nullptr) return;
  __syncthreads();

  // Multiply the latents by the basis: each warp computes its own columns, summed over all vectors.
  {
    float sums[4 * kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 z = *reinterpret_cast<const float4*>(latents[r] + vector);
      const auto along = [&](float b0, float b1, float b2, float b3) {
        return dot(z, make_float4(b0, b1, b2, b3));
      };
      sums[r] = along(basis[0].x, basis[1].x, basis[2].x, basis[3].x);
      sums[kRows + r] = along(basis[0].y, basis[1].y, basis[2].y, basis[3].y);
      sums[2 * kRows + r] = along(basis[0].z, basis[1].z, basis[2].z, basis[3].z);
      sums[3 * kRows + r] = along(basis[0].w, basis[1].w, basis[2].w, basis[3].w);
    }
    // Eight lanes have partial sums of the same four columns. After this call, pairs of lanes four
    // apart have the same column.
    sum_and_deal<4, 8, 4 * kRows>(sums);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 4);
      if ((lane & 4) == 0) frames[r * kWidth + column + lane / 8] = sums[r];
    }
  }
  __syncthreads();

  if (has_linear) {
    decoder.multiply<kRows>(frames, [&](int f, float value) {
      const long long to = first + f / kFrames;
      if (a.out != nullptr && to < a.rows) {
        static_cast<T*>(a.out)[to * kWidth + f % kFrames * kMels + output] =
            from_accumulator<T>(value);
      }
      const float difference = value - original[f * kMels + output];
      slices[f * kMels + output] = difference * difference;
    });
  }
  if (a.score == nullptr) return;
  __syncthreads();
  if (warp < kRows && first + warp < a.rows) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kWidth; i += 32) sum += slices[warp * kWidth + i + lane];
    sum = warp_sum(sum) * (1.f / kWidth);
    if (lane == 0) a.score[first + warp] = sum;
  }
}

}  // namespace

void run_few_rows(const Context& context, const AutoencoderForwardArguments& call) {
  const Arguments a{call.parameters,
                    call.x,
                    call.out,
                    call.z,
                    static_cast<float*>(call.score),
                    static_cast<float*>(call.projection),
                    call.sizes.rows,
                    call.x_stride};
  dispatch_short_dtypes(call.dtype, call.parameter_dtype, [&]<typename T, typename W>(T, W) {
    const std::int64_t all = limits_of(context.device).multiprocessors;
    const auto launch = [&]<int kRows>(std::integral_constant<int, kRows>) {
      launch_kernel({context, (a.rows + kRows - 1) / kRows, 32 * kWarps},
                    "running the autoencoder on few rows", few_rows_kernel<T, W, kRows>, a);
    };
    if (a.rows <= all) return launch(std::integral_constant<int, 1>{});
    if (a.rows <= 2 * all) return launch(std::integral_constant<int, 2>{});
    launch(std::integral_constant<int, kMostRows>{});
  });
}

}  // namespace fusewise::cuda::autoencoder

// Folds and packs the parameters for the fused kernels: normalises the basis, folds LayerNorm's
// affine part into the Linear, multiplies decoder by basis. Reads each parameter a few times,
// writes some 100 KB. Bound by latency: a block computes one row of a matrix, and several blocks
// share a basis vector.

#include <algorithm>

#include "cuda/autoencoder/mma_registers.cuh"
#include "cuda/autoencoder/pack.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kThreads = 256;
constexpr int kDotLanes = 8;  // lanes that share an element of decoder times basis

template <typename W, typename E>
struct Packing {
  AutoencoderTensors<const void*> parameters;
  PackedLayout layout;
  int n_mels, frames, latent, slice_latent;
  int parts;  // blocks that share a basis vector
  bool backward;
  PackedOrder order;
  E* weights;
  float* floats;

  static __device__ __forceinline__ float read(const void* tensor, long long i) {
    return to_accumulator<float>(static_cast<const W*>(tensor)[i]);
  }
};

/// What a matrix's inputs or outputs are, if its element order depends on that: a frame's columns,
/// or the bottleneck on both sides.
enum class MatrixRole { other, mel_inputs, mel_outputs, bottleneck };

/// Weight layout for wgmma: one line of up to 128 bytes of inputs per output, swizzled by eighths
/// of such a line. Inputs are in the order that left operands have in registers. A frame's columns
/// are placed so that a lane gets those that it loads together.
template <typename E>
__device__ __forceinline__ int wgmma_position(int n, int k, int inputs, MatrixRole role) {
  constexpr int kVector = 16 / sizeof(E);
  const auto place = [](int m) {
    const int c = m / (4 * kVector) * kVector + m % kVector;
    return 8 * (c / 2) + 2 * (m / kVector % 4) + c % 2;
  };
  if (role == MatrixRole::mel_outputs) n = place(n);
  if (role == MatrixRole::mel_inputs) k = place(k);
  if (sizeof(E) == 4) k = (k & ~7) | (k >> 1 & 3) | (k & 1) << 2;
  const int line = min(inputs, 8 * kVector), row = n % 8;
  const int chunk = k % line / kVector ^ (line == 8 * kVector ? row : row / 2);
  return ((n / 8 * (inputs / line) + k / line) * 8 + row) * line + chunk * kVector + k % kVector;
}

/// Index of output n, input k in a packed matrix. For operands in registers, mma_registers.cuh
/// explains the order. For operands in shared memory, columns have the tensor cores' own order,
/// except for the bottleneck, whose operands mma_shared.cuh has in registers.
template <typename E>
__device__ __forceinline__ int position(PackedOrder order, int n, int k, int input_blocks,
                                        MatrixRole role) {
  if (order == PackedOrder::wgmma) return wgmma_position<E>(n, k, 16 * input_blocks, role);
  if (order == PackedOrder::registers) return register_position(n, k, input_blocks);
  int tile, g, t = (k & 15) >> 2, i = k & 3;
  if (sizeof(E) == 4) {
    // Outputs in the order of mma_shared.cuh's results.
    tile = n >> 5 << 2 | (n >> 2 & 3), g = n >> 2 & 4 | (n & 3);
    if (role != MatrixRole::bottleneck) t = k & 3, i = (k & 15) >> 2;
  } else {
    tile = n >> 3, g = n & 7;
    if (role != MatrixRole::bottleneck) t = (k & 7) >> 1, i = (k & 8) >> 2 | (k & 1);
  }
  return 4 * ((tile * input_blocks + (k >> 4)) * 32 + 4 * g + t) + i;
}

/// One row of a Linear after a LayerNorm: the weights times the norm's weights, and the bias plus
/// the weights times the norm's bias. In the transposed matrix, the mean is subtracted from the
/// weights: LayerNorm's backward pass would remove it anyway.
template <typename W, typename E, bool kRound>
__device__ void pack_linear(const Packing<W, E>& p, int n, int outputs, int inputs,
                            const void* weight, const void* bias, const void* norm_weight,
                            const void* norm_bias, int output_blocks, int input_blocks,
                            bool of_frames, int at, int transposed_at, float* packed_bias) {
  const auto folded = [&](int k) {
    // A separate multiplication, not fused: a row of one column minus its mean is then exactly 0.
    return __fmul_rn(p.read(weight, static_cast<long long>(n) * inputs + k),
                     p.read(norm_weight, k));
  };
  float sums[2] = {};  // for the bias; of the weights
  for (int k = threadIdx.x; k < 16 * input_blocks; k += blockDim.x) {
    float value = 0;
    if (n < outputs && k < inputs) {
      value = folded(k);
      sums[0] += p.read(weight, static_cast<long long>(n) * inputs + k) * p.read(norm_bias, k);
      sums[1] += value;
    }
    p.weights[4 * at + position<E>(p.order, n, of_frames ? p.layout.mel(k) : k, input_blocks,
                                   of_frames ? MatrixRole::mel_inputs : MatrixRole::bottleneck)] =
        packed_value<E>(value, kRound);
  }
  block_totals<kThreads>(sums);
  if (threadIdx.x == 0) packed_bias[n] = (n < outputs ? p.read(bias, n) : 0.f) + sums[0];
  if (!p.backward) return;
  const float mean = sums[1] / inputs;
  for (int k = threadIdx.x; k < 16 * input_blocks; k += blockDim.x) {
    const float value = n < outputs && k < inputs ? folded(k) - mean : 0.f;
    p.weights[4 * transposed_at +
              position<E>(p.order, k, n, output_blocks,
                          of_frames ? MatrixRole::mel_outputs : MatrixRole::bottleneck)] =
        packed_value<E>(value, kRound);
  }
}

/// Normalises a basis vector and multiplies it by the decoder's rows.
template <typename W, typename E, bool kRound>
__device__ void pack_basis(const Packing<W, E>& p, int l, int part, float* row) {
  const PackedLayout& y = p.layout;
  const int width = p.frames * p.slice_latent;
  const int padded_mels = 16 * y.mels, lane = threadIdx.x % kDotLanes;
  const int count = p.frames * padded_mels, step = p.parts * (kThreads / kDotLanes);
  const int mine = part * (kThreads / kDotLanes) + threadIdx.x / kDotLanes;
  if (mine < count && mine % padded_mels < p.n_mels) {
    // Loaded before the barrier, for the dot product below.
    const W* at = static_cast<const W*>(p.parameters.decoder_weight) +
                  static_cast<long long>(mine % padded_mels) * p.slice_latent;
    for (int s = lane * (32 / sizeof(W)); s < p.slice_latent; s += kDotLanes * (32 / sizeof(W))) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(at + s));
    }
  }
  for (int k = threadIdx.x; k < width; k += blockDim.x) {
    row[k] = l < p.latent ? p.read(p.parameters.basis, static_cast<long long>(l) * width + k) : 0.f;
  }
  __syncthreads();
  // Every warp computes this sum itself, which saves a barrier.
  float squares = 0;
#pragma unroll 4
  for (int k = threadIdx.x % 32; k < width; k += 32) squares += row[k] * row[k];
  const float inverse = inverse_norm(warp_sum(squares));
  if (part == 0 && threadIdx.x == 0) p.floats[y.inverse_norm + l] = inverse;

  // Whole warps stay together for the sum.
  for (int first = part * (kThreads / kDotLanes); first < count; first += step) {
    const int i = first + threadIdx.x / kDotLanes;
    const int f = i / padded_mels, m = i - f * padded_mels;
    const bool real = i < count && m < p.n_mels;
    float sum = 0;
    if (real) {
      const long long at = static_cast<long long>(m) * p.slice_latent;
#pragma unroll 8
      for (int s = lane; s < p.slice_latent; s += kDotLanes) {
        sum += p.read(p.parameters.decoder_weight, at + s) * row[f * p.slice_latent + s];
      }
    }
    sum = warp_sum(sum, kDotLanes) * inverse;
    if (i >= count || lane != 0) continue;
    const E e = packed_value<E>(real ? sum : 0.f, kRound);
    p.weights[4 * (y.decode + f * y.decode_step) +
              position<E>(p.order, y.mel(m), l, y.latents, MatrixRole::mel_outputs)] = e;
    if (p.backward) {
      p.weights[4 * (y.decode_transposed + f * y.decode_step) +
                position<E>(p.order, l, m, y.mels, MatrixRole::mel_inputs)] = e;
    }
  }

  const int padded_slices = 16 * y.slices;
  for (int i = part * kThreads + threadIdx.x; i < p.frames * padded_slices;
       i += p.parts * kThreads) {
    const int f = i / padded_slices, s = i - f * padded_slices;
    const float value = s < p.slice_latent ? row[f * p.slice_latent + s] * inverse : 0.f;
    const E e = packed_value<E>(value, kRound);
    p.weights[4 * (y.project + f * y.project_step) +
              position<E>(p.order, l, s, y.slices, MatrixRole::other)] = e;
    if (p.backward) {
      p.weights[4 * (y.project_transposed + f * y.project_step) +
                position<E>(p.order, s, l, y.latents, MatrixRole::other)] = e;
    }
  }
}

template <typename W, typename E, bool kRound>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ Packing<W, E> p) {
  extern __shared__ float row[];
  allow_next_kernel();
  const PackedLayout& y = p.layout;
  const auto& q = p.parameters;
  int b = blockIdx.x;
  const int basis = p.parts * 16 * y.latents, encoder = 16 * y.slices, mid = 16 * y.latents;
  if (b < basis) return pack_basis<W, E, kRound>(p, b / p.parts, b % p.parts, row);
  b -= basis;
  if (b < encoder) {
    return pack_linear<W, E, kRound>(p, b, p.slice_latent, p.n_mels, q.encoder_weight,
                                     q.encoder_bias, q.norm_weight, q.norm_bias, y.slices, y.mels,
                                     true, y.encode, y.encode_transposed, p.floats + y.encode_bias);
  }
  b -= encoder;
  if (b < mid) {
    return pack_linear<W, E, kRound>(p, b, p.latent, p.latent, q.mid_weight, q.mid_bias,
                                     q.mid_norm_weight, q.mid_norm_bias, y.latents, y.latents,
                                     false, y.mid, y.mid_transposed, p.floats + y.mid_bias);
  }
  for (int m = threadIdx.x; m < 16 * y.mels; m += blockDim.x) {
    p.floats[y.decode_bias + y.mel(m)] = m < p.n_mels ? p.read(q.decoder_bias, m) : 0.f;
  }
}

template <typename W, typename E, bool kRound>
void launch(const Context& context, const AutoencoderSizes& sizes,
            const AutoencoderTensors<const void*>& parameters, bool backward, PackedOrder order,
            const PackedLayout& layout, void* packed) {
  E* weights = static_cast<E*>(packed);
  // Enough blocks that each thread has one dot product.
  const int parts =
      std::min((sizes.frames * 16 * layout.mels * kDotLanes + kThreads - 1) / kThreads, 16);
  const Packing<W, E> p{parameters,
                        layout,
                        sizes.n_mels,
                        sizes.frames,
                        sizes.latent,
                        sizes.slice_latent,
                        parts,
                        backward,
                        order,
                        weights,
                        reinterpret_cast<float*>(weights + std::int64_t{4} * layout.groups)};
  const std::int64_t blocks = 16 * (std::int64_t{p.parts + 1} * layout.latents + layout.slices) + 1;
  const std::size_t shared = sizeof(float) * sizes.frames * sizes.slice_latent;
  launch_kernel({context, blocks, kThreads, shared}, "packing the autoencoder's weights",
                pack_kernel<W, E, kRound>, p);
}

}  // namespace

void pack_weights(const Context& context, const AutoencoderSizes& sizes,
                  const AutoencoderTensors<const void*>& parameters, DType parameter_dtype,
                  DType dtype, PackedKind kind, bool backward, const PackedLayout& layout,
                  void* packed, PackedOrder order) {
  const auto whole_line = [](int size) { return size == 32 || size == 64; };
  check(order != PackedOrder::wgmma || (whole_line(sizes.n_mels) && whole_line(sizes.latent) &&
                                        whole_line(sizes.slice_latent)),
        "packing for warpgroups: sizes of 32 and 64 only");
  if (kind == PackedKind::f32) {
    return launch<float, float, false>(context, sizes, parameters, backward, order, layout, packed);
  }
  if (kind == PackedKind::tf32) {
    return launch<float, float, true>(context, sizes, parameters, backward, order, layout, packed);
  }
  dispatch_short_dtypes(dtype, parameter_dtype, [&]<typename T, typename W>(T, W) {
    launch<W, T, false>(context, sizes, parameters, backward, order, layout, packed);
  });
}

}  // namespace fusewise::cuda::autoencoder

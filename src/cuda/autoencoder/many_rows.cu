// Reconstruction, latent vector or anomaly score of many rows; default sizes, but any number of
// frames. A warp takes 16 rows through the whole chain in registers, and all weights are in shared
// memory. x is read from memory once (the score reads it again, from L2), and the result is written
// once. Bound by the tensor cores in float32, by the latency of loads, MMAs and GELU in TF32 and
// half precision.

#include <algorithm>

#include "common/scratch.h"
#include "cuda/autoencoder/kernels.h"
#include "cuda/autoencoder/warp_tile.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/launch.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kMels = DefaultShape::kMels, kLatents = DefaultShape::kLatents;
constexpr int kSlices = DefaultShape::kSlices;
constexpr int kFrameWidth = 16 * kMels;

struct Arguments {
  const void* x;
  void *out, *z;
  float *score, *projection;
  const void* packed;
  long long rows, x_stride;
  int frames;
  PackedLayout layout;
};

/// Most warps per block, limited by registers.
template <typename P>
constexpr int most_warps() {
  return P::kExact ? 8 : 16;
}

/// The lane's part of a frame in memory format: 16 of every 64 bytes of rows g and g + 8.
template <typename T>
struct RawFrame {
  static constexpr int kSize = Vector<T>::kSize, kVectors = 4 * kMels / kSize;
  Vector<T> rows[2][kVectors];

  /// The lane's value i of row r: column i % 4 of block i / 4. Takes one instruction.
  __device__ __forceinline__ float value(int r, int i) const {
    const Vector<T>& vector = rows[r][i / kSize];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const unsigned pair = reinterpret_cast<const unsigned*>(&vector)[i % kSize / 2];
      return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    } else {
      return vector[i % kSize];
    }
  }
};

/// Addresses of the lane's two rows. A row past the end is replaced by the last row, which is then
/// read and written again.
template <typename T>
struct LaneRows {
  using Value = std::remove_const_t<T>;
  static constexpr int kSize = Vector<Value>::kSize;
  T* at[2];

  __device__ __forceinline__ LaneRows(T* base, long long tile, long long rows, long long stride) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const long long row = 16 * tile + 8 * r + threadIdx.x % 32 / 4;
      at[r] = base + min(row, rows - 1) * stride + threadIdx.x % 4 * kSize;
    }
  }
  /// Loads `count` vectors of a frame, starting at `first`.
  __device__ __forceinline__ void load(RawFrame<Value>& raw, int frame, int first,
                                       int count) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int v = 0; v < count; ++v) {
        raw.rows[r][first + v] = load_once(at[r] + kFrameWidth * frame + 4 * kSize * (first + v));
      }
    }
  }
  __device__ __forceinline__ void store(int r, int frame, int v,
                                        const Vector<Value>& vector) const {
    store_streaming(at[r] + kFrameWidth * frame + 4 * kSize * v, vector);
  }
};

__device__ __forceinline__ void set_pair(Vector<float>& vector, int pair, float a, float b) {
  vector.values[2 * pair] = a, vector.values[2 * pair + 1] = b;
}
template <typename T>
__device__ __forceinline__ void set_pair(Vector<T>& vector, int pair, float a, float b) {
  reinterpret_cast<unsigned*>(&vector)[pair] = pack_pair(T{}, a, b);
}

/// The sum of row r of a frame. In half precision it is a matrix product with ones: this takes
/// fewer instructions, and all lanes get the sum. Half of each vector is passed as part of row r +
/// 8, so that the vector can stay in its registers.
template <typename P, typename T>
__device__ __forceinline__ float sum_of_row(const RawFrame<T>& raw, int r) {
  if constexpr (sizeof(T) == 2) {
    const unsigned ones = pack_pair(T{}, 1.f, 1.f);
    Block sum;
    sum.fill(0.f);
#pragma unroll
    for (const Vector<T>& vector : raw.rows[r]) {
      const uint4 words = reinterpret_cast<const uint4&>(vector);
      P::term(0, sum, 0, {{{words.x, words.z}, {words.y, words.w}}}, make_uint2(ones, ones));
    }
    return sum.v[0][0] + sum.v[1][0];
  } else {
    float sum = 0.f;
#pragma unroll
    for (int b = 0; b < kMels; ++b) {
      sum += (raw.value(r, 4 * b) + raw.value(r, 4 * b + 1)) +
             (raw.value(r, 4 * b + 2) + raw.value(r, 4 * b + 3));
    }
    return row_sum(sum);
  }
}

template <typename P, bool kScores>
__global__ void __launch_bounds__(32 * most_warps<P>(), 1)
    many_rows_kernel(const __grid_constant__ Arguments a) {
  using T = typename P::Weight;
  using Input = LaneRows<const T>;
  constexpr int kSize = Vector<T>::kSize, kVectors = RawFrame<T>::kVectors;
  constexpr int kChunk = P::kExact ? 4 : 2;  // blocks of results computed together
  extern __shared__ __align__(16) unsigned char shared[];
  const PackedLayout& y = a.layout;
  const int warp = warp_index(), warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const long long tiles = (a.rows + 15) / 16;
  const long long step = static_cast<long long>(gridDim.x) * warps;
  // Consecutive tiles go to different blocks, so that the last tiles are spread over all blocks.
  long long tile = static_cast<long long>(warp) * gridDim.x + blockIdx.x;

  // The next frame is loaded while this one is processed. Neither this kernel nor the one before it
  // writes x, so x may be read before the previous kernel has ended.
  RawFrame<T> raw;
  const auto rows_of = [&](long long which) {
    return Input(static_cast<const T*>(a.x), which, a.rows, a.x_stride);
  };
  Input x = rows_of(tile);
  if (tile < tiles) x.load(raw, 0, 0, kVectors);
  wait_for_previous_kernel();
  using Group = typename Weights<P, true>::Group;
  const int vectors = (y.groups * static_cast<int>(sizeof(Group)) + 4 * y.floats) / 16;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    copy_vector(shared + 16 * i, static_cast<const unsigned char*>(a.packed) + 16 * i);
  }
  wait_for_copies();
  __syncthreads();
  Weights<P, true> weights;
  weights.groups = reinterpret_cast<const Group*>(shared);
  weights.floats = reinterpret_cast<const float*>(weights.groups + y.groups);

  for (; tile < tiles; tile += step) {
    Block projection[kLatents];
#pragma unroll
    for (Block& b : projection) b.fill(0.f);
    for (int f = 0; f < a.frames; ++f) {
      // LayerNorm: the mean is subtracted here, and the encoder's result is divided by the
      // deviation. In float16 the difference is halved, because the difference of two numbers may
      // overflow.
      constexpr float kShare = std::is_same_v<T, __half> ? 0.5f : 1.f;
      Block frame[kMels];
      float inverse_deviation[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float mean = sum_of_row<P>(raw, r) * (1.f / kFrameWidth);
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < 4 * kMels; ++i) {
          const float d = fmaf(raw.value(r, i), kShare, -kShare * mean);
          frame[i / 4].v[r][i % 4] = d;
          squares = fmaf(d, d, squares);
        }
        inverse_deviation[r] =
            inverse_root(row_sum(squares) * (1.f / (kShare * kShare * kFrameWidth)) + 1e-5f) *
            (1.f / kShare);
      }
      // If it takes no more registers, hold the frame in the operand format of the MMAs.
      constexpr bool kKeepsLeft = !P::kExact;
      typename P::Left left[kKeepsLeft ? kMels : 1];
      if constexpr (kKeepsLeft) {
#pragma unroll
        for (int m = 0; m < kMels; ++m) left[m] = P::left(frame[m]);
      }
      // After the last frame comes frame 0: of the same rows for the score, otherwise of the next
      // rows. The load is unconditional, so that the registers of the old frame are free from here
      // on.
      const auto fetch_next = [&] {
        const bool last = f + 1 == a.frames;
        if (last && !kScores) x = rows_of(tile + step);
        x.load(raw, last ? 0 : f + 1, 0, kVectors);
      };
      constexpr bool kFetchesEarly = sizeof(T) == 2;  // float32 has no free registers for it
      if (kFetchesEarly) fetch_next();
#pragma unroll
      for (int chunk = 0; chunk < kSlices; chunk += kChunk) {
        Block slice[kChunk];
#pragma unroll
        for (Block& b : slice) b.fill(0.f);
#pragma unroll
        for (int m = 0; m < kMels; ++m) {
          multiply_block<P, 1>(slice, kChunk,
                               kKeepsLeft ? left[kKeepsLeft ? m : 0] : P::left(frame[m]), weights,
                               y.encode, chunk, m, kMels);
        }
        if (!kFetchesEarly && chunk + kChunk == kSlices) fetch_next();
        // The exact product uses a separate accumulator, added in float32 arithmetic: the tensor
        // cores truncate their sums.
        Block part[kLatents];
#pragma unroll
        for (Block& b : part) b.fill(0.f);
        auto& sum = P::kExact ? part : projection;
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          const float4 bias = weights.bias(y.encode_bias, chunk + j);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float (&v)[4] = slice[j].v[r];
            v[0] = fmaf(v[0], inverse_deviation[r], bias.x);
            v[1] = fmaf(v[1], inverse_deviation[r], bias.y);
            v[2] = fmaf(v[2], inverse_deviation[r], bias.z);
            v[3] = fmaf(v[3], inverse_deviation[r], bias.w);
          }
          multiply_block<P, 1>(sum, kLatents, gelu_left<P>(slice[j]), weights,
                               y.project + f * y.project_step, 0, chunk + j, kSlices);
        }
        if (P::kExact) {
#pragma unroll
          for (int l = 0; l < kLatents; ++l) projection[l].add(part[l]);
        }
      }
    }

    if (a.projection != nullptr) {
      RowPair<float>(a.projection, 16 * tile, a.rows, 16 * kLatents)
          .template store<true>(projection, 0, 0);
    }
    float inverse_deviation[2];
    normalise(projection, inverse_deviation);
    Block z[kLatents];
#pragma unroll
    for (int l = 0; l < kLatents; ++l) z[l].fill(weights.bias(y.mid_bias, l));
    multiply_blocks<P, 1>(z, projection, weights, y.mid, 0, 0, kLatents);
    typename P::Left z_left[kLatents];
#pragma unroll
    for (int l = 0; l < kLatents; ++l) {
      gelu_of_any<P::kGeluDegree>(z[l]);
      z_left[l] = P::left(z[l]);
    }
    if (a.z != nullptr) {
      // Copies of z in new registers: a vector store needs a different register order than the
      // GEMMs that use z for all frames.
      Block zero;
      zero.fill(0.f);
#pragma unroll
      for (Block& b : z) b.add(zero);
      RowPair<T>(static_cast<T*>(a.z), 16 * tile, a.rows, 16 * kLatents)
          .template store<true>(z, 0, 0);
    }
    if (!kScores && a.out == nullptr) continue;

    const int width = kFrameWidth * a.frames;
    const LaneRows<T> out(static_cast<T*>(a.out), tile, a.rows, width);
    float squares[2] = {0.f, 0.f};
    for (int f = 0; f < a.frames; ++f) {
      const bool last = f + 1 == a.frames;
      if (last && kScores) x = rows_of(tile + step);
#pragma unroll
      for (int chunk = 0; chunk < kMels; chunk += kChunk) {
        const auto fetch_next = [&] {
          x.load(raw, last ? 0 : f + 1, 4 * chunk / kSize, 4 * kChunk / kSize);
        };
        float biases[4 * kChunk];
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          reinterpret_cast<float4*>(biases)[j] = weights.bias(y.decode_bias, chunk + j);
        }
        // For the score, start the accumulator at bias - x. Not in the exact product: the tensor
        // cores truncate more when the accumulator is large.
        constexpr bool kSubtractsFirst = kScores && !P::kExact;
        Block result[kChunk];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int i = 0; i < 4 * kChunk; ++i) {
            result[i / 4].v[r][i % 4] =
                kSubtractsFirst ? biases[i] - raw.value(r, 4 * chunk + i) : 0.f;
          }
        }
        if (kSubtractsFirst) fetch_next();
#pragma unroll
        for (int l = 0; l < kLatents; ++l) {
          multiply_block<P, 1>(result, kChunk, z_left[l], weights, y.decode + f * y.decode_step,
                               chunk, l, kLatents);
        }
        if constexpr (kScores) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < 4 * kChunk; ++i) {
              float d = result[i / 4].v[r][i % 4];
              if (!kSubtractsFirst) d = d + biases[i] - raw.value(r, 4 * chunk + i);
              squares[r] = fmaf(d, d, squares[r]);
            }
          }
          if (!kSubtractsFirst) fetch_next();
        } else {
          // Adding the bias here writes the values to the registers that the vector store needs.
#pragma unroll
          for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int first = 0; first < 4 * kChunk; first += kSize) {
              Vector<T> vector;
#pragma unroll
              for (int i = first; i < first + kSize; i += 2) {
                const float* v = &result[i / 4].v[r][i % 4];
                set_pair(vector, (i - first) / 2, v[0] + biases[i], v[1] + biases[i + 1]);
              }
              out.store(r, f, (4 * chunk + first) / kSize, vector);
            }
          }
        }
      }
    }
    if constexpr (kScores) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = row_sum(squares[r]);
        const long long row = 16 * tile + 8 * r + lane / 4;
        if (lane % 4 == 0 && row < a.rows) a.score[row] = sum / static_cast<float>(width);
      }
    }
  }
}

void launch(const Context& context, const AutoencoderForwardArguments& call,
            const PackedLayout& layout, const void* packed, int warps) {
  if (call.out != nullptr && call.score != nullptr) {
    AutoencoderForwardArguments first = call, second = call;
    first.score = nullptr;
    second.out = second.z = second.projection = nullptr;
    launch(context, first, layout, packed, warps);
    return launch(context, second, layout, packed, warps);
  }
  const Arguments a{call.x,
                    call.out,
                    call.z,
                    static_cast<float*>(call.score),
                    static_cast<float*>(call.projection),
                    packed,
                    call.sizes.rows,
                    call.x_stride,
                    call.sizes.frames,
                    layout};
  const DeviceLimits& limits = limits_of(context.device);
  const std::int64_t all = limits.multiprocessors, tiles = (a.rows + 15) / 16;
  dispatch_products(call.dtype, call.tf32, [&]<typename P>(P) {
    const std::int64_t most = all * most_warps<P>();
    if (warps == 0) {
      // All warps get the same number of rows. But a block has at least eight warps, even if some
      // only copy weights (4096 rows in TF32: 13.6 us, with two warps 14.8).
      const std::int64_t rounds = (tiles + most - 1) / most;
      warps = std::max(static_cast<int>((tiles + all * rounds - 1) / (all * rounds)), 8);
    }
    warps = std::min(warps, most_warps<P>());
    // Request enough shared memory that only one block fits on an SM. Otherwise, while blocks of
    // the packing kernel still occupy some SMs, two blocks would be placed on the others.
    const std::int64_t shared =
        std::max<std::int64_t>(packed_bytes(layout, packed_kind(call.dtype, call.tf32)),
                               std::min(limits.shared_memory / 2, limits.block_shared_memory));
    const Launch blocks{context, std::min(tiles, all), 32 * warps, static_cast<std::size_t>(shared),
                        true};
    const char* what = "running the autoencoder on many rows";
    if (call.score != nullptr) {
      launch_kernel(blocks, what, many_rows_kernel<P, true>, a);
    } else {
      launch_kernel(blocks, what, many_rows_kernel<P, false>, a);
    }
  });
}

}  // namespace

void run_many_rows(const Context& context, const AutoencoderForwardArguments& call, int warps) {
  PackedLayout layout = packed_layout(call.sizes, false);
  layout.wide = call.dtype != DType::f32;
  const PackedKind kind = packed_kind(call.dtype, call.tf32);
  const Scratch<unsigned char> packed(context, packed_bytes(layout, kind));
  pack_weights(context, call.sizes, call.parameters, call.parameter_dtype, call.dtype, kind, false,
               layout, packed.data());
  launch(context, call, layout, packed.data(), warps);
}

void run_many_rows(const Context& context, const AutoencoderForwardArguments& call) {
  run_many_rows(context, call, 0);
}

}  // namespace fusewise::cuda::autoencoder

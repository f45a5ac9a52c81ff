// Reconstruction, latent vector or anomaly score of the autoencoder with default sizes in one
// kernel, 'block16'. The warps of a block together take 16 rows through the whole chain in
// registers. x is read from memory once (the score reads it again, from L2), and the result is
// written once. Bound by the tensor cores in float32, by latency in TF32 and half precision.

#include <algorithm>

#include "common/scratch.h"
#include "cuda/autoencoder/selection.h"
#include "cuda/autoencoder/warp_tile.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/launch.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

struct Arguments {
  const void* x;
  void *out, *z;
  float *score, *projection;
  const void* packed;
  long long rows, x_stride;
  int frames;
  PackedLayout layout;
};

/// Sums the blocks of values over all warps, in order of the warps. Starts with a barrier, so that
/// earlier reads of `exchange` are complete.
template <int kBlocks>
__device__ __forceinline__ void sum_over_warps(Block (&blocks)[kBlocks], float4* exchange) {
  const int lane = threadIdx.x % 32, warp = warp_index(), warps = blockDim.x / 32;
  __syncthreads();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* v = blocks[b].v[r];
      exchange[((warp * kBlocks + b) * 2 + r) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    blocks[b].fill(0.f);
    for (int w = 0; w < warps; ++w) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4 v = exchange[((w * kBlocks + b) * 2 + r) * 32 + lane];
        blocks[b].v[r][0] += v.x, blocks[b].v[r][1] += v.y;
        blocks[b].v[r][2] += v.z, blocks[b].v[r][3] += v.w;
      }
    }
  }
}

template <typename T, typename P, bool kScores>
__global__ void __launch_bounds__(32 * kMostForwardWarps, 1)
    forward_kernel(const __grid_constant__ Arguments a) {
  constexpr int kMels = DefaultShape::kMels, kLatents = DefaultShape::kLatents;
  constexpr int kSlices = DefaultShape::kSlices, kColumns = 16 * kMels, kLatent = 16 * kLatents;
  constexpr int kChunks = kSlices / kChunk, kAtOnce = 2;
  extern __shared__ __align__(16) unsigned char shared[];
  const PackedLayout& y = a.layout;
  const int warp = warp_index(), warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32, t = lane % 4;

  const long long tiles = (a.rows + 15) / 16;
  const long long width = static_cast<long long>(a.frames) * kColumns;
  long long tile = blockIdx.x;
  const T* x_base = static_cast<const T*>(a.x);

  // The next frame is loaded while this one is processed. Neither this kernel nor the one before it
  // writes x, so x may be read before the previous kernel has ended.
  Four<T> raw[kMels][2];
  const auto fetch = [&](long long from, int f) {
    RowPair<const T>(x_base, 16 * from, a.rows, a.x_stride)
        .fetch(raw, 0, static_cast<long long>(f) * kColumns);
  };
  const int first_frame = warp / kChunks;
  if (tile < tiles) fetch(tile, min(first_frame, a.frames - 1));
  wait_for_previous_kernel();
  Weights<P, true> weights;
  using Group = typename Weights<P, true>::Group;
  // All parts are multiples of 16 bytes.
  const int vectors = y.groups * static_cast<int>(sizeof(Group)) / 16 + y.floats / 4;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    copy_vector(shared + 16 * i, static_cast<const unsigned char*>(a.packed) + 16 * i);
  }
  wait_for_copies();
  __syncthreads();
  weights.groups = reinterpret_cast<const Group*>(shared);
  weights.floats = reinterpret_cast<const float*>(weights.groups + y.groups);
  float4* exchange = reinterpret_cast<float4*>(shared) + vectors;

  for (; tile < tiles; tile += gridDim.x) {
    const RowPair<const T> x(x_base, 16 * tile, a.rows, a.x_stride);
    Block projection[kLatents];
#pragma unroll
    for (int l = 0; l < kLatents; ++l) projection[l].fill(0.f);
    for (int f = first_frame, next; f < a.frames; f = next) {
      // Chunks of all frames are distributed round-robin over the warps. Find this warp's next
      // frame.
      next = f + 1;
      while (next < a.frames && (warp + next * (warps - kChunks % warps)) % warps >= kChunks)
        ++next;
      Block frame[kMels];
      expand(frame, raw);
      float inverse_deviation[2];
      normalise(frame, inverse_deviation);
      // If it takes no more registers, hold the frame in the operand format of the MMAs.
      constexpr bool kKeepsLeft = !P::kExact;
      typename P::Left left[kKeepsLeft ? kMels : 1];
      if constexpr (kKeepsLeft) {
#pragma unroll
        for (int m = 0; m < kMels; ++m) left[m] = P::left(frame[m]);
      }
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const bool mine = (f * kChunks + chunk) % warps == warp;
        Block slice[kChunk];
        if (mine) {
#pragma unroll
          for (int j = 0; j < kChunk; ++j) {
            slice[j].fill(weights.bias(y.encode_bias, chunk * kChunk + j));
          }
#pragma unroll
          for (int m = 0; m < kMels; ++m) {
            multiply_block<P, kAtOnce>(slice, kChunk,
                                       kKeepsLeft ? left[kKeepsLeft ? m : 0] : P::left(frame[m]),
                                       weights, y.encode, chunk * kChunk, m, kMels);
          }
        }
        // Unconditional, so that the registers of the old frame are free from here on.
        if (chunk == kChunks - 1) {
          const bool here = next < a.frames;
          fetch(here ? tile : tile + gridDim.x, here ? next : first_frame);
        }
        if (!mine) continue;
        // A separate accumulator, added in float32 arithmetic: the tensor cores truncate their
        // sums.
        Block part[kLatents];
#pragma unroll
        for (int l = 0; l < kLatents; ++l) part[l].fill(0.f);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          multiply_block<P, kAtOnce>(part, kLatents, gelu_left<P>(slice[j]), weights,
                                     y.project + f * y.project_step, 0, chunk * kChunk + j,
                                     kSlices);
        }
#pragma unroll
        for (int l = 0; l < kLatents; ++l) projection[l].add(part[l]);
      }
    }
    sum_over_warps(projection, exchange);

    if (a.projection != nullptr && warp == 0) {
      RowPair<float>(a.projection, 16 * tile, a.rows, kLatent)
          .template store<true>(projection, 0, 0);
    }
    float inverse_deviation[2];
    normalise(projection, inverse_deviation);
    Block z[kLatents];
#pragma unroll
    for (int l = 0; l < kLatents; ++l) {
      z[l].fill(weights.bias(y.mid_bias, l));
    }
    multiply_blocks<P, kAtOnce>(z, projection, weights, y.mid, 0, 0, kLatents);
#pragma unroll
    for (int l = 0; l < kLatents; ++l) {
      gelu_of_any<P::kGeluDegree>(z[l]);
    }
    if (a.z != nullptr && warp == 0) {
      RowPair<T>(static_cast<T*>(a.z), 16 * tile, a.rows, kLatent).template store<true>(z, 0, 0);
    }
    if (!kScores && a.out == nullptr) continue;
    typename P::Left z_left[kLatents];
#pragma unroll
    for (int l = 0; l < kLatents; ++l) {
      z_left[l] = P::left(z[l]);
    }

    const RowPair<T> out(static_cast<T*>(a.out), 16 * tile, a.rows, width);
    float squares[2] = {0.f, 0.f};
    int unit = 0;  // work units are distributed round-robin over the warps
    for (int f = 0; f < a.frames; ++f) {
      const long long offset = static_cast<long long>(f) * kColumns;
#pragma unroll 1
      for (int chunk = 0; chunk < kMels; chunk += kChunk) {
        if (unit++ % warps != warp) continue;
        Block original[kChunk], result[kChunk];
        if constexpr (kScores) {
          x.load(original, chunk, offset);
        }
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          result[j].fill(weights.bias(y.decode_bias, chunk + j));
        }
#pragma unroll
        for (int l = 0; l < kLatents; ++l) {
          multiply_block<P, kAtOnce>(result, kChunk, z_left[l], weights,
                                     y.decode + f * y.decode_step, chunk, l, kLatents);
        }
        if (!kScores || a.out != nullptr) {
          out.template store<true>(result, chunk, offset);
        }
        if constexpr (kScores) {
#pragma unroll
          for (int j = 0; j < kChunk; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const float d = result[j].v[r][i] - original[j].v[r][i];
                squares[r] = fmaf(d, d, squares[r]);
              }
            }
          }
        }
      }
    }
    if constexpr (kScores) {
      squares[0] = row_sum(squares[0]);
      squares[1] = row_sum(squares[1]);
      Block sums[1];
      sums[0].fill(0.f);
      sums[0].v[0][0] = squares[0], sums[0].v[1][0] = squares[1];
      sum_over_warps(sums, exchange);
      squares[0] = sums[0].v[0][0], squares[1] = sums[0].v[1][0];
      if (t == 0 && warp == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const long long row = 16 * tile + lane / 4 + 8 * r;
          if (row < a.rows) a.score[row] = squares[r] / static_cast<float>(width);
        }
      }
    }
  }
}

// ---- host

template <typename P, bool kScores>
void launch(const Context& context, const Arguments& a, int warps, std::int64_t packed) {
  const std::int64_t tiles = (a.rows + 15) / 16;
  const DeviceLimits& limits = limits_of(context.device);
  std::int64_t shared = packed + exchange_bytes(warps);
  // Blocks per SM: as many as can run at once, the same number on every SM.
  const std::int64_t room =
      std::min<std::int64_t>(kMostForwardWarps / warps, limits.shared_memory / (shared + 1024));
  const std::int64_t resident =
      std::clamp<std::int64_t>((tiles + limits.multiprocessors - 1) / limits.multiprocessors, 1,
                               std::max<std::int64_t>(room, 1));
  // Raise the shared memory request so that no more than that fit. Otherwise, while blocks of the
  // packing kernel still occupy some SMs, too many would be placed on the others (16384 rows in
  // float32: 72 us where 52 are possible).
  shared = std::max(shared, limits.shared_memory / (resident + 1));
  launch_kernel({context, std::min(tiles, resident * limits.multiprocessors), 32 * warps,
                 static_cast<std::size_t>(shared), true},
                "running the autoencoder", forward_kernel<typename P::Weight, P, kScores>, a);
}

}  // namespace

void run_block16(const Context& context, const AutoencoderForwardArguments& call, int warps) {
  const AutoencoderSizes& sizes = call.sizes;
  const PackedLayout layout = packed_layout(sizes, false);
  const PackedKind kind = packed_kind(call.dtype, call.tf32);
  const std::int64_t packed = packed_bytes(layout, kind);
  const Scratch<unsigned char> memory(context, packed);
  pack_weights(context, sizes, call.parameters, call.parameter_dtype, call.dtype, kind, false,
               layout, memory.data());
  const Arguments a{call.x,
                    call.out,
                    call.z,
                    static_cast<float*>(call.score),
                    static_cast<float*>(call.projection),
                    memory.data(),
                    sizes.rows,
                    call.x_stride,
                    sizes.frames,
                    layout};
  dispatch_products(call.dtype, call.tf32, [&]<typename P>(P) {
    call.score != nullptr ? launch<P, true>(context, a, warps, packed)
                          : launch<P, false>(context, a, warps, packed);
  });
}

void run_block16(const Context& context, const AutoencoderForwardArguments& call) {
  run_block16(context, call, block16_warps(limits_of(context.device), call.sizes));
}

}  // namespace fusewise::cuda::autoencoder

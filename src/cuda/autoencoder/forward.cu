// Reconstruction, latent vector or anomaly score of the autoencoder in one kernel: 'block16' for
// the default sizes, 'padded' for others. A warp, or the warps of a block together, take 16 rows
// through the whole chain in registers. x crosses memory once (the score reads it again, from L2),
// the result once. Bound by the tensor cores in float32, by latencies in TF32 and half precision.

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
  int n_mels, frames, latent;
  PackedLayout layout;
};

/// Adds up the blocks of all warps of the block, in order of the warps. Begins with a barrier that
/// ends what was read before.
template <int kBlocks>
__device__ __forceinline__ void sum_over_warps(Block (&blocks)[kBlocks], int count,
                                               float4* exchange) {
  const int lane = threadIdx.x % 32, warp = warp_index(), warps = blockDim.x / 32;
  __syncthreads();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (b >= count) break;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* v = blocks[b].v[r];
      exchange[((warp * count + b) * 2 + r) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (b >= count) break;
    blocks[b].fill(0.f);
    for (int w = 0; w < warps; ++w) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4 v = exchange[((w * count + b) * 2 + r) * 32 + lane];
        blocks[b].v[r][0] += v.x, blocks[b].v[r][1] += v.y;
        blocks[b].v[r][2] += v.z, blocks[b].v[r][3] += v.w;
      }
    }
  }
}

template <typename T, typename P, typename Shape, bool kTogether, bool kScores>
__global__ void __launch_bounds__(32 * Shape::kMostWarps, 1)
    forward_kernel(const __grid_constant__ Arguments a) {
  // Unpadded sizes and weights in shared memory come together: both are for the default model.
  constexpr bool kStaged = Shape::kWhole;
  constexpr int kAtOnce = P::kExact && !kTogether ? 1 : 2;
  extern __shared__ __align__(16) unsigned char shared[];
  const PackedLayout& y = a.layout;
  const int warp = warp_index(), warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int mels = Shape::kWhole ? Shape::kMels : y.mels;
  const int latents = Shape::kWhole ? Shape::kLatents : y.latents;
  const int n_mels = Shape::kWhole ? 16 * Shape::kMels : a.n_mels;
  const int latent = Shape::kWhole ? 16 * Shape::kLatents : a.latent;
  const int slices = Shape::kWhole ? Shape::kSlices : y.slices;
  const int chunks = slices / Shape::kChunk;

  const int member = kTogether ? warp : 0;
  const long long tiles = (a.rows + 15) / 16;
  const long long step = static_cast<long long>(gridDim.x) * (kTogether ? 1 : warps);
  const long long width = static_cast<long long>(a.frames) * n_mels;
  long long tile = kTogether ? blockIdx.x : static_cast<long long>(blockIdx.x) * warps + warp;
  const T* x_base = static_cast<const T*>(a.x);

  // The next frame is on its way while this one is worked on. Nobody writes x while this kernel or
  // the one before it runs.
  Four<T> raw[Shape::kMels][2];
  const auto fetch = [&](long long from, int f) {
    RowPair<const T>(x_base, 16 * from, a.rows, a.x_stride)
        .template fetch<Shape::kWhole>(raw, 0, mels, static_cast<long long>(f) * n_mels, n_mels);
  };
  const int first_frame = member / chunks;
  if (tile < tiles) fetch(tile, min(first_frame, a.frames - 1));
  wait_for_previous_kernel();
  Weights<P, kStaged> weights;
  using Group = typename Weights<P, kStaged>::Group;
  float4* exchange = reinterpret_cast<float4*>(shared);
  if constexpr (kStaged) {
    // All parts are multiples of 16 bytes.
    const int vectors = y.groups * static_cast<int>(sizeof(Group)) / 16 + y.floats / 4;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
      copy_vector(shared + 16 * i, static_cast<const unsigned char*>(a.packed) + 16 * i);
    }
    wait_for_copies();
    __syncthreads();
    weights.groups = reinterpret_cast<const Group*>(shared);
    exchange += vectors;
  } else {
    weights.groups = static_cast<const Group*>(a.packed);
  }
  weights.floats = reinterpret_cast<const float*>(weights.groups + y.groups);

  for (; tile < tiles; tile += step) {
    const RowPair<const T> x(x_base, 16 * tile, a.rows, a.x_stride);
    Block projection[Shape::kLatents];
#pragma unroll
    for (int l = 0; l < Shape::kLatents; ++l) projection[l].fill(0.f);
    for (int f = first_frame, next; f < a.frames; f = next) {
      // The chunks of all frames are dealt out to the group.
      next = f + 1;
      while (kTogether && next < a.frames &&
             (member + next * (warps - chunks % warps)) % warps >= chunks) {
        ++next;
      }
      Block frame[Shape::kMels];
      expand(frame, raw, mels);
      float inverse_deviation[2];
      normalise<Shape::kWhole>(frame, mels, n_mels, inverse_deviation);
      // Where it takes no more room, a frame is kept as the products want it.
      constexpr bool kKeepsLeft = !P::kExact;
      typename P::Left left[kKeepsLeft ? Shape::kMels : 1];
      if constexpr (kKeepsLeft) {
#pragma unroll
        for (int m = 0; m < Shape::kMels; ++m) {
          if (m < mels) left[m] = P::left(frame[m]);
        }
      }
#pragma unroll(Shape::kWhole ? Shape::kSlices / Shape::kChunk : 1)
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const bool mine = !kTogether || (f * chunks + chunk) % warps == member;
        Block slice[Shape::kChunk];
        if (mine) {
#pragma unroll
          for (int j = 0; j < Shape::kChunk; ++j) {
            slice[j].fill(weights.bias(y.encode_bias, chunk * Shape::kChunk + j));
          }
#pragma unroll
          for (int m = 0; m < Shape::kMels; ++m) {
            if (m >= mels) break;
            multiply_block<P, kAtOnce>(slice, Shape::kChunk,
                                       kKeepsLeft ? left[kKeepsLeft ? m : 0] : P::left(frame[m]),
                                       weights, y.encode, chunk * Shape::kChunk, m, mels);
          }
        }
        // Without a condition, so that the old one needs no registers any more.
        if (chunk == chunks - 1) {
          const bool here = next < a.frames;
          fetch(here ? tile : tile + step, here ? next : first_frame);
        }
        if (!mine) continue;
        // A sum of its own, added with rounding: the tensor cores drop what does not fit.
        Block part[Shape::kLatents];
#pragma unroll
        for (int l = 0; l < Shape::kLatents; ++l) part[l].fill(0.f);
#pragma unroll
        for (int j = 0; j < Shape::kChunk; ++j) {
          multiply_block<P, kAtOnce>(part, latents, gelu_left<P>(slice[j]), weights,
                                     y.project + f * y.project_step, 0, chunk * Shape::kChunk + j,
                                     slices);
        }
#pragma unroll
        for (int l = 0; l < Shape::kLatents; ++l) projection[l].add(part[l]);
      }
    }
    if (kTogether) sum_over_warps(projection, latents, exchange);

    if (a.projection != nullptr && member == 0) {
      RowPair<float>(a.projection, 16 * tile, a.rows, latent)
          .template store<Shape::kWhole, true>(projection, 0, latents, 0, latent);
    }
    float inverse_deviation[2];
    normalise<Shape::kWhole>(projection, latents, latent, inverse_deviation);
    Block z[Shape::kLatents];
#pragma unroll
    for (int l = 0; l < Shape::kLatents; ++l) {
      if (l < latents) z[l].fill(weights.bias(y.mid_bias, l));
    }
    multiply_blocks<P, kAtOnce>(z, latents, projection, latents, weights, y.mid, 0, 0, latents);
#pragma unroll
    for (int l = 0; l < Shape::kLatents; ++l) {
      if (l < latents) gelu_of_any<P::kGeluDegree>(z[l]);
    }
    if (a.z != nullptr && member == 0) {
      RowPair<T>(static_cast<T*>(a.z), 16 * tile, a.rows, latent)
          .template store<Shape::kWhole, true>(z, 0, latents, 0, latent);
    }
    if (!kScores && a.out == nullptr) continue;
    typename P::Left z_left[Shape::kLatents];
#pragma unroll
    for (int l = 0; l < Shape::kLatents; ++l) {
      if (l < latents) z_left[l] = P::left(z[l]);
    }

    const RowPair<T> out(static_cast<T*>(a.out), 16 * tile, a.rows, width);
    float squares[2] = {0.f, 0.f};
    int unit = 0;  // of work, dealt out to the group
    for (int f = 0; f < a.frames; ++f) {
      const long long offset = static_cast<long long>(f) * n_mels;
#pragma unroll 1
      for (int chunk = 0; chunk < mels; chunk += Shape::kChunk) {
        if (kTogether && unit++ % warps != member) continue;
        Block original[Shape::kChunk], result[Shape::kChunk];
        if constexpr (kScores) {
          x.template load<Shape::kWhole>(original, chunk, Shape::kChunk, offset, n_mels);
        }
#pragma unroll
        for (int j = 0; j < Shape::kChunk; ++j) {
          result[j].fill(weights.bias(y.decode_bias, chunk + j));
        }
#pragma unroll
        for (int l = 0; l < Shape::kLatents; ++l) {
          if (l >= latents) break;
          multiply_block<P, kAtOnce>(result, Shape::kChunk, z_left[l], weights,
                                     y.decode + f * y.decode_step, chunk, l, latents);
        }
        if (!kScores || a.out != nullptr) {
          out.template store<Shape::kWhole, true>(result, chunk, Shape::kChunk, offset, n_mels);
        }
        if constexpr (kScores) {
          // Padding is zero in both.
#pragma unroll
          for (int j = 0; j < Shape::kChunk; ++j) {
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
      if (kTogether) {
        Block sums[1];
        sums[0].fill(0.f);
        sums[0].v[0][0] = squares[0], sums[0].v[1][0] = squares[1];
        sum_over_warps(sums, 1, exchange);
        squares[0] = sums[0].v[0][0], squares[1] = sums[0].v[1][0];
      }
      if (t == 0 && member == 0) {
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

template <typename P, typename Shape, bool kTogether, bool kScores>
void launch(const Context& context, const Arguments& a, ForwardPlan plan, std::int64_t packed) {
  plan.together = kTogether;
  plan.warps = std::min(plan.warps, Shape::kMostWarps);
  if (kTogether) plan.warps = std::min(plan.warps, units_of<Shape>(a.layout));
  const std::int64_t tiles = (a.rows + 15) / 16;
  const std::int64_t wanted = kTogether ? tiles : (tiles + plan.warps - 1) / plan.warps;
  const DeviceLimits& limits = limits_of(context.device);
  std::int64_t shared = (Shape::kWhole ? packed : 0) + exchange_bytes(plan, a.layout);
  // As many blocks of a multiprocessor as are at work at once, all with the same number.
  std::int64_t resident = Shape::kMostWarps / plan.warps;
  if (shared > 0) resident = std::min(resident, limits.shared_memory / (shared + 1024));
  resident =
      std::clamp<std::int64_t>((wanted + limits.multiprocessors - 1) / limits.multiprocessors, 1,
                               std::max<std::int64_t>(resident, 1));
  // Nor do more fit: while the packing kernel's blocks hold some multiprocessors, they would come
  // to lie on the others (16384 rows in float32: 72 us where 52 are possible).
  if (Shape::kWhole) shared = std::max(shared, limits.shared_memory / (resident + 1));
  const std::int64_t most = resident * limits.multiprocessors;
  launch_kernel(
      {context, std::min(wanted, most), 32 * plan.warps, static_cast<std::size_t>(shared), true},
      "running the autoencoder", forward_kernel<typename P::Weight, P, Shape, kTogether, kScores>,
      a);
}

template <typename Shape>
void run(const Context& context, const AutoencoderForwardArguments& call, const ForwardPlan& plan) {
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
                    sizes.n_mels,
                    sizes.frames,
                    sizes.latent,
                    layout};
  dispatch_products(call.dtype, call.tf32, [&]<typename P>(P) {
    const auto scored = [&]<bool kScores>(std::bool_constant<kScores>) {
      if constexpr (!Shape::kWhole) {
        if (!plan.together) return launch<P, Shape, false, kScores>(context, a, plan, packed);
      }
      launch<P, Shape, true, kScores>(context, a, plan, packed);
    };
    call.score != nullptr ? scored(std::true_type{}) : scored(std::false_type{});
  });
}

}  // namespace

void run_block16(const Context& context, const AutoencoderForwardArguments& call,
                 const ForwardPlan& plan) {
  run<DefaultShape>(context, call, plan);
}
void run_padded(const Context& context, const AutoencoderForwardArguments& call,
                const ForwardPlan& plan) {
  run<WideShape>(context, call, plan);
}

void run_block16(const Context& context, const AutoencoderForwardArguments& call) {
  run_block16(context, call, forward_plan<DefaultShape>(limits_of(context.device), call.sizes));
}
void run_padded(const Context& context, const AutoencoderForwardArguments& call) {
  run_padded(context, call, forward_plan<WideShape>(limits_of(context.device), call.sizes));
}

}  // namespace fusewise::cuda::autoencoder

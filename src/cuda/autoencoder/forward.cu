// Reconstruction, latent vector or anomaly score of the autoencoder in one kernel: a warp takes 16
// rows through the whole chain in registers. x crosses memory once (the score reads it again, from
// L2), the result once. Bound by the tensor cores in float32, by GELU and memory in TF32 and
// halves.

#include "cuda/autoencoder/forward.cuh"

#include <algorithm>

#include "common/scratch.h"
#include "cuda/autoencoder/rows.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace autoencoder {
namespace {

struct Arguments {
  const void* x;
  void *out, *z;
  float* score;
  const void* packed;
  long long rows, x_stride;
  int n_mels, frames, latent;
  int group;
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

template <typename T, typename P, typename Shape, bool kStaged>
__global__ void __launch_bounds__(32 * Shape::kForwardWarps, 1)
    forward_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned char shared[];
  const PackedLayout& y = a.layout;
  const int warp = warp_index(), warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int mels = Shape::kWhole ? Shape::kMels : y.mels;
  const int latents = Shape::kWhole ? Shape::kLatents : y.latents;
  const int n_mels = Shape::kWhole ? 16 * Shape::kMels : a.n_mels;
  const int latent = Shape::kWhole ? 16 * Shape::kLatents : a.latent;
  const int chunks = y.slices / Shape::kChunk;

  const bool together = a.group > 1;
  const int member = together ? warp : 0;
  const long long tiles = (a.rows + 15) / 16;
  const long long step = static_cast<long long>(gridDim.x) * (together ? 1 : warps);
  const long long width = static_cast<long long>(a.frames) * n_mels;
  long long tile = together ? blockIdx.x : static_cast<long long>(blockIdx.x) * warps + warp;
  const T* x_base = static_cast<const T*>(a.x);
  const int first_frame = member / chunks, first_chunk = member - first_frame * chunks;

  // The next frame is on its way while this one is worked on. Nobody writes x while this kernel or
  // the one before it runs.
  Block frame[Shape::kMels];
  if (tile < tiles && first_frame < a.frames) {
    RowPair<const T>(x_base, 16 * tile, a.rows, a.x_stride)
        .template load<Shape::kWhole>(frame, 0, mels, static_cast<long long>(first_frame) * n_mels,
                                      n_mels);
  }
  wait_for_previous_kernel();
  Weights<P, kStaged> weights;
  using Group = typename Weights<P, kStaged>::Group;
  float4* exchange = reinterpret_cast<float4*>(shared);
  if constexpr (kStaged) {
    // The packed size is a multiple of 16 bytes.
    const int vectors = (y.groups * static_cast<int>(sizeof(Group)) + 4 * y.floats) / 16;
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
    // Chunks of frames are dealt out to the group.
    bool fresh = true;
    for (int f = first_frame, chunk = first_chunk; f < a.frames;) {
      if (fresh) {
        float inverse_deviation[2];
        normalise<Shape::kWhole>(frame, mels, n_mels, inverse_deviation);
      }
      Block slice[Shape::kChunk];
#pragma unroll
      for (int j = 0; j < Shape::kChunk; ++j) {
        slice[j].fill(weights.bias(y.encode_bias, chunk * Shape::kChunk + j));
      }
      multiply_blocks<P>(slice, Shape::kChunk, frame, mels, weights, y.encode,
                         chunk * Shape::kChunk, 0, mels);
      int next_frame = f, next_chunk = chunk + (together ? warps : 1);
      for (; next_chunk >= chunks; next_chunk -= chunks) ++next_frame;
      fresh = next_frame != f;
      if (fresh) {
        const bool here = next_frame < a.frames;
        if (here || tile + step < tiles) {
          RowPair<const T>(x_base, 16 * (here ? tile : tile + step), a.rows, a.x_stride)
              .template load<Shape::kWhole>(
                  frame, 0, mels, static_cast<long long>(here ? next_frame : first_frame) * n_mels,
                  n_mels);
        }
      }
#pragma unroll
      for (int j = 0; j < Shape::kChunk; ++j) gelu<P::kGeluTerms>(slice[j]);
      // A sum of its own, added with rounding: the tensor cores drop what does not fit.
      Block part[Shape::kLatents];
#pragma unroll
      for (int l = 0; l < Shape::kLatents; ++l) part[l].fill(0.f);
      multiply_blocks<P>(part, latents, slice, Shape::kChunk, weights,
                         y.project + f * y.project_step, 0, chunk * Shape::kChunk, y.slices);
#pragma unroll
      for (int l = 0; l < Shape::kLatents; ++l) projection[l].add(part[l]);
      f = next_frame, chunk = next_chunk;
    }
    if (together) sum_over_warps(projection, latents, exchange);

    float inverse_deviation[2];
    normalise<Shape::kWhole>(projection, latents, latent, inverse_deviation);
    Block z[Shape::kLatents];
#pragma unroll
    for (int l = 0; l < Shape::kLatents; ++l) {
      if (l < latents) z[l].fill(weights.bias(y.mid_bias, l));
    }
    multiply_blocks<P>(z, latents, projection, latents, weights, y.mid, 0, 0, latents);
#pragma unroll
    for (int l = 0; l < Shape::kLatents; ++l) {
      if (l < latents) gelu<P::kGeluTerms>(z[l]);
    }
    if (a.z != nullptr && member == 0) {
      RowPair<T>(static_cast<T*>(a.z), 16 * tile, a.rows, latent)
          .template store<Shape::kWhole>(z, 0, latents, 0, latent);
    }
    if (a.out == nullptr && a.score == nullptr) continue;

    const RowPair<T> out(static_cast<T*>(a.out), 16 * tile, a.rows, width);
    float squares[2] = {0.f, 0.f};
    int unit = 0;  // of work, dealt out to the group
    for (int f = 0; f < a.frames; ++f) {
      const long long offset = static_cast<long long>(f) * n_mels;
      for (int chunk = 0; chunk < mels; chunk += Shape::kChunk) {
        if (together && unit++ % warps != member) continue;
        Block original[Shape::kChunk], result[Shape::kChunk];
        if (a.score != nullptr) {
          x.template load<Shape::kWhole>(original, chunk, Shape::kChunk, offset, n_mels);
        }
#pragma unroll
        for (int j = 0; j < Shape::kChunk; ++j) {
          result[j].fill(weights.bias(y.decode_bias, chunk + j));
        }
        multiply_blocks<P>(result, Shape::kChunk, z, latents, weights, y.decode + f * y.decode_step,
                           chunk, 0, latents);
        if (a.out != nullptr) {
          out.template store<Shape::kWhole>(result, chunk, Shape::kChunk, offset, n_mels);
        }
        if (a.score == nullptr) continue;
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
    if (a.score == nullptr) continue;
    squares[0] = row_sum(squares[0]);
    squares[1] = row_sum(squares[1]);
    if (together) {
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

// ---- host

bool is_default(const AutoencoderForwardArguments& call) {
  const std::int64_t bytes = size_of(call.dtype);
  const std::int64_t width = std::int64_t{call.sizes.frames} * call.sizes.n_mels;
  return has_default_shape(call.sizes) && rows_aligned(call.x, call.x_stride, bytes) &&
         rows_aligned(call.out, width, bytes) && rows_aligned(call.z, call.sizes.latent, bytes);
}

std::int64_t exchange_bytes(const AutoencoderForwardPlan& plan, const PackedLayout& layout) {
  return plan.group > 1 ? std::int64_t{1024} * plan.warps * layout.latents : 0;
}

AutoencoderForwardPlan plan_for(const Context& context, const AutoencoderForwardArguments& call,
                                const PackedLayout& layout, std::int64_t packed) {
  const DeviceLimits& limits = limits_of(context.device);
  const std::int64_t tiles = (call.sizes.rows + 15) / 16;
  const bool whole = is_default(call);
  const int chunk = whole ? DefaultShape::kChunk : WideShape::kChunk;
  const int most = whole ? DefaultShape::kForwardWarps : WideShape::kForwardWarps;
  AutoencoderForwardPlan plan{most, 1, false};
  // While there are multiprocessors to spare, the warps of a block share 16 rows.
  if (tiles <= 4 * limits.multiprocessors) {
    plan.warps = std::clamp(layout.frames * layout.slices / chunk, 1, most);
    plan.group = plan.warps;
  }
  plan.staged = packed + exchange_bytes(plan, layout) <= limits.block_shared_memory;
  return plan;
}

template <typename T, typename P, typename Shape, bool kStaged>
void launch(const Context& context, const Arguments& a, AutoencoderForwardPlan plan,
            std::int64_t packed) {
  const std::int64_t tiles = (a.rows + 15) / 16;
  const std::int64_t wanted = plan.group > 1 ? tiles : (tiles + plan.warps - 1) / plan.warps;
  const DeviceLimits& limits = limits_of(context.device);
  const std::int64_t shared = (kStaged ? packed : 0) + exchange_bytes(plan, a.layout);
  // As many blocks as are at work at once.
  std::int64_t resident = Shape::kForwardWarps / plan.warps;
  if (shared > 0) resident = std::min(resident, limits.shared_memory / (shared + 1024));
  const std::int64_t most = std::max<std::int64_t>(resident, 1) * limits.multiprocessors;
  launch_kernel(
      {context, std::min(wanted, most), 32 * plan.warps, static_cast<std::size_t>(shared), true},
      "running the autoencoder", forward_kernel<T, P, Shape, kStaged>, a);
}

}  // namespace
}  // namespace autoencoder

using namespace autoencoder;

std::string autoencoder_fused_declines(const Context& context,
                                       const AutoencoderForwardArguments& call) {
  if (call.dtype == DType::f64) return "float64 has no matrix instruction here";
  std::string reason = shape_declines(call.sizes);
  if (!reason.empty()) return reason;
  if (pack_shared_bytes(call.sizes) > limits_of(context.device).block_shared_memory) {
    return "a basis vector does not fit in shared memory";
  }
  return {};
}

void autoencoder_fused_run(const Context& context, const AutoencoderForwardArguments& call) {
  const PackedLayout layout = packed_layout(call.sizes, false);
  const std::int64_t packed = packed_bytes(layout, packed_kind(call.dtype, call.tf32));
  autoencoder_fused_run(context, call, plan_for(context, call, layout, packed));
}

void autoencoder_fused_run(const Context& context, const AutoencoderForwardArguments& call,
                           AutoencoderForwardPlan plan) {
  const AutoencoderSizes& sizes = call.sizes;
  if (sizes.rows == 0) return;
  const PackedLayout layout = packed_layout(sizes, false);
  const PackedKind kind = packed_kind(call.dtype, call.tf32);
  const std::int64_t packed = packed_bytes(layout, kind);
  const Scratch<unsigned char> memory(context, packed);
  pack_weights(context, sizes, call.parameters, call.parameter_dtype, call.dtype, kind, false,
               layout, memory.data());
  const Arguments a{call.x,        call.out,     call.z,        static_cast<float*>(call.score),
                    memory.data(), sizes.rows,   call.x_stride, sizes.n_mels,
                    sizes.frames,  sizes.latent, plan.group,    layout};
  dispatch_products(call.dtype, call.tf32, [&]<typename P>(P) {
    using T = typename P::Weight;
    if (!is_default(call)) {
      launch<T, P, WideShape, false>(context, a, plan, packed);
    } else if (plan.staged) {
      launch<T, P, DefaultShape, true>(context, a, plan, packed);
    } else {
      launch<T, P, DefaultShape, false>(context, a, plan, packed);
    }
  });
}

}  // namespace fusewise::cuda

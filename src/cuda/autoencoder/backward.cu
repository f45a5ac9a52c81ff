// All gradients of the autoencoder with default sizes, kernel 'warps'. Each warp recomputes forward
// for 16 rows and then goes back through it. Sums over rows are computed from a tile in shared
// memory. x is read from memory once, and once more from L2 for the score or if forward saved no
// projection. The incoming gradient is read once and dx is written once. Bound by latency.

#include <algorithm>

#include "common/scratch.h"
#include "cuda/autoencoder/gradients.cuh"
#include "cuda/autoencoder/selection.h"
#include "cuda/autoencoder/warp_tile.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/launch.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

struct Arguments {
  const void *x, *d_out, *d_z;
  const float *d_score, *projection;
  void* dx;
  const void* packed;
  float* sums;
  long long rows, x_stride;
  int frames;
  PackedLayout layout;
  SumsLayout at;
  WantedSums wanted;
  int decode_groups;  // groups of a frame's decoder weights: the score needs both directions
  int room;           // groups in the largest per-frame part of the weights
  int weight_bytes;   // in shared memory
  bool holds;         // the encoder's sums stay in shared memory until the end
};

/// Index of a value in the tile. The column is xored with bits of the row. This avoids bank
/// conflicts between the four rows by eight columns that a warp stores or loads at a time.
__device__ __forceinline__ int tile_at(int row, int column, int columns) {
  return row * columns + (column ^ ((row & 1) << 4 | (row & 2) << 2));
}

/// kRound: round to TF32, as the tensor cores will see the values. Not for values that are also
/// summed.
template <bool kRound, int kBlocks>
__device__ __forceinline__ void put(float* tile, int columns, const Block (&blocks)[kBlocks],
                                    int count, int first_column) {
  const int lane = threadIdx.x % 32, row = warp_index() * 16 + lane / 4, t = lane % 4;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (b >= count) break;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = kRound ? __uint_as_float(round_to_tf32(blocks[b].v[r][i])) : blocks[b].v[r][i];
      }
      *reinterpret_cast<float4*>(tile + tile_at(row + 8 * r, first_column + 16 * b + 4 * t,
                                                columns)) = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
}

/// c[j] += a^T b over eight rows, for 16 columns of a and 8 * kTiles columns of b. The caller has
/// rounded b if it is to be rounded. The MMAs of one result are interleaved with those of the
/// others, because each MMA waits for the previous one of the same result.
template <bool kExact, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&c)[kTiles][4], const float (&a)[4],
                                              const float (&b)[kTiles][2]) {
  unsigned a_high[4], b_high[kTiles][2];
  float parts[kTiles][4] = {};
  if constexpr (kExact) {
    unsigned a_low[4], b_low[kTiles][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) split(a[i], a_high[i], a_low[i]);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      split(b[j][0], b_high[j][0], b_low[j][0]);
      split(b[j][1], b_high[j][1], b_low[j][1]);
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      mma_tf32(parts[j][0], parts[j][1], parts[j][2], parts[j][3], a_low[0], a_low[1], a_low[2],
               a_low[3], b_high[j][0], b_high[j][1]);
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      mma_tf32(parts[j][0], parts[j][1], parts[j][2], parts[j][3], a_high[0], a_high[1], a_high[2],
               a_high[3], b_low[j][0], b_low[j][1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) a_high[i] = round_to_tf32(a[i]);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      b_high[j][0] = __float_as_uint(b[j][0]);
      b_high[j][1] = __float_as_uint(b[j][1]);
    }
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    float (&sum)[4] = kExact ? parts[j] : c[j];
    mma_tf32(sum[0], sum[1], sum[2], sum[3], a_high[0], a_high[1], a_high[2], a_high[3],
             b_high[j][0], b_high[j][1]);
  }
  if constexpr (kExact) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[j][i] += parts[j][i];
    }
  }
}

/// A piece of 16 by 8 * kTiles of a matrix of sums, computed by one warp. A lane has pairs of
/// values.
template <int kTiles>
struct SumPiece {
  int m, n;
  float* first;  ///< first value of this lane
  int stride;    ///< between rows

  __device__ __forceinline__ SumPiece(float* sum, int b_blocks, int job)
      : m(job / (2 * b_blocks / kTiles) * 16),
        n(job % (2 * b_blocks / kTiles) * 8 * kTiles),
        stride(16 * b_blocks) {
    const int lane = threadIdx.x % 32;
    first = sum + (m + lane / 4) * stride + n + 2 * (lane % 4);
  }
  static __device__ __forceinline__ int count(int a_blocks, int b_blocks) {
    return a_blocks * (2 * b_blocks / kTiles);
  }
  /// The pair in tile j, in the upper (r = 0) or lower (r = 1) eight rows.
  __device__ __forceinline__ float2* at(int j, int r) const {
    return reinterpret_cast<float2*>(first + 8 * r * stride + 8 * j);
  }
  /// The same pair when the thread holds its sums in shared memory, starting at `held`.
  static __device__ __forceinline__ float2* held_at(float2* held, int j, int r) {
    return held + (2 * j + r) * blockDim.x;
  }
  static __device__ __forceinline__ float2* next(float2* held) {
    return held == nullptr ? nullptr : held + 2 * kTiles * blockDim.x;
  }
};

/// sum[m][n] += sum over the tile's rows of column a + m times column b + n, m < 16 * a_blocks, n <
/// 16 * b_blocks. If `bias` is given, bias[m] += the sum of column a + m. `job` is this warp's
/// first piece; it then takes every `warps`-th one. If `held` is given, each thread holds its sums
/// there. The tensor cores sum within the tile, and they truncate. That sum is added to the total
/// in float32 arithmetic, which rounds to nearest.
template <bool kExact, int kTiles>
__device__ __forceinline__ void add_products(const float* tile, int columns, int rows, int a,
                                             int a_blocks, int b, int b_blocks, float* sum,
                                             float2* held, float* bias, bool first, bool bias_first,
                                             int& job, int warps) {
  using Piece = SumPiece<kTiles>;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int jobs = Piece::count(a_blocks, b_blocks);
  for (; job < jobs; job += warps, held = Piece::next(held)) {
    const Piece piece(sum, b_blocks, job);
    float2 before[kTiles][2];  // loads in flight while the tile is summed
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        before[j][r] = make_float2(0.f, 0.f);
        if (!first) {
          before[j][r] = held ? *Piece::held_at(held, j, r) : __ldcg(piece.at(j, r));
        }
      }
    }
    float c[kTiles][4] = {};
    float row_sums[2] = {0.f, 0.f};
#pragma unroll(kExact ? 2 : 4)
    for (int k = 0; k < rows; k += 8) {
      const int upper = (k + t) * columns, lower = upper + 4 * columns;
      const int turn = (t & 1) << 4 | (t & 2) << 2;
      const int left = (a + piece.m + g) ^ turn, right = (a + piece.m + g + 8) ^ turn;
      const float av[4] = {tile[upper + left], tile[upper + right], tile[lower + left],
                           tile[lower + right]};
      row_sums[0] += av[0] + av[2];
      row_sums[1] += av[1] + av[3];
      float bv[kTiles][2];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int column = (b + piece.n + 8 * j + g) ^ turn;
        bv[j][0] = tile[upper + column];
        bv[j][1] = tile[lower + column];
      }
      multiply_rows<kExact>(c, av, bv);
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 after =
            make_float2(before[j][r].x + c[j][2 * r], before[j][r].y + c[j][2 * r + 1]);
        if (held) {
          *Piece::held_at(held, j, r) = after;
        } else {
          __stcg(piece.at(j, r), after);
        }
      }
    }
    if (bias != nullptr && piece.n == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float total = row_sum(row_sums[r]);
        float* at = bias + piece.m + g + 8 * r;
        if (t == 0) __stcg(at, (bias_first ? 0.f : __ldcg(at)) + total);
      }
    }
  }
  job -= jobs;
}

/// Writes the sums that add_products held to their final place. Warps get the same pieces as there.
template <int kTiles>
__device__ __forceinline__ void store_held(int a_blocks, int b_blocks, float* sum, float2* held,
                                           int job, int warps) {
  using Piece = SumPiece<kTiles>;
  for (; job < Piece::count(a_blocks, b_blocks); job += warps, held = Piece::next(held)) {
    const Piece piece(sum, b_blocks, job);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) *piece.at(j, r) = *Piece::held_at(held, j, r);
    }
  }
}

/// The packed weights of a block. Weights that all frames share stay in shared memory. Weights of a
/// single frame are double-buffered and prefetched one step ahead.
template <typename P>
class WeightStream {
 public:
  using Source = Weights<P, true>;
  using Group = typename Source::Group;

  __device__ __forceinline__ WeightStream(const Arguments& a, unsigned char* shared)
      : packed_(static_cast<const Group*>(a.packed)), room_(a.room) {
    const PackedLayout& y = a.layout;
    Group* groups = reinterpret_cast<Group*>(shared);
    float* floats = reinterpret_cast<float*>(groups + y.resident + 2 * room_);
    copy(groups, packed_, y.resident);
    copy(floats, reinterpret_cast<const float*>(packed_ + y.groups), y.floats);
    resident_ = {groups, floats};
    buffers_ = groups + y.resident;
  }

  __device__ __forceinline__ const Source& resident() const { return resident_; }

  /// Starts the asynchronous copy of a frame's weights, for the next step.
  __device__ __forceinline__ void fetch(int begin, int count) {
    copy(buffers_ + (1 - turn_) * room_, packed_ + begin, count);
  }
  /// Called by the whole block. On return the asynchronous copies have landed.
  __device__ __forceinline__ void wait() {
    wait_for_copies();
    __syncthreads();
  }
  /// wait(), then switches buffers: the weights used so far may be overwritten.
  __device__ __forceinline__ void advance() {
    wait();
    turn_ = 1 - turn_;
  }
  /// The weights fetched in the previous step.
  __device__ __forceinline__ Source current() const {
    return {buffers_ + turn_ * room_, resident_.floats};
  }

 private:
  template <typename Element>
  __device__ __forceinline__ void copy(Element* to, const Element* from, int count) {
    const int vectors = count * static_cast<int>(sizeof(Element)) / 16;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
      copy_vector(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(from) + i);
    }
  }

  const Group* packed_;
  Source resident_;
  Group* buffers_ = nullptr;
  int room_, turn_ = 0;
};

template <typename T, typename P>
__global__ void __launch_bounds__(32 * kMostBackwardWarps, 1)
    backward_kernel(const __grid_constant__ Arguments a) {
  constexpr int kMels = DefaultShape::kMels, kLatents = DefaultShape::kLatents;
  constexpr int kSlices = DefaultShape::kSlices, kColumns = 16 * kMels, kLatent = 16 * kLatents;
  constexpr TileLayout at = tile_layout(kMels, kLatents, kSlices);
  extern __shared__ __align__(16) unsigned char shared[];
  float* tile = reinterpret_cast<float*>(shared);
  const PackedLayout& y = a.layout;
  const int warp = warp_index(), warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int columns = at.columns, tile_rows = 16 * warps;
  constexpr int kTiles = 4, kAtOnce = 2;
  const bool reconstructs = a.d_out != nullptr || a.d_score != nullptr;
  const int decode_groups = a.decode_groups;
  const bool to_encoder = a.dx != nullptr || a.wanted.encode || a.wanted.project;

  wait_for_previous_kernel();
  allow_next_kernel();
  WeightStream<P> stream(a, shared + sizeof(float) * tile_rows * columns);
  const auto fetch_first = [&] {
    if (a.projection == nullptr) {
      stream.fetch(y.project, y.project_step);
    } else if (reconstructs) {
      stream.fetch(y.decode_transposed, decode_groups);
    } else {
      stream.fetch(y.project_transposed, y.project_step);
    }
  };
  fetch_first();
  const auto& weights = stream.resident();
  float* sums = a.sums + static_cast<long long>(blockIdx.x) * a.at.floats;
  float2* held = nullptr;  // this thread's sums for the encoder
  if (a.holds) {
    held =
        reinterpret_cast<float2*>(shared + sizeof(float) * tile_rows * columns + a.weight_bytes) +
        threadIdx.x;
  }
  const long long width = static_cast<long long>(a.frames) * kColumns;
  const float score_scale = 2.f / static_cast<float>(width);
  const T* x_base = static_cast<const T*>(a.x);

  // `frame` holds a frame of x, which is then normalised. `gradient` holds a frame of the output's
  // gradient, and later of x's gradient. Both are loaded long before they are used.
  Block frame[kMels], gradient[kMels];
  long long begin = static_cast<long long>(blockIdx.x) * tile_rows;
  const long long step = static_cast<long long>(gridDim.x) * tile_rows;
  RowPair<const T>(x_base, begin + 16 * warp, a.rows, a.x_stride).load(frame, 0, 0);
  // After this wait, the weights that all frames share need no further barrier.
  stream.wait();
  bool first = true;  // first tile of this block: there are no sums to add to yet
  for (; begin < a.rows; begin += step, first = false) {
    const long long row = begin + 16 * warp;
    const RowPair<const T> x(x_base, row, a.rows, a.x_stride);
    const RowPair<const T> d_out(static_cast<const T*>(a.d_out), row, a.rows, width);
    const RowPair<T> dx(static_cast<T*>(a.dx), row, a.rows, width);

    // Forward, up to z.
    Block normal[kLatents];
#pragma unroll
    for (int l = 0; l < kLatents; ++l) normal[l].fill(0.f);
    if (a.projection != nullptr) {
      RowPair<const float>(a.projection, row, a.rows, kLatent).load(normal, 0, 0);
    }
    for (int f = 0; f < a.frames && a.projection == nullptr; ++f) {
      stream.advance();
      if (f + 1 < a.frames) {
        stream.fetch(y.project + (f + 1) * y.project_step, y.project_step);
      } else if (reconstructs) {
        stream.fetch(y.decode_transposed, decode_groups);
      } else {
        stream.fetch(y.project_transposed, y.project_step);
      }
      const auto own = stream.current();
      float unused[2];
      normalise(frame, unused);

      Block slice[kSlices];
#pragma unroll
      for (int j = 0; j < kSlices; ++j) {
        slice[j].fill(weights.bias(y.encode_bias, j));
      }
      multiply_blocks<P, kAtOnce>(slice, frame, weights, y.encode, 0, 0, kMels);

      // After the last frame, load the first one again: the backward pass starts with it.
      x.load(frame, 0, static_cast<long long>(f + 1 < a.frames ? f + 1 : 0) * kColumns);

#pragma unroll
      for (int j = 0; j < kSlices; ++j) gelu<P::kGeluDegree>(slice[j]);
      // A separate accumulator, added in float32 arithmetic: the tensor cores truncate their sums.
      Block part[kLatents];
#pragma unroll
      for (int l = 0; l < kLatents; ++l) part[l].fill(0.f);
      multiply_blocks<P, kAtOnce>(part, slice, own, 0, 0, 0, kSlices);
#pragma unroll
      for (int l = 0; l < kLatents; ++l) normal[l].add(part[l]);
    }
    if (a.d_out != nullptr) d_out.load(gradient, 0, 0);
    float mid_inverse_deviation[2];
    normalise(normal, mid_inverse_deviation);
    Block z[kLatents], slope[kLatents], dz[kLatents];
#pragma unroll
    for (int l = 0; l < kLatents; ++l) {
      z[l].fill(weights.bias(y.mid_bias, l));
      dz[l].fill(0.f);
    }
    multiply_blocks<P, kAtOnce>(z, normal, weights, y.mid, 0, 0, kLatents);
#pragma unroll
    for (int l = 0; l < kLatents; ++l) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          z[l].v[r][i] = gelu_and_slope<P::kGeluDegree>(z[l].v[r][i], slope[l].v[r][i]);
        }
      }
    }
    if (a.d_z != nullptr) {
      const RowPair<const T> d_z(static_cast<const T*>(a.d_z), row, a.rows, kLatent);
      d_z.load(dz, 0, 0);
      d_z.clear_missing(dz);
    }

    // Back through the decoder.
    if (reconstructs) {
      float scale[2] = {0.f, 0.f};
      if (a.d_score != nullptr) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (x.real[r]) scale[r] = score_scale * a.d_score[row + lane / 4 + 8 * r];
        }
      }
      for (int f = 0; f < a.frames; ++f) {
        const long long offset = static_cast<long long>(f) * kColumns;
        stream.advance();
        if (f + 1 < a.frames) {
          stream.fetch(y.decode_transposed + (f + 1) * y.decode_step, decode_groups);
        } else {
          stream.fetch(y.project_transposed, y.project_step);
        }
        const auto own = stream.current();
        if (a.d_out != nullptr) {
          d_out.clear_missing(gradient);
        } else {
#pragma unroll
          for (int m = 0; m < kMels; ++m) gradient[m].fill(0.f);
        }
        if (a.d_score != nullptr) {
#pragma unroll
          for (int m = 0; m < kMels; ++m) {
            Block original[1], result[1];
            x.load(original, m, offset);
            result[0].fill(weights.bias(y.decode_bias, m));
            multiply_blocks<P, kAtOnce>(result, z, own, y.decode - y.decode_transposed, m, 0,
                                        kLatents);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const float d = scale[r] * (result[0].v[r][i] - original[0].v[r][i]);
                gradient[m].v[r][i] += d;
                original[0].v[r][i] = -d;
              }
            }
            // The direct part of the score's gradient with respect to x. The part through the model
            // is added below.
            if (a.dx != nullptr) {
              dx.template store<false>(original, m, offset);
            }
          }
        }
        if (a.wanted.decode) {
          if (f == 0) put<!P::kExact>(tile, columns, z, kLatents, at.inner);
          put<false>(tile, columns, gradient, kMels, at.outer);
        }
        Block part[kLatents];
#pragma unroll
        for (int l = 0; l < kLatents; ++l) part[l].fill(0.f);
        multiply_blocks<P, kAtOnce>(part, gradient, own, 0, 0, 0, kMels);
#pragma unroll
        for (int l = 0; l < kLatents; ++l) dz[l].add(part[l]);
        if (a.d_out != nullptr && f + 1 < a.frames) {
          d_out.load(gradient, 0, offset + kColumns);
        }
        if (a.wanted.decode) {
          int job = warp;
          __syncthreads();
          add_products<P::kExact, 2>(tile, columns, tile_rows, at.outer, kMels, at.inner, kLatents,
                                     sums + a.at.q_decode + f * 256 * kMels * kLatents, nullptr,
                                     sums + a.at.b_decode, first, first && f == 0, job, warps);
        }
      }
    }

    // Back through the bottleneck.
#pragma unroll
    for (int l = 0; l < kLatents; ++l) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dz[l].v[r][i] *= slope[l].v[r][i];
      }
    }
    Block d_projection[kLatents];
#pragma unroll
    for (int l = 0; l < kLatents; ++l) d_projection[l].fill(0.f);
    multiply_blocks<P, kAtOnce>(d_projection, dz, weights, y.mid_transposed, 0, 0, kLatents);
    normalise_backward(d_projection, normal, mid_inverse_deviation);
    if (a.wanted.mid) {
      __syncthreads();
      put<false>(tile, columns, dz, kLatents, at.hidden);
      put<!P::kExact>(tile, columns, normal, kLatents, at.slice);
      int job = warp;
      __syncthreads();
      add_products<P::kExact, 2>(tile, columns, tile_rows, at.hidden, kLatents, at.slice, kLatents,
                                 sums + a.at.q_mid, nullptr, sums + a.at.b_mid, first, first, job,
                                 warps);
    }

    // Back through the encoder.
    for (int f = 0; f < a.frames && to_encoder; ++f) {
      const long long offset = static_cast<long long>(f) * kColumns;
      stream.advance();
      if (f + 1 < a.frames) {
        stream.fetch(y.project_transposed + (f + 1) * y.project_step, y.project_step);
      } else if (begin + step < a.rows) {
        fetch_first();
      }
      const auto own = stream.current();
      float inverse_deviation[2];
      normalise(frame, inverse_deviation);
#pragma unroll
      for (int m = 0; m < kMels; ++m) gradient[m].fill(0.f);
      if (a.wanted.project && f == 0) put<false>(tile, columns, d_projection, kLatents, at.inner);
      if (a.wanted.encode) put<!P::kExact>(tile, columns, frame, kMels, at.outer);

      Block slice[kSlices], d_slice[kSlices];
#pragma unroll
      for (int j = 0; j < kSlices; ++j) {
        slice[j].fill(weights.bias(y.encode_bias, j));
        d_slice[j].fill(0.f);
      }
      multiply_blocks<P, kAtOnce>(slice, frame, weights, y.encode, 0, 0, kMels);
      multiply_blocks<P, kAtOnce>(d_slice, d_projection, own, 0, 0, 0, kLatents);
#pragma unroll
      for (int j = 0; j < kSlices; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float slope_here;
            slice[j].v[r][i] = gelu_and_slope<P::kGeluDegree>(slice[j].v[r][i], slope_here);
            d_slice[j].v[r][i] *= slope_here;
          }
        }
      }
      if (a.wanted.project) {
        put<!P::kExact>(tile, columns, slice, kSlices, at.slice);
      }
      if (a.wanted.encode) {
        put<false>(tile, columns, d_slice, kSlices, at.hidden);
      }
      if (a.dx != nullptr) {
        multiply_blocks<P, kAtOnce>(gradient, d_slice, weights, y.encode_transposed, 0, 0, kSlices);
      }

      if (a.dx != nullptr) {
        normalise_backward(gradient, frame, inverse_deviation);
        if (a.d_score != nullptr) {
          // Written by this lane above.
          dx.load(frame, 0, offset);
#pragma unroll
          for (int m = 0; m < kMels; ++m) gradient[m].add(frame[m]);
        }
        dx.template store<false>(gradient, 0, offset);
      }
      if (f + 1 < a.frames) {
        x.load(frame, 0, offset + kColumns);
      } else {
        RowPair<const T>(x_base, row + step, a.rows, a.x_stride).load(frame, 0, 0);
      }
      if (a.wanted.encode || a.wanted.project) {
        int job = warp;
        __syncthreads();
        if (a.wanted.encode) {
          add_products<P::kExact, kTiles>(tile, columns, tile_rows, at.hidden, kSlices, at.outer,
                                          kMels, sums + a.at.q_encode, held, sums + a.at.b_encode,
                                          first && f == 0, first && f == 0, job, warps);
        }
        // Smaller pieces, so that eight warps get equal work.
        if (a.wanted.project) {
          add_products<P::kExact, 2>(tile, columns, tile_rows, at.inner, kLatents, at.slice,
                                     kSlices, sums + a.at.q_project + f * 256 * kLatents * kSlices,
                                     nullptr, nullptr, first, false, job, warps);
        }
      }
    }
    if (!to_encoder) {
      // The encoder's backward pass did not run, so the first weights and rows were not prefetched
      // there.
      stream.advance();
      fetch_first();
      RowPair<const T>(x_base, row + step, a.rows, a.x_stride).load(frame, 0, 0);
    }
  }
  wait_for_copies();

  if (held != nullptr && a.wanted.encode) {
    store_held<kTiles>(kSlices, kMels, sums + a.at.q_encode, held, warp, warps);
  }
}

// ---- host

}  // namespace

void run_warps(const Context& context, const AutoencoderBackwardArguments& call,
               const BackwardPlan& plan) {
  const DeviceLimits& limits = limits_of(context.device);
  const AutoencoderSizes& sizes = call.sizes;
  const PackedLayout layout = packed_layout(sizes, true);
  const SumsLayout at = sums_layout(layout);
  const PackedKind kind = packed_kind(call.dtype, call.tf32);
  const Scratch<unsigned char> memory(context, packed_bytes(layout, kind));
  const std::int64_t tile_rows = 16 * plan.warps;
  const std::int64_t blocks =
      std::clamp<std::int64_t>((sizes.rows + tile_rows - 1) / tile_rows, 0, limits.multiprocessors);
  const Scratch<float> sums(context,
                            finishes(call) ? at.floats * std::max<std::int64_t>(blocks, 1) : 0);
  pack_weights(context, sizes, call.parameters, call.parameter_dtype, call.dtype, kind, true,
               layout, memory.data());
  const Arguments a{call.x,
                    call.d_out,
                    call.d_z,
                    static_cast<const float*>(call.d_score),
                    static_cast<const float*>(call.projection),
                    call.dx,
                    memory.data(),
                    sums.data(),
                    sizes.rows,
                    call.x_stride,
                    sizes.frames,
                    layout,
                    at,
                    wanted_sums(call),
                    decode_groups(call, layout),
                    frame_groups(call, layout),
                    static_cast<int>(staged_bytes(call, layout)),
                    plan.holds};
  // Request enough shared memory that only one block fits on an SM. Otherwise, while blocks of the
  // packing kernel still occupy some SMs, two blocks would be placed on one of the others.
  const std::int64_t shared =
      std::max<std::int64_t>(shared_bytes(call, plan), limits.shared_memory / 2);
  dispatch_products(call.dtype, call.tf32, [&]<typename P>(P) {
    launch_kernel({context, blocks, 32 * plan.warps, static_cast<std::size_t>(shared), true},
                  "running the autoencoder backward", backward_kernel<typename P::Weight, P>, a);
  });
  finish_gradients(context, call, layout, at, static_cast<int>(blocks), sums.data(), memory.data());
}

void run_warps(const Context& context, const AutoencoderBackwardArguments& call) {
  run_warps(context, call, backward_plan(limits_of(context.device), call));
}

}  // namespace fusewise::cuda::autoencoder

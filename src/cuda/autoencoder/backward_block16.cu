// All gradients of the default model. A block processes 16 rows at a time. Four warps share a
// frame; those of the last frame also compute the bottleneck. Activations pass between warps
// through shared memory, and the sums over rows stay in registers until the end. x, the incoming
// gradient and dx cross memory once. Bound by shared memory bandwidth, in float32 by instruction
// issue.

#include <algorithm>

#include "common/scratch.h"
#include "cuda/autoencoder/gradients.cuh"
#include "cuda/autoencoder/mma_shared.cuh"
#include "cuda/autoencoder/selection.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kFrames = 5, kMels = 64, kLatents = 32, kSlices = 64;
constexpr int kRows = 16;
constexpr int kParts = 4;  // warps that share a frame
constexpr int kThreads = 32 * kFrames * kParts;
// A warp's share of a frame's GEMMs: kColumns columns, or one tile of the bottleneck's GEMMs. For
// LayerNorm, a warp has four rows instead.
constexpr int kColumns = kMels / kParts, kTiles = kColumns / 8;
static_assert(kColumns == 16 && kLatents == 8 * kParts && kRows == 4 * kParts);
constexpr PackedLayout kLayout = packed_layout(
    {.rows = 0, .n_mels = kMels, .frames = kFrames, .latent = kLatents, .slice_latent = kSlices},
    true);
constexpr SumsLayout kSums = sums_layout(kLayout);

struct Arguments {
  const void *x, *d_out, *d_z;
  const float *d_score, *projection;
  void* dx;
  const void* packed;
  float* sums;
  long long rows, x_stride;
  WantedSums wanted;

  __device__ __forceinline__ bool reconstructs() const {
    return d_out != nullptr || d_score != nullptr;
  }
  __device__ __forceinline__ bool reaches_encoder() const {
    return dx != nullptr || wanted.encode || wanted.project;
  }
};

/// A block's shared memory. Rows are padded by 16 bytes, so that eight consecutive rows start in
/// different banks.
template <typename P>
struct Shared {
  using T = typename P::Weight;
  using Group = typename PackedGroup<T>::type;
  static constexpr int kPad = 16 / sizeof(T);
  static constexpr int kWide = kMels + kPad, kNarrow = kLatents + kPad;
  using Frames = T[kFrames][kRows][kWide];
  using Latents = T[kRows][kNarrow];
  static_assert(kMels == kSlices);

  Group resident[kLayout.resident];
  Group decode_transposed[kFrames][kLayout.decode - kLayout.decode_transposed];
  Group project_transposed[kFrames][kLayout.project_step];
  alignas(16) float floats[kLayout.floats];
  alignas(16) Frames normal;    ///< x, normalised
  alignas(16) Frames gradient;  ///< of the output
  union {
    alignas(16) Frames hidden;                              ///< gradient before the encoder's GELU
    alignas(16) float parts[kFrames][kRows][kLatents + 4];  ///< of z's gradient; used first
  };
  union {
    alignas(16) Frames slice;                          ///< output of the encoder's GELU
    alignas(16) float raw[kFrames][kRows][kMels + 4];  ///< gradient of `normal`; used after `slice`
  };
  float d_score[kRows];
  alignas(16) Latents z, mid_normal, d_mid, d_projection;
  alignas(16) float projection[kRows][kLatents + 4];  ///< of the next tile
  alignas(16) float mid_slope[kRows][kLatents + 4];   ///< derivative of the bottleneck's GELU
  alignas(16) float mid_linear[kRows][kLatents + 4];  ///< input of that GELU, without the bias
  float mid_inverse[kRows];                           ///< 1 / deviation of the projection
};

__device__ __forceinline__ void store_pair(float* to, float a, float b) {
  *reinterpret_cast<float2*>(to) = make_float2(a, b);
}
template <typename T>
__device__ __forceinline__ void store_pair(T* to, float a, float b) {
  *reinterpret_cast<unsigned*>(to) = pack_pair(T{}, a, b);
}

/// Eight values of a row in memory order. A warp has four rows of a frame.
template <typename T>
struct RowPart {
  static constexpr int kVectors = sizeof(T) / 2;
  static constexpr int kSize = Vector<T>::kSize;
  Vector<T> vectors[kVectors];

  static __device__ __forceinline__ int column(int vector, int lane) {
    return (8 * vector + lane % 8) * kSize;
  }
  /// Zeros if the row does not exist.
  __device__ __forceinline__ void load(const T* row, bool real, int lane) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (real) {
        vectors[v] = load_once(row + column(v, lane));
      } else {
        reinterpret_cast<uint4&>(vectors[v]) = make_uint4(0, 0, 0, 0);
      }
    }
  }
  __device__ __forceinline__ void load_shared(const T* row, int lane) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v] = load_vector(row + column(v, lane));
  }
  __device__ __forceinline__ void store_shared(T* row, int lane) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) store_vector(row + column(v, lane), vectors[v]);
  }
  __device__ __forceinline__ void store(T* row, int lane) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) store_streaming(row + column(v, lane), vectors[v]);
  }
  __device__ __forceinline__ void get(float (&values)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = vectors[i / kSize][i % kSize];
  }
  __device__ __forceinline__ void set(const float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) vectors[i / kSize].set(i % kSize, values[i]);
  }
};

__device__ __forceinline__ long long row_of(int tile) {
  return static_cast<long long>(tile) * kRows;
}

/// Hides the value from the optimiser, so that everything derived from it is recomputed. Otherwise
/// addresses would stay in registers for the next tile, and the sums would spill.
__device__ __forceinline__ void forget(int& number) { asm volatile("" : "+r"(number)); }

/// Sum over the eight lanes that share a row.
__device__ __forceinline__ float eight_lanes_sum(float value) {
  value = row_sum(value);
  return value + __shfl_xor_sync(0xffffffffu, value, 4);
}

/// Loads the weights for one block of 16 inputs, starting at tile first_tile.
template <int kInputs, int kCount, typename Group>
__device__ __forceinline__ void load_weights(Group (&w)[kCount], const Group* matrix,
                                             int first_tile, int block, int lane) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    w[j] = matrix[((first_tile + j) * (kInputs / 16) + block) * 32 + lane];
  }
}

/// c += 16 rows of `left` times kCount tiles of a packed matrix, starting at first_tile.
template <typename P, int kInputs, int kCount>
__device__ __forceinline__ void multiply_rows(float (&c)[kCount][4], const typename P::Weight* left,
                                              int stride, const typename Shared<P>::Group* matrix,
                                              int first_tile, int lane) {
#pragma unroll
  for (int b = 0; b < kInputs / 16; ++b) {
    typename Shared<P>::Group w[kCount];
    load_weights<kInputs>(w, matrix, first_tile, b, lane);
    multiply_16<P>(c, Left16<typename P::Weight>(left + 16 * b, stride, lane), w);
  }
}

/// Calls body(tile, half, row, column) for each pair of results that a lane has in `kCount` tiles.
template <typename T, int kCount, typename Body>
__device__ __forceinline__ void each_pair(int first_tile, int lane, Body&& body) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) body(j, r, lane / 4 + 8 * r, pair_column<T>(first_tile + j, lane));
  }
}

/// Sets both rows of a lane to the same values: a bias.
template <typename T, int kCount>
__device__ __forceinline__ void fill_rows(float (&c)[kCount][4], const float* bias, int first_tile,
                                          int lane) {
  each_pair<T, kCount>(first_tile, lane, [&](int j, int r, int, int column) {
    const float2 pair = *reinterpret_cast<const float2*>(bias + column);
    c[j][2 * r] = pair.x, c[j][2 * r + 1] = pair.y;
  });
}

/// The part between the projection and the decoder, forward and backward. Each participating warp
/// computes one tile of every result. Reductions over all latents of a row are repeated in every
/// warp, so that the warps need not wait for one another. Nothing stays in registers between calls,
/// because the sums over rows occupy them.
template <typename P>
class Bottleneck {
  using T = typename P::Weight;
  static constexpr int kBlocks = kLatents / 16;
  /// All latents of rows g and g + 8, spread over lanes 4g to 4g + 3, in the left operand's layout.
  using Rows = Block[kBlocks];

 public:
  __device__ __forceinline__ Bottleneck(const Arguments& a, Shared<P>& s, int part)
      : a_(a), s_(s), part_(part) {}

  /// Starts the asynchronous copy of the projection. forward() uses it after a barrier.
  __device__ __forceinline__ void fetch(int tile, int lane) {
    const int own = 4 * part_ + lane / 8;
    const long long row = row_of(tile) + own;
    float* to = s_.projection[own] + 4 * (lane % 8);
    if (row < a_.rows) {
      copy_vector(to, a_.projection + row * kLatents + 4 * (lane % 8));
    } else {
      *reinterpret_cast<float4*>(to) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  /// Writes z and the normalised projection to shared memory.
  __device__ __forceinline__ void forward(int lane) {
    Rows v;
    float inverse[2];
    each_four(lane, s_.projection, [&](int b, int r, float4 four) {
      v[b].v[r][0] = four.x, v[b].v[r][1] = four.y, v[b].v[r][2] = four.z, v[b].v[r][3] = four.w;
    });
    normalise(v, inverse);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (part_ == 0 && lane % 4 == 0) s_.mid_inverse[lane / 4 + 8 * r] = inverse[r];
    }
    store_part(s_.mid_normal, v, lane);
    float c[1][4] = {};
    multiply_part(c, v, s_.resident + kLayout.mid, lane);
    each_pair<T, 1>(part_, lane, [&](int, int r, int row, int column) {
      const float* bias = s_.floats + kLayout.mid_bias + column;
      float value[2], slope[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        value[i] = gelu_and_slope<P::kGeluDegree>(c[0][2 * r + i] + bias[i], slope[i]);
      }
      store_pair(s_.z[row] + column, value[0], value[1]);
      store_pair(s_.mid_slope[row] + column, slope[0], slope[1]);
      store_pair(s_.mid_linear[row] + column, c[0][2 * r], c[0][2 * r + 1]);
    });
  }

  /// Computes the projection's gradient from the partial sums of z's gradient.
  __device__ __forceinline__ void backward(int tile, int lane) {
    Rows d = {};
    if (a_.d_z != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const long long row = row_of(tile) + lane / 4 + 8 * r;
        if (row >= a_.rows) continue;
        const T* from = static_cast<const T*>(a_.d_z) + row * kLatents + 4 * (lane % 4);
#pragma unroll
        for (int k = 0; k < 4 * kBlocks; ++k) {
          d[k / 4].v[r][k % 4] = to_accumulator<float>(from[16 * (k / 4) + k % 4]);
        }
      }
    }
    if (a_.reconstructs()) {
#pragma unroll
      for (int f = 0; f < kFrames; ++f) {
        each_four(lane, s_.parts[f], [&](int b, int r, float4 four) {
          d[b].v[r][0] += four.x, d[b].v[r][1] += four.y, d[b].v[r][2] += four.z,
              d[b].v[r][3] += four.w;
        });
      }
    }
    each_four(lane, s_.mid_slope, [&](int b, int r, float4 four) {
      d[b].v[r][0] *= four.x, d[b].v[r][1] *= four.y, d[b].v[r][2] *= four.z,
          d[b].v[r][3] *= four.w;
    });
    store_part(s_.d_mid, d, lane);
    // Dot product of the normalised projection and its gradient, computed without that gradient: d
    // . (W n) equals (W^T d) . n.
    float product[2] = {};
    each_four(lane, s_.mid_linear, [&](int b, int r, float4 four) {
      product[r] += fmaf(d[b].v[r][0], four.x, d[b].v[r][1] * four.y) +
                    fmaf(d[b].v[r][2], four.z, d[b].v[r][3] * four.w);
    });
    float c[1][4] = {};
    multiply_part(c, d, s_.resident + kLayout.mid_transposed, lane);
    each_pair<T, 1>(part_, lane, [&](int, int r, int row, int column) {
      const float along = row_sum(product[r]) * (1.f / kLatents), inverse = s_.mid_inverse[row];
      const T* normal = s_.mid_normal[row] + column;
      float out[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        out[i] = inverse * (c[0][2 * r + i] - to_accumulator<float>(normal[i]) * along);
      }
      store_pair(s_.d_projection[row] + column, out[0], out[1]);
    });
  }

 private:
  /// Calls body(block, half, four values) for each group of four values that a lane has.
  template <typename Body>
  static __device__ __forceinline__ void each_four(int lane,
                                                   const float (&from)[kRows][kLatents + 4],
                                                   Body&& body) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        body(b, r,
             *reinterpret_cast<const float4*>(from[lane / 4 + 8 * r] + 16 * b + 4 * (lane % 4)));
      }
    }
  }
  /// Stores this warp's eight columns.
  __device__ __forceinline__ void store_part(T (&to)[kRows][Shared<P>::kNarrow], const Rows& v,
                                             int lane) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (2 * b + lane % 4 / 2 != part_) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        T* four = to[lane / 4 + 8 * r] + 16 * b + 4 * (lane % 4);
        store_pair(four, v[b].v[r][0], v[b].v[r][1]);
        store_pair(four + 2, v[b].v[r][2], v[b].v[r][3]);
      }
    }
  }
  /// c += rows times this warp's tile of a packed matrix.
  __device__ __forceinline__ void multiply_part(float (&c)[1][4], const Rows& v,
                                                const typename Shared<P>::Group* matrix,
                                                int lane) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      typename Shared<P>::Group w[1];
      load_weights<kLatents>(w, matrix, part_, b, lane);
      multiply_16<P>(c, Left16<T>(v[b].v), w);
    }
  }

  const Arguments& a_;
  Shared<P>& s_;
  const int part_;
};

/// Starts the asynchronous copies of the weights.
template <typename P>
__device__ __forceinline__ void fetch_weights(const void* packed, Shared<P>& s) {
  const auto copy = [](void* to, const void* from, int bytes) {
#pragma unroll 1
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * kThreads) {
      copy_vector(static_cast<unsigned char*>(to) + i, static_cast<const unsigned char*>(from) + i);
    }
  };
  const auto* groups = static_cast<const typename Shared<P>::Group*>(packed);
  copy(s.resident, groups, sizeof s.resident);
#pragma unroll 1
  for (int f = 0; f < kFrames; ++f) {
    copy(s.decode_transposed[f], groups + kLayout.decode_transposed + f * kLayout.decode_step,
         sizeof s.decode_transposed[f]);
  }
  copy(s.project_transposed, groups + kLayout.project_transposed, sizeof s.project_transposed);
  copy(s.floats, groups + kLayout.groups, sizeof s.floats);
}

/// A warp's share of a frame, in every GEMM that produces or uses it. kScores: the incoming
/// gradient is that of the score.
template <typename P, bool kScores>
__device__ __forceinline__ void frame_part(const Arguments& a, Shared<P>& s, int warp) {
  using T = typename P::Weight;
  using Group = typename Shared<P>::Group;
  constexpr int kWide = Shared<P>::kWide, kNarrow = Shared<P>::kNarrow;
  const int f = warp / kParts, part = warp % kParts, first_tile = kTiles * part;
  int lane = threadIdx.x % 32;
  const auto own_row = [&] { return 4 * part + lane / 8; };

  // This warp's sums of 32 columns by 32 latents: the decoder's for half a frame, or the
  // projection's.
  const bool has_decode = part < 2;
  const int pair_m = 32 * (part % 2);
  float pair_sums[2][4][4] = {};
  ColumnSums<T> pair_bias[2];
  // And of 16 by 16: the encoder's, or the bottleneck's in the warps of the last frame.
  const bool has_mid = f == kFrames - 1;
  const int other_m = 16 * (has_mid ? part / 2 : f), other_n = 16 * (has_mid ? part % 2 : part);
  float other_sums[1][2][4] = {};
  ColumnSums<T> other_bias[1];
  static_assert(16 * (kFrames - 1) == kSlices);

  RowPart<T> x;
  const auto load_x = [&](int tile) {
    const long long row = row_of(tile) + own_row();
    x.load(static_cast<const T*>(a.x) + row * a.x_stride + f * kMels, row < a.rows, lane);
  };
  const auto fetch_gradient = [&](int tile) {
    if constexpr (kScores) {
      if (warp != 0 || lane >= kRows) return;
      if (row_of(tile) + lane < a.rows) {
        copy_float(s.d_score + lane, a.d_score + row_of(tile) + lane);
      } else {
        s.d_score[lane] = 0.f;
      }
      return;
    }
    if (a.d_out == nullptr) return;
    const long long row = row_of(tile) + own_row();
    const T* from = static_cast<const T*>(a.d_out) + (row * kFrames + f) * kMels;
#pragma unroll
    for (int v = 0; v < RowPart<T>::kVectors; ++v) {
      T* to = s.gradient[f][own_row()] + RowPart<T>::column(v, lane);
      if (row < a.rows) {
        copy_vector(to, from + RowPart<T>::column(v, lane));
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      }
    }
  };

  // Neither this kernel nor the packing kernel before it writes these, so they can be read at once.
  Bottleneck<P> mid(a, s, part);
  load_x(blockIdx.x);
  fetch_gradient(blockIdx.x);
  if (has_mid) mid.fetch(blockIdx.x, lane);
  wait_for_previous_kernel();
  allow_next_kernel();
  fetch_weights(a.packed, s);
  wait_for_copies();
  __syncthreads();
  if (has_mid) mid.forward(lane);
  const int tiles = static_cast<int>((a.rows + kRows - 1) / kRows);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    forget(lane), forget(tile);
    // These loads are in flight while x is normalised.
    [[maybe_unused]] Group decode[kLatents / 16][kTiles];
    if constexpr (kScores) {
      const Group* packed =
          static_cast<const Group*>(a.packed) + kLayout.decode + f * kLayout.decode_step;
#pragma unroll
      for (int b = 0; b < kLatents / 16; ++b)
        load_weights<kLatents>(decode[b], packed, first_tile, b, lane);
      x.store_shared(s.gradient[f][own_row()], lane);
    }
    float values[8];
    x.get(values);
    const float inverse = normalise_row<8, 1>([&](int i, int) -> float& { return values[i]; },
                                              eight_lanes_sum, kMels);
    x.set(values);
    x.store_shared(s.normal[f][own_row()], lane);
    wait_for_copies();
    __syncthreads();  // publishes the normalised x, the gradient and z
    forget(lane), forget(tile);

    if constexpr (kScores) {
      float y[kTiles][4];
      fill_rows<T>(y, s.floats + kLayout.decode_bias, first_tile, lane);
#pragma unroll
      for (int b = 0; b < kLatents / 16; ++b) {
        multiply_16<P>(y, Left16<T>(s.z[0] + 16 * b, kNarrow, lane), decode[b]);
      }
      each_pair<T, kTiles>(first_tile, lane, [&](int j, int r, int row, int column) {
        const float scale = 2.f / (kFrames * kMels) * s.d_score[row];
        T* pair = s.gradient[f][row] + column;  // holds x until it is overwritten here
        store_pair(pair, scale * (y[j][2 * r] - to_accumulator<float>(pair[0])),
                   scale * (y[j][2 * r + 1] - to_accumulator<float>(pair[1])));
      });
      __syncthreads();  // publishes the gradient
      forget(lane), forget(tile);
    }

    if (a.reconstructs()) {
      float part_of_dz[1][4] = {};
      multiply_rows<P, kMels>(part_of_dz, s.gradient[f][0], kWide, s.decode_transposed[f], part,
                              lane);
      each_pair<T, 1>(part, lane, [&](int, int r, int row, int column) {
        store_pair(&s.parts[f][row][column], part_of_dz[0][2 * r], part_of_dz[0][2 * r + 1]);
      });
    }
    __syncthreads();  // publishes the partial sums of z's gradient
    if (has_mid) mid.backward(tile, lane);
    float slope[kTiles][4];
    if (a.reaches_encoder()) {
      float c[kTiles][4];
      fill_rows<T>(c, s.floats + kLayout.encode_bias, first_tile, lane);
      multiply_rows<P, kMels>(c, s.normal[f][0], kWide, s.resident + kLayout.encode, first_tile,
                              lane);
      each_pair<T, kTiles>(first_tile, lane, [&](int j, int r, int row, int column) {
        float value[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          value[i] = gelu_and_slope<P::kGeluDegree>(c[j][2 * r + i], slope[j][2 * r + i]);
        }
        store_pair(s.slice[f][row] + column, value[0], value[1]);
      });
    }
    __syncthreads();  // publishes the encoder's GELU output and the projection's gradient
    forget(lane), forget(tile);

    if (a.reaches_encoder()) {
      float c[kTiles][4] = {};
      multiply_rows<P, kLatents>(c, s.d_projection[0], kNarrow, s.project_transposed[f], first_tile,
                                 lane);
      each_pair<T, kTiles>(first_tile, lane, [&](int j, int r, int row, int column) {
        store_pair(s.hidden[f][row] + column, c[j][2 * r] * slope[j][2 * r],
                   c[j][2 * r + 1] * slope[j][2 * r + 1]);
      });
    }
    if (has_mid) mid.fetch(tile + gridDim.x, lane);
    if (has_decode ? a.wanted.decode : a.wanted.project) {
      add_rows<P>(pair_sums, pair_bias, (has_decode ? s.gradient : s.slice)[f][0] + pair_m, kWide,
                  has_decode ? s.z[0] : s.d_projection[0], kNarrow, lane);
    }
    if (has_mid) {
      if (a.wanted.mid) {
        add_rows<P>(other_sums, other_bias, s.d_mid[0] + other_m, kNarrow,
                    s.mid_normal[0] + other_n, kNarrow, lane);
      }
      wait_for_copies();
    }
    // Publishes the gradient before the encoder's GELU and the next projection. The output's
    // gradient, z and the other bottleneck values may be overwritten from here on.
    __syncthreads();
    forget(lane), forget(tile);

    fetch_gradient(tile + gridDim.x);
    load_x(tile + gridDim.x);
    if (a.dx != nullptr) {
      float c[kTiles][4] = {};
      multiply_rows<P, kSlices>(c, s.hidden[f][0], kWide, s.resident + kLayout.encode_transposed,
                                first_tile, lane);
      each_pair<T, kTiles>(first_tile, lane, [&](int j, int r, int row, int column) {
        store_pair(&s.raw[f][row][column], c[j][2 * r], c[j][2 * r + 1]);
      });
    }
    if (has_mid) {
      mid.forward(lane);
    } else if (a.wanted.encode) {
#pragma unroll 1
      for (int k = 0; k < kFrames; ++k) {
        add_rows<P>(other_sums, other_bias, s.hidden[k][0] + other_m, kWide,
                    s.normal[k][0] + other_n, kWide, lane);
      }
    }
    __syncthreads();  // publishes the gradient of the normalised x; only its own warp needs that x
    forget(lane), forget(tile);

    if (a.dx != nullptr) {
      float raw[8], normal[8];
      RowPart<T> stored;
      stored.load_shared(s.normal[f][own_row()], lane);
      stored.get(normal);
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        constexpr int kSize = RowPart<T>::kSize;
        const float4 v = *reinterpret_cast<const float4*>(
            &s.raw[f][own_row()][RowPart<T>::column(i / kSize, lane) + i % kSize]);
        raw[i] = v.x, raw[i + 1] = v.y, raw[i + 2] = v.z, raw[i + 3] = v.w;
      }
      normalise_row_backward<8, 1>([&](int i, int) -> float& { return raw[i]; },
                                   [&](int i, int) { return normal[i]; }, eight_lanes_sum, 8,
                                   1.f / kMels, inverse);
      if constexpr (kScores) {
        // The score compares the output with x, so x has a direct gradient as well.
        stored.load_shared(s.gradient[f][own_row()], lane);
        stored.get(normal);
#pragma unroll
        for (int i = 0; i < 8; ++i) raw[i] -= normal[i];
      }
      stored.set(raw);
      const long long row = row_of(tile) + own_row();
      if (row < a.rows) stored.store(static_cast<T*>(a.dx) + (row * kFrames + f) * kMels, lane);
    }
  }
  wait_for_copies();
  __syncwarp();  // all lanes have read the last rows of `raw`

  float* sums = a.sums + static_cast<long long>(blockIdx.x) * kSums.floats;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = pair_m + 16 * i + g + 8 * r;
      const float total = pair_bias[i].total(r);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float v0 = pair_sums[i][j][2 * r], v1 = pair_sums[i][j][2 * r + 1];
        const int latent = 8 * j + 2 * t;
        if (has_decode && a.wanted.decode) {
          store_pair(sums + kSums.q_decode + (f * kMels + column) * kLatents + latent, v0, v1);
        } else if (!has_decode && a.wanted.project) {
          float* q = sums + kSums.q_project + (f * kLatents + latent) * kSlices + column;
          q[0] = v0, q[kSlices] = v1;
        }
      }
      // A row of `raw` that no other warp may still be reading.
      if (has_decode && t == 0) s.raw[f][4 * part][column] = total;
    }
    if (has_mid ? a.wanted.mid : a.wanted.encode) {
      const int m = other_m + g + 8 * r;
      float* q = sums + (has_mid ? kSums.q_mid + m * kLatents : kSums.q_encode + m * kMels) +
                 other_n + 2 * t;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        store_pair(q + 8 * j, other_sums[0][j][2 * r], other_sums[0][j][2 * r + 1]);
      }
      const float total = other_bias[0].total(r);
      if (t == 0 && other_n == 0) sums[(has_mid ? kSums.b_mid : kSums.b_encode) + m] = total;
    }
  }
  __syncthreads();  // publishes the decoder's bias gradient of each frame
  if (a.wanted.decode && threadIdx.x < kMels) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kFrames; ++k) sum += s.raw[k][4 * (threadIdx.x / 32)][threadIdx.x];
    sums[kSums.b_decode + threadIdx.x] = sum;
  }
}

template <typename P, bool kScores>
__global__ void __launch_bounds__(kThreads, 1)
    backward_block16_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  frame_part<P, kScores>(a, *reinterpret_cast<Shared<P>*>(memory), warp_index());
}

static_assert(sizeof(Shared<Tf32Products>) == backward_block16_bytes(DType::f32));
static_assert(sizeof(Shared<HalfProducts<__half>>) == backward_block16_bytes(DType::f16));

}  // namespace

void run_block16(const Context& context, const AutoencoderBackwardArguments& call) {
  const AutoencoderSizes& sizes = call.sizes;
  const float* projection = static_cast<const float*>(call.projection);
  const Scratch<float> made(context, projection == nullptr ? sizes.rows * kLatents : 0);
  if (projection == nullptr) {
    const AutoencoderForwardArguments forward{.sizes = sizes,
                                              .parameters = call.parameters,
                                              .dtype = call.dtype,
                                              .parameter_dtype = call.parameter_dtype,
                                              .tf32 = call.tf32,
                                              .x = call.x,
                                              .x_stride = call.x_stride,
                                              .projection = made.data()};
    choose(limits_of(context.device), forward).run(context, forward);
    projection = made.data();
  }
  const PackedKind kind = packed_kind(call.dtype, call.tf32);
  const Scratch<unsigned char> packed(context, packed_bytes(kLayout, kind));
  const std::int64_t blocks = std::min<std::int64_t>((sizes.rows + kRows - 1) / kRows,
                                                     limits_of(context.device).multiprocessors);
  const Scratch<float> sums(context,
                            finishes(call) ? kSums.floats * std::max<std::int64_t>(blocks, 1) : 0);
  pack_weights(context, sizes, call.parameters, call.parameter_dtype, call.dtype, kind, true,
               kLayout, packed.data(), PackedOrder::shared);
  const Arguments a{
      call.x,     call.d_out,    call.d_z,         static_cast<const float*>(call.d_score),
      projection, call.dx,       packed.data(),    sums.data(),
      sizes.rows, call.x_stride, wanted_sums(call)};
  dispatch_products(call.dtype, call.tf32, [&]<typename P>(P) {
    const auto launch = [&](auto* kernel) {
      launch_kernel({context, blocks, kThreads, sizeof(Shared<P>), true},
                    "running the autoencoder backward", kernel, a);
    };
    if (call.d_score != nullptr) {
      launch(backward_block16_kernel<P, true>);
    } else {
      launch(backward_block16_kernel<P, false>);
    }
  });
  finish_gradients(context, call, kLayout, kSums, static_cast<int>(blocks), sums.data(),
                   packed.data());
}

}  // namespace fusewise::cuda::autoencoder

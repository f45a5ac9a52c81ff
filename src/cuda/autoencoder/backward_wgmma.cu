// All gradients of many rows of the default model on Hopper, in TF32 or half precision. Two
// warpgroups of 64 rows each iterate over the frames twice: back through the decoder, then through
// the encoder. Activations stay in registers from one GEMM to the next. Operands of the sums over
// rows go through shared memory; each warpgroup computes half of the sums and holds them in
// registers. x, the incoming gradient and dx cross memory once. For the score, x is read twice, and
// dx is written, read and written again, mostly in L2. Bound by latency: a scheduler has only two
// warps.

#include <algorithm>

#include "common/scratch.h"
#include "cuda/autoencoder/gradients.cuh"
#include "cuda/autoencoder/kernels.h"
#include "cuda/autoencoder/warp_tile.cuh"
#include "cuda/launch.cuh"
#include "cuda/warpgroup.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kFrames = 5, kMels = 64, kLatents = 32, kSlices = 64;
constexpr int kGroups = 2, kThreads = 128 * kGroups, kRows = 64 * kGroups;
constexpr PackedLayout kLayout = packed_layout(
    {.rows = 0, .n_mels = kMels, .frames = kFrames, .latent = kLatents, .slice_latent = kSlices},
    true);
constexpr SumsLayout kSums = sums_layout(kLayout);

extern __shared__ __align__(1024) unsigned char memory[];

struct Arguments {
  const void *x, *d_out;
  const float *d_score, *projection;
  void* dx;
  const void* packed;
  float* sums;
  long long rows, x_stride;
};

/// The frame's column at position `position` of a GEMM's result. The order is chosen so that a
/// lane's results are the columns of the vectors that it loads.
template <typename T>
__host__ __device__ constexpr int mel_at(int position) {
  constexpr int kVector = Vector<T>::kSize;
  const int c = position / 8 * 2 + position % 2;
  return c / kVector * 4 * kVector + position % 8 / 2 * kVector + c % kVector;
}

/// Shared-memory layout of packed weights with kInputs inputs.
template <typename T, int kInputs>
using Weights = OperandLayout<(kInputs * sizeof(T) < 128 ? 64 : 128),
                              8 * static_cast<int>(kInputs * sizeof(T))>;

/// Operand of the sums over rows: up to 64 columns of all rows. float32 is stored column by column,
/// 32 rows to a line. Half precision is stored row by row, with room for 64 columns in a row.
template <typename T, int kColumns>
struct Panel {
  static constexpr int kWidth = sizeof(T) == 4 ? kColumns : 64;
  using Layout = OperandLayout<128, 1024>;
  T values[kRows * kWidth];

  /// The rows that are summed in step k of a GEMM.
  __device__ __forceinline__ Operand<Layout> rows(int k) const {
    return Operand<Layout>(memory, values) +
           (sizeof(T) == 4 ? k / 4 * kWidth * 128 + k % 4 * 32 : k * 2048);
  }
};

template <typename T, bool kScores>
struct Shared {
  static constexpr int kFrame = kMels * kLatents;
  alignas(1024) T resident[4 * kLayout.resident];
  alignas(1024) T frame[2][kScores ? 2 * kFrame : kFrame];
  alignas(1024) Panel<T, 64> a, b, c;
  alignas(1024) Panel<T, kLatents> latents;  ///< z, then the projection's gradient
  alignas(16) T stage[kRows * kMels];        ///< x or gradient of the next frame
  alignas(16) float floats[kLayout.floats];
};
static_assert(sizeof(Shared<float, true>) <= 227 * 1024);

/// Where a thread's values are in panels. put() stores two tiles of values in the order of a GEMM's
/// result. take() reads the pair of a tile in row g + 8 r, scaled by kStored.
template <typename T>
class PanelAccess;
template <>
class PanelAccess<float> {
 public:
  static constexpr float kStored = 1.f + kCutLoss;

  __device__ __forceinline__ PanelAccess(int group, int warp, int lane) {
    const int g = lane / 4, t = lane % 4, row = 16 * (warp % 2) + g;
    panel_ = 32 * (2 * group + warp / 2);
    even_ = 2 * t * 32 + ((row / 4 ^ 2 * t) * 4) + row % 4;
    odd_ = (2 * t + 1) * 32 + ((row / 4 ^ (2 * t + 1)) * 4) + row % 4;
  }
  template <int kColumns>
  __device__ __forceinline__ void put(Panel<float, kColumns>& to, int tile, const float* v) const {
    float* base = to.values + panel_ * kColumns;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        base[256 * (tile + j) + (even_ ^ 8 * r)] = rounded(v[4 * j + 2 * r]);
        base[256 * (tile + j) + (odd_ ^ 8 * r)] = rounded(v[4 * j + 2 * r + 1]);
      }
    }
  }
  template <int kColumns>
  __device__ __forceinline__ float2 take(const Panel<float, kColumns>& from, int tile,
                                         int r) const {
    const float* base = from.values + panel_ * kColumns + 256 * tile;
    return make_float2(base[even_ ^ 8 * r], base[odd_ ^ 8 * r]);
  }

 private:
  static __device__ __forceinline__ float rounded(float value) {
    return __uint_as_float(round_to_tf32(value));
  }
  int panel_;
  int even_, odd_;  // of columns 2t and 2t + 1 in row g; in row g + 8, one bit differs
};
template <typename T>
  requires(sizeof(T) == 2)
class PanelAccess<T> {
 public:
  static constexpr float kStored = 1.f;

  __device__ __forceinline__ PanelAccess(int group, int warp, int lane)
      : line_((64 * group + 16 * warp + lane % 16) * 64),
        line_xor_(lane % 8),
        line_tile_(lane / 16),
        pair_((64 * group + 16 * warp + lane / 4) * 64 + lane % 4 * 2),
        pair_xor_(lane / 4) {}
  template <int kColumns>
  __device__ __forceinline__ void put(Panel<T, kColumns>& to, int tile, const float* v) const {
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_pair(T{}, v[2 * i], v[2 * i + 1]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(to.values + line_ + ((tile + line_tile_) ^ line_xor_) * 8)),
                 "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
  template <int kColumns>
  __device__ __forceinline__ float2 take(const Panel<T, kColumns>& from, int tile, int r) const {
    const T* pair = from.values + pair_ + r * 8 * 64 + (tile ^ pair_xor_) * 8;
    return make_float2(to_accumulator<float>(pair[0]), to_accumulator<float>(pair[1]));
  }

 private:
  int line_, line_xor_, line_tile_;  // the 16 bytes whose address this lane supplies for the warp
  int pair_, pair_xor_;              // this lane's own columns in row g
};

template <typename T, int kColumns, int kSize>
__device__ __forceinline__ void put_all(const PanelAccess<T>& access, Panel<T, kColumns>& to,
                                        const float (&v)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize / 4; j += 2) access.put(to, j, v + 4 * j);
}

/// Issues d = left times weights, or d += left times weights. A lane has a quarter of the values of
/// two rows. Until the GEMM is complete, it may read `left` but not write it.
template <typename T, bool kAdd, int kLeft, int kSize>
__device__ __forceinline__ void multiply(float (&d)[kSize], const float (&left)[kLeft],
                                         const T* weights) {
  constexpr int kInputs = 2 * kLeft, kSteps = kInputs * static_cast<int>(sizeof(T)) / 32;
  const Operand<Weights<T, kInputs>> right(memory, weights);
  unsigned l[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) l[k][i] = __float_as_uint(left[4 * k + i % 2 * 2 + i / 2]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        l[k][i] = pack_pair(T{}, left[8 * k + 2 * i], left[8 * k + 2 * i + 1]);
      }
    }
  }
  begin_products();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const auto at = right + (k / 4 * 1024 + k % 4 * 32);
    if (k == 0) {
      multiply_left<kAdd>(T{}, d, l[k], at);
    } else {
      multiply_left<true>(T{}, d, l[k], at);
    }
  }
  commit_products();
}

/// Issues sums += left^T right over all rows: 64 columns of left by as many columns of right as
/// `sums` has room for.
template <typename T, int kSize, int kRight>
__device__ __forceinline__ void add_rows(float (&sums)[kSize], const Panel<T, 64>& left,
                                         const Panel<T, kRight>& right) {
  begin_products();
#pragma unroll
  for (int k = 0; k < kRows * static_cast<int>(sizeof(T)) / 32; ++k) {
    multiply_shared(T{}, sums, left.rows(k), right.rows(k));
  }
  commit_products();
}

/// LayerNorm of both rows. Within a pair, the second value is summed first.
template <int kSize>
__device__ __forceinline__ void normalise(float (&d)[kSize], float (&inverse)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    inverse[r] = normalise_row<kSize / 4, 2, 4>(
        [&](int j, int i) -> float& { return d[4 * j + 2 * r + 1 - i]; }, row_sum, 2 * kSize);
  }
}

/// LayerNorm backward. The normalised values are read from a panel.
template <typename T, int kColumns, int kSize>
__device__ __forceinline__ void denormalise(float (&d)[kSize], const float (&inverse)[2],
                                            const PanelAccess<T>& access,
                                            const Panel<T, kColumns>& normal) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float2 n[kSize / 4];
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) n[j] = access.take(normal, j, r);
    constexpr float kScale = 1.f / (2 * kSize * PanelAccess<T>::kStored * PanelAccess<T>::kStored);
    normalise_row_backward<kSize / 4, 2, 4>(
        [&](int j, int i) -> float& { return d[4 * j + 2 * r + 1 - i]; },
        [&](int j, int i) { return i == 0 ? n[j].y : n[j].x; }, row_sum, kSize / 4, kScale,
        inverse[r]);
  }
}

/// v[i] += the values of column i in both rows of a lane.
template <int kSize>
__device__ __forceinline__ void add_both_rows(float (&v)[kSize / 2], const float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) v[i] += d[i / 2 * 4 + i % 2] + d[i / 2 * 4 + 2 + i % 2];
}

/// Sums kCount values over the lanes that differ in the bits of g from kBit down. At each step a
/// lane keeps the half that belongs to its bit. In the end it has an eighth of them, the values
/// starting at kCount / 8 * g.
template <int kCount, int kBit = 4, int kSize>
__device__ __forceinline__ void fold(float (&v)[kSize], int g) {
  constexpr int kHalf = kCount / 2;
  const bool upper = (g & kBit) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = upper ? v[i] : v[i + kHalf], kept = upper ? v[i + kHalf] : v[i];
    v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, 4 * kBit);
  }
  if constexpr (kBit > 1) fold<kHalf, kBit / 2>(v, g);
}

/// GELU of the values. The slopes are stored as pairs in half precision, which is as accurate as
/// the GEMMs.
template <typename P, int kSize>
__device__ __forceinline__ void gelu_and_slopes(float (&d)[kSize], unsigned (&slopes)[kSize / 2]) {
#pragma unroll
  for (int i = 0; i < kSize; i += 2) {
    float s0, s1;
    d[i] = gelu_and_slope<P::kGeluDegree>(d[i], s0);
    d[i + 1] = gelu_and_slope<P::kGeluDegree>(d[i + 1], s1);
    slopes[i / 2] = pack_pair(__half{}, s0, s1);
  }
}
template <int kSize>
__device__ __forceinline__ void multiply_by(float (&d)[kSize],
                                            const unsigned (&slopes)[kSize / 2]) {
#pragma unroll
  for (int i = 0; i < kSize; i += 2) {
    const float2 s = __half22float2(reinterpret_cast<const __half2&>(slopes[i / 2]));
    d[i] *= s.x, d[i + 1] *= s.y;
  }
}

/// Sets both rows to the same values: a bias.
template <int kSize>
__device__ __forceinline__ void set_pair(float (&d)[kSize], int tile, const float* bias) {
  const float2 pair = *reinterpret_cast<const float2*>(bias);
  // The GEMM accumulates into d, so each value needs its own register before the GEMM starts.
  d[4 * tile] = pair.x, d[4 * tile + 1] = pair.y;
  asm volatile("mov.f32 %0, %1;" : "=f"(d[4 * tile + 2]) : "f"(pair.x));
  asm volatile("mov.f32 %0, %1;" : "=f"(d[4 * tile + 3]) : "f"(pair.y));
}
template <int kSize>
__device__ __forceinline__ void fill(float (&d)[kSize], const float* bias, int t) {
#pragma unroll
  for (int j = 0; j < kSize / 4; ++j) set_pair(d, j, bias + 8 * j + 2 * t);
}
template <typename T>
__device__ __forceinline__ void fill_frame(float (&d)[kMels / 2], const float* bias, int t) {
#pragma unroll
  for (int j = 0; j < kMels / 8; ++j) set_pair(d, j, bias + mel_at<T>(8 * j + 2 * t));
}

/// Calls body(r, q) for a lane's vectors of a frame, in rows g and g + 8.
template <typename T, typename Body>
__device__ __forceinline__ void each_vector(Body&& body) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int q = 0; q < 16 / Vector<T>::kSize; ++q) body(r, q);
  }
}
/// Position of value i of such a vector in the order of a GEMM's result.
template <typename T>
__device__ __forceinline__ constexpr int order_of(int r, int q, int i) {
  const int c = Vector<T>::kSize * q + i;
  return c / 2 * 4 + 2 * r + c % 2;
}

template <typename P, bool kScores>
__global__ void __launch_bounds__(kThreads, 1)
    backward_wgmma_kernel(const __grid_constant__ Arguments a) {
  using T = typename P::Weight;
  constexpr int kVector = Vector<T>::kSize, kVectors = 16 / kVector;
  auto& s = *reinterpret_cast<Shared<T, kScores>*>(memory);
  const int group = warp_index() / 4, warp = warp_index() % 4, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const PanelAccess<T> access(group, warp, lane);
  const T* x = static_cast<const T*>(a.x);
  const T* incoming = static_cast<const T*>(kScores ? a.x : a.d_out);
  const long long incoming_stride = kScores ? a.x_stride : kFrames * kMels;
  T* dx = static_cast<T*>(a.dx);

  const auto fetch = [](void* to, const void* from, int bytes) {
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * kThreads) {
      copy_vector(static_cast<unsigned char*>(to) + i, static_cast<const unsigned char*>(from) + i);
    }
  };
  // Prefetches the next step's weights: the decoder's frame by frame, then the encoder's.
  const auto fetch_step = [&](int step) {
    const T* packed = static_cast<const T*>(a.packed);
    if (step < kFrames) {
      fetch(s.frame[step % 2],
            packed + 4 * (kLayout.decode_transposed + step * kLayout.decode_step),
            sizeof s.frame[0]);
    } else {
      fetch(s.frame[step % 2],
            packed + 4 * (kLayout.project_transposed + (step - kFrames) * kLayout.project_step),
            Shared<T, kScores>::kFrame * sizeof(T));
    }
  };
  // A thread stages and uses only its own vectors, so no barrier is needed.
  const auto first_row = [&](int tile) {
    return static_cast<long long>(tile) * kRows + 64 * group + 16 * warp + g;
  };
  const auto slot = [&](int r, int q) {
    return s.stage + ((r * kVectors + q) * kThreads + threadIdx.x) * kVector;
  };
  const auto stage = [&](const T* rows, long long stride, long long row, int f) {
    each_vector<T>([&](int r, int q) {
      copy_vector_or_zeros(slot(r, q),
                           rows + (row + 8 * r) * stride + f * kMels + kVector * (4 * q + t),
                           row + 8 * r < a.rows);
    });
  };
  // Prefetches the next tile's incoming gradient and projection into L2 during the encoder's steps,
  // one cache line per thread. The decoder's steps consume them faster than memory delivers.
  const auto announce = [&](int tile, int f) {
    constexpr int kLine = 128 / sizeof(T), kLines = kMels / kLine;
    const int i = threadIdx.x / kLines;
    const long long row = static_cast<long long>(tile) * kRows + i;
    if (i >= kRows || row >= a.rows) return;
    prefetch(incoming + row * incoming_stride + f * kMels + threadIdx.x % kLines * kLine);
    if (f == kFrames - 1 && threadIdx.x % kLines == 0) {
      prefetch(a.projection + row * kLatents);
    }
  };
  const auto staged = [&](float (&d)[32]) {
    each_vector<T>([&](int r, int q) {
      const Vector<T> v = load_vector(slot(r, q));
#pragma unroll
      for (int i = 0; i < kVector; ++i) d[order_of<T>(r, q, i)] = v[i];
    });
  };
  const auto dx_at = [&](long long row, int f, int r, int q) {
    return dx + ((row + 8 * r) * kFrames + f) * kMels + kVector * (4 * q + t);
  };
  const auto store_dx = [&](long long row, int f, const float (&d)[32], float sign) {
    each_vector<T>([&](int r, int q) {
      if (row + 8 * r >= a.rows) return;
      Vector<T> v;
#pragma unroll
      for (int i = 0; i < kVector; ++i) v.set(i, sign * d[order_of<T>(r, q, i)]);
      store_streaming(dx_at(row, f, r, q), v);
    });
  };

  stage(incoming, incoming_stride, first_row(blockIdx.x), 0);
  wait_for_previous_kernel();
  allow_next_kernel();
  fetch(s.resident, a.packed, sizeof s.resident);
  fetch(s.floats, static_cast<const T*>(a.packed) + 4 * kLayout.groups, sizeof s.floats);
  fetch_step(0);

  // Sums over rows: group 0 has decoder and encoder, group 1 has projection and bottleneck.
  float frame_sums[kFrames][16] = {}, other_sums[32] = {};
  // Bias gradients of the columns that fold() leaves to this lane.
  float decode_bias[2] = {}, encode_bias[2] = {}, mid_bias = 0;

  const int tiles = static_cast<int>((a.rows + kRows - 1) / kRows);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const long long row = first_row(tile);
    const bool real[2] = {row < a.rows, row + 8 < a.rows};
    unsigned mid_slopes[8];
    float mid_inverse[2];
    [[maybe_unused]] float scale[2];
    {  // ---- the bottleneck
      float normal[16], z[16];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* from = a.projection + (row + 8 * r) * kLatents + 2 * t;
        if constexpr (kScores) {
          scale[r] = real[r] ? 2.f / (kFrames * kMels) * a.d_score[row + 8 * r] : 0.f;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 v =
              real[r] ? *reinterpret_cast<const float2*>(from + 8 * j) : make_float2(0.f, 0.f);
          normal[4 * j + 2 * r] = v.x, normal[4 * j + 2 * r + 1] = v.y;
        }
      }
      normalise(normal, mid_inverse);
      wait_for_copies();
      show_to_products();
      __syncthreads();  // the weights have landed; nothing of the previous rows is needed any more
      fill(z, s.floats + kLayout.mid_bias, t);
      multiply<T, true>(z, normal, s.resident + 4 * kLayout.mid);
      put_all(access, s.c, normal);
      wait_for_products();
      gelu_and_slopes<P>(z, mid_slopes);
      put_all(access, s.latents, z);
      __syncwarp();  // a lane may read what other lanes stored for it
    }
    // ---- back through the decoder
    float dz[16], bias[16] = {};
#pragma unroll
    for (int f = 0; f < kFrames; ++f) {
      Panel<T, 64>& rows = f % 2 == 0 ? s.a : s.b;
      float d[32];
      staged(d);
      if constexpr (kScores) {
        float y[32], z[16];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float2 pair = access.take(s.latents, j, r);
            z[4 * j + 2 * r] = pair.x * (1.f / PanelAccess<T>::kStored);
            z[4 * j + 2 * r + 1] = pair.y * (1.f / PanelAccess<T>::kStored);
          }
        }
        fill_frame<T>(y, s.floats + kLayout.decode_bias, t);
        multiply<T, true>(y, z, s.frame[f % 2] + Shared<T, kScores>::kFrame);
        wait_for_products();
#pragma unroll
        for (int i = 0; i < 32; ++i) d[i] = scale[i / 2 % 2] * (y[i] - d[i]);
      }
      if (f == 0) {
        multiply<T, false>(dz, d, s.frame[f % 2]);
      } else {
        multiply<T, true>(dz, d, s.frame[f % 2]);
      }
      stage(f + 1 < kFrames ? incoming : x, f + 1 < kFrames ? incoming_stride : a.x_stride, row,
            (f + 1) % kFrames);
      fetch_step(f + 1);
      put_all(access, rows, d);
      add_both_rows(bias, d);
      if constexpr (kScores) {
        // The score compares the output with x, so x has a direct gradient as well.
        if (dx != nullptr) store_dx(row, f, d, -1.f);
      }
      wait_for_products();
      wait_for_copies();
      show_to_products();
      __syncthreads();  // gradient and next weights are ready; the previous sums are done
      if (group == 0) add_rows<T>(frame_sums[f], rows, s.latents);
    }
    fold<16>(bias, g);
    decode_bias[0] += bias[0], decode_bias[1] += bias[1];

    // ---- and through the bottleneck
    multiply_by(dz, mid_slopes);
    float d_projection[16];
    multiply<T, false>(d_projection, dz, s.resident + 4 * kLayout.mid_transposed);
    put_all(access, s.b, dz);
    {
      float v[8] = {};
      add_both_rows(v, dz);
      fold<8>(v, g);
      mid_bias += v[0];
    }
    wait_for_products();
    denormalise(d_projection, mid_inverse, access, s.c);
    show_to_products();
    __syncthreads();  // the bottleneck's operands are ready; z may be overwritten
    if (group == 1) {
      float (&mid_sums)[16] = reinterpret_cast<float (&)[16]>(other_sums);
      add_rows<T>(mid_sums, s.b, s.c);
      wait_for_products();
    }
    put_all(access, s.latents, d_projection);
    __syncthreads();  // the sums are done

    // ---- back through the encoder
#pragma unroll 1
    for (int f = 0; f < kFrames; ++f) {
      const int step = kFrames + f;
      float inverse[2];
      unsigned slopes[16];
      {
        float normal[32], h[32];
        staged(normal);
        normalise(normal, inverse);
        fill(h, s.floats + kLayout.encode_bias, t);
        multiply<T, true>(h, normal, s.resident + 4 * kLayout.encode);
        if (f + 1 < kFrames) {
          stage(x, a.x_stride, row, f + 1);
          fetch_step(step + 1);
        } else if (tile + gridDim.x < tiles) {
          stage(incoming, incoming_stride, first_row(tile + gridDim.x), 0);
          fetch_step(0);
        }
        announce(tile + gridDim.x, f);
        put_all(access, s.a, normal);
        wait_for_products();
        gelu_and_slopes<P>(h, slopes);
        put_all(access, s.b, h);
      }
      float d[32];
      multiply<T, false>(d, d_projection, s.frame[step % 2]);
      wait_for_products();
      multiply_by(d, slopes);
      float raw[32];
      // Computed even if dx is not wanted: a GEMM inside a branch is not overlapped.
      multiply<T, false>(raw, d, s.resident + 4 * kLayout.encode_transposed);
      put_all(access, s.c, d);
      {
        float v[16] = {};
        add_both_rows(v, d);
        fold<16>(v, g);
        encode_bias[0] += v[0], encode_bias[1] += v[1];
      }
      wait_for_products();
      wait_for_copies();
      show_to_products();
      __syncthreads();  // the encoder's operands and the next step's weights are ready
      const auto finish_dx = [&] {
        if (dx == nullptr) return;
        denormalise(raw, inverse, access, s.a);
        if constexpr (kScores) {
          // Issue all loads before the first store: loads after a store would wait for it.
          each_vector<T>([&](int r, int q) {
            if (!real[r]) return;
            const Vector<T> v = load_vector(dx_at(row, f, r, q));
#pragma unroll
            for (int i = 0; i < kVector; ++i) raw[order_of<T>(r, q, i)] += v[i];
          });
        }
        store_dx(row, f, raw, 1.f);
      };
      // Group 0 writes dx while its GEMM runs. Group 1 writes dx first and then runs its GEMM.
      if (group == 0) {
        add_rows<T>(other_sums, s.c, s.a);
        finish_dx();
        wait_for_products();
      } else {
        finish_dx();
#pragma unroll
        for (int k = 0; k < kFrames; ++k) {
          if (f == k) {
            add_rows<T>(frame_sums[k], s.b, s.latents);
            wait_for_products();
          }
        }
      }
      __syncthreads();  // these operands may be overwritten
    }
  }

  float* sums = a.sums + static_cast<long long>(blockIdx.x) * kSums.floats;
  const auto write = [&](const auto& d, auto&& at) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof d / 4); i += 2) {
      const int m = 16 * warp + g + 8 * (i / 2 % 2), n = 8 * (i / 4) + 2 * t;
      const int first = at(m, n), second = at(m, n + 1);
      if (second == first + 1) {
        *reinterpret_cast<float2*>(sums + first) = make_float2(d[i], d[i + 1]);
      } else {
        sums[first] = d[i], sums[second] = d[i + 1];
      }
    }
  };
#pragma unroll
  for (int f = 0; f < kFrames; ++f) {
    if (group == 0) {
      write(frame_sums[f], [&](int m, int l) {
        return kSums.q_decode + (f * kMels + mel_at<T>(m)) * kLatents + l;
      });
    } else {
      write(frame_sums[f],
            [&](int m, int l) { return kSums.q_project + (f * kLatents + l) * kSlices + m; });
    }
  }
  if (group == 0) {
    write(other_sums, [](int m, int n) { return kSums.q_encode + m * kMels + mel_at<T>(n); });
  } else if (warp < kLatents / 16) {
    write(reinterpret_cast<const float (&)[16]>(other_sums),
          [](int m, int n) { return kSums.q_mid + m * kLatents + n; });
  }
  // Write each warp's bias gradients to shared memory.
  float (*biases)[160] = reinterpret_cast<float (*)[160]>(s.a.values);
  float* own = biases[4 * group + warp];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = 8 * g + 2 * t + i;
    own[mel_at<T>(at)] = decode_bias[i];
    own[64 + at] = encode_bias[i];
  }
  own[128 + 8 * (g / 2) + 2 * t + g % 2] = mid_bias;
  __syncthreads();
  if (threadIdx.x < 160) {
    const int i = threadIdx.x;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < 4 * kGroups; ++w) sum += biases[w][i];
    sums[i < 64    ? kSums.b_decode + i
         : i < 128 ? kSums.b_encode + i - 64
                   : kSums.b_mid + i - 128] = sum;
  }
}

}  // namespace

void run_wgmma(const Context& context, const AutoencoderBackwardArguments& call) {
  const AutoencoderSizes& sizes = call.sizes;
  const PackedKind kind = packed_kind(call.dtype, call.tf32);
  const Scratch<unsigned char> packed(context, packed_bytes(kLayout, kind));
  const std::int64_t blocks = std::min<std::int64_t>((sizes.rows + kRows - 1) / kRows,
                                                     limits_of(context.device).multiprocessors);
  const Scratch<float> sums(context, kSums.floats * blocks);
  pack_weights(context, sizes, call.parameters, call.parameter_dtype, call.dtype, kind, true,
               kLayout, packed.data(), PackedOrder::wgmma);
  const Arguments a{call.x,
                    call.d_out,
                    static_cast<const float*>(call.d_score),
                    static_cast<const float*>(call.projection),
                    call.dx,
                    packed.data(),
                    sums.data(),
                    sizes.rows,
                    call.x_stride};
  dispatch_products(call.dtype, call.tf32, [&]<typename P>(P) {
    if constexpr (!P::kExact) {
      const auto launch = [&](auto* kernel, std::size_t shared) {
        launch_kernel({context, blocks, kThreads, shared, true}, "running the autoencoder backward",
                      kernel, a);
      };
      using T = typename P::Weight;
      if (call.d_score != nullptr) {
        launch(backward_wgmma_kernel<P, true>, sizeof(Shared<T, true>));
      } else {
        launch(backward_wgmma_kernel<P, false>, sizeof(Shared<T, false>));
      }
    }
  });
  finish_gradients(context, call, kLayout, kSums, static_cast<int>(blocks), sums.data(),
                   packed.data());
}

}  // namespace fusewise::cuda::autoencoder

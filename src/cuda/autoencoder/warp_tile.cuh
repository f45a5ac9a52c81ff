#pragma once

// The steps that forward and backward share: a warp's 16 rows, frame by frame, in registers.

#include "cuda/autoencoder/layer_norm.cuh"
#include "cuda/autoencoder/mma_registers.cuh"
#include "cuda/autoencoder/plans.h"

namespace fusewise::cuda::autoencoder {

template <typename Weight>
struct PackedGroup {
  using type = float4;
};
template <>
struct PackedGroup<__half> {
  using type = uint2;
};
template <>
struct PackedGroup<__nv_bfloat16> {
  using type = uint2;
};

/// The packed weights, in shared memory, or read through L1, which all warps of an SM share.
template <typename P, bool kStaged>
struct Weights {
  using Group = typename PackedGroup<typename P::Weight>::type;
  const Group* groups;
  const float* floats;

  __device__ __forceinline__ Group load(int group) const {
    if constexpr (kStaged) {
      return groups[group];
    } else {
      return __ldg(groups + group);
    }
  }
  /// The bias for this lane's four columns in a block.
  __device__ __forceinline__ float4 bias(int begin, int block) const {
    const float* at = floats + begin + 16 * block + 4 * (threadIdx.x % 4);
    if constexpr (kStaged) {
      return *reinterpret_cast<const float4*>(at);
    } else {
      return __ldg(reinterpret_cast<const float4*>(at));
    }
  }
};

/// results[j] += one input block times the packed matrix at `matrix`: output blocks first_output +
/// j, input block `input`. kAtOnce blocks of results are computed at a time. More of them hide more
/// of the MMA latency but need more registers.
template <typename P, int kAtOnce, int kResults, typename Source>
__device__ __forceinline__ void multiply_block(Block (&results)[kResults], int result_count,
                                               const typename P::Left& left, const Source& weights,
                                               int matrix, int first_output, int input,
                                               int matrix_inputs) {
  constexpr int kTogether = kResults < kAtOnce ? kResults : kAtOnce;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kResults; j += kTogether) {
    if (j >= result_count) break;
    typename P::Right right[kTogether][2];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (j + i >= result_count) break;
      const int at = matrix + ((2 * (first_output + j + i)) * matrix_inputs + input) * 32 + lane;
      right[i][0] = P::right(weights.load(at));
      right[i][1] = P::right(weights.load(at + 32 * matrix_inputs));
    }
    Block parts[kTogether];
    if constexpr (P::kExact) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) parts[i].fill(0.f);
    }
#pragma unroll
    for (int term = 0; term < P::kTerms; ++term) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (j + i >= result_count) break;
        Block& sum = P::kExact ? parts[i] : results[j + i];
        P::term(term, sum, 0, left, right[i][0]);
        P::term(term, sum, 1, left, right[i][1]);
      }
    }
    if constexpr (P::kExact) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (j + i >= result_count) break;
        results[j + i].add(parts[i]);
      }
    }
  }
}

/// The same for several input blocks, starting at first_input.
template <typename P, int kAtOnce, int kResults, int kInputs, typename Source>
__device__ __forceinline__ void multiply_blocks(Block (&results)[kResults],
                                                const Block (&inputs)[kInputs],
                                                const Source& weights, int matrix, int first_output,
                                                int first_input, int matrix_inputs) {
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    multiply_block<P, kAtOnce>(results, kResults, P::left(inputs[k]), weights, matrix, first_output,
                               first_input + k, matrix_inputs);
  }
}

/// Index of the warp in its block. The shuffle tells the compiler that all lanes have the same
/// value.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
}

/// LayerNorm of both rows of the blocks. `columns` of them are real, and real(b, i) says which.
template <int kBlocks, typename Real>
__device__ __forceinline__ void normalise(Block (&blocks)[kBlocks], int count, int columns,
                                          Real real, float (&inverse_deviation)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    inverse_deviation[r] = normalise_row<kBlocks, 4>(
        [&](int b, int i) -> float& { return blocks[b].v[r][i]; }, row_sum, count, columns, real);
  }
}
template <int kBlocks>
__device__ __forceinline__ void normalise(Block (&blocks)[kBlocks], float (&inverse_deviation)[2]) {
  normalise(blocks, kBlocks, 16 * kBlocks, [](int, int) { return true; }, inverse_deviation);
}

template <int kBlocks>
__device__ __forceinline__ void normalise_backward(Block (&gradient)[kBlocks],
                                                   const Block (&normalised)[kBlocks],
                                                   const float (&inverse_deviation)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    normalise_row_backward<kBlocks, 4>([&](int b, int i) -> float& { return gradient[b].v[r][i]; },
                                       [&](int b, int i) { return normalised[b].v[r][i]; }, row_sum,
                                       kBlocks, 1.f / (16 * kBlocks), inverse_deviation[r]);
  }
}

template <int kBlocks, typename T>
__device__ __forceinline__ void expand(Block (&blocks)[kBlocks], const Four<T> (&raw)[kBlocks][2]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) blocks[b].v[r][i] = raw[b][r][i];
    }
  }
}

/// The two rows of a tensor that a lane works on. A row past the end is replaced by the last row.
template <typename T>
struct RowPair {
  T* at[2];
  bool real[2];

  __device__ __forceinline__ RowPair(T* base, long long first_row, long long rows,
                                     long long stride) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const long long row = first_row + g + 8 * r;
      real[r] = row < rows;
      at[r] = base + (real[r] ? row : rows - 1) * stride;
    }
  }

  using Raw = Four<std::remove_const_t<T>>;

  /// Loads columns of the frame at `offset` in memory format, starting at block `first`.
  template <int kBlocks>
  __device__ __forceinline__ void fetch(Raw (&raw)[kBlocks][2], int first, long long offset) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) raw[b][r] = load_four(at[r] + offset + 16 * (first + b) + 4 * t);
    }
  }
  template <int kBlocks>
  __device__ __forceinline__ void load(Block (&blocks)[kBlocks], int first,
                                       long long offset) const {
    Raw raw[kBlocks][2];
    fetch(raw, first, offset);
    expand(blocks, raw);
  }
  /// Sets rows past the end to zero.
  template <int kBlocks>
  __device__ __forceinline__ void clear_missing(Block (&blocks)[kBlocks]) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) blocks[b].v[r][i] = real[r] ? blocks[b].v[r][i] : 0.f;
      }
    }
  }
  /// kAll: rows past the end hold the last row's values, so the last row is written again. This
  /// saves a branch.
  template <bool kAll, int kBlocks>
  __device__ __forceinline__ void store(const Block (&blocks)[kBlocks], int first,
                                        long long offset) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (kAll || real[r]) {
          store_four(at[r] + offset + 16 * (first + b) + 4 * t, blocks[b].v[r]);
        }
      }
    }
  }
};

/// Calls body(P) with the way to multiply.
template <typename Body>
void dispatch_products(DType dtype, bool tf32, Body&& body) {
  switch (dtype) {
    case DType::f32:
      return tf32 ? body(Tf32Products{}) : body(ExactProducts{});
    case DType::f16:
      return body(HalfProducts<__half>{});
    case DType::bf16:
      return body(HalfProducts<__nv_bfloat16>{});
    case DType::f64:
    case DType::u8:
    case DType::b8:
    case DType::i64:
      return;
  }
}

}  // namespace fusewise::cuda::autoencoder

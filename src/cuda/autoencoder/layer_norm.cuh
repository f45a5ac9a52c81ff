#pragma once

// LayerNorm without its affine part, forward and backward, of rows that lanes hold in registers.
// The caller says where a lane's values of a row are, and how to sum over the lanes that share a
// row.
//
// A lane has kPieces pieces of kGroup values, of which the first `count` pieces are used. at(p, i)
// is value i of piece p. The values of a piece are summed as a tree. The pieces are summed in
// kStrands independent accumulators, because each addition waits for the previous one.

namespace fusewise::cuda::autoencoder {

/// 1 / sqrt(value), accurate to about the last bit. Returns 0 if the variance is infinite, as torch
/// does.
__device__ __forceinline__ float inverse_root(float value) {
  const float guess = rsqrtf(value);
  const float better = fmaf(guess * 0.5f, fmaf(-value * guess, guess, 1.f), guess);
  return guess == 0.f ? 0.f : better;
}

template <int kStrands>
__device__ __forceinline__ float sum_of(const float (&strands)[kStrands]) {
  static_assert(kStrands == 1 || kStrands == 4);
  if constexpr (kStrands == 1) {
    return strands[0];
  } else {
    return (strands[0] + strands[1]) + (strands[2] + strands[3]);
  }
}

template <int kGroup, typename At>
__device__ __forceinline__ float sum_of_piece(const At& at, int p) {
  static_assert(kGroup == 1 || kGroup == 2 || kGroup == 4);
  if constexpr (kGroup == 1) return at(p, 0);
  if constexpr (kGroup == 2) return at(p, 0) + at(p, 1);
  if constexpr (kGroup == 4) return (at(p, 0) + at(p, 1)) + (at(p, 2) + at(p, 3));
}

/// Replaces the values by (value - mean) / sqrt(variance + 1e-5) and returns 1 / sqrt(variance +
/// 1e-5). real(p, i) says whether a value is one of the row's `columns`. Padding stays zero.
template <int kPieces, int kGroup, int kStrands = 1, typename At, typename RowSum, typename Real>
__device__ __forceinline__ float normalise_row(At at, RowSum row_sum, int count, int columns,
                                               Real real) {
  // With a single piece, no addition to zero comes first.
  constexpr bool kSingle = kPieces == 1;
  float sums[kStrands] = {}, squares[kStrands] = {};
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    float& strand = sums[p % kStrands];
    if (kSingle) strand = sum_of_piece<kGroup>(at, p);
    if (!kSingle && p < count) strand += sum_of_piece<kGroup>(at, p);
  }
  const float mean = row_sum(sum_of(sums)) * (1.f / columns);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (p >= count) break;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float d = real(p, i) ? at(p, i) - mean : 0.f;
      at(p, i) = d;
      float& strand = squares[p % kStrands];
      strand = kSingle && i == 0 ? d * d : fmaf(d, d, strand);
    }
  }
  const float inverse = inverse_root(row_sum(sum_of(squares)) * (1.f / columns) + 1e-5f);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (p >= count) break;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) at(p, i) *= inverse;
  }
  return inverse;
}
template <int kPieces, int kGroup, int kStrands = 1, typename At, typename RowSum>
__device__ __forceinline__ float normalise_row(At at, RowSum row_sum, int columns) {
  return normalise_row<kPieces, kGroup, kStrands>(at, row_sum, kPieces, columns,
                                                  [](int, int) { return true; });
}

/// From the gradient of the normalised values to that of the values. The mean of the gradient is
/// already removed, by the weights. normal(p, i) is a normalised value. `scale` is 1 / columns, and
/// also undoes any scaling of normal.
template <int kPieces, int kGroup, int kStrands = 1, typename At, typename Normal, typename RowSum>
__device__ __forceinline__ void normalise_row_backward(At at, Normal normal, RowSum row_sum,
                                                       int count, float scale, float inverse) {
  float products[kStrands] = {};
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (p >= count) break;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      products[p % kStrands] = fmaf(at(p, i), normal(p, i), products[p % kStrands]);
    }
  }
  const float product = row_sum(sum_of(products)) * scale;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (p >= count) break;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      at(p, i) = inverse * fmaf(-normal(p, i), product, at(p, i));
    }
  }
}

}  // namespace fusewise::cuda::autoencoder

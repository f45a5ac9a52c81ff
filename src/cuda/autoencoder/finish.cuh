#pragma once

// From sums over rows to the gradients of the parameters. One block per row or column of a
// parameter.

#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda::autoencoder {

inline constexpr int kFinishThreads = 1024;  // a block computes few results, each a long sum

template <typename W>
__device__ __forceinline__ Accumulator<W> read(const void* tensor, long long i) {
  return to_accumulator<Accumulator<W>>(static_cast<const W*>(tensor)[i]);
}
template <typename W>
__device__ __forceinline__ void write(void* tensor, long long i, Accumulator<W> value) {
  if (tensor != nullptr) static_cast<W*>(tensor)[i] = from_accumulator<W>(value);
}

/// A LayerNorm's affine part and the Linear that follows it.
struct NormedLinear {
  const void *norm_weight, *norm_bias, *weight;
  void *d_norm_weight, *d_norm_bias, *d_weight, *d_bias;

  __device__ bool wanted() const { return d_norm_weight || d_norm_bias || d_weight || d_bias; }
};

/// Gradients of input column k, from q = sum d^T n (rows of `stride` values) and b(i) = sum d_i. d
/// is the gradient of the Linear's result and n the normalised input.
template <typename W, typename Bias>
__device__ void finish_linear(const NormedLinear& p, const Accumulator<W>* q, int stride, Bias b,
                              int outputs, int inputs, int k) {
  using A = Accumulator<W>;
  const A scale = read<W>(p.norm_weight, k), shift = read<W>(p.norm_bias, k);
  A d_norm[2] = {};  // of the norm's weight and bias
  for (int n = threadIdx.x; n < outputs; n += blockDim.x) {
    const long long at = static_cast<long long>(n) * inputs + k;
    const A w = read<W>(p.weight, at), q_n = q[static_cast<long long>(n) * stride + k], b_n = b(n);
    d_norm[0] += w * q_n;
    d_norm[1] += w * b_n;
    write<W>(p.d_weight, at, q_n * scale + b_n * shift);
    if (k == 0) write<W>(p.d_bias, n, b_n);
  }
  block_totals<kFinishThreads>(d_norm);
  if (threadIdx.x > 0) return;
  write<W>(p.d_norm_weight, k, d_norm[0]);
  write<W>(p.d_norm_bias, k, d_norm[1]);
}

/// Gradient of a basis vector of `width` values, from the gradient of the normalised vector.
template <typename W>
__device__ void finish_basis_vector(const void* basis, void* d_basis, long long begin,
                                    long long width, Accumulator<W> inverse_norm,
                                    const Accumulator<W>* d_unit) {
  using A = Accumulator<W>;
  A along[1] = {};
  for (long long i = threadIdx.x; i < width; i += blockDim.x) {
    along[0] += d_unit[i] * (read<W>(basis, begin + i) * inverse_norm);
  }
  block_totals<kFinishThreads>(along);
  // If the norm is below the smallest allowed norm, the divisor is a constant.
  if (inverse_norm >= A(1e12)) along[0] = 0;
  for (long long i = threadIdx.x; i < width; i += blockDim.x) {
    const A unit = read<W>(basis, begin + i) * inverse_norm;
    write<W>(d_basis, begin + i, (d_unit[i] - unit * along[0]) * inverse_norm);
  }
}

}  // namespace fusewise::cuda::autoencoder

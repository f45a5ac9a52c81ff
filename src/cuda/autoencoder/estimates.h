#pragma once

// How long the fused kernels for any sizes and the vendor's products take, in microseconds: lines
// through times measured on an H200 (docs/autoencoder.md). They only decide between the two, so on
// another GPU it matters how they compare, not how long they are.

#include <algorithm>

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda::autoencoder {

/// Thousands of multiplications for a row, one way, in blocks of 16 by 16 as the fused kernels do
/// them.
inline double fused_work(const AutoencoderSizes& s) {
  const auto whole = [](int size) { return 16. * ((size + 15) / 16); };
  const double m = whole(s.n_mels), l = whole(s.latent), h = whole(s.slice_latent);
  return s.frames * (m * h + h * l + m * l) / 1000;
}

/// Rows in thousands of values that the products' steps read and write.
inline double products_traffic(const AutoencoderSizes& s) {
  return static_cast<double>(s.rows) * s.frames * (s.n_mels + s.slice_latent) / 1000;
}

/// Rows in waves: so many are on the GPU at once.
inline double waves(const AutoencoderSizes& s) { return static_cast<double>(s.rows) / 16384; }

inline bool products_are_faster(const AutoencoderForwardArguments& call) {
  const AutoencoderSizes& s = call.sizes;
  const bool exact = call.dtype == DType::f32 && !call.tf32;
  const double few = std::min(1., 4 * waves(s));
  const double fused = exact ? 10 + fused_work(s) * (0.45 + 0.2 * few + 1.8 * waves(s))
                       : call.dtype == DType::f32
                           ? 10 + fused_work(s) * (0.45 + 0.3 * few + 0.9 * waves(s))
                           : 15 + fused_work(s) * (0.3 + 0.2 * few + 0.6 * waves(s));
  const double rate = exact ? 0.010 : call.dtype == DType::f32 ? 0.008 : 0.006;
  return 35 + products_traffic(s) * rate < fused;
}

/// known_sizes: a kernel for sizes that the compiler knew.
inline bool products_are_faster(const AutoencoderBackwardArguments& call, bool known_sizes) {
  const AutoencoderSizes& s = call.sizes;
  const bool exact = call.dtype == DType::f32 && !call.tf32;
  const double work = fused_work(s) * std::max(1., 1.2 * waves(s));
  const double fused =
      known_sizes ? 5 + work * (exact ? 1.75 : 1.15) : 50 + work * (exact ? 4.1 : 2.6);
  const double rate = exact ? 0.023 : call.dtype == DType::f32 ? 0.017 : 0.0125;
  return 85 + products_traffic(s) * rate < fused;
}

}  // namespace fusewise::cuda::autoencoder

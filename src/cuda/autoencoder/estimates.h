#pragma once

// How long the fused kernels for any sizes and the vendor's products take, in microseconds: fitted
// to `lab/autoencoder_plans sizes` on an H200 (docs/autoencoder.md). They only decide between the
// two, so on another GPU it matters how they compare, not how long they are.

#include <algorithm>

#include "cuda/autoencoder/arguments.cuh"

namespace fusewise::cuda::autoencoder {

struct ProductsTime {
  double fixed;
  double traffic;  ///< of a thousand values that the steps read and write

  double of(const AutoencoderSizes& s) const {
    return fixed +
           traffic * static_cast<double>(s.rows) * s.frames * (s.n_mels + s.slice_latent) / 1000;
  }
};

struct FusedTime {
  double fixed;
  /// Of a thousand multiplications for a row: of any rows, of a quarter as many as the GPU has at
  /// once, and of all of these. Twice as many as it has take twice as long.
  double any, quarter, whole;

  double of(const AutoencoderSizes& s) const {
    const auto padded = [](int size) { return 16. * ((size + 15) / 16); };
    const double m = padded(s.n_mels), l = padded(s.latent), h = padded(s.slice_latent);
    const double work = s.frames * (m * h + h * l + m * l) / 1000;
    const double waves = static_cast<double>(s.rows) / 16384;
    return fixed + work * std::max(1., waves) *
                       (any + quarter * std::min(1., 4 * waves) + whole * std::min(1., waves));
  }
};

/// Of float32 exactly, of TF32 and of halves.
template <typename Time>
Time choose(DType dtype, bool tf32, const Time (&times)[3]) {
  return times[dtype != DType::f32 ? 2 : tf32 ? 1 : 0];
}

inline bool products_are_faster(const AutoencoderForwardArguments& call) {
  constexpr ProductsTime kProducts[] = {{38, 0.0097}, {33, 0.0066}, {31, 0.0049}};
  constexpr FusedTime kFused[] = {
      {13, 0.41, 0.14, 2.04}, {13, 0.41, 0.44, 1.04}, {13, 0.25, 0.11, 0.88}};
  return choose(call.dtype, call.tf32, kProducts).of(call.sizes) <
         choose(call.dtype, call.tf32, kFused).of(call.sizes);
}

/// known_sizes: by a kernel for sizes that the compiler knew.
inline bool products_are_faster(const AutoencoderBackwardArguments& call, bool known_sizes) {
  constexpr ProductsTime kProducts[] = {{97, 0.0289}, {86, 0.0198}, {81, 0.0134}};
  constexpr FusedTime kFused[] = {{66, 4.63, 0, 2.55}, {60, 3.39, 0, 1.87}, {59, 2.92, 0, 1.10}};
  constexpr FusedTime kKnown[] = {{30, 1.72, 0, 0.70}, {20, 1.11, 0, 0.37}, {20, 1.05, 0, 0.31}};
  return choose(call.dtype, call.tf32, kProducts).of(call.sizes) <
         choose(call.dtype, call.tf32, known_sizes ? kKnown : kFused).of(call.sizes);
}

/// Whether backward_groups.cu is faster than backward_frames.cu. Both take as long as the
/// multiprocessor with most tiles of rows, of 128 and of 16; a large tile takes as long as some
/// four small ones, or, as it goes through the score, somewhat more, and that kernel begins and
/// ends later. From the times of 4096 to 65536 rows, in TF32 and bfloat16.
inline bool warpgroups_are_faster(std::int64_t rows, int multiprocessors, bool of_score) {
  const auto turns = [&](int tile) {
    const std::int64_t once = std::int64_t{tile} * multiprocessors;
    return static_cast<double>((rows + once - 1) / once);
  };
  return of_score ? 4.6 * turns(128) + 1.8 < turns(16) : 4 * turns(128) + 1.5 < turns(16);
}

}  // namespace fusewise::cuda::autoencoder

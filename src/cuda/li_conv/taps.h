#pragma once

#include <cstdint>
#include <span>

#include "fusewise/context.h"

namespace fusewise::cuda {

/// Rows of half precision, of which the windows that a convolution sees become channels:
/// to[row, q, j] = from[row, q * step - offset + j] for j < taps, and 0 for the others and outside
/// of the row. 16 bytes of `to` are aligned.
struct Windows {
  const void* from;  ///< [rows, width]
  void* to;          ///< [rows, count, 8 * vectors]
  std::int64_t rows;
  int width, count, step, offset, taps, vectors;
};

/// In one launch for every kMostWindows.
inline constexpr int kMostWindows = 32;
void unfold(const Context& context, std::span<const Windows> windows);

/// to[row, j] = from[row, j] for j < taps.
struct Trimmed {
  const void* from;  ///< [rows, channels]
  void* to;          ///< [rows, taps]
  std::int64_t rows;
  int channels, taps;
};

/// In one launch for every kMostWindows.
void trim(const Context& context, std::span<const Trimmed> all);

}  // namespace fusewise::cuda

#include "cuda/gemm/algorithm_probe.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/scratch.h"
#include "cuda/cuda_error.h"
#include "cuda/gemm/padding.h"
#include "cuda/gemm/tuning.h"

namespace fusewise::cuda {
namespace {

constexpr std::int64_t kLooked = 16;

/// Reads back the first and the last few elements of d, as bits.
std::vector<std::uint64_t> look_at(const Context& context, const Product& p) {
  const std::int64_t size = size_of(p.dtype), count = std::min(kLooked, p.columns);
  const auto* d = static_cast<const char*>(p.d.data);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  char bytes[2][kLooked * 8];
  for (const int last : {0, 1}) {
    const std::int64_t at = last * ((p.rows - 1) * p.d.stride + p.columns - count);
    check_cuda(
        cudaMemcpyAsync(bytes[last], d + at * size, count * size, cudaMemcpyDeviceToHost, stream),
        "reading the result of a GEMM");
  }
  check_cuda(cudaStreamSynchronize(stream), "reading the result of a GEMM");
  std::vector<std::uint64_t> seen(2 * count);
  for (std::int64_t i = 0; i < 2 * count; ++i) {
    std::memcpy(&seen[i], bytes[i / count] + i % count * size, size);
  }
  return seen;
}

bool is_nan(DType dtype, std::uint64_t bits) {
  switch (dtype) {
    case DType::f64:
      return (bits & ~(1ull << 63)) > 0x7ff0000000000000;
    case DType::f32:
      return (bits & 0x7fffffff) > 0x7f800000;
    case DType::f16:
      return (bits & 0x7fff) > 0x7c00;
    default:
      return (bits & 0x7fff) > 0x7f80;
  }
}

/// Runs a GEMM in which every element is NaN before the epilogue.
bool keeps_nan(const Context& context, const Product& p, Description& description,
               const Algorithm& algorithm) {
  const Scratch<char> workspace(context, static_cast<std::int64_t>(algorithm.workspace));
  run_algorithm(context, p, description, algorithm, workspace.data(),
                std::numeric_limits<double>::quiet_NaN());
  const auto seen = look_at(context, p);
  return std::all_of(seen.begin(), seen.end(),
                     [&](std::uint64_t bits) { return is_nan(p.dtype, bits); });
}

/// A factor for the test below: a half-precision number with two equal bytes, so that memset can
/// write it.
struct Factor {
  unsigned char byte;
  std::uint16_t negative_square;  ///< -factor^2, rounded to half precision
};

/// The square is larger than its rounded value, so relu does not clip the difference.
Factor factor_for(DType dtype) {
  // 0x3d3d is 1.3095703125, its square 1756.13 * 2^-10; 0x3c3c is 0.011474609375, 138.06 * 2^-20.
  if (dtype == DType::f16) return {0x3d, 0xc000 - (2048 - 1756)};
  return {0x3c, 0x8000 | (127 - 13) << 7 | (138 - 128)};
}

/// Runs a GEMM whose sums have one term each, with a bias that is minus the rounded term. The
/// result is the rounding error, or 0 if the term was rounded before the bias was added.
bool rounds_once(const Context& context, const Product& p, const Algorithm& algorithm) {
  constexpr std::int64_t kHalf = 2;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Factor factor = factor_for(p.dtype);
  const std::int64_t longest = std::max(p.rows, p.columns);
  const Scratch<char> factors(context, longest * kHalf), bias(context, p.columns * kHalf);
  check_cuda(cudaMemsetAsync(factors.data(), factor.byte, longest * kHalf, stream), "trying");
  const std::vector<std::uint16_t> negative(p.columns, factor.negative_square);
  check_cuda(cudaMemcpyAsync(bias.data(), negative.data(), p.columns * kHalf,
                             cudaMemcpyHostToDevice, stream),
             "trying an algorithm");
  const auto stored_bytes = [](const Matrix& matrix, std::int64_t rows, std::int64_t columns) {
    return (matrix.transposed ? columns : rows) * matrix.stride * kHalf;
  };
  const std::int64_t a_bytes = stored_bytes(p.a, p.rows, p.inner);
  const std::int64_t b_bytes = stored_bytes(p.b, p.inner, p.columns);
  const Scratch<char> a(context, a_bytes), b(context, b_bytes);
  check_cuda(cudaMemsetAsync(a.data(), 0, a_bytes, stream), "trying an algorithm");
  check_cuda(cudaMemsetAsync(b.data(), 0, b_bytes, stream), "trying an algorithm");
  // The first column of a, and the first row of b.
  const auto line = [&](void* to, const Matrix& matrix, bool adjacent, std::int64_t count) {
    return adjacent ? Copy{factors.data(), 0, 1, count, to, matrix.stride, 1, count}
                    : Copy{factors.data(), 1, count, 1, to, matrix.stride, count, 1};
  };
  const Copy lines[] = {line(a.data(), p.a, p.a.transposed, p.rows),
                        line(b.data(), p.b, !p.b.transposed, p.columns)};
  run_copies(context, lines, 2);

  Product trial = p;
  trial.a.data = a.data();
  trial.b.data = b.data();
  trial.bias = bias.data();
  Description description(trial);
  const Scratch<char> workspace(context, static_cast<std::int64_t>(algorithm.workspace));
  run_algorithm(context, trial, description, algorithm, workspace.data());
  const auto seen = look_at(context, trial);
  constexpr std::uint64_t kMagnitude = 0x7fff;
  return std::all_of(seen.begin(), seen.end(),
                     [&](std::uint64_t bits) { return (bits & kMagnitude) != 0; });
}

bool has_half_bias(const Product& p) {
  return p.bias != nullptr && size_of(p.dtype) == 2 && !p.wide_result;
}

}  // namespace

bool needs_probe(const Product& p) { return p.epilogue != Epilogue::none || has_half_bias(p); }

bool is_right(const Context& context, const Product& p, Description& description,
              const Algorithm& algorithm) {
  const RelaxedCapture relaxed;
  if (p.epilogue != Epilogue::none && !keeps_nan(context, p, description, algorithm)) return false;
  return !has_half_bias(p) || rounds_once(context, p, algorithm);
}

}  // namespace fusewise::cuda

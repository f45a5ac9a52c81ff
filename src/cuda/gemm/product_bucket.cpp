#include "cuda/gemm/product_bucket.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "cuda/gemm/alignment.h"

namespace fusewise::cuda {
namespace {

/// Everything except sizes, strides and addresses.
std::int64_t flags_of(const Product& p) {
  return static_cast<std::int64_t>(p.dtype) | p.a.transposed << 4 | p.b.transposed << 5 |
         p.d.transposed << 6 | std::int64_t{p.bias != nullptr} << 7 |
         static_cast<std::int64_t>(p.epilogue) << 8 | static_cast<std::int64_t>(p.batch) << 12 |
         std::int64_t{p.math.tf32} << 16 | std::int64_t{p.math.reduced_sums} << 17 |
         std::int64_t{p.math.tune} << 18 | std::int64_t{p.wide_result} << 19 |
         std::int64_t{p.add} << 20 | std::int64_t{p.count - 1} << 21;
}

/// Alignment classes instead of byte counts. An algorithm needs 16-byte alignment or none, and
/// slices of one tensor should not each become a separate kind.
std::int64_t alignments_of(const Product& p) {
  const auto address = [](const void* data) { return std::countr_zero(alignment_of(data)); };
  const auto stride = [&](const Matrix& matrix) {
    const std::int64_t bytes = matrix.stride * size_of(p.dtype);
    return std::min(std::countr_zero(static_cast<std::uint64_t>(bytes)), 4);
  };
  std::int64_t all = 0;
  for (const int each :
       {p.c == nullptr ? 0 : address(p.c), address(p.a.data), address(p.b.data), address(p.d.data),
        address(p.bias), stride(p.a), stride(p.b), stride(p.d)}) {
    all = all << 4 | each;
  }
  return all;
}

/// Octaves that share a representative. Otherwise each octave would load its own kernels, which
/// takes milliseconds.
constexpr int kOctavesTogether = 3;

std::int64_t& batch_of(Product& p) {
  switch (p.batch) {
    case BatchSize::rows:
      return p.rows;
    case BatchSize::columns:
      return p.columns;
    default:
      return p.inner;
  }
}

int octave_of(std::int64_t size) {
  return std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(size, 1))) - 1;
}

}  // namespace

ProductBucket bucket_of(const Product& product) {
  Product p = product;
  const std::int64_t batch = std::exchange(batch_of(p), 0);
  ProductBucket bucket{{p.rows, p.columns, p.inner, flags_of(p), alignments_of(p)}, 0};
  if (p.math.tune) {
    bucket.octave = octave_of(batch);
  } else {
    bucket.kind[static_cast<int>(p.batch)] = batch;
  }
  return bucket;
}

std::string text_of(const ProductBucket& bucket) {
  std::string text;
  for (const std::int64_t part : bucket.kind) text.append(" ").append(std::to_string(part));
  return text.append(" ").append(std::to_string(bucket.octave));
}

Product representative_of(const Product& product) {
  Product p = product;
  const int octave = octave_of(batch_of(p)) / kOctavesTogether * kOctavesTogether + 1;
  batch_of(p) = std::int64_t{3} << (octave - 1);
  // A stride must be at least as long as its row, even if the row is the batch dimension.
  const auto fit = [](Matrix& matrix, std::int64_t rows, std::int64_t columns) {
    constexpr std::int64_t kStep = 16;  // keeps the class of an aligned stride
    const std::int64_t row = matrix.transposed ? rows : columns;
    if (matrix.stride < row) matrix.stride += (row - matrix.stride + kStep - 1) / kStep * kStep;
  };
  fit(p.a, p.rows, p.inner);
  fit(p.b, p.inner, p.columns);
  fit(p.d, p.rows, p.columns);
  const auto step = [](std::int64_t& step, const Matrix& matrix, std::int64_t rows,
                       std::int64_t columns) {
    if (step > 0) step = std::max(step, (matrix.transposed ? columns : rows) * matrix.stride);
  };
  step(p.a_step, p.a, p.rows, p.inner);
  step(p.b_step, p.b, p.inner, p.columns);
  step(p.d_step, p.d, p.rows, p.columns);
  return p;
}

ExactKey exact_key_of(const Product& p) {
  return {p.rows,     p.columns,  p.inner,     p.a.stride,
          p.b.stride, p.d.stride, flags_of(p), alignments_of(p)};
}

}  // namespace fusewise::cuda

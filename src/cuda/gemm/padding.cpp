#include "cuda/gemm/padding.h"

#include "common/divide.h"
#include "cuda/gemm/alignment.h"

namespace fusewise::cuda {
namespace {

constexpr std::int64_t kHalf = 2;  // bytes of an element
constexpr std::int64_t kMultiple = kVectorBytes / kHalf;
constexpr std::int64_t kScratchAlignment = 256;

// Measured on an H200: 80 TFLOP/s with unaligned operands, 400 with aligned ones. A copy reads and
// writes at 2 TB/s, and its launch takes 2 us.
constexpr double kSavedPerFlop = 1 / 80e12 - 1 / 400e12, kPerByte = 2 / 2e12, kPerLaunch = 2e-6;

constexpr std::int64_t round_up(std::int64_t size) {
  return divide_up(size, kMultiple) * kMultiple;
}

/// Sizes in memory: rows, and contiguous elements in each row.
struct Shape {
  std::int64_t rows, columns;
  friend bool operator==(const Shape&, const Shape&) = default;
};

Shape stored(const Matrix& matrix, std::int64_t rows, std::int64_t columns) {
  return matrix.transposed ? Shape{columns, rows} : Shape{rows, columns};
}

bool suits_vectors(const Matrix& matrix) {
  return is_aligned(matrix.data) && matrix.stride % kMultiple == 0;
}

}  // namespace

std::optional<CopiedProduct> padded(const Product& p) {
  if (size_of(p.dtype) != kHalf || p.add || p.wide_result || p.count > 1) return std::nullopt;
  Product wide = p;
  // A dimension is padded if its elements are contiguous in one of the matrices.
  if (p.a.transposed) wide.rows = round_up(p.rows);
  wide.columns = round_up(p.columns);
  if (!p.a.transposed || p.b.transposed) wide.inner = round_up(p.inner);

  CopiedProduct result;
  result.product = wide;
  const auto copy_of = [&](Matrix& matrix, Shape shape, Shape to) {
    if (shape == to && suits_vectors(matrix)) return Copy{};
    Copy copy{matrix.data, matrix.stride,        shape.rows, shape.columns,
              nullptr,     round_up(to.columns), to.rows,    to.columns};
    result.bytes +=
        divide_up(copy.to_rows * copy.to_stride * kHalf, kScratchAlignment) * kScratchAlignment;
    matrix.stride = copy.to_stride;
    return copy;
  };
  Product& q = result.product;
  result.inputs[0] = copy_of(q.a, stored(p.a, p.rows, p.inner), stored(p.a, q.rows, q.inner));
  result.inputs[1] = copy_of(q.b, stored(p.b, p.inner, p.columns), stored(p.b, q.inner, q.columns));
  if (p.bias != nullptr && (q.columns != p.columns || !is_aligned(p.bias))) {
    Matrix bias{const_cast<void*>(p.bias), p.columns, false};
    result.inputs[2] = copy_of(bias, {1, p.columns}, {1, q.columns});
  }
  result.result = copy_of(q.d, {p.rows, p.columns}, {q.rows, q.columns});
  if (result.bytes == 0) return std::nullopt;
  return result;
}

CopiedProduct as_is(const Product& product) {
  CopiedProduct result;
  result.product = product;
  if (is_aligned(product.bias) || size_of(product.dtype) != kHalf || product.wide_result) {
    return result;
  }
  result.inputs[2] = {product.bias, product.columns, 1, product.columns,
                      nullptr,      product.columns, 1, product.columns};
  result.bytes = divide_up(product.columns * kHalf, kScratchAlignment) * kScratchAlignment;
  return result;
}

bool padding_should_pay(const Product& p, const CopiedProduct& padded) {
  const double flops = 2.0 * p.rows * p.columns * p.inner;
  const int launches = 1 + (padded.result.rows > 0);
  return flops * kSavedPerFlop > launches * kPerLaunch + padded.bytes * kPerByte;
}

void CopiedProduct::place(void* scratch) {
  auto* next = static_cast<char*>(scratch);
  const auto take = [&](Copy& copy) {
    copy.to = next;
    next += divide_up(copy.to_rows * copy.to_stride * kHalf, kScratchAlignment) * kScratchAlignment;
    return copy.to;
  };
  if (inputs[0].rows > 0) product.a.data = take(inputs[0]);
  if (inputs[1].rows > 0) product.b.data = take(inputs[1]);
  if (inputs[2].rows > 0) product.bias = take(inputs[2]);
  if (result.rows == 0) return;
  // The result is computed in scratch memory and then copied out.
  void* const d = product.d.data;
  const std::int64_t d_stride = result.from_stride;
  product.d.data = take(result);
  result = {product.d.data, result.to_stride, result.rows,   result.columns, d,
            d_stride,       result.rows,      result.columns};
}

}  // namespace fusewise::cuda

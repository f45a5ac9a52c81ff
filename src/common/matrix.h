#pragma once

// A matrix in the form that GEMM libraries take: contiguous rows, or transposed.

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace fusewise {

struct Matrix {
  void* data = nullptr;
  /// Elements from one row to the next, of the transposed matrix if `transposed`.
  std::int64_t stride = 0;
  bool transposed = false;
};

inline bool has_adjacent_rows(const TensorView& t) {
  return (t.sizes[1] <= 1 || t.strides[1] == 1) && (t.sizes[0] <= 1 || t.strides[0] >= t.sizes[1]);
}

inline bool has_adjacent_columns(const TensorView& t) {
  return (t.sizes[0] <= 1 || t.strides[0] == 1) && (t.sizes[1] <= 1 || t.strides[1] >= t.sizes[0]);
}

inline bool is_matrix(const TensorView& t) {
  return has_adjacent_rows(t) || has_adjacent_columns(t);
}

inline TensorView transposed(TensorView t) {
  std::swap(t.sizes[0], t.sizes[1]);
  std::swap(t.strides[0], t.strides[1]);
  return t;
}

/// The view must have contiguous rows or columns.
inline Matrix matrix_of(const TensorView& t) {
  const bool transposed = !has_adjacent_rows(t);
  const std::int64_t across = t.sizes[transposed ? 0 : 1], along = t.sizes[transposed ? 1 : 0];
  // A stride that is never used may have any value, but libraries require a valid one.
  const std::int64_t stride = along <= 1 ? across : t.strides[transposed ? 1 : 0];
  return {t.data, std::max<std::int64_t>(stride, 1), transposed};
}

}  // namespace fusewise

#pragma once

// A GEMM for contexts that checks what it is asked for.

#include <gtest/gtest.h>

#include "reference.h"

namespace fusewise::testing {

/// Sums in double. Fails the test where a call is not as promised.
class PlainGemm : public Gemm {
 public:
  int calls = 0, declined = 0, sums = 0;  // sums: calls that add a matrix
  bool (*declines)(const TensorView& d) = [](const TensorView&) { return false; };

  bool multiply(const TensorView& a, const TensorView& b, const TensorView& c,
                const TensorView& d) override {
    ++calls;
    const Index m = d.sizes[0], n = d.sizes[1], k = a.sizes[1];
    expect_operand(a, m, k);
    expect_operand(b, k, n);
    EXPECT_TRUE(d.rank == 2 && d.strides[1] == 1 && d.strides[0] >= n);
    EXPECT_TRUE(m >= 1 && n >= 1 && k >= 1);
    EXPECT_TRUE(a.dtype == d.dtype && b.dtype == d.dtype);
    if (c.defined() && c.rank == 2) {
      ++sums;
      EXPECT_TRUE(c.sizes[0] == m && c.sizes[1] == n && c.strides[1] == 1 && c.strides[0] >= n);
    } else if (c.defined()) {
      EXPECT_TRUE(c.rank == 1 && c.sizes[0] == n && (n == 1 || c.strides[0] == 1));
    }
    EXPECT_TRUE(!c.defined() || c.dtype == d.dtype);
    if (declines(d)) {
      ++declined;
      return false;
    }
    for (Index i = 0; i < m; ++i) {
      for (Index j = 0; j < n; ++j) {
        double sum = !c.defined() ? 0 : load(c, (c.rank == 2 ? i * c.strides[0] : 0) + j);
        for (Index p = 0; p < k; ++p) {
          sum += load(a, i * a.strides[0] + p * a.strides[1]) *
                 load(b, p * b.strides[0] + j * b.strides[1]);
        }
        store(d, i * d.strides[0] + j, sum);
      }
    }
    return true;
  }

 private:
  static void expect_operand(const TensorView& t, Index rows, Index columns) {
    EXPECT_TRUE(t.rank == 2 && t.sizes[0] == rows && t.sizes[1] == columns);
    EXPECT_TRUE((t.strides[1] == 1 && t.strides[0] >= columns) ||
                (t.strides[0] == 1 && t.strides[1] >= rows))
        << t.strides[0] << ", " << t.strides[1];
  }
  static double load(const TensorView& t, Index at) {
    return t.dtype == DType::f64 ? static_cast<const double*>(t.data)[at]
                                 : static_cast<const float*>(t.data)[at];
  }
  static void store(const TensorView& t, Index at, double value) {
    if (t.dtype == DType::f64) {
      static_cast<double*>(t.data)[at] = value;
    } else {
      static_cast<float*>(t.data)[at] = static_cast<float>(value);
    }
  }
};

inline Context with(Gemm& gemm) {
  Context context;
  context.gemm = &gemm;
  return context;
}

}  // namespace fusewise::testing

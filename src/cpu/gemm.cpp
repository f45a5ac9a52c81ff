#include "cpu/gemm.h"

#include "common/matrix.h"

#if defined(FUSEWISE_BLAS)
#include <cblas.h>

#include <algorithm>
#include <limits>
#endif

namespace fusewise::cpu {
namespace {

#if defined(FUSEWISE_BLAS)

/// For float32 and float64.
class Blas : public Gemm {
 public:
  bool multiply(const TensorView& a, const TensorView& b, const TensorView& c,
                const TensorView& d) override {
    for (const TensorView& t : {a, b, d}) {
      constexpr std::int64_t kMost = std::numeric_limits<int>::max();
      if (std::max({t.sizes[0], t.sizes[1], matrix_of(t).stride}) > kMost) return false;
    }
    if (d.dtype == DType::f32) return multiply<float>(cblas_sgemm, a, b, c, d);
    if (d.dtype == DType::f64) return multiply<double>(cblas_dgemm, a, b, c, d);
    return false;
  }

 private:
  template <typename T, typename Function>
  static bool multiply(Function* gemm, const TensorView& a, const TensorView& b,
                       const TensorView& c, const TensorView& d) {
    const Matrix left = matrix_of(a), right = matrix_of(b), out = matrix_of(d);
    auto* to = static_cast<T*>(out.data);
    if (c.defined() && c.data != d.data) {  // d starts as c
      const auto* from = static_cast<const T*>(c.data);
      const std::int64_t stride = c.rank == 2 ? matrix_of(c).stride : 0;
      for (std::int64_t i = 0; i < d.sizes[0]; ++i) {
        std::copy_n(from + i * stride, d.sizes[1], to + i * out.stride);
      }
    }
    const auto kind = [](const Matrix& m) { return m.transposed ? CblasTrans : CblasNoTrans; };
    gemm(CblasRowMajor, kind(left), kind(right), d.sizes[0], d.sizes[1], a.sizes[1], T(1),
         static_cast<const T*>(left.data), left.stride, static_cast<const T*>(right.data),
         right.stride, T(c.defined() ? 1 : 0), to, out.stride);
    return true;
  }
};

Gemm* of_the_build() {
  static Blas blas;
  return &blas;
}

#else

Gemm* of_the_build() { return nullptr; }

#endif

/// The view with valid strides, one of which is 1.
TensorView plain(TensorView t) {
  const Matrix matrix = matrix_of(t);
  t.strides = {matrix.stride, 1};
  if (matrix.transposed) std::swap(t.strides[0], t.strides[1]);
  return t;
}

}  // namespace

bool multiply_by_library(const Context& context, const TensorView& a, const TensorView& b,
                         const TensorView& c, const TensorView& d) {
  Gemm* const gemm = context.gemm != nullptr ? context.gemm : of_the_build();
  if (gemm == nullptr || d.numel() == 0 || a.numel() == 0) return false;
  return gemm->multiply(plain(a), plain(b), c.rank == 2 ? plain(c) : c, plain(d));
}

}  // namespace fusewise::cpu

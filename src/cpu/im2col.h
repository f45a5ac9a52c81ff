#pragma once

// Convolutions for contexts without their own: each output pixel's values of x become a row of a
// matrix, and a GEMM multiplies the rows by the weights.

#include "cpu/li_conv_kernels.h"
#include "fusewise/context.h"

namespace fusewise::cpu {

/// d = a b^T, by the context's GEMM or the library's own.
void multiply(const Context& context, const TensorView& a, const TensorView& b,
              const TensorView& d);

template <typename T>
class Im2col final : public Convolution {
 public:
  Im2col(const Context& context, const LiConvKernels<T>& kernels)
      : context_(context), kernels_(kernels) {}

  void forward(const TensorView& x, const TensorView& w, std::int64_t stride, std::int64_t padding,
               const TensorView& y) override;
  void backward(const TensorView& dy, const TensorView& x, const TensorView& w, std::int64_t stride,
                std::int64_t padding, const TensorView& dx, const TensorView& dw) override;

 private:
  const Context& context_;
  const LiConvKernels<T>& kernels_;
};

extern template class Im2col<float>;
extern template class Im2col<double>;
extern template class Im2col<F16>;
extern template class Im2col<BF16>;

}  // namespace fusewise::cpu

#pragma once

// Convolutions as GEMMs, for contexts without their own and where a GEMM is faster: each output
// pixel's values of x become a row of a matrix, and a GEMM multiplies the rows by the weights.

#include "cpu/li_conv_kernels.h"
#include "cpu/linear_act_kernels.h"
#include "fusewise/context.h"

namespace fusewise::cpu {

/// Writes the channels of a pixel, which are `stride` apart, or adds to them.
template <typename T>
void write_pixel(const LiConvKernels<T>& kernels, const T* from, std::int64_t channels, T* to,
                 std::int64_t stride, bool add) {
  if (!add) {
    for (std::int64_t c = 0; c < channels; ++c) to[c * stride] = from[c];
    return;
  }
  const std::int64_t together = stride == 1 ? channels : 1;
  for (std::int64_t c = 0; c < channels; c += together) {
    const T* const terms[] = {from + c, to + c * stride};
    kernels.sum_rows(terms, 2, together, to + c * stride);
  }
}

template <typename T>
class Im2col final : public Convolution {
 public:
  Im2col(const Context& context, const LiConvKernels<T>& kernels, const LinearKernels<T>& gemm)
      : context_(context), kernels_(kernels), gemm_(gemm) {}

  void forward(const TensorView& x, const TensorView& w, std::int64_t stride, std::int64_t padding,
               const TensorView& y) override;
  void backward(const TensorView& dy, const TensorView& x, const TensorView& w, std::int64_t stride,
                std::int64_t padding, const TensorView& dx, const TensorView& dw,
                bool add) override;

 private:
  void weight_gradient(const TensorView& dy, const TensorView& x, std::int64_t stride,
                       std::int64_t padding, const TensorView& dw) const;
  void input_gradient(const TensorView& dy, const TensorView& w, std::int64_t stride,
                      std::int64_t padding, const TensorView& dx, bool add) const;

  const Context& context_;
  const LiConvKernels<T>& kernels_;
  const LinearKernels<T>& gemm_;
};

extern template class Im2col<float>;
extern template class Im2col<double>;
extern template class Im2col<F16>;
extern template class Im2col<BF16>;

}  // namespace fusewise::cpu

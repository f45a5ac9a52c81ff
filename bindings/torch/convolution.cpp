// Compiled once per device, like the operators.

#include "convolution.h"

#ifdef FUSEWISE_CUDA_VERSION
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#else
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#endif

#include "failure.h"

namespace fusewise::binding {
namespace {

#ifdef FUSEWISE_CUDA_VERSION
constexpr auto torch_add = aoti_torch_cuda_add_Tensor;
constexpr auto convolution = aoti_torch_cuda_convolution;
constexpr auto convolution_backward = aoti_torch_cuda_convolution_backward;
#else
constexpr auto torch_add = aoti_torch_cpu_add_Tensor;
constexpr auto convolution = aoti_torch_cpu_convolution;
constexpr auto convolution_backward = aoti_torch_cpu_convolution_backward;
#endif

class TorchConvolution : public Convolution {
 public:
  void forward(const TensorView& x, const TensorView& w, std::int64_t stride, std::int64_t padding,
               const TensorView& y) override {
    const Tensor image = tensor_of(x), weights = tensor_of(w);
    const std::int64_t strides[] = {stride, stride_of_columns(stride, y)};
    const std::int64_t paddings[] = {padding, padding};
    AtenTensorHandle result = nullptr;
    const AOTITorchError status = convolution(image.get(), weights.get(), nullptr, strides, 2,
                                              paddings, 2, kOnes, 2, 0, kZeros, 2, 1, &result);
    if (status != AOTI_TORCH_SUCCESS) fail_in("aten::convolution", x.device, y);
    const Tensor found(result);
    TensorView wanted = view_of("y", found);
    wanted.sizes[3] = y.sizes[3];
    copy(tensor_of(wanted), tensor_of(y));
  }

  void backward(const TensorView& dy, const TensorView& x, const TensorView& w, std::int64_t stride,
                std::int64_t padding, const TensorView& dx, const TensorView& dw,
                bool add) override {
    const Tensor gradient = tensor_of(dy), image = tensor_of(x), weights = tensor_of(w);
    const std::int64_t strides[] = {stride, stride}, paddings[] = {padding, padding};
    const std::int32_t wanted[] = {dx.defined(), dw.defined(), 0};
    AtenTensorHandle results[3] = {};
    const AOTITorchError status = convolution_backward(
        gradient.get(), image.get(), weights.get(), nullptr, 0, strides, 2, paddings, 2, kOnes, 2,
        0, kZeros, 2, 1, wanted, 3, &results[0], &results[1], &results[2]);
    if (status != AOTI_TORCH_SUCCESS) {
      fail_in("aten::convolution_backward", x.device, dx.defined() ? dx : dw);
    }
    const Tensor found[] = {Tensor(results[0]), Tensor(results[1]), Tensor(results[2])};
    if (dx.defined() && add) {
      add_to(tensor_of(dx), found[0]);
    } else if (dx.defined()) {
      copy(found[0], tensor_of(dx));
    }
    if (!dw.defined()) return;
    copy(found[1], tensor_of(dw));
    for (const int d : {2, 3}) clear_unread_taps(dw, d, x.sizes[d], dy.sizes[d], stride, padding);
  }

 private:
  static constexpr std::int64_t kOnes[] = {1, 1}, kZeros[] = {0, 0};

  /// oneDNN on CPUs with AMX leaves half-precision results of one column unwritten where the stride
  /// is larger than 1 (seen with torch 2.11). One column does not depend on the stride between
  /// columns. With a stride of 1 torch computes a few more, which are not used.
  static std::int64_t stride_of_columns(std::int64_t stride, const TensorView& y) {
    const bool is_half = y.dtype == DType::f16 || y.dtype == DType::bf16;
    return is_half && y.device.type == DeviceType::cpu && y.sizes[3] == 1 ? 1 : stride;
  }

  /// oneDNN does not write the bf16 gradients of taps that read nothing but padding (seen with
  /// torch 2.11, stride 2 and images of one column). They are 0. `d`: rows or columns.
  static void clear_unread_taps(const TensorView& dw, int d, std::int64_t size,
                                std::int64_t results, std::int64_t stride, std::int64_t padding) {
    for (std::int64_t tap = 0; tap < dw.sizes[d]; ++tap) {
      bool read = false;
      for (std::int64_t i = 0; i < results && !read; ++i) {
        const std::int64_t at = i * stride - padding + tap;
        read = at >= 0 && at < size;
      }
      if (read) continue;
      TensorView unread = dw;
      unread.data = static_cast<char*>(dw.data) + tap * dw.strides[d] * size_of(dw.dtype);
      unread.sizes[d] = 1;
      TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(tensor_of(unread).get()));
    }
  }

  [[noreturn]] static void fail_in(const char* name, Device device, const TensorView& result) {
    fail_as_torch(name, device, result.numel() * size_of(result.dtype));
  }
};

}  // namespace

void add_to(const Tensor& sum, const Tensor& term) {
  AtenTensorHandle result = nullptr;
  if (torch_add(sum.get(), term.get(), 1.0, &result) != AOTI_TORCH_SUCCESS) {
    fail_as_torch("aten::add", device_of("sum", sum), bytes_of(sum));
  }
  copy(Tensor(result), sum);
}

Convolution& torch_convolution() {
  static TorchConvolution convolution;
  return convolution;
}

}  // namespace fusewise::binding

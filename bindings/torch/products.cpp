#include "products.h"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <atomic>
#include <string>

#include "fusewise/error.h"

namespace fusewise::binding {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::detail::from;
using torch::stable::detail::to;

// Measured on two Zen 4 cores: in float32, from so many multiplications on, oneDNN is faster than
// what torch's own linear takes there, by 7 % at 1024 x 784 x 2048; below it takes up to three
// times as long (64 x 65 x 33). On fewer rows than these it is no better forward, but at 32 x 2048
// x 784 back.
constexpr std::int64_t kLarge = 1 << 24, kRowsForOneDnn = 64;

std::atomic<bool> one_dnn_missing = false;

/// oneDNN's product, through the operator that torch's compiler uses for it; nothing where it
/// fails.
std::optional<Tensor> one_dnn(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  std::array<StableIValue, 6> stack{from(x),
                                    from(w),
                                    from(b),
                                    from(std::string("none")),
                                    from(std::vector<std::int64_t>{}),
                                    from(std::optional<std::string>("none"))};
  if (torch_call_dispatcher("mkldnn::_linear_pointwise", "", stack.data(), TORCH_ABI_VERSION) !=
      AOTI_TORCH_SUCCESS) {
    return std::nullopt;
  }
  return to<Tensor>(stack[0]);
}

/// Everything else has been checked before, and the stable ABI keeps only the fact that it failed.
void check_product(AOTITorchError status) {
  if (status != AOTI_TORCH_SUCCESS) throw OutOfMemory("out of memory: a product does not fit");
}

/// Of x [..., K] and a matrix that makes `columns` of its K.
bool is_for_one_dnn(const Tensor& x, std::int64_t columns) {
  return x.scalar_type() == ScalarType::Float && x.numel() * columns >= kLarge && !one_dnn_missing;
}

Tensor multiply(const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 2> stack{from(a), from(b)};
  check_product(torch_call_dispatcher("aten::mm", "", stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  const bool many_rows = x.numel() >= kRowsForOneDnn * x.size(-1);
  const bool tries = many_rows && is_for_one_dnn(x, w.size(0));
  if (tries) {
    if (auto result = one_dnn(x, w, b)) return *result;
  }
  std::array<StableIValue, 3> stack{from(x), from(w), from(b)};
  check_product(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  if (tries) one_dnn_missing = true;  // where memory was missing, it would have been here, too
  return to<Tensor>(stack[0]);
}

Tensor back(const Tensor& dz, const Tensor& w) {
  const bool tries = is_for_one_dnn(dz, w.size(1));
  if (tries) {
    if (auto result = one_dnn(dz, torch::stable::transpose(w, 0, 1), {})) return *result;
  }
  const Tensor result = multiply(dz, w);
  if (tries) one_dnn_missing = true;
  return result;
}

Tensor outer(const Tensor& dz, const Tensor& x) {
  const std::vector<std::int64_t> shape{dz.size(0), x.size(-1)};
  const Tensor rows = x.dim() == 2 ? x : torch::stable::reshape(x, shape);
  return multiply(torch::stable::transpose(dz, 0, 1), rows);
}

}  // namespace fusewise::binding

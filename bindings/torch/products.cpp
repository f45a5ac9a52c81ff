#include "products.h"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <atomic>
#include <string>

#include "failure.h"

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

/// One of torch's operators, whose result is as large as `rows` x `columns` elements of `like`.
template <std::size_t kArguments>
Tensor product(const char* name, std::array<StableIValue, kArguments>& stack, const Tensor& like,
               std::int64_t rows, std::int64_t columns) {
  if (torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    fail_as_torch(name, device_of("x", like),
                  rows * columns * static_cast<std::int64_t>(like.element_size()));
  }
  return to<Tensor>(stack[0]);
}

/// Of x [..., K] and a matrix that makes `columns` of its K.
bool is_for_one_dnn(const Tensor& x, std::int64_t columns) {
  return x.scalar_type() == ScalarType::Float && x.numel() * columns >= kLarge && !one_dnn_missing;
}

Tensor multiply(const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 2> stack{from(a), from(b)};
  return product("aten::mm", stack, a, a.size(0), b.size(1));
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
  std::int64_t rows = 1;
  for (int d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  const bool tries = rows >= kRowsForOneDnn && is_for_one_dnn(x, w.size(0));
  if (tries) {
    if (auto result = one_dnn(x, w, b)) return *result;
  }
  std::array<StableIValue, 3> stack{from(x), from(w), from(b)};
  const Tensor result = product("aten::linear", stack, x, rows, w.size(0));
  if (tries) one_dnn_missing = true;  // where memory was missing, it would have been here, too
  return result;
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
  const Tensor rows = x.dim() == 2 ? x
                                   : torch_call("aten::reshape", device_of("x", x), bytes_of(x),
                                                [&] { return torch::stable::reshape(x, shape); });
  return multiply(torch::stable::transpose(dz, 0, 1), rows);
}

}  // namespace fusewise::binding

// Operators that do nothing: they take tensors and return new ones. What a call of one costs is
// torch's own part of every call: the arguments, the dispatcher, the stable ABI, the memory of the
// results. Named fusewise_empty::empty_INPUTS_OUTPUTS; all results are float32 scalars.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

constexpr int kMostTensors = 32;

void run(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs) {
  using torch::stable::Tensor;
  std::vector<Tensor> taken;
  taken.reserve(inputs);
  for (std::uint64_t i = 0; i < inputs; ++i) {
    taken.push_back(torch::stable::detail::to<Tensor>(stack[i]));
  }
  const bool cpu = taken[0].is_cpu();
  for (std::uint64_t i = 0; i < outputs; ++i) {
    AtenTensorHandle made = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(0, nullptr, nullptr, aoti_torch_dtype_float32(),
                                 cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(),
                                 cpu ? 0 : taken[0].get_device_index(), &made));
    stack[i] = torch::stable::detail::from(Tensor(made));
  }
}

/// Calls body(name, inputs, outputs) for each operator: forward and backward of every number of
/// tensors.
template <typename Body>
void each_operator(const Body& body) {
  for (int tensors = 1; tensors < kMostTensors; ++tensors) {
    const std::string forward = "empty_" + std::to_string(tensors) + "_1";
    body(forward, tensors, 1);
    if (tensors == 1) continue;
    const std::string backward =
        "empty_" + std::to_string(tensors + 1) + "_" + std::to_string(tensors);
    body(backward, tensors + 1, tensors);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY(fusewise_empty, m) {
  each_operator([&](const std::string& name, int inputs, int outputs) {
    std::string schema = name + "(";
    for (int i = 0; i < inputs; ++i) {
      schema += (i == 0 ? "Tensor t" : ", Tensor t") + std::to_string(i);
    }
    schema += ") -> (";
    for (int i = 0; i < outputs; ++i) schema += i == 0 ? "Tensor" : ", Tensor";
    m.def((schema + ")").c_str());
  });
}

STABLE_TORCH_LIBRARY_IMPL(fusewise_empty, CompositeExplicitAutograd, m) {
  each_operator([&](const std::string& name, int, int) { m.impl(name.c_str(), &run); });
}

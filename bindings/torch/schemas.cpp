// Every operator's schema. The names start with an underscore because the operators are not
// differentiable: fusewise.functional is the public interface.

#include "common/operators.h"
#include "operator.h"

using namespace fusewise;
using namespace fusewise::binding;

namespace {

/// The names, one per line.
std::string operators() {
  std::string names;
#define FUSEWISE_NAME(name, Name) names += #name "\n"
  FUSEWISE_EACH_OPERATOR(FUSEWISE_NAME)
  return names + "li_conv\n";  // bound by hand; each layer of `mlp` counts as a linear_act
}

}  // namespace

STABLE_TORCH_LIBRARY(fusewise, m) {
  m.def("_build_info() -> str");
  m.def("_cuda_build_info() -> str");
  m.def("_operators() -> str");
#define FUSEWISE_DEFINE(name, Name) define<k##Name>(m)
  FUSEWISE_EACH_OPERATOR(FUSEWISE_DEFINE)
  m.def(OperatorBinding<kBatchNormStatistics>::schema("").c_str());
  m.def(
      "_mlp(Tensor x, Tensor[] weights, Tensor[] biases, str activation, str final_activation, "
      "bool save, bool tf32, bool reduced_sums, bool tune, str implementation) -> "
      "(Tensor y, Tensor[] saved)");
  m.def(
      "_mlp_backward(Tensor dy, Tensor x, Tensor[] weights, Tensor[] saved, str activation, "
      "str final_activation, bool need_dx, int[] needs, bool tf32, bool reduced_sums, bool tune, "
      "str implementation) -> Tensor[]");
  m.def(
      "_li_conv(Tensor[] x, Tensor[] weights, Tensor[] mix, Tensor? previous, int stride, "
      "int padding, bool packed, bool tf32, bool reduced_sums, bool tune, str implementation) -> "
      "(Tensor y, Tensor u, Tensor cast)");
  m.def(
      "_li_conv_backward(Tensor gradient, Tensor u, Tensor? cast, Tensor[] x, Tensor[] weights, "
      "Tensor[] mix, Tensor? previous, int stride, int padding, bool packed, int[] needs, "
      "bool tf32, bool reduced_sums, bool tune, str implementation) -> Tensor[]");
  m.def(
      "_li_conv_explain(Tensor[] x, Tensor[] weights, Tensor[] mix, Tensor? previous, int stride, "
      "int padding, bool backward, str implementation) -> str");
  m.def(
      "_li_block(Tensor x, Tensor[] weights, Tensor[] norms, Tensor(a!)[] running, "
      "Tensor? blanked, int[] strides, bool shortcut, bool integrated_only, bool training, "
      "float momentum, float eps, bool save, bool tf32, bool reduced_sums, bool tune, "
      "str convolution, str norm) -> "
      "(Tensor y, Tensor kept, Tensor statistics, Tensor parameters, Tensor cast)");
  m.def(
      "_li_block_backward(Tensor gradient, Tensor x, Tensor kept, Tensor statistics, "
      "Tensor parameters, Tensor? cast, Tensor[] weights, Tensor? blanked, int[] strides, "
      "bool shortcut, bool integrated_only, bool training, int[] needs, bool tf32, "
      "bool reduced_sums, bool tune, str convolution, str norm) -> Tensor[]");
  m.def("_mlp_is_kept(str activation, bool last) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(fusewise, CompositeExplicitAutograd, m) {
  m.impl("_operators", TORCH_BOX(&operators));
#define FUSEWISE_DESCRIBE(name, Name) \
  m.impl("_" #name "_description", TORCH_BOX(&OperatorBinding<k##Name>::description))
  FUSEWISE_EACH_OPERATOR(FUSEWISE_DESCRIBE)
}

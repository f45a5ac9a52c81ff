// Every operator's schema. They start with an underscore because they carry no gradient:
// fusewise.functional is the public door.

#include "common/autoencoder.h"
#include "common/squeeze_excite.h"
#include "operator.h"

using namespace fusewise;
using namespace fusewise::binding;

STABLE_TORCH_LIBRARY(fusewise, m) {
  m.def("_build_info() -> str");
  m.def("_cuda_build_info() -> str");
  define<kAutoencoder>(m);
  define<kSqueezeExcite>(m);
  m.def(
      "_linear_act(Tensor x, Tensor w, Tensor? b, str activation, bool save, bool tf32, "
      "bool reduced_sums, bool tune, str implementation) -> (Tensor y, Tensor kept)");
  m.def(
      "_linear_act_backward(Tensor dy, Tensor x, Tensor w, Tensor kept, str activation, "
      "bool need_dx, bool need_dw, bool need_db, bool tf32, bool reduced_sums, bool tune, "
      "str implementation) -> (Tensor dx, Tensor dw, Tensor db)");
  m.def(
      "_linear_act_explain(Tensor x, Tensor w, Tensor? b, str activation, bool save, "
      "bool backward, bool tf32, bool reduced_sums, bool tune, str implementation) -> str");
  m.def(
      "_mlp(Tensor x, Tensor[] weights, Tensor[] biases, str activation, str final_activation, "
      "bool save, bool tf32, bool reduced_sums, bool tune, str implementation) -> "
      "(Tensor y, Tensor[] saved)");
  m.def(
      "_mlp_backward(Tensor dy, Tensor x, Tensor[] weights, Tensor[] saved, str activation, "
      "str final_activation, bool need_dx, int[] needs, bool tf32, bool reduced_sums, bool tune, "
      "str implementation) -> Tensor[]");
  m.def("_mlp_is_kept(str activation, bool last) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(fusewise, CompositeExplicitAutograd, m) {
  m.impl("_autoencoder_description", TORCH_BOX(&OperatorBinding<kAutoencoder>::description));
  m.impl("_squeeze_excite_description", TORCH_BOX(&OperatorBinding<kSqueezeExcite>::description));
}

// Every operator's schema. They start with an underscore because they carry no gradient:
// fusewise.functional is the public door.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(fusewise, m) {
  m.def("_build_info() -> str");
  m.def("_cuda_build_info() -> str");
  m.def(
      "_autoencoder(Tensor x, Tensor[] weights, str output, bool tf32, bool save, "
      "str implementation) -> Tensor[]");
  m.def(
      "_autoencoder_backward(Tensor gradient, Tensor x, Tensor[] weights, Tensor projection, "
      "str output, bool tf32, int needed, str implementation) -> Tensor[]");
  m.def(
      "_autoencoder_explain(Tensor x, Tensor[] weights, str output, bool tf32, bool backward, "
      "str implementation) -> str");
  m.def(
      "_squeeze_excite(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str activation, "
      "str gate, bool save, str implementation) -> (Tensor y, Tensor saved)");
  m.def(
      "_squeeze_excite_backward(Tensor dy, Tensor x, Tensor w1, Tensor w2, Tensor saved, "
      "str activation, str gate, bool need_dx, bool need_dw1, bool need_db1, bool need_dw2, "
      "bool need_db2, str implementation) -> "
      "(Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2)");
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
  m.def(
      "_squeeze_excite_explain(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, "
      "str activation, str gate, bool backward, str implementation) -> str");
}

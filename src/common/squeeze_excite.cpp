// Squeeze-and-Excitation's description and front door.

#include "common/squeeze_excite.h"

#include "common/check.h"

namespace fusewise {
namespace {

using F = SqueezeExciteForward;
using B = SqueezeExciteBackward;

constexpr auto kTensors = std::to_array<OperatorTensor<F, B>>({
    {{"x", Role::input, "N C H W", Type::data, Layout::any}, at<&F::x>, at<&B::x>, at<&B::dx>},
    {{"w1", Role::input, "R C | R C 1 1", Type::weight, Layout::dense},
     at<&F::w1>,
     at<&B::w1>,
     at<&B::dw1>},
    {{"b1", Role::optional_input, "R", Type::weight, Layout::dense},
     at<&F::b1>,
     nullptr,
     at<&B::db1>},
    {{"w2", Role::input, "C R | C R 1 1", Type::weight, Layout::dense},
     at<&F::w2>,
     at<&B::w2>,
     at<&B::dw2>},
    {{"b2", Role::optional_input, "C", Type::weight, Layout::dense},
     at<&F::b2>,
     nullptr,
     at<&B::db2>},
    {{"y", Role::output, "x", Type::data, Layout::any}, at<&F::y>, nullptr, at<&B::dy>},
    {{"pooled", Role::saved, "N C", Type::statistics, Layout::dense},
     at<&F::pooled>,
     at<&B::pooled>},
    {{"hidden", Role::saved, "N R", Type::statistics, Layout::dense},
     at<&F::hidden>,
     at<&B::hidden>},
    {{"gates", Role::saved, "N C", Type::statistics, Layout::dense}, at<&F::gates>, at<&B::gates>},
});

constexpr const char* kActivationNames[] = {"silu", "relu", "hardswish"};
constexpr const char* kGateNames[] = {"sigmoid", "hardsigmoid"};
constexpr ChoiceRule kChoiceRules[] = {{"activation", kActivationNames}, {"gate", kGateNames}};

template <typename Call>
void set_activation(Call& call, std::string_view name) {
  call.activation = activation_from(name, kSqueezeExciteActivations);
}
template <typename Call>
void set_gate(Call& call, std::string_view name) {
  call.gate = gate_from(name);
}
constexpr OperatorChoice<F, B> kChoices[] = {{set_activation<F>, set_activation<B>},
                                             {set_gate<F>, set_gate<B>}};

constexpr auto kRules = rules_of(kTensors);

/// Throws for those that this operator does not have.
void check_activation(Activation activation) {
  activation_from(name_of(activation), kSqueezeExciteActivations);
}

}  // namespace

constexpr Operator<F, B> kSqueezeExcite{
    .rules = {.name = "squeeze_excite",
              .tensors = kRules,
              .choices = kChoiceRules,
              .positive = "CHWR"},
    .tensors = kTensors,
    .choices = kChoices,
    .forward_on_cpu = cpu::squeeze_excite_forward,
    .forward_on_cuda = cuda::squeeze_excite_forward,
    .backward_on_cpu = cpu::squeeze_excite_backward,
    .backward_on_cuda = cuda::squeeze_excite_backward,
};

Gate gate_from(std::string_view name) {
  if (name == "sigmoid") return Gate::sigmoid;
  if (name == "hardsigmoid") return Gate::hardsigmoid;
  fail("gate: expected 'sigmoid' or 'hardsigmoid', got '", name, "'");
}

void squeeze_excite(const Context& context, const SqueezeExciteForward& call) {
  check_activation(call.activation);
  run(kSqueezeExcite, context, call);
}
void squeeze_excite(const Context& context, const SqueezeExciteBackward& call) {
  check_activation(call.activation);
  run(kSqueezeExcite, context, call);
}
Candidates explain(const Context& context, const SqueezeExciteForward& call) {
  check_activation(call.activation);
  return explain(kSqueezeExcite, context, call);
}
Candidates explain(const Context& context, const SqueezeExciteBackward& call) {
  check_activation(call.activation);
  return explain(kSqueezeExcite, context, call);
}

}  // namespace fusewise

// Description and public functions of Squeeze-and-Excitation.

#include "common/operators.h"

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

constexpr ChoiceRule kChoiceRules[] = {{"activation", kNames<kSqueezeExciteActivations>},
                                       {"gate", kNames<kGates>}};
constexpr OperatorChoice<F, B> kChoices[] = {
    choice_in<kSqueezeExciteActivations, &F::activation, &B::activation>(),
    choice_in<kGates, &F::gate, &B::gate>()};
constexpr auto kRules = rules_of(kTensors);

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

Gate gate_from(std::string_view name) { return kGates[check_choice(kChoiceRules[1], name)]; }

void squeeze_excite(const Context& context, const SqueezeExciteForward& call) {
  run(kSqueezeExcite, context, call);
}
void squeeze_excite(const Context& context, const SqueezeExciteBackward& call) {
  run(kSqueezeExcite, context, call);
}
Candidates explain(const Context& context, const SqueezeExciteForward& call) {
  return explain(kSqueezeExcite, context, call);
}
Candidates explain(const Context& context, const SqueezeExciteBackward& call) {
  return explain(kSqueezeExcite, context, call);
}

}  // namespace fusewise

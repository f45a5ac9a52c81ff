// Description and public functions of linear + activation.

#include "common/operators.h"

namespace fusewise {
namespace {

using F = LinearActForward;
using B = LinearActBackward;

constexpr auto kTensors = std::to_array<OperatorTensor<F, B>>({
    {{"x", Role::input, "M* K", Type::data, Layout::matrix},
     at<&F::x>,
     at<&B::x>,
     at<&B::dx>,
     at<&B::dw>},
    {{"w", Role::input, "N K", Type::data, Layout::matrix},
     at<&F::w>,
     at<&B::w>,
     at<&B::dw>,
     at<&B::dx>},
    {{"b", Role::optional_input, "N", Type::data, Layout::dense}, at<&F::b>, nullptr, at<&B::db>},
    {{"y", Role::output, "M* N", Type::data, Layout::rows}, at<&F::y>, nullptr, at<&B::dy>},
    {{"kept", Role::saved, "M* N", Type::bits, Layout::rows, "relu"}, at<&F::kept>, at<&B::kept>},
    {{"kept", Role::saved, "M* N", Type::data, Layout::rows, "gelu gelu_tanh silu"},
     at<&F::kept>,
     at<&B::kept>},
});

constexpr ChoiceRule kChoiceRules[] = {{"activation", kNames<kActivations>}};
constexpr OperatorChoice<F, B> kChoices[] = {
    choice_in<kActivations, &F::activation, &B::activation>()};

constexpr const char* kFlagNames[] = {"tf32", "reduced_sums", "tune"};
template <bool ProductMath::* kFlag>
constexpr OperatorFlag<F, B> kMathFlag{at<&F::math, kFlag>, at<&B::math, kFlag>};
constexpr OperatorFlag<F, B> kFlags[] = {kMathFlag<&ProductMath::tf32>,
                                         kMathFlag<&ProductMath::reduced_sums>,
                                         kMathFlag<&ProductMath::tune>};

constexpr auto kRules = rules_of(kTensors);

}  // namespace

constexpr Operator<F, B> kLinearAct{
    .rules = {.name = "linear_act",
              .tensors = kRules,
              .choices = kChoiceRules,
              .flags = kFlagNames},
    .tensors = kTensors,
    .choices = kChoices,
    .flags = kFlags,
    .forward_on_cpu = cpu::linear_act_forward,
    .forward_on_cuda = cuda::linear_act_forward,
    .backward_on_cpu = cpu::linear_act_backward,
    .backward_on_cuda = cuda::linear_act_backward,
};

void linear_act(const Context& context, const LinearActForward& call) {
  run(kLinearAct, context, call);
}
void linear_act(const Context& context, const LinearActBackward& call) {
  run(kLinearAct, context, call);
}
Candidates explain(const Context& context, const LinearActForward& call) {
  return explain(kLinearAct, context, call);
}
Candidates explain(const Context& context, const LinearActBackward& call) {
  return explain(kLinearAct, context, call);
}

}  // namespace fusewise

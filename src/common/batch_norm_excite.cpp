// Description and public functions of BatchNorm + activation + Squeeze-and-Excitation.

#include "common/batch_norm_excite.h"

#include "common/batch_norm.h"
#include "common/operators.h"

namespace fusewise {
namespace {

using F = BatchNormExciteForward;
using B = BatchNormExciteBackward;

constexpr auto kTensors = std::to_array<OperatorTensor<F, B>>({
    {{"x", Role::input, "N C H W", Type::data, Layout::any}, at<&F::x>, at<&B::x>, at<&B::dx>},
    {{"running_mean", Role::updated, "C", Type::weight, Layout::dense}, at<&F::running_mean>},
    {{"running_var", Role::updated, "C", Type::weight, Layout::dense}, at<&F::running_var>},
    {{"weight", Role::optional_input, "C", Type::weight, Layout::dense},
     at<&F::weight>,
     at<&B::weight>,
     at<&B::dweight>},
    {{"bias", Role::optional_input, "C", Type::weight, Layout::dense},
     at<&F::bias>,
     at<&B::bias>,
     at<&B::dbias>},
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
    {{"num_batches_tracked", Role::updated, "", Type::counter, Layout::dense},
     at<&F::num_batches_tracked>},
    {{"y", Role::output, "x", Type::data, Layout::any}, at<&F::y>, nullptr, at<&B::dy>},
    {{"mean", Role::saved, "C", Type::statistics, Layout::dense}, at<&F::mean>, at<&B::mean>},
    {{"inverse_deviation", Role::saved, "C", Type::statistics, Layout::dense},
     at<&F::inverse_deviation>,
     at<&B::inverse_deviation>},
    {{"pooled", Role::saved, "N C", Type::statistics, Layout::dense},
     at<&F::pooled>,
     at<&B::pooled>},
    {{"hidden", Role::saved, "N R", Type::statistics, Layout::dense},
     at<&F::hidden>,
     at<&B::hidden>},
    {{"gates", Role::saved, "N C", Type::statistics, Layout::dense}, at<&F::gates>, at<&B::gates>},
});

constexpr ChoiceRule kChoiceRules[] = {{"activation", kNames<kBatchNormActivations>},
                                       {"hidden_activation", kNames<kSqueezeExciteActivations>},
                                       {"gate", kNames<kGates>}};
constexpr OperatorChoice<F, B> kChoices[] = {
    choice_in<kBatchNormActivations, &F::activation, &B::activation>(),
    choice_in<kSqueezeExciteActivations, &F::hidden_activation, &B::hidden_activation>(),
    choice_in<kGates, &F::gate, &B::gate>()};
constexpr const char* kFlagNames[] = {"training"};
constexpr OperatorFlag<F, B> kFlags[] = {{at<&F::training>, at<&B::training>}};
constexpr const char* kNumberNames[] = {"momentum", "eps"};
constexpr OperatorNumber<F> kNumbers[] = {at<&F::momentum>, at<&F::eps>};
constexpr auto kRules = rules_of(kTensors);

void check_more(const F& call) { check_statistics(norm_of(call)); }

}  // namespace

BatchNormActForward norm_of(const BatchNormExciteForward& call) { return norm_in_forward(call); }

BatchNormActBackward norm_of(const BatchNormExciteBackward& call) {
  BatchNormActBackward norm = norm_in_backward(call);
  norm.dy = call.dy;
  return norm;
}

SqueezeExciteForward excite_of(const BatchNormExciteForward& call) {
  SqueezeExciteForward excite;
  excite.x = call.x;
  excite.w1 = call.w1;
  excite.b1 = call.b1;
  excite.w2 = call.w2;
  excite.b2 = call.b2;
  excite.activation = call.hidden_activation;
  excite.gate = call.gate;
  excite.y = call.y;
  excite.pooled = call.pooled;
  excite.hidden = call.hidden;
  excite.gates = call.gates;
  return excite;
}

SqueezeExciteBackward excite_of(const BatchNormExciteBackward& call) {
  SqueezeExciteBackward excite;
  excite.dy = call.dy;
  excite.x = call.x;
  excite.w1 = call.w1;
  excite.w2 = call.w2;
  excite.pooled = call.pooled;
  excite.hidden = call.hidden;
  excite.gates = call.gates;
  excite.activation = call.hidden_activation;
  excite.gate = call.gate;
  excite.dw1 = call.dw1;
  excite.db1 = call.db1;
  excite.dw2 = call.dw2;
  excite.db2 = call.db2;
  return excite;
}

constexpr Operator<F, B> kBatchNormExcite{
    .rules = {.name = "batch_norm_excite",
              .tensors = kRules,
              .choices = kChoiceRules,
              .flags = kFlagNames,
              .numbers = kNumberNames,
              .positive = "CHWR"},
    .tensors = kTensors,
    .choices = kChoices,
    .flags = kFlags,
    .numbers = kNumbers,
    .check_more = check_more,
    .forward_on_cpu = cpu::batch_norm_excite_forward,
    .forward_on_cuda = cuda::batch_norm_excite_forward,
    .backward_on_cpu = cpu::batch_norm_excite_backward,
    .backward_on_cuda = cuda::batch_norm_excite_backward,
};

void batch_norm_excite(const Context& context, const BatchNormExciteForward& call) {
  run(kBatchNormExcite, context, call);
}
void batch_norm_excite(const Context& context, const BatchNormExciteBackward& call) {
  run(kBatchNormExcite, context, call);
}
Candidates explain(const Context& context, const BatchNormExciteForward& call) {
  return explain(kBatchNormExcite, context, call);
}
Candidates explain(const Context& context, const BatchNormExciteBackward& call) {
  return explain(kBatchNormExcite, context, call);
}

}  // namespace fusewise

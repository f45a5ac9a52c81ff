// Description and public functions of BatchNorm + activation + max-pool.

#include "common/batch_norm.h"
#include "common/check.h"
#include "common/operators.h"

namespace fusewise {
namespace {

using F = BatchNormActPoolForward;
using B = BatchNormActPoolBackward;

constexpr auto kTensors = std::to_array<OperatorTensor<F, B>>({
    {{"x", Role::input, "S? N C H W", Type::data, Layout::any}, at<&F::x>, at<&B::x>, at<&B::dx>},
    {{"running_mean", Role::updated, "S? C", Type::weight, Layout::dense}, at<&F::running_mean>},
    {{"running_var", Role::updated, "S? C", Type::weight, Layout::dense}, at<&F::running_var>},
    {{"weight", Role::optional_input, "S? C", Type::weight, Layout::dense},
     at<&F::weight>,
     at<&B::weight>,
     at<&B::dweight>},
    {{"bias", Role::optional_input, "S? C", Type::weight, Layout::dense},
     at<&F::bias>,
     at<&B::bias>,
     at<&B::dbias>},
    {{"num_batches_tracked", Role::updated, "| S?", Type::counter, Layout::dense},
     at<&F::num_batches_tracked>},
    {{"blanked", Role::optional_input, "S? N", Type::flags, Layout::dense},
     at<&F::blanked>,
     at<&B::blanked>},
    {{"group", Role::optional_input, "S? 3 C", Type::statistics, Layout::dense},
     at<&F::group>,
     at<&B::group>,
     at<&B::dgroup>},
    {{"y", Role::output, "S? N C P Q", Type::data, Layout::any}, at<&F::y>, nullptr, at<&B::dy>},
    {{"mean", Role::saved, "S? C", Type::statistics, Layout::dense}, at<&F::mean>, at<&B::mean>},
    {{"inverse_deviation", Role::saved, "S? C", Type::statistics, Layout::dense},
     at<&F::inverse_deviation>,
     at<&B::inverse_deviation>},
    {{"choices", Role::saved, "SNCPQ", Type::bytes, Layout::dense},
     at<&F::choices>,
     at<&B::choices>},
});

constexpr ChoiceRule kChoiceRules[] = {{"activation", kNames<kBatchNormActivations>}};
constexpr OperatorChoice<F, B> kChoices[] = {
    choice_in<kBatchNormActivations, &F::activation, &B::activation>()};
constexpr const char* kFlagNames[] = {"training"};
constexpr OperatorFlag<F, B> kFlags[] = {{at<&F::training>, at<&B::training>}};
constexpr const char* kNumberNames[] = {"momentum", "eps"};
constexpr OperatorNumber<F> kNumbers[] = {at<&F::momentum>, at<&F::eps>};
constexpr auto kRules = rules_of(kTensors);

void check_more(const F& call) { check_statistics(without_pool(call)); }

}  // namespace

BatchNormActForward without_pool(const BatchNormActPoolForward& call) {
  BatchNormActForward norm = norm_in_forward(call);
  norm.blanked = call.blanked;
  norm.group = call.group;
  return norm;
}

BatchNormActBackward without_pool(const BatchNormActPoolBackward& call) {
  BatchNormActBackward norm = norm_in_backward(call);
  norm.blanked = call.blanked;
  norm.group = call.group;
  norm.dgroup = call.dgroup;
  return norm;
}

constexpr Operator<F, B> kBatchNormActPool{
    .rules = {.name = "batch_norm_act_pool",
              .tensors = kRules,
              .choices = kChoiceRules,
              .flags = kFlagNames,
              .numbers = kNumberNames,
              .positive = "SCHW",
              .halves = "HPWQ"},
    .tensors = kTensors,
    .choices = kChoices,
    .flags = kFlags,
    .numbers = kNumbers,
    .check_more = check_more,
    .forward_on_cpu = cpu::batch_norm_act_pool_forward,
    .forward_on_cuda = cuda::batch_norm_act_pool_forward,
    .backward_on_cpu = cpu::batch_norm_act_pool_backward,
    .backward_on_cuda = cuda::batch_norm_act_pool_backward,
};

void batch_norm_act_pool(const Context& context, const BatchNormActPoolForward& call) {
  run(kBatchNormActPool, context, call);
}
void batch_norm_act_pool(const Context& context, const BatchNormActPoolBackward& call) {
  run(kBatchNormActPool, context, call);
}
Candidates explain(const Context& context, const BatchNormActPoolForward& call) {
  return explain(kBatchNormActPool, context, call);
}
Candidates explain(const Context& context, const BatchNormActPoolBackward& call) {
  return explain(kBatchNormActPool, context, call);
}

}  // namespace fusewise

// Description and public functions of BatchNorm + activation.

#include "common/batch_norm.h"
#include "common/check.h"
#include "common/operators.h"
#include "common/overlap.h"

namespace fusewise {
namespace {

using F = BatchNormActForward;
using B = BatchNormActBackward;

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
    {{.name = "residual",
      .role = Role::optional_input,
      .shape = "x",
      .type = Type::data,
      .layout = Layout::any,
      .read_with = "silu hardswish"},
     at<&F::residual>,
     at<&B::residual>,
     at<&B::dresidual>},
    {{"num_batches_tracked", Role::updated, "| S?", Type::counter, Layout::dense},
     at<&F::num_batches_tracked>},
    {{"blanked", Role::optional_input, "S? N", Type::flags, Layout::dense},
     at<&F::blanked>,
     at<&B::blanked>},
    {{"group", Role::optional_input, "S? 3 C", Type::statistics, Layout::dense},
     at<&F::group>,
     at<&B::group>,
     at<&B::dgroup>},
    {{"y", Role::output, "x", Type::data, Layout::any}, at<&F::y>, nullptr, at<&B::dy>},
    {{"mean", Role::saved, "S? C", Type::statistics, Layout::dense}, at<&F::mean>, at<&B::mean>},
    {{"inverse_deviation", Role::saved, "S? C", Type::statistics, Layout::dense},
     at<&F::inverse_deviation>,
     at<&B::inverse_deviation>},
    {{"passes", Role::saved, "SNCHW", Type::bits, Layout::dense, "relu relu6", "residual"},
     at<&F::passes>,
     at<&B::passes>},
});

constexpr ChoiceRule kChoiceRules[] = {{"activation", kNames<kBatchNormActivations>}};
constexpr OperatorChoice<F, B> kChoices[] = {
    choice_in<kBatchNormActivations, &F::activation, &B::activation>()};
constexpr const char* kFlagNames[] = {"training"};
constexpr OperatorFlag<F, B> kFlags[] = {{at<&F::training>, at<&B::training>}};
constexpr const char* kNumberNames[] = {"momentum", "eps"};
constexpr OperatorNumber<F> kNumbers[] = {at<&F::momentum>, at<&F::eps>};
constexpr auto kRules = rules_of(kTensors);

}  // namespace

void check_statistics(const BatchNormActForward& call) {
  check(call.running_mean.defined() == call.running_var.defined(),
        "running_mean and running_var: expected both or none");
  check_apart({"running_mean", call.running_mean}, {"running_var", call.running_var});
  const TensorView& x = call.x;
  const bool own = call.training || !call.running_mean.defined();
  const std::int64_t n = x.sizes[x.rank - 4];
  check(!own || call.group.defined() || n * x.sizes[x.rank - 2] * x.sizes[x.rank - 1] != 1,
        "x: expected more than 1 value per channel when training, got ", x);
  check(call.momentum >= 0 || !call.training || !call.running_mean.defined() ||
            call.num_batches_tracked.defined(),
        "num_batches_tracked: expected a tensor where momentum is None, got none");
  check(call.eps >= 0, "eps: expected a number that is not negative, got ", call.eps);
}

namespace {

/// Forward had a residual if its gradient is wanted. Then x alone does not determine v.
void check_backward(const B& call) {
  if (!call.dresidual.defined() || call.activation == Activation::identity) return;
  if (call.activation == Activation::relu || call.activation == Activation::relu6) {
    check(call.passes.defined(), "passes: is missing, which forward saves if it has a residual");
  } else {
    check(call.residual.defined(), "residual: expected forward's, whose gradient is wanted");
  }
}

using S = BatchNormStatistics;

constexpr auto kStatisticsTensors = std::to_array<OperatorTensor<S, NoBackward>>({
    {{"x", Role::input, "S? N C H W", Type::data, Layout::any}, at<&S::x>},
    {{"blanked", Role::optional_input, "S? N", Type::flags, Layout::dense}, at<&S::blanked>},
    {{"statistics", Role::output, "S? 3 C", Type::statistics, Layout::dense}, at<&S::statistics>},
});
constexpr auto kStatisticsRules = rules_of(kStatisticsTensors);

}  // namespace

constexpr Operator<F, B> kBatchNormAct{
    .rules = {.name = "batch_norm_act",
              .tensors = kRules,
              .choices = kChoiceRules,
              .flags = kFlagNames,
              .numbers = kNumberNames,
              .positive = "SCHW"},
    .tensors = kTensors,
    .choices = kChoices,
    .flags = kFlags,
    .numbers = kNumbers,
    .check_more = check_statistics,
    .check_backward = check_backward,
    .forward_on_cpu = cpu::batch_norm_act_forward,
    .forward_on_cuda = cuda::batch_norm_act_forward,
    .backward_on_cpu = cpu::batch_norm_act_backward,
    .backward_on_cuda = cuda::batch_norm_act_backward,
};

constexpr Operator<S, NoBackward> kBatchNormStatistics{
    .rules = {.name = "batch_norm_statistics", .tensors = kStatisticsRules, .positive = "SCHW"},
    .tensors = kStatisticsTensors,
    .forward_on_cpu = cpu::batch_norm_statistics,
    .forward_on_cuda = cuda::batch_norm_statistics,
};

void batch_norm_act(const Context& context, const BatchNormActForward& call) {
  run(kBatchNormAct, context, call);
}
void batch_norm_act(const Context& context, const BatchNormActBackward& call) {
  run(kBatchNormAct, context, call);
}
Candidates explain(const Context& context, const BatchNormActForward& call) {
  return explain(kBatchNormAct, context, call);
}
Candidates explain(const Context& context, const BatchNormActBackward& call) {
  return explain(kBatchNormAct, context, call);
}
void batch_norm_statistics(const Context& context, const BatchNormStatistics& call) {
  run(kBatchNormStatistics, context, call);
}
Candidates explain(const Context& context, const BatchNormStatistics& call) {
  return explain(kBatchNormStatistics, context, call);
}

}  // namespace fusewise

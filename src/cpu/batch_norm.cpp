// BatchNorm + activation on the CPU: the implementations, and their types.

#include "common/implementation.h"
#include "common/operators.h"
#include "cpu/batch_norm_passes.h"
#include "cpu/instruction_sets.h"

namespace fusewise::cpu {
namespace {

using namespace batch_norm;

template <const BatchNormKernelSet& kKernels>
void forward(const Context& context, const BatchNormActForward& call) {
  const DType weights = type_of({&call.weight, &call.bias, &call.running_mean});
  run<Forward>(kKernels, context, call, weights);
}

template <const BatchNormKernelSet& kKernels>
void backward(const Context& context, const BatchNormActBackward& call) {
  const DType weights = type_of({&call.weight, &call.bias, &call.dweight, &call.dbias});
  run<Backward>(kKernels, context, call, weights);
}

template <const BatchNormKernelSet& kKernels>
void statistics(const Context& context, const BatchNormStatistics& call) {
  BatchNormActForward forward;
  forward.x = call.x;
  forward.blanked = call.blanked;
  forward.training = true;
  run<Forward>(kKernels, context, forward, call.x.dtype, call.statistics);
}

constexpr Implementation<BatchNormActForward> kForward[] = {
    {"avx512", needs_avx512, forward<avx512::batch_norm_kernels>},
    {"avx2", needs_avx2, forward<avx2::batch_norm_kernels>},
    {"portable", needs_nothing, forward<portable::batch_norm_kernels>},
};

constexpr Implementation<BatchNormActBackward> kBackward[] = {
    {"avx512", needs_avx512, backward<avx512::batch_norm_kernels>},
    {"avx2", needs_avx2, backward<avx2::batch_norm_kernels>},
    {"portable", needs_nothing, backward<portable::batch_norm_kernels>},
};

constexpr Implementation<BatchNormStatistics> kStatistics[] = {
    {"avx512", needs_avx512, statistics<avx512::batch_norm_kernels>},
    {"avx2", needs_avx2, statistics<avx2::batch_norm_kernels>},
    {"portable", needs_nothing, statistics<portable::batch_norm_kernels>},
};

}  // namespace

Implementations<BatchNormActForward> batch_norm_act_forward() { return kForward; }
Implementations<BatchNormActBackward> batch_norm_act_backward() { return kBackward; }
Implementations<BatchNormStatistics> batch_norm_statistics() { return kStatistics; }

}  // namespace fusewise::cpu

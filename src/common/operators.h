#pragma once

// The list of all operators. From it come the declarations below, their stubs in a build without
// CUDA, torch's operators and the names in Python's `fusewise.implementation`.

#include "common/operator.h"
#include "fusewise/autoencoder.h"
#include "fusewise/batch_norm.h"
#include "fusewise/batch_norm_excite.h"
#include "fusewise/linear_act.h"
#include "fusewise/squeeze_excite.h"

/// each(foo, Foo): the structs are FooForward and FooBackward, the description is kFoo, and each
/// backend has the lists foo_forward() and foo_backward().
#define FUSEWISE_EACH_OPERATOR(each)           \
  each(autoencoder, Autoencoder);              \
  each(batch_norm_act, BatchNormAct);          \
  each(batch_norm_act_pool, BatchNormActPool); \
  each(batch_norm_excite, BatchNormExcite);    \
  each(linear_act, LinearAct);                 \
  each(squeeze_excite, SqueezeExcite);

namespace fusewise {

#define FUSEWISE_DECLARE(name, Name) extern const Operator<Name##Forward, Name##Backward> k##Name
FUSEWISE_EACH_OPERATOR(FUSEWISE_DECLARE)
#undef FUSEWISE_DECLARE
/// Beside the list, because it has no backward and is only called between collectives.
extern const Operator<BatchNormStatistics, NoBackward> kBatchNormStatistics;

#define FUSEWISE_DECLARE(name, Name)               \
  Implementations<Name##Forward> name##_forward(); \
  Implementations<Name##Backward> name##_backward()

namespace cpu {
FUSEWISE_EACH_OPERATOR(FUSEWISE_DECLARE)
Implementations<BatchNormStatistics> batch_norm_statistics();
}  // namespace cpu
/// Defined in src/cuda, or in no_cuda.cpp for a build without CUDA.
namespace cuda {
FUSEWISE_EACH_OPERATOR(FUSEWISE_DECLARE)
Implementations<BatchNormStatistics> batch_norm_statistics();
}  // namespace cuda
#undef FUSEWISE_DECLARE

}  // namespace fusewise

// The operators of one device. Compiled once per device: FUSEWISE_DEVICE is CPU or CUDA.

#include "common/operators.h"

#include "operator.h"

STABLE_TORCH_LIBRARY_IMPL(fusewise, FUSEWISE_DEVICE, m) {
#define FUSEWISE_IMPLEMENT(name, Name) fusewise::binding::implement<fusewise::k##Name>(m)
  FUSEWISE_EACH_OPERATOR(FUSEWISE_IMPLEMENT)
  m.impl("_batch_norm_statistics",
         &fusewise::binding::OperatorBinding<fusewise::kBatchNormStatistics>::forward);
}

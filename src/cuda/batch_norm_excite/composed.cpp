// BatchNorm + activation, then Squeeze-and-Excitation, with the activated tensor in scratch memory.
// Memory: as the two operators: in training x is read up to twice and the activated tensor is
// written, then it is read up to twice and y is written. Each has kernels that keep images in
// shared memory or L2, which `general` has not.
// Bound by memory bandwidth when large, by the launches of both when small.

#include "cuda/batch_norm_excite/composed.h"

#include "common/batch_norm_excite.h"
#include "common/operators.h"
#include "common/scratch.h"
#include "cuda/device.h"

namespace fusewise::cuda {

void composed_run(const Context& context, const BatchNormExciteForward& call) {
  const std::int64_t bytes = call.y.numel() * size_of(call.y.dtype);
  // y is dense or strided by the caller's choice; the scratch memory is dense in x's order.
  TensorView activated(nullptr, call.x.dtype, call.x.device,
                       {call.x.sizes[0], call.x.sizes[1], call.x.sizes[2], call.x.sizes[3]});
  if (call.x.sizes[1] > 1 && call.x.strides[1] == 1) {
    activated.strides[1] = 1;
    activated.strides[3] = call.x.sizes[1];
    activated.strides[2] = call.x.sizes[3] * activated.strides[3];
    activated.strides[0] = call.x.sizes[2] * activated.strides[2];
  }
  const Scratch<char> memory(context, bytes);
  activated.data = memory.data();
  BatchNormActForward norm = norm_of(call);
  norm.y = activated;
  run_chosen(batch_norm_act_forward(), context, norm);
  SqueezeExciteForward excite = excite_of(call);
  excite.x = activated;
  run_chosen(squeeze_excite_forward(), context, excite);
}

std::string composed_yields(const Context& context, const BatchNormExciteForward& call) {
  // In inference the two operators move four images, `general` three. From about two thirds of L2
  // on, neither launches nor what L2 keeps outweigh that.
  const std::int64_t bytes = call.x.numel() * size_of(call.x.dtype);
  const bool own = call.training || !call.running_mean.defined();
  if (own || 3 * bytes < 2 * limits_of(context.device).l2_cache) return {};
  return "'general' moves fewer bytes in inference";
}

}  // namespace fusewise::cuda

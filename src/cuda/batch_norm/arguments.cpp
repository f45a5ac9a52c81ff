#include "cuda/batch_norm/arguments.h"

namespace fusewise::cuda {
namespace {

/// Whether any of the parameters is float32 beside half-precision x.
template <typename... Views>
bool are_wide(const TensorView& x, const Views&... parameters) {
  return ((parameters.defined() && parameters.dtype != x.dtype) || ...);
}

std::int64_t streams_of(const TensorView& x) { return x.rank == 5 ? x.sizes[0] : 1; }
std::int64_t channels_of(const TensorView& x) { return x.sizes[x.rank - 3]; }

}  // namespace

ForwardChannels channels_of(const BatchNormActForward& call) {
  return {.weight = call.weight.data,
          .bias = call.bias.data,
          .running_mean = call.running_mean.data,
          .running_var = call.running_var.data,
          .tracked = static_cast<long long*>(call.num_batches_tracked.data),
          .group = call.group.data,
          .mean = call.mean.data,
          .inverse = call.inverse_deviation.data,
          .momentum = call.momentum,
          .eps = call.eps,
          .wide = are_wide(call.x, call.weight, call.bias, call.running_mean, call.running_var),
          .training = call.training,
          .streams = streams_of(call.x),
          .channels = channels_of(call.x)};
}

BackwardChannels channels_of(const BatchNormActBackward& call) {
  return {.weight = call.weight.data,
          .bias = call.bias.data,
          .mean = call.mean.data,
          .inverse = call.inverse_deviation.data,
          .group = call.group.data,
          .dweight = call.dweight.data,
          .dbias = call.dbias.data,
          .wide = are_wide(call.x, call.weight, call.bias, call.dweight, call.dbias),
          .training = call.training,
          .streams = streams_of(call.x),
          .channels = channels_of(call.x)};
}

BackwardNeeds needs_of(const BatchNormActBackward& call) {
  const bool for_dx = call.dx.defined() && call.training && !call.group.defined();
  return {.sums = for_dx || call.dweight.defined() || call.dbias.defined(),
          .images = call.dx.defined() || call.dresidual.defined()};
}

bool has_adjacent_channels(const TensorView& x) {
  return x.sizes[x.rank - 3] > 1 && x.strides[x.rank - 3] == 1;
}

}  // namespace fusewise::cuda

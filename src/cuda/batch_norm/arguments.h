#pragma once

// From a call of BatchNorm to what its kernels need.

#include "fusewise/batch_norm.h"

namespace fusewise::cuda {

/// The per-channel tensors of forward, [S, C] each. Any may be null.
struct ForwardChannels {
  const void *weight, *bias;
  void *running_mean, *running_var;
  long long* tracked;
  const void* group;
  void *mean, *inverse;
  double momentum, eps;
  bool wide, training;
  long long streams, channels;

  /// Whether the statistics are those of this call's x.
  bool own() const { return group == nullptr && (training || running_mean == nullptr); }
};

struct BackwardChannels {
  const void *weight, *bias;
  const void *mean, *inverse;
  const void* group;
  void *dweight, *dbias;
  bool wide, training;
  long long streams, channels;
};

/// Which of the kernels a backward call needs.
struct BackwardNeeds {
  bool sums;    ///< dv and dv * (x - mean) over this call's values
  bool images;  ///< dx or dresidual
};

ForwardChannels channels_of(const BatchNormActForward& call);
BackwardChannels channels_of(const BatchNormActBackward& call);
BackwardNeeds needs_of(const BatchNormActBackward& call);

/// Whether the bits of `passes` are in the order S, N, H, W, C, not S, N, C, H, W.
bool has_adjacent_channels(const TensorView& x);

}  // namespace fusewise::cuda

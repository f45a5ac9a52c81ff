#pragma once

// Which kernel takes a call. Plain C++ on sizes, types, addresses and the GPU's limits: tested
// without a GPU.

#include <string>

#include "cuda/autoencoder/kernels.h"
#include "cuda/device.h"

namespace fusewise::cuda::autoencoder {

template <typename Arguments>
struct Kernel {
  const char* name;
  /// Why it cannot take a call, as a sentence; empty where it can.
  std::string (*declines)(const DeviceLimits&, const Arguments&);
  /// Why another one is expected to be faster, as a sentence; empty where none is. Null: none ever
  /// is.
  std::string (*yields)(const DeviceLimits&, const Arguments&);
  void (*run)(const Context&, const Arguments&);
};

/// In the order in which they are tried. The last one takes every call.
extern const Kernel<AutoencoderForwardArguments> kForwardKernels[4];
extern const Kernel<AutoencoderBackwardArguments> kBackwardKernels[4];

/// The first kernel that neither declines nor yields.
const Kernel<AutoencoderForwardArguments>& choose(const DeviceLimits& limits,
                                                  const AutoencoderForwardArguments& call);
const Kernel<AutoencoderBackwardArguments>& choose(const DeviceLimits& limits,
                                                   const AutoencoderBackwardArguments& call);

/// Warps of a block of forward.cu.
int block16_warps(const DeviceLimits& limits, const AutoencoderSizes& sizes);
/// How backward.cu is laid out for a call.
BackwardPlan backward_plan(const DeviceLimits& limits, const AutoencoderBackwardArguments& call);

}  // namespace fusewise::cuda::autoencoder

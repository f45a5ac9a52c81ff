#pragma once

// Chooses the kernel for a call. Plain C++ on sizes, types, addresses and the GPU's limits: tested
// without a GPU.

#include <string>

#include "cuda/autoencoder/kernels.h"
#include "cuda/device.h"

namespace fusewise::cuda::autoencoder {

template <typename Arguments>
struct Kernel {
  const char* name;
  /// Why the kernel cannot take a call, as a sentence. Empty if it can.
  std::string (*declines)(const DeviceLimits&, const Arguments&);
  /// Why another kernel is expected to be faster, as a sentence. Empty if none is. A null pointer
  /// means that none ever is.
  std::string (*yields)(const DeviceLimits&, const Arguments&);
  void (*run)(const Context&, const Arguments&);
};

/// In the order in which they are tried. The last one is the generic fallback.
extern const Kernel<AutoencoderForwardArguments> kForwardKernels[5];
extern const Kernel<AutoencoderBackwardArguments> kBackwardKernels[4];

/// The first kernel that neither declines nor yields.
const Kernel<AutoencoderForwardArguments>& choose(const DeviceLimits& limits,
                                                  const AutoencoderForwardArguments& call);
const Kernel<AutoencoderBackwardArguments>& choose(const DeviceLimits& limits,
                                                   const AutoencoderBackwardArguments& call);

/// Warps per block of forward.cu.
int block16_warps(const DeviceLimits& limits, const AutoencoderSizes& sizes);
/// Launch plan of backward.cu for a call.
BackwardPlan backward_plan(const DeviceLimits& limits, const AutoencoderBackwardArguments& call);

}  // namespace fusewise::cuda::autoencoder

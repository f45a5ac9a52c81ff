#pragma once

// Properties of the GPU that launchers need, queried once per device and cached.

#include "fusewise/tensor.h"

namespace fusewise::cuda {

inline constexpr int kMaxDevices = 64;

struct DeviceLimits {
  int capability;           ///< 90 for sm_90; that of the built code if it is older
  int gpu_capability;       ///< of the GPU itself, which may be newer
  int multiprocessors;      ///< 132 on an H200
  int shared_memory;        ///< bytes per SM
  int block_shared_memory;  ///< most bytes per block
  std::int64_t l2_cache;    ///< bytes
};

const DeviceLimits& limits_of(Device device);

}  // namespace fusewise::cuda

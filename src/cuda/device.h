#pragma once

// What a launcher needs to know of the GPU, asked once per device and kept.

#include "fusewise/tensor.h"

namespace fusewise::cuda {

inline constexpr int kMaxDevices = 64;

struct DeviceLimits {
  int capability;           ///< 90 for sm_90; of the built code where that is older
  int gpu_capability;       ///< of the GPU itself, which may be newer
  int multiprocessors;      ///< 132 on an H200
  int shared_memory;        ///< bytes of one multiprocessor
  int block_shared_memory;  ///< bytes that one block may have at the most
  std::int64_t l2_cache;    ///< bytes
};

const DeviceLimits& limits_of(Device device);

}  // namespace fusewise::cuda

#pragma once

// Pseudorandom values for the experiments.

#include <cstdint>

/// mean plus values between -scale and scale. For any grid of blocks of 256 threads.
template <typename T>
__global__ void fill(T* out, std::int64_t count, float scale, unsigned seed, float mean = 0) {
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u ^ seed;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    out[i] = T(mean + scale * (static_cast<float>(h & 0xffff) / 32768.f - 1.f));
  }
}

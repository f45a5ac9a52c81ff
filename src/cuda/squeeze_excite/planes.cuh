#pragma once

// How the threads of a block share the planes of NCHW images: a group of threads for each plane.

namespace fusewise::cuda {

template <int kThreads, int kVector>
struct Planes {
  int count, pixels;

  /// Threads of a group, a power of two: enough that each has a vector or two, and that all threads
  /// of the block are busy when there are few planes.
  __device__ int threads() const {
    int threads = 4;
    while (threads < 32 && threads * kVector * 2 <= pixels) threads *= 2;
    while (threads < kThreads && threads * 2 * count <= kThreads) threads *= 2;
    return threads;
  }

  /// Calls body(plane, thread, threads) for this thread's planes.
  template <typename Body>
  __device__ void each(Body body) const {
    const int group = threads();
    for (int plane = threadIdx.x / group; plane < count; plane += kThreads / group) {
      body(plane, threadIdx.x % group, group);
    }
  }

  /// Sum over `threads` lanes. Other lanes of the warp may have no plane left.
  static __device__ float sum(float value, int threads) {
    const unsigned one = threads == 32 ? ~0u : (1u << threads) - 1;
    const unsigned mine = one << (threadIdx.x % 32 / threads * threads);
    for (int offset = threads / 2; offset > 0; offset /= 2) {
      value += __shfl_xor_sync(mine, value, offset);
    }
    return value;
  }
};

}  // namespace fusewise::cuda

#pragma once

// Shared by the experiments: errors end the program, and calls are timed by graph replay.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

/// For CUDA and cuBLASLt, whose success is 0.
#define CHECK(call) lab::check((call) == 0, #call)

namespace lab {

inline void check(bool right, const char* what) {
  if (right) return;
  std::printf("failed: %s (%s)\n", what, cudaGetErrorString(cudaGetLastError()));
  std::exit(1);
}

using Run = std::function<void(int)>;

/// A graph of `calls` calls. Each gets its index.
inline cudaGraph_t capture(cudaStream_t stream, int calls, const Run& run) {
  cudaGraph_t graph{};
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) run(i);
  CHECK(cudaStreamEndCapture(stream, &graph));
  return graph;
}

/// Microseconds per call: the median of several replays of a graph of `calls` calls.
inline double time_us(cudaStream_t stream, int calls, const Run& run, int replays = 7) {
  const cudaGraph_t graph = capture(stream, calls, run);
  cudaGraphExec_t executable{};
  cudaEvent_t begin{}, end{};
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaGraphLaunch(executable, stream));  // warm-up
  std::vector<float> times(replays);
  for (float& time : times) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&time, begin, end));
  }
  std::sort(times.begin(), times.end());
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
  return times[times.size() / 2] * 1000.0 / calls;
}

}  // namespace lab

// For the benchmark and the lesson `naive-gemm`: y = relu(x W^T + b) as a common first attempt has
// it, one thread for each output with a loop of its own. Every element of x and W is read again for
// each output that it enters, W by neighbouring threads a row apart; these loads bound it.

#include <cuda_runtime.h>

namespace {

__global__ void one_thread_per_output(const float* x, const float* w, const float* b, float* y,
                                      int m, int n, int k) {
  const int i = blockIdx.y * blockDim.y + threadIdx.y;
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= m || j >= n) return;
  float sum = b[j];
  for (int p = 0; p < k; ++p) sum += x[i * k + p] * w[j * k + p];
  y[i * n + j] = sum > 0 ? sum : 0;
}

}  // namespace

/// x is [m, k], w [n, k], b [n], y [m, n], all dense. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_naive_linear_relu_cuda(
    const float* x, const float* w, const float* b, float* y, int m, int n, int k, void* stream) {
  const dim3 threads(16, 16);
  const dim3 blocks((n + threads.x - 1) / threads.x, (m + threads.y - 1) / threads.y);
  one_thread_per_output<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(x, w, b, y, m, n,
                                                                                   k);
  return cudaGetLastError();
}

// For the lesson `naive-gemm`: C = A B as a common first attempt has it, one thread for each
// output. Every element of A and B is read again for each output that it enters; the loads, two for
// each multiplication and addition, bound it.

#include <cuda_runtime.h>

namespace {

__global__ void one_thread_per_output(const float* a, const float* b, float* c, int m, int n,
                                      int k) {
  const int i = blockIdx.y * blockDim.y + threadIdx.y;
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= m || j >= n) return;
  float sum = 0;
  for (int p = 0; p < k; ++p) sum += a[i * k + p] * b[p * n + j];
  c[i * n + j] = sum;
}

}  // namespace

/// A is [m, k], B [k, n], C [m, n], all dense and row-major. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_naive_gemm_cuda(
    const float* a, const float* b, float* c, int m, int n, int k, void* stream) {
  const dim3 threads(16, 16);
  const dim3 blocks((n + threads.x - 1) / threads.x, (m + threads.y - 1) / threads.y);
  one_thread_per_output<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(a, b, c, m, n,
                                                                                   k);
  return cudaGetLastError();
}

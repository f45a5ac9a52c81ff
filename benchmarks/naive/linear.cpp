// For the lesson `naive-gemm`: y = relu(x W^T + b) as a common first attempt has it, one loop for
// each output. Every element of x and W is read again for each output that it enters, and each
// addition waits for the one before; that waiting bounds it.

/// x is [m, k], w [n, k], b [n], y [m, n], all dense.
extern "C" __attribute__((visibility("default"))) void fusewise_naive_linear_relu_cpu(
    const float* x, const float* w, const float* b, float* y, int m, int n, int k) {
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = b[j];
      for (int p = 0; p < k; ++p) sum += x[i * k + p] * w[j * k + p];
      y[i * n + j] = sum > 0 ? sum : 0;
    }
  }
}

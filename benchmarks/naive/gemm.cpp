// For the lesson `naive-gemm`: C = A B as a common first attempt has it, one loop for each output.
// Every element of A and B is read again for each output that it enters, B with a stride; the
// waiting for these loads bounds it.

/// A is [m, k], B [k, n], C [m, n], all dense and row-major.
extern "C" __attribute__((visibility("default"))) void fusewise_naive_gemm_cpu(const float* a,
                                                                               const float* b,
                                                                               float* c, int m,
                                                                               int n, int k) {
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int p = 0; p < k; ++p) sum += a[i * k + p] * b[p * n + j];
      c[i * n + j] = sum;
    }
  }
}

// Which of cuBLASLt's epilogues are fused, and which are faster: the tables of
// docs/journal/linear.md.
//
//   cmake --preset core -DFUSEWISE_LAB=ON && cmake --build --preset core
//   build/core/lab/linear_epilogues
//
// For each size, type, GEMM and epilogue it prints the time of the heuristic's first algorithm, the
// time of the fastest candidate, and how many nodes a call adds to a graph (a fused epilogue adds
// none). Then it shows what relu and its mask do with 0 and NaN.

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "timing.h"

namespace {

struct Type {
  const char* name;
  cudaDataType_t data;
  cublasComputeType_t compute;
  int bytes;
};
constexpr Type kTypes[] = {{"fp32", CUDA_R_32F, CUBLAS_COMPUTE_32F, 4},
                           {"tf32", CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32, 4},
                           {"fp16", CUDA_R_16F, CUBLAS_COMPUTE_32F, 2},
                           {"bf16", CUDA_R_16BF, CUBLAS_COMPUTE_32F, 2}};

struct Epilogue {
  const char* name;
  cublasLtEpilogue_t kind;
  bool vector, mask, values;  // uses a bias, a mask of bits, the values before gelu
};
constexpr Epilogue kForward[] = {
    {"bare", CUBLASLT_EPILOGUE_DEFAULT, false, false, false},
    {"bias", CUBLASLT_EPILOGUE_BIAS, true, false, false},
    {"relu + bias", CUBLASLT_EPILOGUE_RELU_BIAS, true, false, false},
    {"relu + bias + mask", CUBLASLT_EPILOGUE_RELU_AUX_BIAS, true, true, false},
    {"gelu + bias", CUBLASLT_EPILOGUE_GELU_BIAS, true, false, false},
    {"gelu + bias + z", CUBLASLT_EPILOGUE_GELU_AUX_BIAS, true, false, true}};
constexpr Epilogue kInputGradient[] = {
    {"bare", CUBLASLT_EPILOGUE_DEFAULT, false, false, false},
    {"drelu", CUBLASLT_EPILOGUE_DRELU, false, true, false},
    {"drelu + bias gradient", CUBLASLT_EPILOGUE_DRELU_BGRAD, true, true, false},
    {"dgelu + bias gradient", CUBLASLT_EPILOGUE_DGELU_BGRAD, true, false, true}};
constexpr Epilogue kWeightGradient[] = {
    {"bare", CUBLASLT_EPILOGUE_DEFAULT, false, false, false},
    {"bias gradient", CUBLASLT_EPILOGUE_BGRADB, true, false, false}};

constexpr std::size_t kWorkspace = 32 << 20;
constexpr int kCandidates = 8, kCalls = 20;
constexpr double kSampleUs = 3000;

struct Machine {
  cublasLtHandle_t library{};
  cudaStream_t stream{};
  void* workspace = nullptr;

  Machine() {
    CHECK(cublasLtCreate(&library));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&workspace, kWorkspace));
  }
};

/// d [m, n] = a [m, k] b [k, n], column-major as the library requires.
struct Product {
  const Machine& machine;
  cublasLtMatmulDesc_t operation{};
  cublasLtMatrixLayout_t layout_a{}, layout_b{}, layout_d{};
  const void *a, *b;
  void* d;

  Product(const Machine& machine, const Type& type, const Epilogue& epilogue, std::int64_t m,
          std::int64_t n, std::int64_t k, bool transposed_a, bool transposed_b, const void* a,
          const void* b, void* d, void* vector, void* extra)
      : machine(machine), a(a), b(b), d(d) {
    CHECK(cublasLtMatmulDescCreate(&operation, type.compute, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, transposed_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, transposed_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue.kind);
    if (epilogue.vector) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector);
    if (epilogue.mask || epilogue.values) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, extra);
      const std::int64_t step = epilogue.mask ? 128 : 8;
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (m + step - 1) / step * step);
    }
    const auto layout = [&](cublasLtMatrixLayout_t* made, std::int64_t rows, std::int64_t columns,
                            bool transposed) {
      if (transposed) std::swap(rows, columns);
      CHECK(cublasLtMatrixLayoutCreate(made, type.data, rows, columns, rows));
    };
    layout(&layout_a, m, k, transposed_a);
    layout(&layout_b, k, n, transposed_b);
    layout(&layout_d, m, n, false);
  }
  ~Product() {
    cublasLtMatmulDescDestroy(operation);
    for (cublasLtMatrixLayout_t layout : {layout_a, layout_b, layout_d}) {
      cublasLtMatrixLayoutDestroy(layout);
    }
  }
  Product(const Product&) = delete;

  std::vector<cublasLtMatmulAlgo_t> algorithms() const {
    cublasLtMatmulPreference_t preference{};
    CHECK(cublasLtMatmulPreferenceCreate(&preference));
    CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &kWorkspace, sizeof(kWorkspace)));
    cublasLtMatmulHeuristicResult_t found[kCandidates];
    int count = 0;
    static_cast<void>(cublasLtMatmulAlgoGetHeuristic(machine.library, operation, layout_a, layout_b,
                                                     layout_d, layout_d, preference, kCandidates,
                                                     found, &count));
    cublasLtMatmulPreferenceDestroy(preference);
    std::vector<cublasLtMatmulAlgo_t> result;
    for (int i = 0; i < count; ++i) result.push_back(found[i].algo);
    return result;
  }

  void run(const cublasLtMatmulAlgo_t& algorithm) const {
    const float one = 1, zero = 0;
    CHECK(cublasLtMatmul(machine.library, operation, &one, a, layout_a, b, layout_b, &zero, d,
                         layout_d, d, layout_d, &algorithm, machine.workspace, kWorkspace,
                         machine.stream));
  }

  std::size_t nodes(const cublasLtMatmulAlgo_t& algorithm) const {
    const cudaGraph_t made = lab::capture(machine.stream, 1, [&](int) { run(algorithm); });
    std::size_t count = 0;
    CHECK(cudaGraphGetNodes(made, nullptr, &count));
    CHECK(cudaGraphDestroy(made));
    return count;
  }

  double microseconds(const cublasLtMatmulAlgo_t& algorithm) const {
    run(algorithm);  // loads its kernels, which is not allowed in a capture
    const auto call = [&](int) { run(algorithm); };
    const double once = lab::time_us(machine.stream, 1, call);
    const int calls = std::clamp(static_cast<int>(kSampleUs / once), 2, kCalls);
    return lab::time_us(machine.stream, calls, call);
  }

 private:
  template <typename Value>
  void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
    CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)));
  }
};

void report(const Product& product, const char* size, const char* type, const char* which,
            const char* epilogue) {
  const std::vector<cublasLtMatmulAlgo_t> algorithms = product.algorithms();
  if (algorithms.empty()) {
    std::printf("| %s | %s | %s | %s | none | | |\n", size, type, which, epilogue);
    return;
  }
  double first = 0, best = 0;
  std::size_t winner = 0;
  for (std::size_t i = 0; i < algorithms.size(); ++i) {
    const double us = product.microseconds(algorithms[i]);
    if (i == 0) first = best = us;
    if (us < best) best = us, winner = i;
  }
  std::printf("| %s | %s | %s | %s | %.1f | %.1f | %zu |\n", size, type, which, epilogue, first,
              best, product.nodes(algorithms[winner]));
}

void measure(const Machine& machine) {
  constexpr std::int64_t kSizes[][3] = {
      {256, 256, 512}, {1024, 784, 2048}, {8192, 4096, 4096}, {65536, 1024, 1024}};
  std::puts("| rows x in x out | type | product | epilogue | first, us | best, us | nodes |");
  for (const auto& [rows, in, out] : kSizes) {
    char size[40];
    std::snprintf(size, sizeof(size), "%ld x %ld x %ld", rows, in, out);
    const std::size_t most = std::max({rows * in, rows * out, out * in}) * 4;
    void* memory[5];
    for (void*& each : memory) {
      CHECK(cudaMalloc(&each, most));
      CHECK(cudaMemset(each, 0x3c, most));  // a small number in every type
    }
    auto& [x, w, dz, result, extra] = memory;
    for (const Type& type : kTypes) {
      for (const Epilogue& epilogue : kForward) {
        report({machine, type, epilogue, out, rows, in, true, false, w, x, result, extra, dz}, size,
               type.name, "y", epilogue.name);
      }
      for (const Epilogue& epilogue : kInputGradient) {
        report({machine, type, epilogue, in, rows, out, false, false, w, dz, result, x, extra},
               size, type.name, "dx", epilogue.name);
      }
      for (const Epilogue& epilogue : kWeightGradient) {
        report({machine, type, epilogue, in, out, rows, false, true, x, dz, result, w, nullptr},
               size, type.name, "dW", epilogue.name);
      }
    }
    for (void* each : memory) CHECK(cudaFree(each));
  }
}

/// Three rows of z = 0, of NaN and of 1, with each algorithm: prints y and the mask's bit.
void show_corner_cases(const Machine& machine) {
  constexpr int kRows = 3, kIn = 64, kOut = 128;
  const Type& type = kTypes[3];
  std::vector<__nv_bfloat16> x(kRows * kIn), w(kOut * kIn), y(kRows * kOut);
  for (int i = 0; i < kIn; ++i) x[kIn + i] = NAN;
  x[2 * kIn] = 1.0f;
  for (int i = 0; i < kOut; ++i) w[i * kIn] = 1.0f;
  __nv_bfloat16 *device_x, *device_w, *device_y;
  unsigned char *device_mask, mask[kRows * kOut / 8];
  CHECK(cudaMalloc(&device_x, x.size() * 2));
  CHECK(cudaMalloc(&device_w, w.size() * 2));
  CHECK(cudaMalloc(&device_y, y.size() * 2));
  CHECK(cudaMalloc(&device_mask, sizeof(mask)));
  CHECK(cudaMemcpy(device_x, x.data(), x.size() * 2, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(device_w, w.data(), w.size() * 2, cudaMemcpyHostToDevice));
  const Epilogue epilogue{"relu + mask", CUBLASLT_EPILOGUE_RELU_AUX, false, true, false};
  const Product product(machine, type, epilogue, kOut, kRows, kIn, true, false, device_w, device_x,
                        device_y, nullptr, device_mask);
  for (const cublasLtMatmulAlgo_t& algorithm : product.algorithms()) {
    product.run(algorithm);
    CHECK(cudaStreamSynchronize(machine.stream));
    CHECK(cudaMemcpy(y.data(), device_y, y.size() * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(mask, device_mask, sizeof(mask), cudaMemcpyDeviceToHost));
    for (int row = 0; row < kRows; ++row) {
      constexpr const char* kNames[] = {"0", "NaN", "1"};
      std::printf("z = %s: relu %g, mask bit %d; ", kNames[row], static_cast<float>(y[row * kOut]),
                  mask[row * kOut / 8] & 1);
    }
    std::puts("");
  }
}

}  // namespace

int main() {
  const Machine machine;
  std::printf("cuBLASLt %zu\n", cublasLtGetVersion());
  show_corner_cases(machine);
  measure(machine);
}

// Which of cuBLASLt's algorithms lose terms of a sum, and when: docs/journal/linear.md.
//
//   cmake --preset core -DFUSEWISE_LAB=ON && cmake --build --preset core
//   build/core/lab/lost_terms
//
// d = a^T b, where a is all ones and b[k][j] = 1 if k % n == j. Every row counts in exactly one
// column, so d shows how many rows were summed. Each suggested split-K algorithm runs with many
// numbers of parts. The rule: rows are lost if a kernel's number of whole steps is divisible by the
// number of parts and there is a remainder. The program counts how often this rule is wrong.

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "timing.h"

namespace {

constexpr std::size_t kWorkspace = 32 << 20;
constexpr int kCandidates = 8;

template <typename T>
__global__ void fill(T* a, T* b, long rows, int m, int n) {
  const long step = static_cast<long>(gridDim.x) * blockDim.x;
  const long first = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (long i = first; i < rows * m; i += step) a[i] = T(1.f);
  for (long i = first; i < rows * n; i += step) b[i] = T(i / n % n == i % n ? 1.f : 0.f);
}

/// Number of terms that a kernel sums in one step. 0 for older kernels, which do not report it.
int step_of(int stages) {
  if (stages == CUBLASLT_MATMUL_STAGES_768xAUTO) return 768;
  const bool tells =
      stages >= CUBLASLT_MATMUL_STAGES_8xAUTO && stages <= CUBLASLT_MATMUL_STAGES_256xAUTO;
  return tells ? 8 << (stages - CUBLASLT_MATMUL_STAGES_8xAUTO) : 0;
}

int setting(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  int value = 0;
  std::size_t written;
  CHECK(
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), &written));
  return value;
}

struct Count {
  long run = 0, foreseen = 0, lost = 0, unforeseen = 0;
  std::string example;
};

class Machine {
 public:
  Machine() {
    CHECK(cublasLtCreate(&library_));
    CHECK(cudaMalloc(&a_, kBytes));
    CHECK(cudaMalloc(&b_, kBytes));
    CHECK(cudaMalloc(&d_, kBytes));
    CHECK(cudaMalloc(&workspace_, kWorkspace));
  }

  template <typename T>
  void try_all(const char* name, cudaDataType_t type, cublasComputeType_t compute, long rows, int m,
               int n) {
    if (rows * std::max(m, n) * static_cast<long>(sizeof(T)) > kBytes) return;
    fill<<<512, 256>>>(static_cast<T*>(a_), static_cast<T*>(b_), rows, m, n);
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t left, right, result;
    cublasLtMatmulPreferenceOpaque_t preference;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    CHECK(cublasLtMatmulDescInit(&operation, compute, CUDA_R_32F));
    CHECK(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSB, &transposed,
                                         sizeof(transposed)));
    CHECK(cublasLtMatrixLayoutInit(&left, type, n, rows, n));
    CHECK(cublasLtMatrixLayoutInit(&right, type, m, rows, m));
    CHECK(cublasLtMatrixLayoutInit(&result, CUDA_R_32F, n, m, n));
    CHECK(cublasLtMatmulPreferenceInit(&preference));
    CHECK(cublasLtMatmulPreferenceSetAttribute(
        &preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspace, sizeof(kWorkspace)));
    cublasLtMatmulHeuristicResult_t found[kCandidates];
    int count = 0;
    cublasLtMatmulAlgoGetHeuristic(library_, &operation, &left, &right, &result, &result,
                                   &preference, kCandidates, found, &count);
    std::vector<float> columns(n);
    for (int i = 0; i < count; ++i) {
      if (setting(found[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1) continue;
      const int step = step_of(setting(found[i].algo, CUBLASLT_ALGO_CONFIG_STAGES_ID));
      const int id = setting(found[i].algo, CUBLASLT_ALGO_CONFIG_ID);
      for (const int parts : {2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 17, 20, 24, 32, 48}) {
        cublasLtMatmulAlgo_t algorithm = found[i].algo;
        cublasLtMatmulHeuristicResult_t fit;
        if (cublasLtMatmulAlgoConfigSetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
                                                 &parts, sizeof(parts)) != 0 ||
            cublasLtMatmulAlgoCheck(library_, &operation, &left, &right, &result, &result,
                                    &algorithm, &fit) != 0 ||
            fit.workspaceSize > kWorkspace) {
          continue;
        }
        const float one = 1, zero = 0;
        CHECK(cudaMemset(d_, 0xff, sizeof(float) * m * n));
        CHECK(cublasLtMatmul(library_, &operation, &one, b_, &left, a_, &right, &zero, d_, &result,
                             d_, &result, &algorithm, workspace_, kWorkspace, nullptr));
        CHECK(cudaMemcpy(columns.data(), d_, sizeof(float) * n, cudaMemcpyDeviceToHost));
        double added = 0;
        for (const float column : columns) added += column;
        const long lost = rows - static_cast<long>(added);
        const bool even = step > 0 && rows % step != 0 && rows / step % parts == 0;
        Count& here = counts_[std::string(name) + ", algorithm " + std::to_string(id) +
                              (step > 0 ? ", step " + std::to_string(step) : ", no step")];
        ++here.run;
        here.foreseen += even;
        here.lost += lost != 0;
        if (lost != 0 && !even) {
          ++here.unforeseen;
          here.example = std::to_string(rows) + " rows in " + std::to_string(parts) +
                         " parts: " + std::to_string(lost) + " lost";
        }
      }
    }
  }

  void print() const {
    for (const auto& [name, count] : counts_) {
      std::printf("%-32s %6ld run, %5ld foreseen to lose rows, %5ld did, %5ld unforeseen %s\n",
                  name.c_str(), count.run, count.foreseen, count.lost, count.unforeseen,
                  count.example.c_str());
    }
  }

 private:
  static constexpr long kBytes = 256L << 20;
  cublasLtHandle_t library_{};
  void *a_, *b_, *d_, *workspace_;
  std::map<std::string, Count> counts_;
};

}  // namespace

int main() {
  Machine machine;
  std::printf("cuBLASLt %zu\n", cublasLtGetVersion());
  std::vector<long> all_rows{1000, 1001, 4097, 4099, 8193, 10001, 65537, 65600, 100003};
  for (int rest = 0; rest < 130; rest += rest < 20 ? 1 : 7) all_rows.push_back(20480 + rest);
  for (const auto& [m, n] : {std::pair{64, 64}, {32, 320}, {128, 128}, {256, 256}, {512, 512}}) {
    for (const long rows : all_rows) {
      machine.try_all<__half>("fp16", CUDA_R_16F, CUBLAS_COMPUTE_32F, rows, m, n);
      machine.try_all<__nv_bfloat16>("bf16", CUDA_R_16BF, CUBLAS_COMPUTE_32F, rows, m, n);
      machine.try_all<float>("tf32", CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32, rows, m, n);
      machine.try_all<float>("fp32", CUDA_R_32F, CUBLAS_COMPUTE_32F, rows, m, n);
    }
  }
  machine.print();
}

#include "cuda/gemm/cublaslt.h"

#include <array>
#include <mutex>
#include <string>
#include <utility>

#include "common/check.h"
#include "cuda/device.h"
#include "cuda/gemm/alignment.h"
#include "cuda/gemm/tuning.h"

namespace fusewise::cuda {
namespace {

constexpr int kMostCandidates = 8;
constexpr int kMostDivisors = 32;  // more neighbouring numbers than this never all divide a sum
constexpr std::size_t kMostWorkspace = 32 << 20;  // NVIDIA's advice for Hopper

void check_blas(cublasStatus_t status, const char* doing) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  static_cast<void>(cudaGetLastError());  // so that later calls do not report it
  const std::string message =
      std::string("cuBLASLt: ") + doing + " failed: " + cublasLtGetStatusString(status);
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw OutOfMemory(message);
  throw Error(message);
}

/// One per GPU, for the life of the process. Safe to use from several threads.
cublasLtHandle_t handle_of(Device device) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<cublasLtHandle_t, kMaxDevices> handles{};
  check(device.index >= 0 && device.index < kMaxDevices, "device: expected a GPU from 0 to ",
        kMaxDevices - 1, ", got ", device.index);
  std::call_once(once[device.index], [&] {
    const RelaxedCapture relaxed;  // it allocates, and another thread may be capturing
    check_blas(cublasLtCreate(&handles[device.index]), "starting");
  });
  return handles[device.index];
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return CUDA_R_64F;
    case DType::f16:
      return CUDA_R_16F;
    case DType::bf16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

cublasComputeType_t compute_of(const Product& p) {
  if (p.dtype == DType::f64) return CUBLAS_COMPUTE_64F;
  if (p.dtype == DType::f32 && p.math.tf32) return CUBLAS_COMPUTE_32F_FAST_TF32;
  return CUBLAS_COMPUTE_32F;
}

cublasLtEpilogue_t epilogue_of(const Product& p) {
  const bool bias = p.bias != nullptr;
  switch (p.epilogue) {
    case Epilogue::relu:
      return bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Epilogue::gelu_tanh:
      return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    default:
      return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

template <typename Value>
void set(cublasLtMatmulDescOpaque_t& operation, cublasLtMatmulDescAttributes_t attribute,
         Value value) {
  check_blas(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)),
             "describing a GEMM");
}

void describe(cublasLtMatrixLayoutOpaque_t* layout, cudaDataType_t type, std::int64_t rows,
              std::int64_t columns, const Matrix& matrix, std::int32_t count, std::int64_t step) {
  if (matrix.transposed) std::swap(rows, columns);
  check_blas(cublasLtMatrixLayoutInit(layout, type, rows, columns, matrix.stride),
             "describing a matrix");
  if (count == 1) return;
  check_blas(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                              sizeof(count)),
             "describing a matrix");
  check_blas(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                              &step, sizeof(step)),
             "describing a matrix");
}

std::uint32_t setting(const cublasLtMatmulAlgo_t& algorithm,
                      cublasLtMatmulAlgoConfigAttributes_t attribute) {
  std::uint32_t value = 0;
  std::size_t written = 0;
  check_blas(
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), &written),
      "reading an algorithm");
  return value;
}

/// Number of terms that a kernel sums in one step (its tile depth in k). 0 for older kernels, which
/// do not report it.
std::int64_t step_of(const cublasLtMatmulAlgo_t& algorithm) {
  switch (setting(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID)) {
    case CUBLASLT_MATMUL_STAGES_8xAUTO:
      return 8;
    case CUBLASLT_MATMUL_STAGES_16xAUTO:
      return 16;
    case CUBLASLT_MATMUL_STAGES_32xAUTO:
      return 32;
    case CUBLASLT_MATMUL_STAGES_64xAUTO:
      return 64;
    case CUBLASLT_MATMUL_STAGES_128xAUTO:
      return 128;
    case CUBLASLT_MATMUL_STAGES_256xAUTO:
      return 256;
    case CUBLASLT_MATMUL_STAGES_768xAUTO:
      return 768;
    default:
      return 0;
  }
}

/// What is added; d where nothing is, as cuBLASLt wants some address.
const void* c_of(const Product& p) { return p.c != nullptr ? p.c : p.d.data; }

/// Whether cuBLASLt accepts the algorithm. Sets its workspace.
bool fits(const Context& context, Description& description, Algorithm& algorithm) {
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(
      handle_of(context.device), &description.operation, &description.a, &description.b,
      &description.d, &description.d, &algorithm.algorithm, &result);
  algorithm.workspace = result.workspaceSize;
  return status == CUBLAS_STATUS_SUCCESS && algorithm.workspace <= kMostWorkspace;
}

/// Makes an algorithm sum every term. Returns false if that is impossible.
///
/// Split-K kernels of cuBLAS 12 and 13 distribute the whole steps of a sum over the parts. If the
/// number of steps is divisible by the number of parts, no part takes the remainder. With 20495
/// terms, 320 steps of 64 in 16 parts, the last 15 terms are lost. With another number of parts,
/// the last part also takes the remainder.
bool add_every_term(const Context& context, Description& description, Algorithm& algorithm) {
  const auto parts =
      static_cast<std::int32_t>(setting(algorithm.algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM));
  const std::int64_t step = step_of(algorithm.algorithm);
  const auto loses = [&](std::int64_t count) {
    return count > 1 && description.inner % step != 0 && description.inner / step % count == 0;
  };
  if (step == 0 || !loses(parts)) return true;
  // 60 steps, say, divide evenly by 2 to 6.
  for (std::int32_t i = 2; i <= 2 * (parts + kMostDivisors); ++i) {
    const std::int32_t other = parts + (i % 2 == 0 ? i / 2 : -(i / 2));  // one more, one fewer, ...
    if (other < 2 || loses(other)) continue;
    Algorithm changed = algorithm;
    check_blas(cublasLtMatmulAlgoConfigSetAttribute(
                   &changed.algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &other, sizeof(other)),
               "changing an algorithm");
    if (!fits(context, description, changed)) continue;
    algorithm = changed;
    return true;
  }
  return false;
}

}  // namespace

Description::Description(const Product& p) : inner(p.inner) {
  const cudaDataType_t type = type_of(p.dtype);
  const cudaDataType_t scale = p.dtype == DType::f64 ? CUDA_R_64F : CUDA_R_32F;
  check_blas(cublasLtMatmulDescInit(&operation, compute_of(p), scale), "describing a GEMM");
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
  if (p.bias != nullptr) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  describe(&a, type, p.columns, p.inner, p.b, p.count, p.b_step);
  describe(&b, type, p.inner, p.rows, p.a, p.count, p.a_step);
  describe(&d, p.wide_result ? scale : type, p.columns, p.rows, p.d, p.count, p.d_step);
}

std::vector<Algorithm> suggested(const Context& context, const Product& p) {
  Description description(p);
  cublasLtMatmulPreferenceOpaque_t preference;
  check_blas(cublasLtMatmulPreferenceInit(&preference), "asking for algorithms");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check_blas(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
               "asking for algorithms");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMostWorkspace);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.b.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.a.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(c_of(p)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.d.data));
  if (!p.math.reduced_sums) {
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  }
  cublasLtMatmulHeuristicResult_t found[kMostCandidates];
  int count = 0;
  // On failure the list stays empty.
  static_cast<void>(cublasLtMatmulAlgoGetHeuristic(
      handle_of(context.device), &description.operation, &description.a, &description.b,
      &description.d, &description.d, &preference, kMostCandidates, found, &count));
  std::vector<Algorithm> list;
  for (int i = 0; i < count; ++i) {
    if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
    Algorithm algorithm{found[i].algo, found[i].workspaceSize};
    if (add_every_term(context, description, algorithm)) list.push_back(algorithm);
  }
  return list;
}

bool takes(const Context& context, Description& description, Algorithm& algorithm) {
  return add_every_term(context, description, algorithm) && fits(context, description, algorithm);
}

void run_algorithm(const Context& context, const Product& p, Description& description,
                   const Algorithm& algorithm, void* workspace, double factor) {
  const double kept = p.add ? 1 : 0;
  const float factor32 = static_cast<float>(factor), kept32 = static_cast<float>(kept);
  const bool f64 = p.dtype == DType::f64;
  const void* alpha = f64 ? static_cast<const void*>(&factor) : &factor32;
  const void* beta = f64 ? static_cast<const void*>(&kept) : &kept32;
  check_blas(cublasLtMatmul(handle_of(context.device), &description.operation, alpha, p.b.data,
                            &description.a, p.a.data, &description.b, beta, c_of(p), &description.d,
                            p.d.data, &description.d, &algorithm.algorithm, workspace,
                            algorithm.workspace, static_cast<cudaStream_t>(context.stream)),
             "a GEMM");
}

}  // namespace fusewise::cuda

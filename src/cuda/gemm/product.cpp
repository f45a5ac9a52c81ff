// cuBLASLt's products. It thinks in columns: a row-major matrix is its transposed one to it, so
// that d = a b is computed as d^T = b^T a^T, and nothing is ever copied.

#include "cuda/gemm/product.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "common/check.h"
#include "common/scratch.h"
#include "cuda/cuda_error.h"
#include "cuda/device.h"
#include "cuda/gemm/tuning.h"

namespace fusewise::cuda {
namespace {

constexpr int kMostCandidates = 8;
constexpr std::size_t kMostWorkspace = 32 << 20;  // what the vendor advises for Hopper
constexpr std::uintptr_t kBiasAlignment = 16;     // its kernels take it for granted

void check_blas(cublasStatus_t status, const char* doing) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  static_cast<void>(cudaGetLastError());  // told here, it must not come up again in another's call
  const std::string message =
      std::string("cuBLASLt: ") + doing + " failed: " + cublasLtGetStatusString(status);
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw OutOfMemory(message + " (out of memory)");
  throw Error(message);
}

/// One for each GPU, for the life of the process; safe to use from several threads.
cublasLtHandle_t handle_of(Device device) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<cublasLtHandle_t, kMaxDevices> handles{};
  check(device.index >= 0 && device.index < kMaxDevices, "device: no GPU number ", device.index);
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

/// The largest power of two up to 256 that an address is a multiple of: what kernels may rely on.
std::uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address) | 256;
  return std::uint32_t{1} << std::countr_zero(bits);
}

/// A product in the vendor's terms, on the stack: nothing is allocated. Never const, as the
/// vendor's functions do not say that they leave it alone.
struct Description {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, d;

  explicit Description(const Product& p) {
    const cudaDataType_t type = type_of(p.dtype);
    const cudaDataType_t scale = p.dtype == DType::f64 ? CUDA_R_64F : CUDA_R_32F;
    check_blas(cublasLtMatmulDescInit(&operation, compute_of(p), scale), "describing a product");
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
    if (p.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    describe(&a, type, p.columns, p.inner, p.b);
    describe(&b, type, p.inner, p.rows, p.a);
    describe(&d, p.wide_result ? scale : type, p.columns, p.rows, p.d);
  }

 private:
  template <typename Value>
  void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
    check_blas(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)),
               "describing a product");
  }
  static void describe(cublasLtMatrixLayoutOpaque_t* layout, cudaDataType_t type, std::int64_t rows,
                       std::int64_t columns, const Matrix& matrix) {
    if (matrix.transposed) std::swap(rows, columns);
    check_blas(cublasLtMatrixLayoutInit(layout, type, rows, columns, matrix.stride),
               "describing a matrix");
  }
};

struct Algorithm {
  cublasLtMatmulAlgo_t algorithm;
  std::size_t workspace;
  bool nan = true;  // see lets_nan_through
};

std::string written(const Algorithm& algorithm) {
  std::string text = algorithm.nan ? "1" : "0";
  for (const std::uint64_t word : algorithm.algorithm.data) {
    char digits[18];
    std::snprintf(digits, sizeof(digits), " %016" PRIx64, word);
    text += digits;
  }
  return text;
}

void run(const Context& context, const Product& p, Description& description,
         const Algorithm& algorithm, void* workspace, double factor = 1) {
  const double kept = p.add ? 1 : 0;
  const float factor32 = static_cast<float>(factor), kept32 = static_cast<float>(kept);
  const bool f64 = p.dtype == DType::f64;
  const void* alpha = f64 ? static_cast<const void*>(&factor) : &factor32;
  const void* beta = f64 ? static_cast<const void*>(&kept) : &kept32;
  check_blas(
      cublasLtMatmul(handle_of(context.device), &description.operation, alpha, p.b.data,
                     &description.a, p.a.data, &description.b, beta, p.d.data, &description.d,
                     p.d.data, &description.d, &algorithm.algorithm, workspace, algorithm.workspace,
                     static_cast<cudaStream_t>(context.stream)),
      "a product");
}

/// Adds what the vendor suggests for a product, best guess first.
void suggest(const Context& context, const Product& p, std::vector<Algorithm>& list) {
  Description description(p);
  cublasLtMatmulPreferenceOpaque_t preference;
  check_blas(cublasLtMatmulPreferenceInit(&preference), "asking for algorithms");
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check_blas(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
               "asking for algorithms");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMostWorkspace);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.b.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.a.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.d.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.d.data));
  if (!p.math.reduced_sums) {
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  }
  cublasLtMatmulHeuristicResult_t found[kMostCandidates];
  int count = 0;
  // A failure is an empty list.
  static_cast<void>(cublasLtMatmulAlgoGetHeuristic(
      handle_of(context.device), &description.operation, &description.a, &description.b,
      &description.d, &description.d, &preference, kMostCandidates, found, &count));
  for (int i = 0; i < count; ++i) {
    if (found[i].state == CUBLAS_STATUS_SUCCESS) {
      list.push_back({found[i].algo, found[i].workspaceSize});
    }
  }
}

/// Whether a product can take an algorithm, with how much workspace.
bool takes(const Context& context, Description& description, Algorithm& algorithm) {
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(
      handle_of(context.device), &description.operation, &description.a, &description.b,
      &description.d, &description.d, &algorithm.algorithm, &result);
  algorithm.workspace = result.workspaceSize;
  return status == CUBLAS_STATUS_SUCCESS && algorithm.workspace <= kMostWorkspace;
}

/// The vendor's own list for a product, best guess first: at least one.
std::vector<Algorithm> suggested(const Context& context, const Product& p) {
  std::vector<Algorithm> list;
  suggest(context, p, list);
  check(!list.empty(), "cuBLASLt has no algorithm for a ", name_of(p.dtype), " product of [",
        p.rows, ", ", p.inner, "] and [", p.inner, ", ", p.columns, "]");
  return list;
}

/// With what the vendor suggests for the bare product: its guesses for an epilogue are other ones,
/// and at times worse.
std::vector<Algorithm> candidates(const Context& context, const Product& p,
                                  Description& description) {
  std::vector<Algorithm> list = suggested(context, p), more;
  if (epilogue_of(p) != CUBLASLT_EPILOGUE_DEFAULT) {
    Product bare = p;
    bare.bias = nullptr;
    bare.epilogue = Epilogue::none;
    suggest(context, bare, more);
  }
  for (Algorithm& each : more) {
    const bool known = std::any_of(list.begin(), list.end(), [&](const Algorithm& other) {
      return std::memcmp(&each.algorithm, &other.algorithm, sizeof(each.algorithm)) == 0;
    });
    if (!known && takes(context, description, each)) list.push_back(each);
  }
  return list;
}

bool is_nan(DType dtype, const char* bytes) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, bytes, size_of(dtype));
  switch (dtype) {
    case DType::f64:
      return (bits & ~(1ull << 63)) > 0x7ff0000000000000;
    case DType::f32:
      return (bits & 0x7fffffff) > 0x7f800000;
    case DType::f16:
      return (bits & 0x7fff) > 0x7c00;
    default:
      return (bits & 0x7fff) > 0x7f80;
  }
}

/// By a product of which every element is NaN before the epilogue.
bool lets_nan_through(const Context& context, const Product& p, Description& description,
                      const Algorithm& algorithm) {
  constexpr std::int64_t kLooked = 16;
  const RelaxedCapture relaxed;
  const Scratch<char> workspace(context, static_cast<std::int64_t>(algorithm.workspace));
  run(context, p, description, algorithm, workspace.data(),
      std::numeric_limits<double>::quiet_NaN());
  const std::int64_t size = size_of(p.dtype), count = std::min(kLooked, p.columns);
  const auto* d = static_cast<const char*>(p.d.data);
  char seen[2][kLooked * 8];
  const auto stream = static_cast<cudaStream_t>(context.stream);
  for (const int last : {0, 1}) {
    const std::int64_t at = last * ((p.rows - 1) * p.d.stride + p.columns - count);
    check_cuda(
        cudaMemcpyAsync(seen[last], d + at * size, count * size, cudaMemcpyDeviceToHost, stream),
        "looking at a product");
  }
  check_cuda(cudaStreamSynchronize(stream), "looking at a product");
  for (std::int64_t i = 0; i < count; ++i) {
    if (!is_nan(p.dtype, seen[0] + i * size) || !is_nan(p.dtype, seen[1] + i * size)) return false;
  }
  return true;
}

/// From the file; nothing where it does not describe an algorithm that this product can take.
std::optional<Algorithm> restored(const Context& context, const std::string& text,
                                  Description& description) {
  Algorithm algorithm{};
  algorithm.nan = text.starts_with("1 ");
  char* end = const_cast<char*>(text.c_str()) + std::min<std::size_t>(1, text.size());
  for (std::uint64_t& word : algorithm.algorithm.data) {
    const char* at = end;
    word = std::strtoull(at, &end, 16);
    if (end == at) return std::nullopt;
  }
  if (*end != '\0' || !takes(context, description, algorithm)) return std::nullopt;
  return algorithm;
}

/// The fastest of those that run and, where there is such a one, keep NaN.
Algorithm measured(const Context& context, const Product& p, Description& description) {
  std::vector<Algorithm> algorithms = candidates(context, p, description);
  const auto fails = [&](Algorithm& each) {
    try {
      each.nan = lets_nan_through(context, p, description, each);
      return false;
    } catch (const OutOfMemory&) {
      throw;
    } catch (const Error&) {
      return true;
    }
  };
  algorithms.erase(std::remove_if(algorithms.begin() + 1, algorithms.end(), fails),
                   algorithms.end());
  fails(algorithms.front());
  if (p.epilogue != Epilogue::none &&
      std::any_of(algorithms.begin(), algorithms.end(), [](auto& each) { return each.nan; })) {
    std::erase_if(algorithms, [](const Algorithm& each) { return !each.nan; });
  }
  if (algorithms.size() == 1) return algorithms.front();

  std::size_t most = 0;
  for (const Algorithm& each : algorithms) most = std::max(most, each.workspace);
  const Scratch<char> workspace(context, static_cast<std::int64_t>(most));
  std::vector<std::function<void(const Context&)>> ways;
  for (const Algorithm& each : algorithms) {
    ways.push_back(
        [&](const Context& where) { run(where, p, description, each, workspace.data()); });
  }
  return algorithms[fastest(context, ways)];
}

/// The algorithms that this process has settled on, for one GPU.
class Settled {
 public:
  Algorithm of(const Context& context, const Product& p, Description& description) {
    const ProductKey key = key_of(p);
    if (const auto found = find(key)) return *found;
    const std::string text = "product" + text_of(key);
    const auto kept = p.math.tune ? kept_choice(context, text) : std::nullopt;
    // Those of the file count, so that a process with the same file measures no more than that one
    // has that wrote it.
    const bool among_first = is_among_first(key);
    if (kept) {
      if (const auto known = restored(context, *kept, description)) return settle(key, *known);
    }
    // Also under capture: it then stays so for this process, as results must not change in it.
    if (!may_measure(context, p.math) || !among_first) {
      return settle(key, unmeasured(context, p, description));
    }
    const auto alone = measuring(context.device);
    if (const auto found = find(key)) return *found;  // another thread was faster
    try {
      const Algorithm best = measured(context, p, description);
      keep_choice(context, text, written(best), kept.has_value());
      return settle(key, best);
    } catch (const OutOfMemory&) {
      return settle(key, unmeasured(context, p, description));
    }
  }

 private:
  // Where one of the sizes changes from call to call, measuring each would stall all of them.
  static constexpr int kMostOfAKind = 8;

  /// Of all products that differ in the rows alone, or in the length of the sums alone, the first
  /// few.
  bool is_among_first(const ProductKey& key) {
    ProductKey any_rows = key, any_inner = key;
    any_rows[0] = -1;
    any_inner[2] = -1;
    const std::lock_guard lock(mutex_);
    return kinds_[any_rows]++ < kMostOfAKind && kinds_[any_inner]++ < kMostOfAKind;
  }

  Algorithm unmeasured(const Context& context, const Product& p, Description& description) {
    Algorithm first = suggested(context, p).front();
    if (p.epilogue == Epilogue::none) return first;
    // What an algorithm does to NaN is asked once, not for every size: the answer takes a wait.
    ProbeKey probe{};
    std::copy(std::begin(first.algorithm.data), std::end(first.algorithm.data), probe.begin());
    probe.back() = static_cast<std::uint64_t>(key_of(p)[6]);
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = probed_.find(probe); found != probed_.end()) {
        first.nan = found->second;
        return first;
      }
    }
    if (is_captured(context)) return first;
    first.nan = lets_nan_through(context, p, description, first);
    const std::lock_guard lock(mutex_);
    probed_[probe] = first.nan;
    return first;
  }

  std::optional<Algorithm> find(const ProductKey& key) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(key);
    if (found == known_.end()) return std::nullopt;
    return found->second;
  }

  /// Whoever comes first decides.
  Algorithm settle(const ProductKey& key, const Algorithm& algorithm) {
    const std::lock_guard lock(mutex_);
    return known_.try_emplace(key, algorithm).first->second;
  }

  /// An algorithm's words, and the kind of product.
  using ProbeKey = std::array<std::uint64_t, std::size(cublasLtMatmulAlgo_t{}.data) + 1>;

  std::mutex mutex_;
  std::map<ProbeKey, bool> probed_;
  std::unordered_map<ProductKey, Algorithm, ProductKeyHash> known_;
  std::unordered_map<ProductKey, int, ProductKeyHash> kinds_;
};

Settled& settled_for(Device device) {
  static std::array<Settled, kMaxDevices> all;
  return all[device.index];
}

}  // namespace

ProductKey key_of(const Product& p) {
  const auto alignment = [](const void* address, int place) {
    return std::int64_t{std::countr_zero(alignment_of(address))} << (4 * place);
  };
  const std::int64_t kind = static_cast<std::int64_t>(p.dtype) | p.a.transposed << 4 |
                            p.b.transposed << 5 | std::int64_t{epilogue_of(p)} << 8 |
                            std::int64_t{p.math.tf32} << 32 |
                            std::int64_t{p.math.reduced_sums} << 33 |
                            std::int64_t{p.math.tune} << 34 | std::int64_t{p.wide_result} << 35;
  const std::int64_t alignments = alignment(p.a.data, 0) | alignment(p.b.data, 1) |
                                  alignment(p.d.data, 2) | alignment(p.bias, 3);
  return {p.rows, p.columns, p.inner, p.a.stride, p.b.stride, p.d.stride, kind, alignments};
}

std::string text_of(const ProductKey& key) {
  std::string text;
  for (const std::int64_t part : key) text.append(" ").append(std::to_string(part));
  return text;
}

struct PreparedProduct::State {
  /// As the vendor takes it: no sum is empty, the bias is aligned, d is not transposed.
  Product p;
  std::optional<Scratch<char>> zeros, bias, workspace;
  std::optional<Description> description;
  Algorithm algorithm{};

  State(const Context& context, const Product& product) : p(product) {
    check(!p.add || (p.bias == nullptr && p.epilogue == Epilogue::none && !p.math.tune),
          "a product that adds has no bias, no epilogue and no tuning");
    check(!p.wide_result || (p.epilogue == Epilogue::none && !p.math.tune),
          "a product with a wide result has no epilogue and no tuning");
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const std::int64_t size = size_of(p.wide_result ? DType::f32 : p.dtype);
    if (p.inner == 0) {  // nothing to sum up: as a product of zeros
      const std::int64_t bytes = std::max(p.rows, p.columns) * size;
      zeros.emplace(context, bytes);
      check_cuda(cudaMemsetAsync(zeros->data(), 0, bytes, stream), "clearing zeros");
      p.inner = 1;
      p.a = {zeros->data(), 1, false};
      p.b = {zeros->data(), 1, true};
    }
    if (reinterpret_cast<std::uintptr_t>(p.bias) % kBiasAlignment != 0) {
      bias.emplace(context, p.columns * size);
      check_cuda(
          cudaMemcpyAsync(bias->data(), p.bias, p.columns * size, cudaMemcpyDeviceToDevice, stream),
          "copying a bias");
      p.bias = bias->data();
    }
    if (p.d.transposed) {  // d^T = b^T a^T
      std::swap(p.rows, p.columns);
      std::swap(p.a, p.b);
      for (Matrix* matrix : {&p.a, &p.b, &p.d}) matrix->transposed = !matrix->transposed;
    }
    description.emplace(p);
    algorithm = settled_for(context.device).of(context, p, *description);
    workspace.emplace(context, static_cast<std::int64_t>(algorithm.workspace));
  }
};

PreparedProduct::PreparedProduct(const Context& context, const Product& product) {
  if (product.rows > 0 && product.columns > 0) state_ = std::make_unique<State>(context, product);
}

PreparedProduct::~PreparedProduct() = default;

void PreparedProduct::run(const Context& context) const {
  if (state_ == nullptr) return;
  cuda::run(context, state_->p, *state_->description, state_->algorithm, state_->workspace->data());
}

bool PreparedProduct::lets_nan_through() const {
  return state_ == nullptr || state_->algorithm.nan;
}

void multiply(const Context& context, const Product& product) {
  PreparedProduct(context, product).run(context);
}

}  // namespace fusewise::cuda

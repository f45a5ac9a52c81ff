// The CPU library's context: torch's threads run our loops, so that the two do not compete for
// cores, and torch's libraries compute the GEMMs.

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include <exception>
#include <mutex>

#include "call.h"
#include "convolution.h"
#include "failure.h"

namespace fusewise::binding {
namespace {

class TorchThreads : public Executor {
 public:
  int threads() const override { return static_cast<int>(torch::stable::get_num_threads()); }

  void parallel_for(std::int64_t count, Body body, void* state) override {
    // An exception must not cross torch's C interface, so it is stored and rethrown after the loop.
    std::exception_ptr failure;
    std::mutex mutex;
    torch::stable::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
      try {
        body(begin, end, state);
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
      }
    });
    if (failure) std::rethrow_exception(failure);
  }
};

/// The same GEMM as torch's linear for matrices, but without the dispatcher and into existing
/// memory. If x has more than two dimensions, torch's linear may round the product before it adds
/// the bias; here all tensors are matrices. Tiny GEMMs are left to the library's own loops, which
/// finish before torch has checked its arguments, and so are those that torch computes slowly.
class TorchGemm : public Gemm {
 public:
  bool multiply(const TensorView& a, const TensorView& b, const TensorView& c,
                const TensorView& d) override {
    constexpr std::int64_t kTiny = 4096;  // multiplications
    if (a.numel() * d.sizes[1] <= kTiny || is_slow(a, d)) return false;
    const Tensor left = tensor_of(a), right = tensor_of(b), out = tensor_of(d);
    // The same tensor, not another view of it: torch then adds in place, without a copy.
    const Tensor added = !c.defined() || c.data == d.data ? out : tensor_of(c);
    const AOTITorchError status =
        c.defined()
            ? aoti_torch_cpu_addmm_out(out.get(), added.get(), left.get(), right.get(), 1, 1)
            : aoti_torch_cpu_mm_out(out.get(), left.get(), right.get());
    if (status != AOTI_TORCH_SUCCESS) {
      fail_as_torch(c.defined() ? "aten::addmm" : "aten::mm", {}, bytes_of(out));
    }
    return true;
  }

 private:
  /// torch's float32 and float64 GEMMs are MKL's, which takes kernels without AVX-512 on AMD's
  /// CPUs: 200 GFLOP/s where our loops reach 450 (two cores of family 26). Ours lose where they
  /// would mostly copy b, for few rows, or compute with zeros, for few columns.
  static bool is_slow(const TensorView& a, const TensorView& d) {
#if defined(__x86_64__)
    static const bool is_amd = __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
    if (!is_amd || (d.dtype != DType::f32 && d.dtype != DType::f64)) return false;
    constexpr std::int64_t kFewRows = 24, kFewBytes = 24;
    if (d.sizes[0] < kFewRows || a.sizes[1] == 1 || d.sizes[1] == 1) return false;
    const bool adjacent = a.strides[1] == 1;  // MKL is slow for a^T beside few columns, too
    return !adjacent || d.sizes[1] * size_of(d.dtype) >= kFewBytes;
#else
    return false;
#endif
  }
};

}  // namespace

void check_works(Device) {}

void cast_all(const Context&, std::span<const CastPair> pairs) {
  for (const CastPair& pair : pairs) copy(tensor_of(pair.from), tensor_of(pair.to));
}

struct CallContext::State {};

CallContext::CallContext(const Tensor&) {
  static TorchThreads threads;  // neither has any state
  static TorchGemm gemm;
  context_.executor = &threads;
  context_.gemm = &gemm;
  context_.convolution = &torch_convolution();
}

CallContext::~CallContext() = default;

}  // namespace fusewise::binding

#pragma once

// Finds the fastest of several ways to the same result. Measured once, then cached on disk.

#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "cuda/cuda_error.h"
#include "cuda/gemm/product_bucket.h"
#include "fusewise/context.h"
#include "fusewise/linear_act.h"

namespace fusewise::cuda {

/// Whether a graph is being captured on the context's stream.
bool is_captured(const Context& context);

/// The settings after applying the environment: FUSEWISE_TUNE=0 turns tuning off.
ProductMath with_environment(ProductMath math);

/// Whether this call may measure its bucket. Its settings must ask for tuning, no graph may be
/// being captured on its stream, and the bucket must be one of the first few of its kind.
bool may_measure(const Context& context, const ProductMath& math, const ProductBucket& bucket);

/// Allows calls that a graph capture on another thread would otherwise forbid on this one.
class RelaxedCapture {
 public:
  RelaxedCapture() { swap(); }
  ~RelaxedCapture() { swap(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void swap() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// The cached choice for a key, made by this process or by an earlier one with the same GPU and
/// cuBLASLt.
std::optional<std::string> kept_choice(const Context& context, const std::string& key);

/// A measured choice is also written to the file in the user's cache folder. A choice that could
/// not be measured lasts only as long as the process, so that results do not change within it.
enum class Lifetime { process, file };
void keep_choice(const Context& context, const std::string& key, const std::string& value,
                 Lifetime lifetime);

/// Held while measuring. Only one thread per GPU may measure at a time, because two would disturb
/// each other's timings. Measuring may nest. The end of the outermost one writes the new choices to
/// the file.
class Measuring {
 public:
  explicit Measuring(Device device);
  ~Measuring();
  Measuring(const Measuring&) = delete;
  Measuring& operator=(const Measuring&) = delete;

 private:
  Device device_;
  std::unique_lock<std::recursive_mutex> lock_;
};

/// Memory that is in L2 when a GEMM starts.
struct Resident {
  const void* data = nullptr;
  std::int64_t bytes = 0;
};

/// The operand of a product that does not depend on the batch: weights, which every call uses.
Resident weights_of(const Product& product);

/// Index of the fastest, by GPU time, of several ways that enqueue the same work. Before each call,
/// L2 holds only the weights, as when different batches follow each other. The first way wins
/// unless another is faster by more than the noise. A way that throws Error is left out. If all
/// throw, the last error is rethrown.
std::size_t fastest(const Context& context, Resident weights,
                    std::span<const std::function<void(const Context&)>> ways);

}  // namespace fusewise::cuda

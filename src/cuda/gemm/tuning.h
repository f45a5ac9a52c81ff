#pragma once

// Which of several ways to the same result is the fastest: measured once, kept for good.

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

/// The settings with what the environment says of them: FUSEWISE_TUNE=0 turns tuning off.
ProductMath with_environment(ProductMath math);

/// Whether this call may measure for its bucket: its settings ask for it, no graph is being
/// captured on its stream, and the bucket is one of the first few of its kind.
bool may_measure(const Context& context, const ProductMath& math, const ProductBucket& bucket);

/// Allows what a graph capture on another thread would otherwise forbid here.
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

/// The choice kept under a key, by this process or, for the same GPU and cuBLASLt, by an earlier
/// one.
std::optional<std::string> kept_choice(const Context& context, const std::string& key);

/// A measured choice goes into the file of the user's cache folder, too. A choice that could not be
/// measured lasts as long as the process, so that its results do not change.
enum class Lifetime { process, file };
void keep_choice(const Context& context, const std::string& key, const std::string& value,
                 Lifetime lifetime);

/// Held while measuring: one thread at a time on a GPU, as two would measure each other. What is
/// measured may need to measure in turn. The end of the outermost one writes the new choices.
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

/// Memory that is in L2 when a product starts.
struct Resident {
  const void* data = nullptr;
  std::int64_t bytes = 0;
};

/// The operand of a product that does not depend on the batch: weights, which every call uses.
Resident weights_of(const Product& product);

/// The fastest, by GPU time, of ways that each enqueue the same work. L2 holds nothing before each
/// call but the weights, as where batches follow each other. The first stays unless another is
/// faster by more than the noise. A way that throws Error is left out; where all do, the last error
/// is thrown.
std::size_t fastest(const Context& context, Resident weights,
                    std::span<const std::function<void(const Context&)>> ways);

}  // namespace fusewise::cuda

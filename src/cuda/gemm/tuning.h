#pragma once

// Which of several ways to the same result is the fastest: measured once, kept for good.

#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "cuda/cuda_error.h"
#include "fusewise/context.h"
#include "fusewise/linear_act.h"

namespace fusewise::cuda {

/// Whether a graph is being captured on the context's stream.
bool is_captured(const Context& context);

/// Whether this call may measure: its settings and the environment (FUSEWISE_TUNE) want it, and no
/// graph is being captured on its stream.
bool may_measure(const Context& context, const ProductMath& math);

/// Another thread may be capturing a graph meanwhile, in a mode that would refuse what is done here
/// although it has nothing to do with that thread.
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

/// What was kept under a key, for this GPU and this cuBLASLt, by this process or one before it.
std::optional<std::string> kept_choice(const Context& context, const std::string& key);
void keep_choice(const Context& context, const std::string& key, const std::string& value);

/// Only one thread measures at a time: two would measure each other. What it measures may need to
/// measure in turn.
std::unique_lock<std::recursive_mutex> measuring();

/// The fastest, by GPU time, of ways that each enqueue the same work, by a few launches and without
/// allocations: they are timed as graphs, so that the host's time does not count. The first stays
/// unless another is faster by more than the noise.
std::size_t fastest(const Context& context,
                    std::span<const std::function<void(const Context&)>> ways);

}  // namespace fusewise::cuda

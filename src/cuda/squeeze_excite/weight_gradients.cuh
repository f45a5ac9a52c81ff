#pragma once

// The gradients of the weights, from the small vectors of every sample, for backward without
// batched GEMMs. The kernel reads what forward saved before the previous kernel is done. This is
// safe because the previous kernel lets it start only when forward is done.

#include <optional>

#include "common/scratch.h"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {

/// dz2 [N, C] and dz1 [N, R], the gradients before gate and activation, in the accumulation type.
/// They last for one call: the backward kernel fills them, and `run` computes the weight gradients
/// from them.
class WeightGradientVectors {
 public:
  /// Empty if the call wants no weight gradient, unless `always`.
  WeightGradientVectors(const Context& context, const SqueezeExciteBackward& call,
                        bool always = false);

  template <typename A = float>
  A* dz2() const {
    return memory_ ? reinterpret_cast<A*>(memory_->data()) : nullptr;
  }
  template <typename A = float>
  A* dz1() const {
    return memory_ ? reinterpret_cast<A*>(memory_->data() + dz2_bytes_) : nullptr;
  }

  /// Enqueues the kernel if the call wants any weight gradient.
  void run(const Context& context, const SqueezeExciteBackward& call) const;

 private:
  std::int64_t dz2_bytes_ = 0;
  std::optional<Scratch<char>> memory_;
};

}  // namespace fusewise::cuda

#pragma once

// The per-channel work of BatchNorm in kernels of their own, between the two passes.

#include "common/divide.h"
#include "common/scratch.h"
#include "cuda/batch_norm/channels.cuh"

namespace fusewise::cuda {

/// Combines the parts of a first pass, or takes the statistics of the group or the running ones if
/// there are none. Writes the saved and running statistics and the coefficients of all channels.
template <typename T>
void launch_finish(const Context& context, const ForwardChannels& f,
                   const MomentParts<Accumulator<T>>& parts, Coefficients<Accumulator<T>>* out);

/// The same in backward. Without parts, dweight and dbias are not written.
template <typename T>
void launch_finish(const Context& context, const BackwardChannels& b,
                   const GradientParts<Accumulator<T>>& parts, Coefficients<Accumulator<T>>* out,
                   Corrections<Accumulator<T>>* out_corrections);

/// Advances the counters of all streams before a kernel whose blocks all need the number of calls
/// with this one, for the cumulative average, and do not wait for each other.
void count_calls(const Context& context, const Counter& counter, const TensorView& x,
                 const TensorView& blanked);

/// Scratch memory for the parts of the first pass, as one allocation.
template <typename A>
class PartMemory {
 public:
  PartMemory(const Context& context, std::int64_t streams, std::int64_t slabs,
             std::int64_t channels)
      : rows_(streams * slabs),
        values_(rows_ * channels),
        memory_(context, rows_ + values_ + divide_up(2 * values_ * sizeof(A), sizeof(double))),
        slabs_(static_cast<int>(slabs)) {}

  MomentParts<A> moments() const { return {memory_.data(), doubles(), values(), slabs_}; }
  GradientParts<A> gradients() const {
    return {memory_.data(), values(), values() + values_, slabs_};
  }

 private:
  double* doubles() const { return memory_.data() + rows_; }
  A* values() const { return reinterpret_cast<A*>(memory_.data() + rows_ + values_); }

  std::int64_t rows_, values_;
  Scratch<double> memory_;
  int slabs_;
};

}  // namespace fusewise::cuda

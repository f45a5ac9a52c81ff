// The sums of LINet's convolution: gradients that meet, and the taps of a convolution. Each byte is
// read once and written once; bound by memory bandwidth.

// Compiled once per instruction set, under the rule of cpu/vector.h.

#include "cpu/li_conv_kernels.h"

#include "cpu/vector.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

/// Calls step(i) for whole vectors, then step(i, count) for the remaining columns.
template <int kLanes, typename Step>
void for_columns(Index columns, const Step& step) {
  Index i = 0;
  for (; i + kLanes <= columns; i += kLanes) step(i);
  if (i < columns) step(i, columns - i);
}

template <typename T>
void sum_rows(const T* const* rows, int count, Index columns, T* out) {
  using M = Memory<T>;
  for_columns<M::kLanes>(columns, [&](Index i, auto... left) {
    typename M::V sum{};
    for (int row = 0; row < count; ++row) sum = sum + M::load(rows[row] + i, left...);
    M::store(out + i, sum, left...);
  });
}

template <typename T>
void accumulate(const T* row, Index columns, AccumulatorOf<T>* sums) {
  using M = Memory<T>;
  using Sums = Memory<AccumulatorOf<T>>;
  for_columns<M::kLanes>(columns, [&](Index i, auto... left) {
    Sums::store(sums + i, Sums::load(sums + i, left...) + M::load(row + i, left...), left...);
  });
}

template <typename T>
void round_to(const AccumulatorOf<T>* sums, Index columns, T* out) {
  using M = Memory<T>;
  using Sums = Memory<AccumulatorOf<T>>;
  for_columns<M::kLanes>(columns, [&](Index i, auto... left) {
    M::store(out + i, Sums::load(sums + i, left...), left...);
  });
}

template <typename T>
constexpr LiConvKernels<T> kernels_of() {
  return {sum_rows<T>, accumulate<T>, round_to<T>};
}

}  // namespace

const LiConvKernelSet li_conv_kernels = {kernels_of<float>(), kernels_of<double>(),
                                         kernels_of<F16>(), kernels_of<BF16>()};

}  // namespace fusewise::cpu::FUSEWISE_ISA

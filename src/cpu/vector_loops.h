#pragma once

// Loops over contiguous elements, vector by vector. The rule of cpu/vector.h applies.

#include "cpu/vector.h"
#include "fusewise/activation.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

/// Calls step(i) for every vector of a row, and step(i, count) for the columns that remain.
template <typename T, typename Step>
void each_vector(Index columns, const Step& step) {
  constexpr int kLanes = Memory<T>::kLanes;
  Index i = 0;
  for (; i + kLanes <= columns; i += kLanes) step(i);
  if (i < columns) step(i, columns - i);
}

/// Sets all lanes with an index below count.
template <typename V>
auto first_lanes(Index count) {
  using Mask = decltype(V{} < V{});
  Mask index{};
  for (unsigned i = 0; i < sizeof(V) / sizeof(index[0]); ++i) index[i] = i;
  return index < static_cast<decltype(+index[0])>(count);
}

/// A value per channel, for the vectors of a row: planes have one value for each row, rows of
/// channels one for each column.
template <typename A, bool kPlanar>
class PerChannel {
 public:
  explicit PerChannel(const A* values, Index row = 0) : values_(values) {
    if (kPlanar && values != nullptr) value_ = LanesOf<A>{} + values[row];
  }
  /// The index is the first column of a vector.
  template <typename... Count>
  LanesOf<A> at(Index i, Count... count) const {
    if constexpr (kPlanar)
      return value_;
    else
      return Memory<A>::load(values_ + i, count...);
  }

 private:
  [[maybe_unused]] const A* values_;
  LanesOf<A> value_{};
};

/// Number of elements before the first address that is aligned for a streaming store.
template <typename T>
Index to_alignment(const T* to) {
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  return (kBytes - address % kBytes) % kBytes / sizeof(T);
}

/// out[i] = value(i, count...) for all i < n. Values are vectors.
template <typename T, bool kStream, typename Value>
void write(T* out, Index n, const Value& value) {
  using M = Memory<T>;
  Index i = 0;
  if constexpr (kStream) {
    Index head = to_alignment(out);
    if (head > n) head = n;
    for (; head - i > M::kLanes; i += M::kLanes) M::store(out + i, value(i));
    if (head > i) M::store(out + i, value(i, head - i), head - i), i = head;
  }
  for (; i + M::kLanes <= n; i += M::kLanes) {
    if constexpr (kStream)
      M::stream(out + i, value(i));
    else
      M::store(out + i, value(i));
  }
  if (i < n) M::store(out + i, value(i, n - i), n - i);
}

/// Calls function.operator()<...>() with BatchNorm's activation as a template argument.
template <typename Function>
void with_activation(Activation kind, const Function& function) {
  switch (kind) {
    case Activation::relu:
      return function.template operator()<Activation::relu>();
    case Activation::relu6:
      return function.template operator()<Activation::relu6>();
    case Activation::silu:
      return function.template operator()<Activation::silu>();
    case Activation::hardswish:
      return function.template operator()<Activation::hardswish>();
    default:
      return function.template operator()<Activation::identity>();
  }
}

}  // namespace
}  // namespace fusewise::cpu::FUSEWISE_ISA

// Linear + activation's inner loops: activations with relu's bits, gradients with their sums, and a
// plain GEMM for callers without one. The elementwise passes read and write each byte once and are
// bound by memory bandwidth. The GEMM is bound by arithmetic.

// Compiled once per instruction set, under the rule of cpu/vector.h.

#include "cpu/linear_act_kernels.h"

#include "cpu/vector_bits.h"
#include "cpu/vector_lanes.h"
#include "cpu/vector_math.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

template <typename T>
constexpr bool kHalf = sizeof(T) == 2;

/// Columns processed at a time: whole bytes of bits, whole vectors.
template <typename T>
constexpr int kUnit = Memory<T>::kLanes > 8 ? Memory<T>::kLanes : 8;

// Activations. -----------------------------------------------------------------------------------

/// One unit of columns, or the `count` that remain.
template <Activation kKind, typename T, bool kBits, typename... Count>
void activate_unit(const T* z, const T* bias, T* y, std::uint8_t* bits, Count... count) {
  using M = Memory<T>;
  unsigned open = 0;
  const auto step = [&](int i, auto... left) {
    LanesOf<T> value = M::load(z + i, left...);
    if (bias != nullptr) value = value + M::load(bias + i, left...);
    if constexpr (kBits) open |= to_bits(~(value <= 0)) << i;
    M::store(y + i, activate<kKind, kHalf<T>>(value), left...);
  };
  if constexpr (sizeof...(Count) == 0) {
    for (int i = 0; i < kUnit<T>; i += M::kLanes) step(i);
    if constexpr (kBits) {
      for (int i = 0; i < kUnit<T> / 8; ++i) bits[i] = static_cast<std::uint8_t>(open >> 8 * i);
    }
  } else {
    const Index columns = (count, ...);
    for (int i = 0; i < columns; i += M::kLanes) {
      if (columns - i >= M::kLanes)
        step(i);
      else
        step(i, columns - i);
    }
    if constexpr (kBits) {
      open &= (1u << columns) - 1;
      for (int i = 0; i < (columns + 7) / 8; ++i)
        bits[i] = static_cast<std::uint8_t>(open >> 8 * i);
    }
  }
}

template <Activation kKind, typename T, bool kBits>
void activate_rows(const T* z, Index z_stride, const T* bias, T* y, Index y_stride,
                   std::uint8_t* bits, Index bit_stride, Index rows, Index columns) {
  for (Index row = 0; row < rows; ++row) {
    const T* from = z + row * z_stride;
    T* to = y + row * y_stride;
    std::uint8_t* open = kBits ? bits + row * bit_stride : nullptr;
    Index i = 0;
    const auto unit = [&](auto... count) {
      activate_unit<kKind, T, kBits>(from + i, bias == nullptr ? nullptr : bias + i, to + i,
                                     kBits ? open + i / 8 : nullptr, count...);
    };
    for (; i + kUnit<T> <= columns; i += kUnit<T>) unit();
    if (i < columns) unit(columns - i);
  }
}

template <typename T>
void activate_matrix(Activation kind, const T* z, Index z_stride, const T* bias, T* y,
                     Index y_stride, std::uint8_t* bits, Index bit_stride, Index rows,
                     Index columns) {
  const auto run = [&](auto function) {
    function(z, z_stride, bias, y, y_stride, bits, bit_stride, rows, columns);
  };
  switch (kind) {
    case Activation::relu:
      return bits == nullptr ? run(activate_rows<Activation::relu, T, false>)
                             : run(activate_rows<Activation::relu, T, true>);
    case Activation::gelu:
      return run(activate_rows<Activation::gelu, T, false>);
    case Activation::gelu_tanh:
      return run(activate_rows<Activation::gelu_tanh, T, false>);
    case Activation::silu:
      return run(activate_rows<Activation::silu, T, false>);
    case Activation::identity:
      return run(activate_rows<Activation::identity, T, false>);
    case Activation::relu6:
    case Activation::hardswish:  // rejected earlier
      return;
  }
}

// Gradients. -------------------------------------------------------------------------------------

enum class Keeps { nothing, bits, values };

template <typename T>
struct GradientRow {
  const T* dy;
  const std::uint8_t* bits;
  const T* kept;
  T* dz;
  AccumulatorOf<T>* sums;
};

/// One vector of columns starting at i, or the `count` that remain.
template <Activation kKind, Keeps kKeeps, typename T, typename... Count>
void differentiate_lanes(const GradientRow<T>& row, Index i, Count... count) {
  using M = Memory<T>;
  using S = Memory<AccumulatorOf<T>>;
  LanesOf<T> gradient = M::load(row.dy + i, count...);
  if constexpr (kKeeps == Keeps::bits) {
    unsigned open = row.bits[i / 8];
    if constexpr (M::kLanes > 8) {
      const bool more = sizeof...(Count) == 0 || ((count + 0) + ... + 0) > 8;
      if (more) open |= static_cast<unsigned>(row.bits[i / 8 + 1]) << 8;
    }
    gradient = select(from_bits(gradient, open >> i % 8), gradient, LanesOf<T>{});
  }
  if constexpr (kKeeps == Keeps::values) {
    gradient = activation_gradient<kKind, kHalf<T>>(M::load(row.kept + i, count...), gradient);
  }
  if (row.dz != nullptr) M::store(row.dz + i, gradient, count...);
  if (row.sums != nullptr) {
    // Rounded to the type in memory before summing, as in torch.
    if constexpr (sizeof(T) == 2) gradient = widen(T{}, narrow(T{}, gradient));
    S::store(row.sums + i, S::load(row.sums + i, count...) + gradient, count...);
  }
}

template <Activation kKind, Keeps kKeeps, typename T>
void differentiate_row(const GradientRow<T>& row, Index columns) {
  constexpr Index kLanes = Memory<T>::kLanes;
  Index i = 0;
  for (; i + kLanes <= columns; i += kLanes) differentiate_lanes<kKind, kKeeps>(row, i);
  if (i < columns) differentiate_lanes<kKind, kKeeps>(row, i, columns - i);
}

template <typename T>
void differentiate_matrix(Activation kind, const T* dy, Index dy_stride, const std::uint8_t* bits,
                          Index bit_stride, const T* kept, Index kept_stride, T* dz,
                          Index dz_stride, AccumulatorOf<T>* sums, Index rows, Index columns) {
  const auto run = [&](auto function) {
    for (Index row = 0; row < rows; ++row) {
      const GradientRow<T> at{dy + row * dy_stride,
                              bits == nullptr ? nullptr : bits + row * bit_stride,
                              kept == nullptr ? nullptr : kept + row * kept_stride,
                              dz == nullptr ? nullptr : dz + row * dz_stride, sums};
      function(at, columns);
    }
  };
  switch (kind) {
    case Activation::relu:
      return bits != nullptr ? run(differentiate_row<Activation::relu, Keeps::bits, T>)
                             : run(differentiate_row<Activation::relu, Keeps::values, T>);
    case Activation::gelu:
      return run(differentiate_row<Activation::gelu, Keeps::values, T>);
    case Activation::gelu_tanh:
      return run(differentiate_row<Activation::gelu_tanh, Keeps::values, T>);
    case Activation::silu:
      return run(differentiate_row<Activation::silu, Keeps::values, T>);
    case Activation::identity:
      return run(differentiate_row<Activation::identity, Keeps::nothing, T>);
    case Activation::relu6:
    case Activation::hardswish:  // rejected earlier
      return;
  }
}

constexpr Index kChunkGroup = 32;

template <typename T>
void add_chunks(const AccumulatorOf<T>* chunks, Index count, Index columns, T* out) {
  using M = Memory<T>;
  using S = Memory<AccumulatorOf<T>>;
  const auto step = [&](Index i, auto... left) {
    // Sum in groups: in a single sum of many equal terms, all rounding errors may have the same
    // sign.
    typename S::V sum{};
    for (Index first = 0; first < count; first += kChunkGroup) {
      typename S::V group{};
      const Index last = count < first + kChunkGroup ? count : first + kChunkGroup;
      for (Index chunk = first; chunk < last; ++chunk)
        group += S::load(chunks + chunk * columns + i, left...);
      sum += group;
    }
    M::store(out + i, sum, left...);
  };
  Index i = 0;
  for (; i + S::kLanes <= columns; i += S::kLanes) step(i);
  if (i < columns) step(i, columns - i);
}

// The GEMM. --------------------------------------------------------------------------------------

// Two vectors wide. With six rows that is twelve accumulators: enough to hide the latency of a
// multiplication, and few enough to leave registers for the operands.
template <typename T>
constexpr Index kPanel = 2 * Memory<AccumulatorOf<T>>::kLanes;
constexpr Index kRows = 6;

template <typename T>
AccumulatorOf<T> to_sum(const T* from) {
  if constexpr (sizeof(T) == 2)
    return Memory<T>::load(from, 1)[0];
  else
    return *from;
}

/// Packs one vector of columns, for at most a vector of the sum's steps, of a matrix with
/// contiguous columns. `columns`: how many there are.
template <typename T>
void pack_square(const T* b, Index stride, Index steps, Index columns, AccumulatorOf<T>* panel) {
  using A = AccumulatorOf<T>;
  using M = Memory<T>;
  using S = Memory<A>;
  if (steps == S::kLanes && columns >= S::kLanes) {
    transpose_square<A>([&](Index j) { return M::load(b + j * stride); },
                        [&](Index i, LanesOf<A> value) { S::store(panel + i * kPanel<T>, value); });
    return;
  }
  LanesOf<A> tile[S::kLanes] = {};
  for (Index j = 0; j < S::kLanes && j < columns; ++j) {
    tile[j] = steps == S::kLanes ? M::load(b + j * stride) : M::load(b + j * stride, steps);
  }
  transpose<A>(tile);
  for (Index i = 0; i < steps; ++i) S::store(panel + i * kPanel<T>, tile[i]);
}

template <typename T>
void pack_panel(const T* b, Strides strides, Index inner, Index columns, AccumulatorOf<T>* panel) {
  using A = AccumulatorOf<T>;
  using M = Memory<T>;
  using S = Memory<A>;
  const Index count = columns < kPanel<T> ? columns : kPanel<T>;
  if (strides.column == 1) {
    for (Index i = 0; i < inner; ++i) {
      for (int half = 0; half < 2; ++half) {
        const Index at = half * S::kLanes, left = count - at;
        const T* from = b + i * strides.row + at;
        typename S::V values{};
        if (left >= S::kLanes) {
          values = M::load(from);
        } else if (left > 0) {
          values = M::load(from, left);
        }
        S::store(panel + i * kPanel<T> + at, values);
      }
    }
  } else if (strides.row == 1) {
    for (Index i = 0; i < inner; i += S::kLanes) {
      const Index steps = inner - i < S::kLanes ? inner - i : S::kLanes;
      for (Index j = 0; j < kPanel<T>; j += S::kLanes) {
        pack_square(b + i + j * strides.column, strides.column, steps, count - j,
                    panel + i * kPanel<T> + j);
      }
    }
  } else {  // one row or column
    for (Index i = 0; i < inner; ++i) {
      for (Index j = 0; j < kPanel<T>; ++j) {
        panel[i * kPanel<T> + j] =
            j < count ? to_sum(b + i * strides.row + j * strides.column) : A(0);
      }
    }
  }
}

template <typename T, int kCount>
void multiply_rows(const T* a, Strides strides, const AccumulatorOf<T>* panel, Index inner,
                   const T* c, Index c_stride, T* d, Index d_stride, Index columns) {
  using A = AccumulatorOf<T>;
  using M = Memory<T>;
  using S = Memory<A>;
  constexpr Index kLanes = S::kLanes;
  typename S::V sums[kCount][2];
  for (int row = 0; row < kCount; ++row) sums[row][0] = sums[row][1] = typename S::V{};
  for (Index i = 0; i < inner; ++i) {
    const typename S::V left = S::load(panel + i * kPanel<T>);
    const typename S::V right = S::load(panel + i * kPanel<T> + kLanes);
    for (int row = 0; row < kCount; ++row) {
      const A value = to_sum(a + row * strides.row + i * strides.column);
      const auto factor = broadcast<typename S::V>(value);
      sums[row][0] = multiply_add(factor, left, sums[row][0]);
      sums[row][1] = multiply_add(factor, right, sums[row][1]);
    }
  }
  for (int row = 0; row < kCount; ++row) {
    for (int half = 0; half < 2; ++half) {
      const Index at = half * kLanes, left = columns - at;
      if (left <= 0) break;
      typename S::V sum = sums[row][half];
      T* const to = d + row * d_stride + at;
      if (left >= kLanes) {
        if (c != nullptr) sum += M::load(c + row * c_stride + at);
        M::store(to, sum);
      } else {
        if (c != nullptr) sum += M::load(c + row * c_stride + at, left);
        M::store(to, sum, left);
      }
    }
  }
}

template <typename T>
void multiply_panel(const T* a, Strides strides, const AccumulatorOf<T>* panel, Index inner,
                    const T* c, Index c_stride, T* d, Index d_stride, Index rows, Index columns) {
  Index row = 0;
  const auto take = [&]<int kCount>() {
    for (; row + kCount <= rows; row += kCount) {
      multiply_rows<T, kCount>(a + row * strides.row, strides, panel, inner, c + row * c_stride,
                               c_stride, d + row * d_stride, d_stride, columns);
    }
  };
  take.template operator()<kRows>();
  take.template operator()<4>();
  take.template operator()<2>();
  take.template operator()<1>();
}

template <typename T>
constexpr LinearKernels<T> kernels_of() {
  return {activate_matrix<T>, differentiate_matrix<T>, add_chunks<T>,
          pack_panel<T>,      multiply_panel<T>,       kPanel<T>};
}

}  // namespace

const LinearKernelSet linear_kernels = {kernels_of<float>(), kernels_of<double>(),
                                        kernels_of<F16>(), kernels_of<BF16>()};

}  // namespace fusewise::cpu::FUSEWISE_ISA

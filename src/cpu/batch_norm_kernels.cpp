// BatchNorm + activation's inner loops: moments, normalisation, sums of gradients, gradients.
// `moments` reads planes twice, so the caller passes one that fits the caches. All others read and
// write each byte once. Bound by memory bandwidth.

// Compiled once per instruction set, under the rule of cpu/vector.h.

#include "cpu/batch_norm_kernels.h"

#include "cpu/batch_norm_pool_loops.h"
#include "cpu/vector_bits.h"
#include "cpu/vector_loops.h"
#include "cpu/vector_math.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

/// The rows from `row` on.
template <typename T>
Rows<T> from_row(Rows<T> rows, Index row) {
  return {rows.data + row * rows.stride, rows.stride};
}

// Rows of channels are taken in groups. They share the loads of values per channel, and being
// several streams for the hardware's prefetcher, they are read faster than one long row.
constexpr int kGroup = 4;

/// Rows of which the pivot is the mean. If it is that of k among n values, the sum of squared
/// differences from it is at most 1 + n / k times that from the mean, so little cancels.
constexpr Index kPivotRows = 8;
constexpr Index kRowsPerPivot = 16;  // of a bundle: one row of the pivot's for so many rows

/// Into L2, because L1 is too small for the groups of several tensors.
inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

/// visit.operator()<kRows>(first) returns a function of (row, i, count...), see each_vector. It
/// takes vectors of kRows rows, from first + row on.
template <typename T, bool kPlanar, typename Visit>
void each_group(const BatchNormShape& shape, const Visit& visit) {
  if constexpr (kPlanar) {
    const auto step = visit.template operator()<1>(0);
    for (Index row = 0; row < shape.rows; ++row) {
      each_vector<T>(shape.columns, [&](Index i, auto... count) { step(row, i, count...); });
    }
  } else {
    const auto take = [&]<int kRows>(Index first) {
      const auto step = visit.template operator()<kRows>(first);
      each_vector<T>(shape.columns, [&](Index i, auto... count) { step(Index(0), i, count...); });
    };
    Index row = 0;
    for (; row + kGroup <= shape.rows; row += kGroup) take.template operator()<kGroup>(row);
    for (; row < shape.rows; ++row) take.template operator()<1>(row);
  }
}

// All arguments in memory are copied first. Otherwise the compiler would read them again after
// every store, because a store might have changed them.

// Sums. ------------------------------------------------------------------------------------------

template <typename V, int kSums>
struct Terms {
  V of[kSums];
};

/// totals[k] = the sum of all terms of a matrix. term(row, i, count...) returns kSums vectors.
/// Terms of columns that do not exist must be zero.
template <typename T, int kSums, typename Term>
void sum_planes(BatchNormShape shape, AccumulatorOf<T>* const (&totals)[kSums], const Term& term) {
  using V = LanesOf<T>;
  constexpr int kChains = 4, kLanes = Memory<T>::kLanes;  // enough to hide an addition's latency
  constexpr Index kRun = 16 * kChains * kLanes;  // sums of sums: long sums of float32 are inexact
  V all[kSums] = {}, sums[kChains][kSums] = {};
  Index run = 0;
  for (Index row = 0; row < shape.rows; ++row) {
    const auto add = [&](int chain, auto... where) {
      const auto terms = term.of(term.channels(where...), row, where...);
      for (int k = 0; k < kSums; ++k) sums[chain][k] = sums[chain][k] + terms.of[k];
    };
    for (Index i = 0; i < shape.columns;) {
      const Index end = i + kRun < shape.columns ? i + kRun : shape.columns;
      run += end - i;
      for (; i + kChains * kLanes <= end; i += kChains * kLanes) {
        for (int chain = 0; chain < kChains; ++chain) add(chain, i + chain * kLanes);
      }
      for (; i + kLanes <= end; i += kLanes) add(0, i);
      if (i < end) add(1, i, end - i), i = end;
      if (run < kRun) continue;
      for (int k = 0; k < kSums; ++k) {
        all[k] = all[k] + ((sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]));
        for (int chain = 0; chain < kChains; ++chain) sums[chain][k] = V{};
      }
      run = 0;
    }
  }
  for (int k = 0; k < kSums; ++k) {
    const V rest = (sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]);
    *totals[k] = add_lanes<typename Memory<T>::Sum>(all[k] + rest);
  }
}

/// totals[k][column] = the sum over the rows of a column's terms.
template <typename T, int kSums, typename Term>
void sum_rows(BatchNormShape shape, AccumulatorOf<T>* const (&into)[kSums], const Term& term) {
  using S = Memory<AccumulatorOf<T>>;
  AccumulatorOf<T>* totals[kSums];
  for (int k = 0; k < kSums; ++k) totals[k] = into[k];
  each_vector<T>(shape.columns, [&](Index i, auto... count) {
    for (int k = 0; k < kSums; ++k) S::store(totals[k] + i, LanesOf<T>{}, count...);
  });
  each_group<T, false>(shape, [&]<int kRows>(Index first) {
    return [=, rows = term.from(first)](Index, Index i, auto... count) {
      LanesOf<T> sums[kSums] = {};
      const auto channels = rows.channels(i, count...);
      for (int row = 0; row < kRows; ++row) {
        rows.prefetch_at(row + kGroup, i);
        const auto terms = rows.of(channels, row, i, count...);
        for (int k = 0; k < kSums; ++k) sums[k] = sums[k] + terms.of[k];
      }
      for (int k = 0; k < kSums; ++k) {
        S::store(totals[k] + i, S::load(totals[k] + i, count...) + sums[k], count...);
      }
    };
  });
}

template <typename T, bool kPlanar, int kSums, typename Term>
void sum(BatchNormShape shape, AccumulatorOf<T>* const (&totals)[kSums], const Term& term) {
  if constexpr (kPlanar)
    sum_planes<T>(shape, totals, term);
  else
    sum_rows<T>(shape, totals, term);
}

/// x * scale.
template <typename T>
struct MeanTerms {
  using V = LanesOf<T>;
  const Rows<const T> x;
  const AccumulatorOf<T> scale;

  MeanTerms from(Index row) const { return {from_row(x, row), scale}; }
  void prefetch_at(Index row, Index i) const { prefetch(x.data + row * x.stride + i); }
  template <typename... Count>
  V channels(Index, Count...) const {
    return V{} + scale;
  }
  template <typename... Count>
  Terms<V, 1> of(V scales, Index row, Index i, Count... count) const {
    return {{Memory<T>::load(x.data + row * x.stride + i, count...) * scales}};
  }
};

/// Values of a bundle's channels, repeated for every pixel.
template <typename A>
class Repeated {
 public:
  Repeated(const BatchNormShape& shape, const A* values) {
    if (values == nullptr) return;
    given_ = true;
    constexpr int kLanes = Memory<A>::kLanes;
    for (Index c = 0; c < shape.channels; ++c) {
      const LanesOf<A> value = LanesOf<A>{} + values[c];
      A* const to = values_ + c * shape.columns;
      for (Index i = 0; i < shape.columns; i += kLanes) Memory<A>::store(to + i, value);
    }
  }
  const A* data() const { return given_ ? values_ : nullptr; }

 private:
  // Whole vectors are written. What is behind a plane is overwritten by the next one.
  alignas(kBytes) A values_[kBundledRow + Memory<A>::kLanes];
  bool given_ = false;
};

/// The rows of a bundle as rows of channels.
BatchNormShape as_rows(const BatchNormShape& bundle) {
  return {bundle.rows, bundle.columns * bundle.channels, false, bundle.stream};
}

/// x - pivot and its square.
template <typename T, bool kPlanar>
struct MomentTerms {
  using V = LanesOf<T>;
  const Rows<const T> x;
  const PerChannel<AccumulatorOf<T>, kPlanar> pivots;

  MomentTerms from(Index row) const { return {from_row(x, row), pivots}; }
  void prefetch_at(Index row, Index i) const { prefetch(x.data + row * x.stride + i); }
  template <typename... Count>
  V channels(Index i, Count... count) const {
    return pivots.at(i, count...);
  }
  template <typename... Count>
  Terms<V, 2> of(V pivot, Index row, Index i, Count... count) const {
    V d = Memory<T>::load(x.data + row * x.stride + i, count...) - pivot;
    if constexpr (sizeof...(count) > 0) d = select(first_lanes<V>((count, ...)), d, V{});
    return {{d, d * d}};
  }
};

/// The sums over each plane of a row of a bundle.
template <typename A>
void add_pixels(const BatchNormShape& bundle, const A* values, A* sums) {
  for (Index c = 0; c < bundle.channels; ++c) {
    const Rows<const A> plane{values + c * bundle.columns, bundle.columns};
    sum_planes<A, 1>({1, bundle.columns}, {sums + c}, MeanTerms<A>{plane, 1});
  }
}

/// A factor with which a sum of so many values does not overflow. A power of two, so that nothing
/// is rounded.
template <typename A>
A scale_for(A values) {
  A scale = 1;
  while (scale * values > 1) scale /= 2;
  return scale;
}

/// Sums become means, those that are not finite 0.
template <typename A>
void become_means(Index channels, A share, A* sums) {
  for (Index c = 0; c < channels; ++c) {
    const A mean = sums[c] * share;
    sums[c] = mean - mean == 0 ? mean : 0;
  }
}

template <typename T, bool kPlanar>
void moments_of(BatchNormShape shape, Rows<const T> x, AccumulatorOf<T>* pivots,
                AccumulatorOf<T>* sums, AccumulatorOf<T>* squares) {
  using A = AccumulatorOf<T>;
  BatchNormShape some = shape;
  if (!kPlanar && some.rows > kPivotRows) some.rows = kPivotRows;
  const A values = A(kPlanar ? shape.rows * shape.columns : some.rows), scale = scale_for(values);
  sum<T, kPlanar, 1>(some, {pivots}, MeanTerms<T>{x, scale});
  become_means(kPlanar ? 1 : shape.columns, A(1) / (values * scale), pivots);
  const PerChannel<A, kPlanar> pivot(pivots);
  sum<T, kPlanar, 2>(shape, {sums, squares}, MomentTerms<T, kPlanar>{x, pivot});
}

template <typename T>
void moments_of_bundle(const BatchNormShape& bundle, Rows<const T> x, AccumulatorOf<T>* pivots,
                       AccumulatorOf<T>* sums, AccumulatorOf<T>* squares) {
  using A = AccumulatorOf<T>;
  const BatchNormShape shape = as_rows(bundle);
  BatchNormShape some = shape;
  some.rows = (shape.rows + kRowsPerPivot - 1) / kRowsPerPivot;
  const A values = A(some.rows * bundle.columns), scale = scale_for(values);
  A first[kBundledRow], second[kBundledRow];
  sum_rows<T, 1>(some, {first}, MeanTerms<T>{x, scale});
  add_pixels<A>(bundle, first, pivots);
  become_means(bundle.channels, A(1) / (values * scale), pivots);
  const Repeated<A> repeated(bundle, pivots);
  const PerChannel<A, false> pivot(repeated.data());
  sum_rows<T, 2>(shape, {first, second}, MomentTerms<T, false>{x, pivot});
  add_pixels<A>(bundle, first, sums);
  add_pixels<A>(bundle, second, squares);
}

template <typename T>
void moments(const BatchNormShape& shape, Rows<const T> x, AccumulatorOf<T>* pivots,
             AccumulatorOf<T>* sums, AccumulatorOf<T>* squares) {
  if (shape.channels > 1)
    moments_of_bundle<T>(shape, x, pivots, sums, squares);
  else if (shape.planar)
    moments_of<T, true>(shape, x, pivots, sums, squares);
  else
    moments_of<T, false>(shape, x, pivots, sums, squares);
}

// Normalisation. ---------------------------------------------------------------------------------

constexpr bool has_bits(Activation kind) {
  return kind == Activation::relu || kind == Activation::relu6;
}

/// (x - mean) and v of one vector. Both directions compute v here, so that they agree on its bits.
template <typename T, bool kPlanar>
class Normalize {
  using A = AccumulatorOf<T>;
  using M = Memory<T>;

 public:
  explicit Normalize(const Normalization<T>& in)
      : in_(in), mean_(in.mean), scale_(in.scale), shift_(in.shift) {}

  Normalize from(Index row) const {
    Normalize rows = *this;
    rows.in_.x = from_row(in_.x, row);
    if (in_.residual.data != nullptr) rows.in_.residual = from_row(in_.residual, row);
    return rows;
  }

  void prefetch_at(Index row, Index i) const { prefetch(in_.x.data + row * in_.x.stride + i); }
  /// The values of a vector's channels.
  struct Channels {
    LanesOf<T> mean, scale, shift;
  };
  template <typename... Count>
  Channels channels(Index i, Count... count) const {
    return {mean_.at(i, count...), scale_.at(i, count...), shift_.at(i, count...)};
  }

  template <typename... Count>
  LanesOf<T> centered(const Channels& of, Index row, Index i, Count... count) const {
    return M::load(in_.x.data + row * in_.x.stride + i, count...) - of.mean;
  }
  template <typename... Count>
  LanesOf<T> v(const Channels& of, LanesOf<T> centered, Index row, Index i, Count... count) const {
    LanesOf<T> v = multiply_add(centered, of.scale, of.shift);
    if (in_.residual.data != nullptr) {
      v = v + M::load(in_.residual.data + row * in_.residual.stride + i, count...);
    }
    return v;
  }

 private:
  Normalization<T> in_;
  PerChannel<A, kPlanar> mean_, scale_, shift_;
};

/// What a value is after it went through memory.
template <typename T>
LanesOf<T> as_stored(LanesOf<T> value) {
  if constexpr (sizeof(T) == 2)
    return widen(T{}, narrow(T{}, value));
  else
    return value;
}

/// Where the gradient of relu or relu6 passes. y is the rounded output.
template <Activation kKind, typename V>
auto passes(V y) {
  if constexpr (kKind == Activation::relu6)
    return ~((y <= 0) | (y >= 6));
  else
    return ~(y <= 0);
}

/// The same as bits.
template <Activation kKind, typename V>
unsigned passing_bits(V y) {
#if defined(__AVX512F__)
  if constexpr (sizeof(y[0]) == 4) {
    unsigned bits = _mm512_cmp_ps_mask((__m512)y, (__m512)V{}, _CMP_NLE_UQ);
    if (kKind == Activation::relu6)
      bits &= _mm512_cmp_ps_mask((__m512)y, (__m512)(V{} + 6), _CMP_NGE_UQ);
    return bits;
  }
#endif
  return to_bits(passes<kKind>(y));
}

/// The lanes whose bits are set; 0 in the others.
template <typename V>
V where_set(unsigned bits, V value) {
#if defined(__AVX512F__)
  if constexpr (sizeof(value[0]) == 4)
    return (V)_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), (__m512)value);
#endif
  return select(from_bits(value, bits), value, V{});
}

/// `count`: only those of so many lanes, because what follows may have been written.
template <typename T>
void store_bits(std::uint8_t* bits, Index i, unsigned open, Index count = Memory<T>::kLanes) {
  constexpr int kLanes = Memory<T>::kLanes;
  if (kLanes == 16 && count > 8) {
    const auto both = static_cast<std::uint16_t>(open);
    __builtin_memcpy(bits + i / 8, &both, sizeof(both));
  } else if (kLanes >= 8 || i % 8 == 0) {
    bits[i / 8] = static_cast<std::uint8_t>(open);
  } else {
    bits[i / 8] |= static_cast<std::uint8_t>(open << i % 8);
  }
}

template <typename T>
unsigned load_some_bits(const std::uint8_t* bits, Index i) {
  if constexpr (Memory<T>::kLanes == 16) {
    std::uint16_t both;
    __builtin_memcpy(&both, bits + i / 8, sizeof(both));
    return both;
  } else {
    return bits[i / 8] >> i % 8;
  }
}

/// Writes an output, past the caches with kStream.
template <typename T, bool kStream>
struct Writer {
  Rows<T> to;

  bool wanted() const { return to.data != nullptr; }
  Writer from(Index row) const { return {wanted() ? from_row(to, row) : to}; }
  void store(Index row, Index i, LanesOf<T> value) const {
    T* at = to.data + row * to.stride + i;
    if constexpr (kStream)
      Memory<T>::stream(at, value);
    else
      Memory<T>::store(at, value);
  }
  void store(Index row, Index i, LanesOf<T> value, Index count) const {
    Memory<T>::store(to.data + row * to.stride + i, value, count);
  }
};

/// Calls function.operator()<kStream>(). Large outputs bypass the caches if all of their vectors
/// are aligned.
template <typename T, typename Function, typename... Outputs>
void with_stream(const BatchNormShape& shape, const Function& function, Outputs... outputs) {
  const auto address = [](Rows<T> to) {
    return reinterpret_cast<std::uintptr_t>(to.data) | to.stride * sizeof(T);
  };
  if (shape.stream && (address(outputs) | ...) % kBytes == 0) {
    function.template operator()<true>();
    end_of_stream();
  } else {
    function.template operator()<false>();
  }
}

template <typename T, Activation kKind, bool kPlanar, bool kBits>
void normalize_as(BatchNormShape shape, const Normalization<T>& in, Rows<T> y,
                  [[maybe_unused]] Rows<std::uint8_t> bits) {
  const Normalize<T, kPlanar> all(in);
  const auto run = [&]<bool kStream>() {
    each_group<T, kPlanar>(shape, [&]<int kRows>(Index first) {
      const Writer<T, kStream> out{from_row(y, first)};
      std::uint8_t* const bytes = kBits ? bits.data + first * bits.stride : nullptr;
      return [=, bits_of_row = bits.stride, rows = all.from(first)](Index from, Index i,
                                                                    auto... count) {
        const auto channels = rows.channels(i, count...);
        for (Index row = from; row < from + kRows; ++row) {
          const LanesOf<T> centered = rows.centered(channels, row, i, count...);
          const LanesOf<T> v = rows.v(channels, centered, row, i, count...);
          const LanesOf<T> value = activate<kKind>(v);
          out.store(row, i, value, count...);
          if constexpr (kBits) {
            const unsigned open = passing_bits<kKind>(as_stored<T>(value));
            store_bits<T>(bytes + row * bits_of_row, i, open, count...);
          }
        }
      };
    });
  };
  with_stream<T>(shape, run, y);
}

/// The values per channel of a bundle, as rows of channels need them.
template <typename T>
class RepeatedInputs {
  using A = AccumulatorOf<T>;

 public:
  RepeatedInputs(const BatchNormShape& bundle, const Normalization<T>& in)
      : in_(in), mean_(bundle, in.mean), scale_(bundle, in.scale), shift_(bundle, in.shift) {}
  Normalization<T> get() const {
    return {in_.x, in_.residual, mean_.data(), scale_.data(), shift_.data(), in_.activation};
  }

 private:
  const Normalization<T>& in_;
  const Repeated<A> mean_, scale_, shift_;
};

template <typename T>
void normalize(const BatchNormShape& shape, const Normalization<T>& in, Rows<T> y,
               Rows<std::uint8_t> bits) {
  if (shape.channels > 1) {
    const RepeatedInputs<T> repeated(shape, in);
    return normalize<T>(as_rows(shape), repeated.get(), y, bits);
  }
  with_activation(in.activation, [&]<Activation kKind>() {
    const auto run = [&]<bool kPlanar>() {
      if constexpr (has_bits(kKind)) {
        if (bits.data != nullptr) return normalize_as<T, kKind, kPlanar, true>(shape, in, y, bits);
      }
      normalize_as<T, kKind, kPlanar, false>(shape, in, y, bits);
    };
    if (shape.planar)
      run.template operator()<true>();
    else
      run.template operator()<false>();
  });
}

// Gradients. -------------------------------------------------------------------------------------

/// dv of one vector. With bits, the activation does not matter.
template <typename T, Activation kKind, bool kPlanar, bool kBits>
class Gradient {
  using M = Memory<T>;

 public:
  explicit Gradient(const ActivationGradient<T>& in)
      : dy_(in.dy), wide_dy_(in.wide_dy), bits_(in.bits), normalize_(in.forward) {}

  /// Whether dv depends on x.
  static constexpr bool kReadsX = !kBits && kKind != Activation::identity;

  Gradient from(Index row) const {
    Gradient rows = *this;
    if (dy_.data != nullptr) rows.dy_ = from_row(dy_, row);
    if (wide_dy_.data != nullptr) rows.wide_dy_ = from_row(wide_dy_, row);
    if (kBits) rows.bits_ = from_row(bits_, row);
    rows.normalize_ = normalize_.from(row);
    return rows;
  }
  void prefetch_at(Index row, Index i) const {
    if (dy_.data != nullptr) prefetch(dy_.data + row * dy_.stride + i);
    normalize_.prefetch_at(row, i);
  }

  using Channels = typename Normalize<T, kPlanar>::Channels;
  template <typename... Count>
  Channels channels(Index i, Count... count) const {
    return normalize_.channels(i, count...);
  }
  template <typename... Count>
  LanesOf<T> centered(const Channels& of, Index row, Index i, Count... count) const {
    return normalize_.centered(of, row, i, count...);
  }
  template <typename... Count>
  LanesOf<T> dv([[maybe_unused]] const Channels& of, [[maybe_unused]] LanesOf<T> centered,
                Index row, Index i, Count... count) const {
    const LanesOf<T> dy =
        wide_dy_.data != nullptr
            ? Memory<AccumulatorOf<T>>::load(wide_dy_.data + row * wide_dy_.stride + i, count...)
            : M::load(dy_.data + row * dy_.stride + i, count...);
    if constexpr (kBits) {
      return where_set(load_some_bits<T>(bits_.data + row * bits_.stride, i), dy);
    } else if constexpr (kReadsX) {
      const LanesOf<T> v = normalize_.v(of, centered, row, i, count...);
      if constexpr (has_bits(kKind))
        return select(passes<kKind>(as_stored<T>(activate<kKind>(v))), dy, LanesOf<T>{});
      else
        return activation_gradient<kKind>(v, dy);
    } else {
      return dy;
    }
  }

 private:
  Rows<const T> dy_;
  Rows<const AccumulatorOf<T>> wide_dy_;
  Rows<const std::uint8_t> bits_;
  Normalize<T, kPlanar> normalize_;
};

/// Calls function(Gradient) of the right kind.
template <typename T, typename Function>
void with_gradient(const BatchNormShape& shape, const ActivationGradient<T>& in,
                   const Function& function) {
  const auto in_layout = [&]<bool kPlanar>() {
    if (in.bits.data != nullptr) {
      return function.template operator()<kPlanar>(
          Gradient<T, Activation::identity, kPlanar, true>(in));
    }
    with_activation(in.forward.activation, [&]<Activation kKind>() {
      function.template operator()<kPlanar>(Gradient<T, kKind, kPlanar, false>(in));
    });
  };
  if (shape.planar)
    in_layout.template operator()<true>();
  else
    in_layout.template operator()<false>();
}

/// dv and dv * (x - mean).
template <typename T, typename Gradient>
struct GradientTerms {
  const Gradient gradient;

  GradientTerms from(Index row) const { return {gradient.from(row)}; }
  void prefetch_at(Index row, Index i) const { gradient.prefetch_at(row, i); }
  template <typename... Count>
  auto channels(Index i, Count... count) const {
    return gradient.channels(i, count...);
  }
  template <typename Channels, typename... Count>
  Terms<LanesOf<T>, 2> of(const Channels& of, Index row, Index i, Count... count) const {
    const LanesOf<T> centered = gradient.centered(of, row, i, count...);
    const LanesOf<T> dv = gradient.dv(of, centered, row, i, count...);
    return {{dv, dv * centered}};
  }
};

template <typename T>
void gradient_sums(const BatchNormShape& shape, const ActivationGradient<T>& in,
                   AccumulatorOf<T>* sums, AccumulatorOf<T>* products) {
  if (shape.channels > 1) {
    const RepeatedInputs<T> repeated(shape, in.forward);
    ActivationGradient<T> rows = in;
    rows.forward = repeated.get();
    AccumulatorOf<T> first[kBundledRow], second[kBundledRow];
    gradient_sums<T>(as_rows(shape), rows, first, second);
    add_pixels(shape, first, sums);
    return add_pixels(shape, second, products);
  }
  with_gradient<T>(shape, in, [&]<bool kPlanar>(auto gradient) {
    sum<T, kPlanar, 2>(shape, {sums, products}, GradientTerms<T, decltype(gradient)>{gradient});
  });
}

template <typename T>
void differentiate(const BatchNormShape& from, const ActivationGradient<T>& in,
                   const AccumulatorOf<T>* slopes, const AccumulatorOf<T>* offsets, Rows<T> dx,
                   Rows<T> dresidual) {
  using V = LanesOf<T>;
  if (from.channels > 1) {
    const RepeatedInputs<T> repeated(from, in.forward);
    const Repeated<AccumulatorOf<T>> slope(from, slopes), offset(from, offsets);
    ActivationGradient<T> rows = in;
    rows.forward = repeated.get();
    return differentiate<T>(as_rows(from), rows, slope.data(), offset.data(), dx, dresidual);
  }
  with_gradient<T>(from, in, [=]<bool kPlanar>(auto gradient) {
    const BatchNormShape shape = from;
    const PerChannel<AccumulatorOf<T>, kPlanar> slope(slopes), offset(offsets);
    const auto run = [&]<bool kStream>() {
      each_group<T, kPlanar>(shape, [&]<int kRows>(Index first) {
        const Writer<T, kStream> to_dx = Writer<T, kStream>{dx}.from(first);
        const Writer<T, kStream> to_dresidual = Writer<T, kStream>{dresidual}.from(first);
        const bool centred = slopes != nullptr;
        return [=, rows = gradient.from(first)](Index from, Index i, auto... count) {
          const auto channels = rows.channels(i, count...);
          V slope_of{}, offset_of{};
          if (centred) slope_of = slope.at(i, count...), offset_of = offset.at(i, count...);
          for (Index row = from; row < from + kRows; ++row) {
            V centered{};
            if (rows.kReadsX || centred) centered = rows.centered(channels, row, i, count...);
            const V dv = rows.dv(channels, centered, row, i, count...);
            if (to_dresidual.wanted()) to_dresidual.store(row, i, dv, count...);
            if (!to_dx.wanted()) continue;
            V value = channels.scale * dv;
            if (centred) {
              value = multiply_add(centered, slope_of, offset_of);
              value = multiply_add(channels.scale, dv, value);
            }
            to_dx.store(row, i, value, count...);
          }
        };
      });
    };
    with_stream<T>(shape, run, dx, dresidual);
  });
}

template <typename T>
constexpr BatchNormKernels<T> all() {
  return {moments<T>, normalize<T>, gradient_sums<T>, differentiate<T>,
          pool<T>,    unpool<T>,    widen_row<T>,     narrow_row<T>};
}

}  // namespace

constinit const BatchNormKernelSet batch_norm_kernels = {all<float>(), all<double>(), all<F16>(),
                                                         all<BF16>()};

}  // namespace fusewise::cpu::FUSEWISE_ISA

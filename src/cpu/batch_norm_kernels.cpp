// BatchNorm + activation's inner loops: moments, normalisation, sums of gradients, gradients.
// `moments` reads its matrix twice, so the caller passes one that fits the caches. All others read
// and write each byte once. Bound by memory bandwidth.

// Compiled once per instruction set, under the rule of cpu/vector.h.

#include "cpu/batch_norm_kernels.h"

#include "cpu/batch_norm_pool_loops.h"
#include "cpu/vector_bits.h"
#include "cpu/vector_math.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

/// A value per channel. The index is the first column of a vector.
template <typename A, bool kPlanar>
class PerChannel {
 public:
  explicit PerChannel(const A* values) : values_(values) {
    if (kPlanar && values != nullptr) value_ = LanesOf<A>{} + values[0];
  }
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

/// Sets all lanes with an index below count.
template <typename V>
auto first_lanes(Index count) {
  using Mask = decltype(V{} < V{});
  Mask index{};
  for (unsigned i = 0; i < sizeof(V) / sizeof(index[0]); ++i) index[i] = i;
  return index < static_cast<decltype(+index[0])>(count);
}

// All arguments in memory are copied first. Otherwise the compiler would read them again after
// every store, because a store might have changed them.

// Sums. ------------------------------------------------------------------------------------------

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
      const auto terms = term(row, where...);
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
  // Several rows share a load and a store of the sums.
  const auto add = [&]<int kRows>(Index row) {
    each_vector<T>(shape.columns, [&](Index i, auto... count) {
      LanesOf<T> sums[kSums] = {};
      for (int r = 0; r < kRows; ++r) {
        const auto terms = term(row + r, i, count...);
        for (int k = 0; k < kSums; ++k) sums[k] = sums[k] + terms.of[k];
      }
      for (int k = 0; k < kSums; ++k) {
        S::store(totals[k] + i, S::load(totals[k] + i, count...) + sums[k], count...);
      }
    });
  };
  Index row = 0;
  for (; row + 4 <= shape.rows; row += 4) add.template operator()<4>(row);
  for (; row < shape.rows; ++row) add.template operator()<1>(row);
}

template <typename T, bool kPlanar, int kSums, typename Term>
void sum(BatchNormShape shape, AccumulatorOf<T>* const (&totals)[kSums], const Term& term) {
  if constexpr (kPlanar)
    sum_planes<T>(shape, totals, term);
  else
    sum_rows<T>(shape, totals, term);
}

template <typename V, int kSums>
struct Terms {
  V of[kSums];
};

template <typename T, bool kPlanar>
void moments_of(BatchNormShape shape, Rows<const T> x, AccumulatorOf<T>* pivots,
                AccumulatorOf<T>* sums, AccumulatorOf<T>* squares) {
  using A = AccumulatorOf<T>;
  using V = LanesOf<T>;
  const A values = A(kPlanar ? shape.rows * shape.columns : shape.rows);
  // So that the sum does not overflow. A power of two, so that nothing is rounded.
  A scale = 1;
  while (scale * values > 1) scale /= 2;
  sum<T, kPlanar, 1>(shape, {pivots}, [&](Index row, Index i, auto... count) {
    return Terms<V, 1>{{Memory<T>::load(x.data + row * x.stride + i, count...) * scale}};
  });
  const A share = A(1) / (values * scale);
  const Index channels = kPlanar ? 1 : shape.columns;
  for (Index c = 0; c < channels; ++c) pivots[c] *= share;
  const PerChannel<A, kPlanar> pivot(pivots);
  sum<T, kPlanar, 2>(shape, {sums, squares}, [&](Index row, Index i, auto... count) {
    V d = Memory<T>::load(x.data + row * x.stride + i, count...) - pivot.at(i, count...);
    if constexpr (sizeof...(count) > 0) d = select(first_lanes<V>((count, ...)), d, V{});
    return Terms<V, 2>{{d, d * d}};
  });
}

template <typename T>
void moments(const BatchNormShape& shape, Rows<const T> x, AccumulatorOf<T>* pivots,
             AccumulatorOf<T>* sums, AccumulatorOf<T>* squares) {
  if (shape.planar)
    moments_of<T, true>(shape, x, pivots, sums, squares);
  else
    moments_of<T, false>(shape, x, pivots, sums, squares);
}

// Normalisation. ---------------------------------------------------------------------------------

/// Calls function.operator()<...>() with the activation as a template argument.
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

  template <typename... Count>
  LanesOf<T> centered(Index row, Index i, Count... count) const {
    return M::load(in_.x.data + row * in_.x.stride + i, count...) - mean_.at(i, count...);
  }
  template <typename... Count>
  LanesOf<T> v(LanesOf<T> centered, Index row, Index i, Count... count) const {
    LanesOf<T> v = multiply_add(centered, scale_.at(i, count...), shift_.at(i, count...));
    if (in_.residual.data != nullptr) {
      v = v + M::load(in_.residual.data + row * in_.residual.stride + i, count...);
    }
    return v;
  }
  template <typename... Count>
  LanesOf<T> scale(Index i, Count... count) const {
    return scale_.at(i, count...);
  }

 private:
  const Normalization<T> in_;
  const PerChannel<A, kPlanar> mean_, scale_, shift_;
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

template <typename T>
void store_bits(std::uint8_t* bits, Index i, unsigned open) {
  constexpr int kLanes = Memory<T>::kLanes;
  if constexpr (kLanes == 16) {
    const auto both = static_cast<std::uint16_t>(open);
    __builtin_memcpy(bits + i / 8, &both, sizeof(both));
  } else if (kLanes == 8 || i % 8 == 0) {
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

/// Writes an output. Large ones bypass the caches if all of their vectors are aligned.
template <typename T>
class Writer {
 public:
  Writer(const BatchNormShape& shape, Rows<T> to) : to_(to) {
    const auto address = reinterpret_cast<std::uintptr_t>(to.data);
    stream_ = shape.stream && (address | to.stride * sizeof(T)) % kBytes == 0;
  }
  ~Writer() {
    if (stream_) end_of_stream();
  }
  bool wanted() const { return to_.data != nullptr; }
  void store(Index row, Index i, LanesOf<T> value) const {
    T* to = to_.data + row * to_.stride + i;
    if (stream_)
      Memory<T>::stream(to, value);
    else
      Memory<T>::store(to, value);
  }
  void store(Index row, Index i, LanesOf<T> value, Index count) const {
    Memory<T>::store(to_.data + row * to_.stride + i, value, count);
  }

 private:
  const Rows<T> to_;
  bool stream_;
};

template <typename T, Activation kKind, bool kPlanar, bool kBits>
void normalize_as(BatchNormShape shape, const Normalization<T>& in, Rows<T> y,
                  [[maybe_unused]] Rows<std::uint8_t> bits) {
  const Normalize<T, kPlanar> normalize(in);
  const Writer<T> out(shape, y);
  for (Index row = 0; row < shape.rows; ++row) {
    each_vector<T>(shape.columns, [&](Index i, auto... count) {
      const LanesOf<T> v = normalize.v(normalize.centered(row, i, count...), row, i, count...);
      const LanesOf<T> value = activate<kKind>(v);
      out.store(row, i, value, count...);
      if constexpr (kBits) {
        const unsigned open = to_bits(passes<kKind>(as_stored<T>(value)));
        store_bits<T>(bits.data + row * bits.stride, i, open);
      }
    });
  }
}

template <typename T>
void normalize(const BatchNormShape& shape, const Normalization<T>& in, Rows<T> y,
               Rows<std::uint8_t> bits) {
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

  template <typename... Count>
  LanesOf<T> centered(Index row, Index i, Count... count) const {
    return normalize_.centered(row, i, count...);
  }
  template <typename... Count>
  LanesOf<T> scale(Index i, Count... count) const {
    return normalize_.scale(i, count...);
  }
  template <typename... Count>
  LanesOf<T> dv([[maybe_unused]] LanesOf<T> centered, Index row, Index i, Count... count) const {
    const LanesOf<T> dy =
        wide_dy_.data != nullptr
            ? Memory<AccumulatorOf<T>>::load(wide_dy_.data + row * wide_dy_.stride + i, count...)
            : M::load(dy_.data + row * dy_.stride + i, count...);
    if constexpr (kBits) {
      const unsigned open = load_some_bits<T>(bits_.data + row * bits_.stride, i);
      return select(from_bits(dy, open), dy, LanesOf<T>{});
    } else if constexpr (kReadsX) {
      const LanesOf<T> v = normalize_.v(centered, row, i, count...);
      if constexpr (has_bits(kKind))
        return select(passes<kKind>(as_stored<T>(activate<kKind>(v))), dy, LanesOf<T>{});
      else
        return activation_gradient<kKind>(v, dy);
    } else {
      return dy;
    }
  }

 private:
  const Rows<const T> dy_;
  const Rows<const AccumulatorOf<T>> wide_dy_;
  const Rows<const std::uint8_t> bits_;
  const Normalize<T, kPlanar> normalize_;
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

template <typename T>
void gradient_sums(const BatchNormShape& shape, const ActivationGradient<T>& in,
                   AccumulatorOf<T>* sums, AccumulatorOf<T>* products) {
  with_gradient<T>(shape, in, [&]<bool kPlanar>(auto gradient) {
    sum<T, kPlanar, 2>(shape, {sums, products}, [&](Index row, Index i, auto... count) {
      const LanesOf<T> centered = gradient.centered(row, i, count...);
      const LanesOf<T> dv = gradient.dv(centered, row, i, count...);
      return Terms<LanesOf<T>, 2>{{dv, dv * centered}};
    });
  });
}

template <typename T>
void differentiate(const BatchNormShape& from, const ActivationGradient<T>& in,
                   const AccumulatorOf<T>* slopes, const AccumulatorOf<T>* offsets, Rows<T> dx,
                   Rows<T> dresidual) {
  using V = LanesOf<T>;
  with_gradient<T>(from, in, [=]<bool kPlanar>(auto gradient) {
    const BatchNormShape shape = from;
    const PerChannel<AccumulatorOf<T>, kPlanar> slope(slopes), offset(offsets);
    const Writer<T> to_dx(shape, dx), to_dresidual(shape, dresidual);
    for (Index row = 0; row < shape.rows; ++row) {
      each_vector<T>(shape.columns, [&](Index i, auto... count) {
        V centered{};
        if (gradient.kReadsX || slopes != nullptr) centered = gradient.centered(row, i, count...);
        const V dv = gradient.dv(centered, row, i, count...);
        if (to_dresidual.wanted()) to_dresidual.store(row, i, dv, count...);
        if (!to_dx.wanted()) return;
        V value = gradient.scale(i, count...) * dv;
        if (slopes != nullptr) {
          value = multiply_add(centered, slope.at(i, count...), offset.at(i, count...));
          value = multiply_add(gradient.scale(i, count...), dv, value);
        }
        to_dx.store(row, i, value, count...);
      });
    }
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

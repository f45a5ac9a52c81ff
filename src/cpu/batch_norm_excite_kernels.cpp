// The inner loops of BatchNorm + activation + Squeeze-and-Excitation: activation with pooling,
// gating, sums of gradients, dx. Each reads and writes every byte once. SiLU is bound by its
// exponential and its division, the other activations by memory bandwidth.

// Compiled once per instruction set, under the rule of cpu/vector.h.

#include "cpu/batch_norm_excite_kernels.h"

#include "cpu/vector_loops.h"
#include "cpu/vector_math.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

// All arguments in memory are copied first. Otherwise the compiler would read them again after
// every store, because a store might have changed them.

/// A few vectors: values per channel, or terms of sums.
template <typename V, int kCount>
struct Vectors {
  V of[kCount];
};

/// The lanes of `first` where the mask is set, otherwise those of `second`.
template <typename V, int kCount, typename M>
Vectors<V, kCount> mix(M mask, const Vectors<V, kCount>& first, const Vectors<V, kCount>& second) {
  Vectors<V, kCount> mixed;
  for (int k = 0; k < kCount; ++k) mixed.of[k] = select(mask, first.of[k], second.of[k]);
  return mixed;
}

/// x - mean and v of the rows from `row` on.
template <typename T, bool kPlanar>
class Normalize {
  using A = AccumulatorOf<T>;
  using V = LanesOf<T>;

 public:
  Normalize(const NormalizedRows<T>& in, Index row)
      : x_(in.x.data + row * in.x.stride),
        stride_(in.x.stride),
        mean_(in.mean, row),
        scale_(in.scale, row),
        shift_(in.shift, row) {}

  /// Mean, scale and shift of a vector's channels.
  using Channels = Vectors<V, 3>;
  template <typename... Count>
  Channels channels(Index i, Count... count) const {
    return {{mean_.at(i, count...), scale_.at(i, count...), shift_.at(i, count...)}};
  }
  template <typename... Count>
  V centered(const Channels& channels, Index row, Index i, Count... count) const {
    return Memory<T>::load(x_ + row * stride_ + i, count...) - channels.of[0];
  }
  static V v(const Channels& channels, V centered) {
    return multiply_add(centered, channels.of[1], channels.of[2]);
  }
  void prefetch_at(Index row, Index i) const { __builtin_prefetch(x_ + row * stride_ + i, 0, 2); }

 private:
  const T* x_;
  Index stride_;
  PerChannel<A, kPlanar> mean_, scale_, shift_;
};

// Sums. ------------------------------------------------------------------------------------------

/// totals[k] += the sum of all terms of a plane.
template <typename T, int kSums, typename Term>
void sum_plane(Index columns, AccumulatorOf<T>* const (&totals)[kSums], const Term& term) {
  using V = LanesOf<T>;
  constexpr int kChains = kSums > 2 ? 2 : 4, kLanes = Memory<T>::kLanes;
  constexpr Index kRun = 16 * kChains * kLanes;  // sums of sums: long sums of float32 are inexact
  V all[kSums] = {};
  for (Index i = 0; i < columns;) {
    V sums[kChains][kSums] = {};
    const auto add = [&](int chain, auto... where) {
      const auto channels = term.channels(where...);
      const auto terms = term.of(channels, Index(0), where...);
      for (int k = 0; k < kSums; ++k) sums[chain][k] = sums[chain][k] + terms.of[k];
    };
    const Index end = i + kRun < columns ? i + kRun : columns;
    for (; i + kChains * kLanes <= end; i += kChains * kLanes) {
      for (int chain = 0; chain < kChains; ++chain) add(chain, i + chain * kLanes);
    }
    for (; i + kLanes <= end; i += kLanes) add(0, i);
    if (i < end) add(1, i, end - i), i = end;
    for (int k = 0; k < kSums; ++k) {
      for (int chain = 0; chain < kChains; ++chain) all[k] = all[k] + sums[chain][k];
    }
  }
  for (int k = 0; k < kSums; ++k) *totals[k] += add_lanes<typename Memory<T>::Sum>(all[k]);
}

/// The same for small planes that follow each other in memory. The last vector of a plane goes on
/// into the next one, so that no lanes are left empty.
template <typename T, int kSums, typename Make>
void sum_adjacent_planes(const ExciteShape& shape, AccumulatorOf<T>* const (&totals)[kSums],
                         const Make& make) {
  using V = LanesOf<T>;
  constexpr int kLanes = Memory<T>::kLanes;
  Vectors<V, kSums> sums{}, zero{};
  Index i = 0;
  for (Index row = 0; row < shape.rows; ++row) {
    const auto term = make(row);
    const auto channels = term.channels(0);
    const auto add = [&](const Vectors<V, kSums>& terms) {
      for (int k = 0; k < kSums; ++k) sums.of[k] = sums.of[k] + terms.of[k];
    };
    for (; i + kLanes <= shape.columns; i += kLanes) add(term.of(channels, Index(0), i));
    Vectors<V, kSums> next = zero;
    const Index rest = shape.columns - i;
    i = 0;
    if (rest > 0 && row + 1 < shape.rows) {
      const auto mine = first_lanes<V>(rest);
      const auto both = mix(mine, channels, make(row + 1).channels(0));
      const auto terms = term.of(both, Index(0), shape.columns - rest);
      add(mix(mine, terms, zero));
      next = mix(mine, zero, terms);
      i = kLanes - rest;
    } else if (rest > 0) {
      add(term.of(channels, Index(0), shape.columns - rest, rest));
    }
    for (int k = 0; k < kSums; ++k) {
      totals[k][row] += add_lanes<typename Memory<T>::Sum>(sums.of[k]);
    }
    sums = next;
  }
}

/// totals[k][column] += the sum over kRows rows of a column's terms.
template <typename T, int kRows, int kSums, typename Term>
void sum_some_rows(Index columns, AccumulatorOf<T>* const (&into)[kSums], const Term& term) {
  using S = Memory<AccumulatorOf<T>>;
  AccumulatorOf<T>* totals[kSums];
  for (int k = 0; k < kSums; ++k) totals[k] = into[k];
  each_vector<T>(columns, [=](Index i, auto... count) {
    LanesOf<T> sums[kSums] = {};
    const auto channels = term.channels(i, count...);
    for (Index row = 0; row < kRows; ++row) {
      if constexpr (kRows > 1) term.prefetch_at(row + kRows, i);
      const auto terms = term.of(channels, row, i, count...);
      for (int k = 0; k < kSums; ++k) sums[k] = sums[k] + terms.of[k];
    }
    for (int k = 0; k < kSums; ++k) {
      S::store(totals[k] + i, S::load(totals[k] + i, count...) + sums[k], count...);
    }
  });
}

/// Planes that are shorter and adjacent are taken together.
constexpr Index kShortPlane = 128;

/// make(row) returns the terms of the rows from `row` on: channels(i, count...) and
/// of(channels, row, i, count...). `adjacent`: whether planes follow each other in all tensors.
template <typename T, bool kPlanar, int kSums, typename Make>
void sum(ExciteShape shape, AccumulatorOf<T>* const (&totals)[kSums], bool adjacent,
         const Make& make) {
  if constexpr (kPlanar) {
    if (adjacent && shape.columns >= Memory<T>::kLanes && shape.columns < kShortPlane) {
      return sum_adjacent_planes<T, kSums>(shape, totals, make);
    }
    for (Index row = 0; row < shape.rows; ++row) {
      AccumulatorOf<T>* of_row[kSums];
      for (int k = 0; k < kSums; ++k) of_row[k] = totals[k] + row;
      sum_plane<T, kSums>(shape.columns, of_row, make(row));
    }
  } else {
    constexpr int kGroup = 4;  // rows that share the loads of sums and of values per channel
    Index row = 0;
    for (; row + kGroup <= shape.rows; row += kGroup) {
      sum_some_rows<T, kGroup, kSums>(shape.columns, totals, make(row));
    }
    for (; row < shape.rows; ++row) sum_some_rows<T, 1, kSums>(shape.columns, totals, make(row));
  }
}

/// The value, or 0 in lanes that do not exist.
template <typename V, typename... Count>
V existing(V value, Count... count) {
  if constexpr (sizeof...(count) > 0)
    return select(first_lanes<V>((count, ...)), value, V{});
  else
    return value;
}

/// Calls function.operator()<kKind, kPlanar>().
template <typename Function>
void with_layout(const ExciteShape& shape, Activation kind, const Function& function) {
  with_activation(kind, [&]<Activation kKind>() {
    if (shape.planar)
      function.template operator()<kKind, true>();
    else
      function.template operator()<kKind, false>();
  });
}

// Forward. ---------------------------------------------------------------------------------------

/// a, which it also stores.
template <typename T, Activation kKind, bool kPlanar>
struct ActivatedTerms {
  using V = LanesOf<T>;
  const Normalize<T, kPlanar> rows;
  AccumulatorOf<T>* const to;
  const Index stride;

  void prefetch_at(Index row, Index i) const { rows.prefetch_at(row, i); }
  template <typename... Count>
  auto channels(Index i, Count... count) const {
    return rows.channels(i, count...);
  }
  template <typename Channels, typename... Count>
  Vectors<V, 1> of(const Channels& of, Index row, Index i, Count... count) const {
    const V a = activate<kKind>(rows.v(of, rows.centered(of, row, i, count...)));
    Memory<AccumulatorOf<T>>::store(to + row * stride + i, a, count...);
    return {{existing(a, count...)}};
  }
};

template <typename T>
void activate_rows(const ExciteShape& shape, const NormalizedRows<T>& in, Rows<AccumulatorOf<T>> a,
                   AccumulatorOf<T>* sums) {
  with_layout(shape, in.activation, [&]<Activation kKind, bool kPlanar>() {
    const bool adjacent = in.x.stride == shape.columns && a.stride == shape.columns;
    sum<T, kPlanar, 1>(shape, {sums}, adjacent, [&](Index row) {
      return ActivatedTerms<T, kKind, kPlanar>{{in, row}, a.data + row * a.stride, a.stride};
    });
  });
}

template <typename T, bool kPlanar, bool kStream>
void gate_as(const ExciteShape& shape, Rows<const AccumulatorOf<T>> a,
             const AccumulatorOf<T>* gates, Rows<T> y) {
  using A = AccumulatorOf<T>;
  for (Index row = 0; row < shape.rows; ++row) {
    const A* const from = a.data + row * a.stride;
    const PerChannel<A, kPlanar> gate(gates, row);
    write<T, kStream>(y.data + row * y.stride, shape.columns, [=](Index i, auto... count) {
      return Memory<A>::load(from + i, count...) * gate.at(i, count...);
    });
  }
}

/// Calls function.operator()<kPlanar, kStream>().
template <typename Function>
void with_stream(const ExciteShape& shape, bool stream, const Function& function) {
  const auto in_layout = [&]<bool kPlanar>() {
    if (stream) {
      function.template operator()<kPlanar, true>();
      end_of_stream();
    } else {
      function.template operator()<kPlanar, false>();
    }
  };
  if (shape.planar)
    in_layout.template operator()<true>();
  else
    in_layout.template operator()<false>();
}

template <typename T>
void gate(const ExciteShape& shape, Rows<const AccumulatorOf<T>> a, const AccumulatorOf<T>* gates,
          Rows<T> y, bool stream) {
  with_stream(shape, stream, [&]<bool kPlanar, bool kStream>() {
    gate_as<T, kPlanar, kStream>(shape, a, gates, y);
  });
}

// Backward. --------------------------------------------------------------------------------------

template <typename V>
struct Activated {
  V a, slope;  // act(v) and act'(v)
};

template <Activation kKind, typename V>
Activated<V> activated(V v) {
  if constexpr (kKind == Activation::silu) {  // one exponential and one division for both
    const V s = 1 / (1 + exp(-v));
    return {v * s, s * (1 + v * (1 - s))};
  } else {
    return {activate<kKind>(v), activation_gradient<kKind>(v, V{} + 1)};
  }
}

/// The terms of GateSums, in its order.
template <typename T, Activation kKind, bool kPlanar, int kSums>
struct GateTerms {
  using V = LanesOf<T>;
  const Normalize<T, kPlanar> rows;
  const T* const dy;
  const Index stride;

  void prefetch_at(Index row, Index i) const {
    rows.prefetch_at(row, i);
    __builtin_prefetch(dy + row * stride + i, 0, 2);
  }
  template <typename... Count>
  auto channels(Index i, Count... count) const {
    return rows.channels(i, count...);
  }
  template <typename Channels, typename... Count>
  Vectors<V, kSums> of(const Channels& of, Index row, Index i, Count... count) const {
    const V gradient = Memory<T>::load(dy + row * stride + i, count...);
    const V centered = rows.centered(of, row, i, count...), v = rows.v(of, centered);
    if constexpr (kSums == 1) {
      return {{existing(gradient * activate<kKind>(v), count...)}};
    } else {
      const auto [a, slope] = activated<kKind>(v);
      // The other activations select: where they are closed, not even NaN passes.
      const V passed =
          kKind == Activation::silu ? gradient * slope : activation_gradient<kKind>(v, gradient);
      return {{existing(gradient * a, count...), existing(slope, count...),
               existing(slope * centered, count...), existing(passed, count...),
               existing(passed * centered, count...)}};
    }
  }
};

template <typename T>
void gate_sums(const ExciteShape& shape, const NormalizedRows<T>& in, Rows<const T> dy,
               const GateSums<AccumulatorOf<T>>& to) {
  with_layout(shape, in.activation, [&]<Activation kKind, bool kPlanar>() {
    const auto make = [&]<int kSums>(Index row) {
      return GateTerms<T, kKind, kPlanar, kSums>{{in, row}, dy.data + row * dy.stride, dy.stride};
    };
    const bool adjacent = in.x.stride == shape.columns && dy.stride == shape.columns;
    if (to.open == nullptr) {
      sum<T, kPlanar, 1>(shape, {to.a}, adjacent,
                         [&](Index row) { return make.template operator()<1>(row); });
    } else {
      sum<T, kPlanar, 5>(shape, {to.a, to.open, to.open_centered, to.passed, to.passed_centered},
                         adjacent, [&](Index row) { return make.template operator()<5>(row); });
    }
  });
}

/// dv = (dy * gate + dp) * act'(v), and its product with x - mean.
template <typename T, Activation kKind, bool kPlanar>
struct GradientTerms {
  using A = AccumulatorOf<T>;
  using V = LanesOf<T>;
  const Normalize<T, kPlanar> rows;
  const T* const dy;
  const Index stride;
  const PerChannel<A, kPlanar> gate, dp;

  void prefetch_at(Index row, Index i) const { rows.prefetch_at(row, i); }
  template <typename... Count>
  Vectors<V, 5> channels(Index i, Count... count) const {
    const auto [mean, scale, shift] = rows.channels(i, count...).of;
    return {{mean, scale, shift, gate.at(i, count...), dp.at(i, count...)}};
  }
  template <typename... Count>
  Vectors<V, 2> of(const Vectors<V, 5>& channels, Index row, Index i, Count... count) const {
    const auto& of = channels.of;
    const Vectors<V, 3> normalize{{of[0], of[1], of[2]}};
    const V centered = rows.centered(normalize, row, i, count...);
    const V da = multiply_add(Memory<T>::load(dy + row * stride + i, count...), of[3], of[4]);
    const V dv = activation_gradient<kKind>(rows.v(normalize, centered), da);
    return {{existing(dv, count...), existing(dv * centered, count...)}};
  }
};

template <typename T>
void gradient_sums(const ExciteShape& shape, const NormalizedRows<T>& in,
                   const GatedGradient<T>& gradient, AccumulatorOf<T>* dv,
                   AccumulatorOf<T>* dv_centered) {
  with_layout(shape, in.activation, [&]<Activation kKind, bool kPlanar>() {
    sum<T, kPlanar, 2>(shape, {dv, dv_centered}, /*adjacent=*/false, [&](Index row) {
      const Rows<const T> dy = gradient.dy;
      using OfRow = PerChannel<AccumulatorOf<T>, kPlanar>;
      return GradientTerms<T, kKind, kPlanar>{{in, row},
                                              dy.data + row * dy.stride,
                                              dy.stride,
                                              OfRow(gradient.gates, row),
                                              OfRow(gradient.dp, row)};
    });
  });
}

/// dx of one row.
template <typename T, Activation kKind, bool kPlanar, bool kCentered>
class Differential {
  using A = AccumulatorOf<T>;
  using V = LanesOf<T>;

 public:
  Differential(const NormalizedRows<T>& in, const GatedGradient<T>& gradient, Index row)
      : rows_(in, row),
        dy_(gradient.dy.data + row * gradient.dy.stride),
        gate_(gradient.gates, row),
        dp_(gradient.dp, row),
        slope_(gradient.slope, row),
        offset_(gradient.offset, row) {}

  using Channels = Vectors<V, kCentered ? 7 : 5>;
  template <typename... Count>
  Channels channels(Index i, Count... count) const {
    const auto [mean, scale, shift] = rows_.channels(i, count...).of;
    const V gate = gate_.at(i, count...), dp = dp_.at(i, count...);
    if constexpr (kCentered)
      return {{mean, scale, shift, gate, dp, slope_.at(i, count...), offset_.at(i, count...)}};
    else
      return {{mean, scale, shift, gate, dp}};
  }
  template <typename... Count>
  V of(const Channels& channels, Index i, Count... count) const {
    const auto& of = channels.of;
    const Vectors<V, 3> normalize{{of[0], of[1], of[2]}};
    const V centered = rows_.centered(normalize, 0, i, count...);
    const V da = multiply_add(Memory<T>::load(dy_ + i, count...), of[3], of[4]);
    const V dv = activation_gradient<kKind>(rows_.v(normalize, centered), da);
    if constexpr (kCentered)
      return multiply_add(of[1], dv, multiply_add(centered, of[5], of[6]));
    else
      return of[1] * dv;
  }

 private:
  Normalize<T, kPlanar> rows_;
  const T* dy_;
  PerChannel<A, kPlanar> gate_, dp_, slope_, offset_;
};

/// Small planes that follow each other in memory, as in sum_adjacent_planes.
template <typename T, typename Make>
void write_adjacent_planes(const ExciteShape& shape, T* to, const Make& make) {
  constexpr int kLanes = Memory<T>::kLanes;
  Index i = 0;
  for (Index row = 0; row < shape.rows; ++row, to += shape.columns) {
    const auto plane = make(row);
    const auto channels = plane.channels(0);
    for (; i + kLanes <= shape.columns; i += kLanes) {
      Memory<T>::store(to + i, plane.of(channels, i));
    }
    const Index rest = shape.columns - i;
    if (rest > 0 && row + 1 < shape.rows) {
      const auto mine = first_lanes<LanesOf<T>>(rest);
      Memory<T>::store(to + i, plane.of(mix(mine, channels, make(row + 1).channels(0)), i));
      i = kLanes - rest;
    } else if (rest > 0) {
      Memory<T>::store(to + i, plane.of(channels, i, rest), rest);
      i = 0;
    } else {
      i = 0;
    }
  }
}

template <typename T, Activation kKind, bool kPlanar, bool kStream, bool kCentered>
void differentiate_as(const ExciteShape& shape, const NormalizedRows<T>& in,
                      const GatedGradient<T>& gradient, Rows<T> dx) {
  const auto make = [&](Index row) {
    return Differential<T, kKind, kPlanar, kCentered>(in, gradient, row);
  };
  if constexpr (kPlanar && !kStream) {
    const bool adjacent = in.x.stride == shape.columns && gradient.dy.stride == shape.columns &&
                          dx.stride == shape.columns;
    if (adjacent && shape.columns >= Memory<T>::kLanes && shape.columns < kShortPlane) {
      return write_adjacent_planes(shape, dx.data, make);
    }
  }
  for (Index row = 0; row < shape.rows; ++row) {
    write<T, kStream>(dx.data + row * dx.stride, shape.columns,
                      [plane = make(row)](Index i, auto... count) {
                        return plane.of(plane.channels(i, count...), i, count...);
                      });
  }
}

template <typename T>
void differentiate(const ExciteShape& shape, const NormalizedRows<T>& in,
                   const GatedGradient<T>& gradient, Rows<T> dx, bool stream) {
  with_stream(shape, stream, [&]<bool kPlanar, bool kStream>() {
    with_activation(in.activation, [&]<Activation kKind>() {
      if (gradient.slope != nullptr)
        differentiate_as<T, kKind, kPlanar, kStream, true>(shape, in, gradient, dx);
      else
        differentiate_as<T, kKind, kPlanar, kStream, false>(shape, in, gradient, dx);
    });
  });
}

template <typename T>
constexpr BatchNormExciteKernels<T> all() {
  return {activate_rows<T>, gate<T>, gate_sums<T>, gradient_sums<T>, differentiate<T>};
}

}  // namespace

constinit const BatchNormExciteKernelSet batch_norm_excite_kernels = {all<float>(), all<double>(),
                                                                      all<F16>(), all<BF16>()};

}  // namespace fusewise::cpu::FUSEWISE_ISA

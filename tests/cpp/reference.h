#pragma once

// What the tests hold the library against: tensors of any layout, the operator as plain loops in
// float64, and one comparator. Every reference value carries the error that it may be off by: a few
// epsilons of the sum of |terms| behind it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "fusewise/fusewise.h"

namespace fusewise::testing {

using Index = std::int64_t;

// Types. -----------------------------------------------------------------------------------------

/// The distance from 1 to the next value.
inline double epsilon(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 0x1p-52;
    case DType::f32:
      return 0x1p-23;
    case DType::f16:
      return 0x1p-10;
    case DType::bf16:
      return 0x1p-7;
    case DType::u8:
    case DType::b8:
    case DType::i64:
      break;
  }
  return 0;
}

/// The smallest step between two values.
inline double smallest(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 0x1p-1074;
    case DType::f32:
      return 0x1p-149;
    case DType::f16:
      return 0x1p-24;
    case DType::bf16:
      return 0x1p-133;
    case DType::u8:
    case DType::b8:
    case DType::i64:
      break;
  }
  return 0;
}

/// The type of sums and of what forward saves.
inline DType sum_type(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

/// Rounds to nearest, ties to even, to `digits` bits of mantissa; the exponent stays >= `lowest`.
inline double rounded(double value, int digits, int lowest) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), lowest) - (digits - 1);
  return std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
}

inline std::uint16_t half_bits(double value, DType dtype) {
  if (dtype == DType::bf16) {
    const float narrow = std::isnan(value) ? NAN : static_cast<float>(rounded(value, 8, -126));
    std::uint32_t bits;
    std::memcpy(&bits, &narrow, sizeof(bits));
    return static_cast<std::uint16_t>(bits >> 16);
  }
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  if (std::isnan(value)) return sign | 0x7e00;
  const double magnitude = std::fabs(rounded(value, 11, -14));
  if (magnitude > 65504) return sign | 0x7c00;
  if (magnitude < 0x1p-14) return sign | static_cast<std::uint16_t>(magnitude * 0x1p24);
  const int exponent = std::ilogb(magnitude);
  const auto mantissa = static_cast<int>(std::ldexp(magnitude, 10 - exponent)) - 1024;
  return static_cast<std::uint16_t>(sign | (exponent + 15) << 10 | mantissa);
}

inline double half_value(std::uint16_t bits, DType dtype) {
  if (dtype == DType::bf16) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

// Tensors. ---------------------------------------------------------------------------------------

/// A tensor with memory of its own, and guards around and between its elements.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::vector<Index> sizes, std::vector<Index> strides = {}, Index offset = 0)
      : sizes_(std::move(sizes)), strides_(std::move(strides)), offset_(offset) {
    if (strides_.empty()) {
      strides_.assign(sizes_.size(), 1);
      for (int d = static_cast<int>(sizes_.size()) - 2; d >= 0; --d) {
        strides_[d] = strides_[d + 1] * sizes_[d + 1];
      }
    }
    Index span = 1;
    for (std::size_t d = 0; d < sizes_.size(); ++d) {
      if (sizes_[d] == 0) span = 0;
      if (span > 0) span += (sizes_[d] - 1) * strides_[d];
    }
    memory_.assign((offset_ + span + kGuard) * size_of(dtype), kGuardByte);
    view_.dtype = dtype;
    view_.rank = static_cast<int>(sizes_.size());
    std::copy(sizes_.begin(), sizes_.end(), view_.sizes.begin());
    std::copy(strides_.begin(), strides_.end(), view_.strides.begin());
  }

  bool defined() const { return view_.defined(); }
  DType dtype() const { return view_.dtype; }
  Index numel() const { return view_.numel(); }
  const std::vector<std::uint8_t>& memory() const { return memory_; }
  std::vector<std::uint8_t>& memory() { return memory_; }

  TensorView view() const {
    TensorView view = view_;
    if (defined()) view.data = const_cast<std::uint8_t*>(address(0));
    return view;
  }

  /// Element i in row-major order, whatever the strides.
  double get(Index i) const {
    const std::uint8_t* from = address(place(i));
    if (dtype() == DType::f64) return read<double>(from);
    if (dtype() == DType::f32) return read<float>(from);
    return half_value(read<std::uint16_t>(from), dtype());
  }
  void set(Index i, double value) {
    std::uint8_t* to = const_cast<std::uint8_t*>(address(place(i)));
    if (dtype() == DType::f64) return write(to, value);
    if (dtype() == DType::f32) return write(to, static_cast<float>(value));
    write(to, half_bits(value, dtype()));
  }

  Tensor& fill(unsigned seed, double scale = 1) {
    std::mt19937 engine(seed);
    std::normal_distribution<double> normal(0, scale);
    for (Index i = 0; i < numel(); ++i) set(i, normal(engine));
    return *this;
  }

  /// Every byte of every element 0xff: NaN in all types.
  void poison() {
    for (Index i = 0; i < numel(); ++i) {
      std::memset(const_cast<std::uint8_t*>(address(place(i))), 0xff, size_of(dtype()));
    }
  }

  /// Whether every byte outside the elements is as it was made.
  bool guards_hold() const {
    std::vector<std::uint8_t> outside = memory_;
    const Index count = numel(), size = size_of(dtype());
    for (Index i = 0; i < count; ++i) {
      std::memset(outside.data() + (offset_ + place(i)) * size, kGuardByte, size);
    }
    return std::count(outside.begin(), outside.end(), kGuardByte) == std::ssize(outside);
  }

 private:
  static constexpr Index kGuard = 64;
  static constexpr std::uint8_t kGuardByte = 0xa5;

  template <typename E>
  static E read(const std::uint8_t* from) {
    E value;
    std::memcpy(&value, from, sizeof(E));
    return value;
  }
  template <typename E>
  static void write(std::uint8_t* to, E value) {
    std::memcpy(to, &value, sizeof(E));
  }
  Index place(Index i) const {
    Index place = 0;
    for (int d = static_cast<int>(sizes_.size()) - 1; d >= 0; --d) {
      place += i % sizes_[d] * strides_[d];
      i /= sizes_[d];
    }
    return place;
  }
  const std::uint8_t* address(Index element) const {
    return memory_.data() + (offset_ + element) * size_of(dtype());
  }

  std::vector<Index> sizes_, strides_;
  Index offset_ = 0;
  std::vector<std::uint8_t> memory_;
  TensorView view_;
};

enum class Layout { nchw, channels_last, sliced, channels_last_sliced, transposed, misaligned };

constexpr Layout kLayouts[] = {Layout::nchw,       Layout::channels_last,
                               Layout::sliced,     Layout::channels_last_sliced,
                               Layout::transposed, Layout::misaligned};

inline Tensor image(DType dtype, Layout layout, Index n, Index c, Index h, Index w) {
  const std::vector<Index> sizes{n, c, h, w};
  switch (layout) {
    case Layout::nchw:
      return Tensor(dtype, sizes);
    case Layout::channels_last:
      return Tensor(dtype, sizes, {h * w * c, 1, w * c, c});
    case Layout::sliced:  // every other column, a wider row, spare channels
      return Tensor(dtype, sizes, {(c + 1) * h * (2 * w + 3), h * (2 * w + 3), 2 * w + 3, 2}, 5);
    case Layout::channels_last_sliced:  // some channels of more
      return Tensor(dtype, sizes, {h * w * (c + 3), 1, w * (c + 3), c + 3}, 3);
    case Layout::transposed:  // H and W changed places
      return Tensor(dtype, sizes, {c * h * w, h * w, 1, h});
    case Layout::misaligned:  // dense, one element after an aligned address, spare samples
      return Tensor(dtype, sizes, {c * h * w + 7, h * w, w, 1}, 1);
  }
  return {};
}

// The operator. ----------------------------------------------------------------------------------

/// A reference value and how far from it a right answer may be.
struct Bounded {
  double value = 0, error = 0;
};

/// A sum in the making; `error` takes in the errors of the terms.
struct Sum {
  double value = 0, magnitude = 0, error = 0;
  void add(double a, double b = 1) {
    value += a * b;
    magnitude += std::fabs(a * b);
  }
  void add(double a, Bounded b) {
    add(a, b.value);
    error += std::fabs(a) * b.error;
  }
  /// `steps` epsilons of the sum of |terms|, where `epsilon` is that of the type of sums.
  Bounded done(double epsilon, double steps = 4) const {
    return {value, error + steps * epsilon * magnitude};
  }
};

inline double activate(Activation kind, double z) {
  if (kind == Activation::relu) return z < 0 ? 0 : z;
  if (kind == Activation::hardswish) return z * (z + 3 < 0 ? 0 : z + 3 > 6 ? 6 : z + 3) / 6;
  return z / (1 + std::exp(-z));
}
inline double open_gate(Gate kind, double z) {
  if (kind == Gate::sigmoid) return 1 / (1 + std::exp(-z));
  return (z + 3 < 0 ? 0 : z + 3 > 6 ? 6 : z + 3) / 6;
}

/// The gradient before the activation: relu and hardswish select, so where they are closed not even
/// NaN comes through. The slope of SiLU is off by an epsilon of its largest term.
inline Bounded activation_gradient(Activation kind, double z, Bounded gradient, double eps) {
  if (kind == Activation::relu) return z <= 0 ? Bounded{} : gradient;
  if (kind == Activation::hardswish) {
    if (z <= -3) return {};
    if (!(z < 3)) return gradient;
    const double slope = z / 3 + 0.5;
    return {gradient.value * slope, gradient.error * std::fabs(slope) +
                                        eps * (1 + std::fabs(z)) * std::fabs(gradient.value)};
  }
  const double s = 1 / (1 + std::exp(-z)), slope = s * (1 + z * (1 - s));
  return {gradient.value * slope, gradient.error * std::fabs(slope) +
                                      4 * eps * (1 + std::fabs(z)) * std::fabs(gradient.value)};
}
/// The gradient before the gate; 1 - g is exact to an epsilon of 1, not of itself.
inline Bounded gate_gradient(Gate kind, double g, Bounded gradient, double eps) {
  const bool open = g > 0 && g < 1;
  if (kind == Gate::hardsigmoid && !open) return {};
  const double slope = kind == Gate::sigmoid ? g * (1 - g) : 1.0 / 6;
  return {gradient.value * slope, gradient.error * slope + 2 * eps * g * std::fabs(gradient.value)};
}

/// Arguments of one call, forward and backward, by value.
struct SqueezeExcite {
  Index n = 0, c = 0, r = 0, h = 0, w = 0;
  Activation activation = Activation::silu;
  Gate gate = Gate::sigmoid;
  Tensor x, w1, b1, w2, b2, y, pooled, hidden, gates;
  Tensor dy, dx, dw1, db1, dw2, db2;

  Index pixels() const { return h * w; }

  SqueezeExciteForward forward() const {
    return {x.view(), w1.view(), b1.view(),     w2.view(),     b2.view(),    activation,
            gate,     y.view(),  pooled.view(), hidden.view(), gates.view(), {}};
  }
  SqueezeExciteBackward backward() const {
    return {dy.view(),     x.view(),     w1.view(),  w2.view(),  pooled.view(),
            hidden.view(), gates.view(), activation, gate,       dx.view(),
            dw1.view(),    db1.view(),   dw2.view(), db2.view(), {}};
  }
};

struct Sizes {
  Index n, c, r, h, w;
};

/// All tensors, inputs filled. dy, y and dx may have layouts of their own.
inline SqueezeExcite make_squeeze_excite(Sizes s, DType dtype, DType weights, Layout layout,
                                         Layout other) {
  SqueezeExcite call;
  call.n = s.n, call.c = s.c, call.r = s.r, call.h = s.h, call.w = s.w;
  call.x = image(dtype, layout, s.n, s.c, s.h, s.w).fill(1);
  call.y = image(dtype, other, s.n, s.c, s.h, s.w);
  call.dy = image(dtype, other, s.n, s.c, s.h, s.w).fill(2);
  call.dx = image(dtype, layout, s.n, s.c, s.h, s.w);
  call.w1 = Tensor(weights, {s.r, s.c}).fill(3, 1 / std::sqrt(s.c));
  call.b1 = Tensor(weights, {s.r}).fill(4, 0.5);
  call.w2 = Tensor(weights, {s.c, s.r}).fill(5, 1 / std::sqrt(s.r));
  call.b2 = Tensor(weights, {s.c}).fill(6, 2);
  call.dw1 = Tensor(weights, {s.r, s.c});
  call.db1 = Tensor(weights, {s.r});
  call.dw2 = Tensor(weights, {s.c, s.r});
  call.db2 = Tensor(weights, {s.c});
  const DType sums = sum_type(dtype);
  call.pooled = Tensor(sums, {s.n, s.c});
  call.hidden = Tensor(sums, {s.n, s.r});
  call.gates = Tensor(sums, {s.n, s.c});
  return call;
}

using Values = std::vector<Bounded>;

struct ForwardReference {
  Values pooled, hidden, gates, y;
};

inline ForwardReference forward_reference(const SqueezeExcite& call) {
  const double eps = epsilon(sum_type(call.x.dtype()));
  const Index c = call.c, r = call.r, pixels = call.pixels();
  ForwardReference out;
  for (Index n = 0; n < call.n; ++n) {
    Values active(r);
    for (Index i = n * c; i < (n + 1) * c; ++i) {
      Sum sum;
      for (Index p = 0; p < pixels; ++p) sum.add(call.x.get(i * pixels + p), 1.0 / pixels);
      out.pooled.push_back(sum.done(eps));
    }
    for (Index k = 0; k < r; ++k) {
      Sum z;
      if (call.b1.defined()) z.add(call.b1.get(k));
      for (Index i = 0; i < c; ++i) z.add(call.w1.get(k * c + i), out.pooled[n * c + i]);
      out.hidden.push_back(z.done(eps));
      const Bounded hidden = out.hidden.back();
      const double h = activate(call.activation, hidden.value);
      // The slope of SiLU stays below 1.1, that of hardswish at 1.5; SiLU's exponential is good to
      // a few epsilons.
      const double steepest = call.activation == Activation::hardswish ? 1.5 : 1.1;
      active[k] = {h, steepest * hidden.error + 4 * eps * std::fabs(h)};
    }
    for (Index i = 0; i < c; ++i) {
      Sum z;
      if (call.b2.defined()) z.add(call.b2.get(i));
      for (Index k = 0; k < r; ++k) z.add(call.w2.get(i * r + k), active[k]);
      const Bounded z2 = z.done(eps);
      const double g = open_gate(call.gate, z2.value);
      out.gates.push_back({g, z2.error / 4 + 4 * eps * g});
    }
  }
  for (Index i = 0; i < call.x.numel(); ++i) {
    Sum y;
    y.add(call.x.get(i), out.gates[i / pixels]);
    out.y.push_back(y.done(eps));
  }
  return out;
}

struct BackwardReference {
  Values dx, dw1, db1, dw2, db2;
};

/// From the saved tensors of the call, as backward itself.
inline BackwardReference backward_reference(const SqueezeExcite& call) {
  const double eps = epsilon(sum_type(call.x.dtype()));
  const Index c = call.c, r = call.r, pixels = call.pixels();
  Values dz2, dz;
  BackwardReference out;
  for (Index n = 0; n < call.n; ++n) {
    for (Index i = n * c; i < (n + 1) * c; ++i) {
      Sum dg;
      for (Index p = 0; p < pixels; ++p) {
        dg.add(call.dy.get(i * pixels + p), call.x.get(i * pixels + p));
      }
      dz2.push_back(gate_gradient(call.gate, call.gates.get(i), dg.done(eps), eps));
    }
    for (Index k = 0; k < r; ++k) {
      Sum dh;
      for (Index i = 0; i < c; ++i) dh.add(call.w2.get(i * r + k), dz2[n * c + i]);
      const double z = call.hidden.get(n * r + k);
      dz.push_back(activation_gradient(call.activation, z, dh.done(eps), eps));
    }
    for (Index i = 0; i < c; ++i) {
      Sum dp;
      for (Index k = 0; k < r; ++k) dp.add(call.w1.get(k * c + i), dz[n * r + k]);
      const Bounded sum = dp.done(eps);
      const double g = call.gates.get(n * c + i);
      for (Index p = 0; p < pixels; ++p) {
        Sum dx;
        dx.add(call.dy.get((n * c + i) * pixels + p), g);
        dx.add(1.0 / pixels, sum);
        out.dx.push_back(dx.done(eps));
      }
    }
  }
  const auto add_samples = [&](Index count, const std::function<void(Index, Index, Sum&)>& term) {
    Values values;
    for (Index i = 0; i < count; ++i) {
      Sum sum;
      for (Index n = 0; n < call.n; ++n) term(n, i, sum);
      values.push_back(sum.done(eps));
    }
    return values;
  };
  out.dw1 = add_samples(r * c, [&](Index n, Index i, Sum& sum) {
    sum.add(call.pooled.get(n * c + i % c), dz[n * r + i / c]);
  });
  out.db1 = add_samples(r, [&](Index n, Index i, Sum& sum) { sum.add(1, dz[n * r + i]); });
  out.dw2 = add_samples(r * c, [&](Index n, Index i, Sum& sum) {
    const double h = activate(call.activation, call.hidden.get(n * r + i % r));
    sum.add(h, dz2[n * c + i / r]);
  });
  out.db2 = add_samples(c, [&](Index n, Index i, Sum& sum) { sum.add(1, dz2[n * c + i]); });
  return out;
}

// The comparator. --------------------------------------------------------------------------------

/// Whether `got`, stored as `dtype`, is a right answer for `expected`: NaN where that is NaN, the
/// same infinity, else within the error plus the rounding to dtype.
inline bool is_close(double got, Bounded expected, DType dtype) {
  const double ref = expected.value;
  if (std::isnan(ref)) return std::isnan(got);
  if (std::isinf(ref)) return got == ref;
  if (!std::isfinite(got)) return false;
  const double rounding = epsilon(dtype) / 2 * std::fabs(ref) + smallest(dtype);
  return std::fabs(got - ref) <= 1.01 * expected.error + rounding;
}

inline ::testing::AssertionResult all_close(const Tensor& got, const Values& expected) {
  if (got.numel() != static_cast<Index>(expected.size())) {
    return ::testing::AssertionFailure()
           << got.numel() << " elements, expected " << expected.size();
  }
  for (Index i = 0; i < got.numel(); ++i) {
    if (!is_close(got.get(i), expected[i], got.dtype())) {
      return ::testing::AssertionFailure()
             << "element " << i << " is " << got.get(i) << ", expected " << expected[i].value
             << " +- " << expected[i].error << " before the rounding to " << name_of(got.dtype());
    }
  }
  if (!got.guards_hold()) return ::testing::AssertionFailure() << "wrote outside the tensor";
  return ::testing::AssertionSuccess();
}

}  // namespace fusewise::testing

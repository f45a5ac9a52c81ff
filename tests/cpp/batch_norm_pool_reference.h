#pragma once

// BatchNorm + activation + max-pool from BatchNorm + activation, which has tests of its own, and
// plain loops for the max-pool.

#include "fusewise/batch_norm.h"
#include "reference.h"

namespace fusewise::testing {

struct PoolProblem {
  Index n, c, h, w, rows, columns;
  Activation activation = Activation::relu;
  bool training = true;
  Tensor x, y, dy, dx, u, du;  // u: act(v)
  Tensor weight, bias, dweight, dbias, running_mean, running_var, mean, inverse, choices;

  PoolProblem(DType dtype, Layout layout, Layout other, Index n, Index c, Index h, Index w)
      : n(n), c(c), h(h), w(w), rows((h + 1) / 2), columns((w + 1) / 2) {
    x = image(dtype, layout, n, c, h, w).fill(1, 2);
    u = image(dtype, layout, n, c, h, w);
    du = image(dtype, layout, n, c, h, w);
    dx = image(dtype, layout, n, c, h, w);
    y = image(dtype, other, n, c, rows, columns);
    dy = image(dtype, other, n, c, rows, columns).fill(2);
    weight = Tensor(dtype, {c}).fill(3);
    bias = Tensor(dtype, {c}).fill(4);
    running_mean = Tensor(dtype, {c}).fill(5);
    running_var = Tensor(dtype, {c});
    for (Index i = 0; i < c; ++i) running_var.set(i, 0.5 + static_cast<double>(i));
    dweight = Tensor(dtype, {c});
    dbias = Tensor(dtype, {c});
    mean = Tensor(sum_type(dtype), {c});
    inverse = Tensor(sum_type(dtype), {c});
    choices = Tensor(DType::u8, {n * c * rows * columns});
  }

  BatchNormActPoolForward forward() const {
    BatchNormActPoolForward call;
    call.x = x.view(), call.y = y.view(), call.weight = weight.view(), call.bias = bias.view();
    call.running_mean = running_mean.view(), call.running_var = running_var.view();
    call.mean = mean.view(), call.inverse_deviation = inverse.view();
    call.choices = choices.view();
    call.activation = activation, call.training = training;
    return call;
  }
  BatchNormActPoolBackward backward() const {
    BatchNormActPoolBackward call;
    call.x = x.view(), call.dy = dy.view(), call.weight = weight.view(), call.bias = bias.view();
    call.mean = mean.view(), call.inverse_deviation = inverse.view();
    call.choices = choices.view();
    call.dx = dx.view(), call.dweight = dweight.view(), call.dbias = dbias.view();
    call.activation = activation, call.training = training;
    return call;
  }

  /// The place of the choice of an output, by its row-major number.
  Index place(Index i) const {
    const TensorView view = x.view();
    if (c == 1 || view.strides[1] != 1) return i;
    const Index pixel = i % (rows * columns), plane = i / (rows * columns);
    return (plane / c * rows * columns + pixel) * c + plane % c;
  }
  std::uint8_t choice(Index i) const { return choices.memory()[place(i)]; }

  /// Calls body(output, choice, pixel of u) for the pixels of every window.
  template <typename Body>
  void each(const Body& body) const {
    for (Index i = 0; i < y.numel(); ++i) {
      const Index column = i % columns, row = i / columns % rows, plane = i / columns / rows;
      for (Index k = 0; k < 9; ++k) {
        const Index a = 2 * row - 1 + k / 3, b = 2 * column - 1 + k % 3;
        if (a < 0 || a >= h || b < 0 || b >= w) continue;
        body(i, k, (plane * h + a) * w + b);
      }
    }
  }
  /// What y and the choices must be, from u.
  void expect_pooled() const {
    std::vector<double> best(y.numel(), -std::numeric_limits<double>::infinity());
    std::vector<Index> chosen(y.numel(), -1);
    each([&](Index i, Index k, Index pixel) {
      const double value = u.get(pixel);
      if (chosen[i] >= 0 && !(value > best[i])) return;
      best[i] = value;
      chosen[i] = k;
    });
    for (Index i = 0; i < y.numel(); ++i) {
      ASSERT_EQ(y.get(i), best[i]) << "value " << i;
      ASSERT_EQ(choice(i), chosen[i]) << "choice " << i;
    }
  }
  /// du from dy and the choices, added before it is rounded.
  void unpool() {
    std::vector<double> sums(u.numel(), 0);
    each([&](Index i, Index k, Index pixel) {
      if (choice(i) == k) sums[pixel] += dy.get(i);
    });
    for (Index i = 0; i < u.numel(); ++i) du.set(i, sums[i]);
  }
  /// The calls without the max-pool, which read du and write u.
  BatchNormActForward plain_forward() const {
    BatchNormActForward call;
    call.x = x.view(), call.y = u.view(), call.weight = weight.view(), call.bias = bias.view();
    if (!training) {
      call.running_mean = running_mean.view(), call.running_var = running_var.view();
    }
    call.activation = activation, call.training = training;
    return call;
  }
  BatchNormActBackward plain_backward() const {
    BatchNormActBackward call;
    call.x = x.view(), call.dy = du.view(), call.weight = weight.view(), call.bias = bias.view();
    call.mean = mean.view(), call.inverse_deviation = inverse.view();
    call.dx = dx.view(), call.dweight = dweight.view(), call.dbias = dbias.view();
    call.activation = activation, call.training = training;
    return call;
  }
};

/// `factor`: of the type's epsilon times the largest value.
inline void expect_near(const Tensor& got, const Tensor& expected, double factor,
                        const char* name) {
  double largest = 0;
  for (Index i = 0; i < expected.numel(); ++i) {
    largest = std::max(largest, std::fabs(expected.get(i)));
  }
  const double bound = factor * epsilon(expected.dtype()) * (1 + largest);
  for (Index i = 0; i < expected.numel(); ++i) {
    ASSERT_NEAR(got.get(i), expected.get(i), bound) << name << ", element " << i;
  }
}

}  // namespace fusewise::testing

#pragma once

// BatchNorm + activation + Squeeze-and-Excitation as plain loops in float64, with the error that
// each value may be off by.

#include "batch_norm_reference.h"

namespace fusewise::testing {

/// Arguments of one call, forward and backward, by value. The parts have the operator's tensors;
/// those of the activated tensor, which is no output, are absent.
struct BatchNormExcite {
  BatchNorm norm;        // no y and no dy
  SqueezeExcite excite;  // no x and no dx

  BatchNormExciteForward forward() const {
    const BatchNormActForward n = norm.forward();
    const SqueezeExciteForward e = excite.forward();
    BatchNormExciteForward call;
    call.x = n.x, call.weight = n.weight, call.bias = n.bias;
    call.w1 = e.w1, call.b1 = e.b1, call.w2 = e.w2, call.b2 = e.b2;
    call.running_mean = n.running_mean, call.running_var = n.running_var;
    call.num_batches_tracked = n.num_batches_tracked;
    call.activation = n.activation, call.hidden_activation = e.activation, call.gate = e.gate;
    call.training = n.training, call.momentum = n.momentum, call.eps = n.eps;
    call.y = e.y, call.mean = n.mean, call.inverse_deviation = n.inverse_deviation;
    call.pooled = e.pooled, call.hidden = e.hidden, call.gates = e.gates;
    return call;
  }
  BatchNormExciteBackward backward() const {
    const BatchNormActBackward n = norm.backward();
    const SqueezeExciteBackward e = excite.backward();
    BatchNormExciteBackward call;
    call.dy = e.dy, call.x = n.x, call.weight = n.weight, call.bias = n.bias;
    call.w1 = e.w1, call.w2 = e.w2, call.mean = n.mean;
    call.inverse_deviation = n.inverse_deviation;
    call.pooled = e.pooled, call.hidden = e.hidden, call.gates = e.gates;
    call.activation = n.activation, call.hidden_activation = e.activation, call.gate = e.gate;
    call.training = n.training;
    call.dx = n.dx, call.dweight = n.dweight, call.dbias = n.dbias;
    call.dw1 = e.dw1, call.db1 = e.db1, call.dw2 = e.dw2, call.db2 = e.db2;
    return call;
  }
};

/// All tensors, inputs filled. y and dy have the layout `other`.
inline BatchNormExcite make_batch_norm_excite(Sizes s, DType dtype, DType weights, Layout layout,
                                              Layout other) {
  BatchNormExcite call;
  call.norm = make_batch_norm({0, s.n, s.c, s.h, s.w}, dtype, weights, layout, other, false);
  call.excite = make_squeeze_excite(s, dtype, weights, layout, other);
  call.norm.activation = Activation::silu;
  call.norm.y = call.norm.dy = call.excite.x = call.excite.dx = Tensor();
  return call;
}

struct BatchNormExciteReference {
  BatchNormReference norm;
  ForwardReference forward;
  BackwardReference backward;
};

/// a * b, both off by something. The error of a factor may be infinite where the other one is 0.
inline Bounded product(Bounded a, Bounded b, double eps) {
  const auto times = [](double x, double y) { return x == 0 || y == 0 ? 0 : std::fabs(x * y); };
  const double value = a.value * b.value;
  return {value, times(a.value, b.error) + times(b.value, a.error) + times(a.error, b.error) +
                     4 * eps * std::fabs(value)};
}

inline BatchNormExciteReference batch_norm_excite_forward_reference(const BatchNormExcite& call) {
  BatchNormExciteReference out;
  out.norm = batch_norm_forward_reference(call.norm);
  for (Bounded& a : out.norm.y) {
    if (std::isfinite(a.value) && std::isnan(a.error)) a.error = 0;  // from an infinite v: exact
  }
  const SqueezeExcite& e = call.excite;
  const Values& a = out.norm.y;
  const double eps = epsilon(sum_type(call.norm.x.dtype()));
  const Index c = e.c, r = e.r, pixels = e.pixels();
  ForwardReference& to = out.forward;
  for (Index n = 0; n < e.n; ++n) {
    Values active(r);
    for (Index i = n * c; i < (n + 1) * c; ++i) {
      Sum sum;
      long double value = 0;  // float64 is tested, too
      for (Index p = 0; p < pixels; ++p) {
        sum.add(1.0 / pixels, a[i * pixels + p]);
        value += a[i * pixels + p].value;
      }
      sum.value = static_cast<double>(value / pixels);
      to.pooled.push_back(sum.done(eps));
    }
    for (Index k = 0; k < r; ++k) {
      Sum z;
      if (e.b1.defined()) z.add(e.b1.get(k));
      for (Index i = 0; i < c; ++i) z.add(e.w1.get(k * c + i), to.pooled[n * c + i]);
      to.hidden.push_back(z.done(eps));
      const double h = activate(e.activation, to.hidden.back().value);
      active[k] = {h, 1.5 * to.hidden.back().error + 4 * eps * std::fabs(h)};
    }
    for (Index i = 0; i < c; ++i) {
      Sum z;
      if (e.b2.defined()) z.add(e.b2.get(i));
      for (Index k = 0; k < r; ++k) z.add(e.w2.get(i * r + k), active[k]);
      const Bounded z2 = z.done(eps);
      const double g = open_gate(e.gate, z2.value);
      to.gates.push_back({g, z2.error / 4 + 4 * eps * g});
    }
  }
  for (Index i = 0; i < call.norm.x.numel(); ++i) {
    to.y.push_back(product(a[i], to.gates[i / pixels], eps));
  }
  return out;
}

/// How much the gradient of an activation jumps within the error of v.
inline double jump_at(Activation kind, Bounded v) {
  const auto near = [&](double kink) { return std::fabs(v.value - kink) <= v.error; };
  switch (kind) {
    case Activation::relu:
      return near(0) ? 1 : 0;
    case Activation::relu6:
      return near(0) || near(6) ? 1 : 0;
    case Activation::hardswish:
      return near(-3) || near(3) ? 0.5 : 0;
    default:
      return 0;
  }
}

/// The gradient before BatchNorm's activation, from the one after it.
inline Bounded through_activation(Activation kind, Bounded v, Bounded da, double eps) {
  Bounded dv = da;
  if (kind == Activation::relu6)
    dv = v.value <= 0 || v.value >= 6 ? Bounded{} : da;
  else if (kind != Activation::identity)
    dv = activation_gradient(kind, v.value, da, eps);
  const double jump = jump_at(kind, v);
  if (jump > 0) dv.error += jump * (std::fabs(da.value) + da.error);
  // The second derivative of SiLU and hardswish is at most 0.5.
  const bool bends = kind == Activation::silu || kind == Activation::hardswish;
  if (bends && dv.value != 0) dv.error += 0.5 * v.error * std::fabs(da.value);
  return dv;
}

/// From the saved tensors of the call, as backward itself.
inline BatchNormExciteReference batch_norm_excite_backward_reference(const BatchNormExcite& call) {
  const SqueezeExcite& e = call.excite;
  const BatchNorm& norm = call.norm;
  const double eps = epsilon(sum_type(norm.x.dtype()));
  const Index c = e.c, r = e.r, pixels = e.pixels(), count = norm.x.numel();
  BatchNormExciteReference out;
  Values v, dv, dz2, dz;
  for (Index i = 0; i < count; ++i) {
    const Index channel = i / pixels % c;
    v.push_back(value_before_activation(norm, i, channel, {norm.mean.get(channel), 0},
                                        {norm.inverse.get(channel), 0}));
    if (std::isinf(v.back().value)) v.back().error = 0;
  }
  for (Index n = 0; n < e.n; ++n) {
    for (Index i = n * c; i < (n + 1) * c; ++i) {
      Sum dg;
      for (Index p = i * pixels; p < (i + 1) * pixels; ++p) {
        const double a = batch_norm_activate(norm.activation, v[p].value);
        dg.add(e.dy.get(p), Bounded{a, 1.5 * v[p].error + 4 * eps * std::fabs(a)});
      }
      dz2.push_back(gate_gradient(e.gate, e.gates.get(i), dg.done(eps), eps));
    }
    for (Index k = 0; k < r; ++k) {
      Sum dh;
      for (Index i = 0; i < c; ++i) dh.add(e.w2.get(i * r + k), dz2[n * c + i]);
      const double z = e.hidden.get(n * r + k);
      dz.push_back(activation_gradient(e.activation, z, dh.done(eps), eps));
    }
    for (Index i = 0; i < c; ++i) {
      Sum dp;
      for (Index k = 0; k < r; ++k) dp.add(e.w1.get(k * c + i), dz[n * r + k]);
      const Bounded sum = dp.done(eps);
      const double g = e.gates.get(n * c + i);
      for (Index p = (n * c + i) * pixels; p < (n * c + i + 1) * pixels; ++p) {
        Sum da;
        da.add(e.dy.get(p), g);
        da.add(1.0 / pixels, sum);
        dv.push_back(through_activation(norm.activation, v[p], da.done(eps), eps));
      }
    }
  }

  out.norm.dx.resize(count);
  for (Index channel = 0; channel < c; ++channel) {
    const double mean = norm.mean.get(channel), inverse = norm.inverse.get(channel);
    Sum bias_sum, weight_sum;
    each_value(norm, 0, channel, [&](Index i, bool) {
      bias_sum.add(1, dv[i]);
      weight_sum.add((norm.x.get(i) - mean) * inverse, dv[i]);
    });
    const Bounded dbias = bias_sum.done(eps), dweight = weight_sum.done(eps);
    out.norm.dbias.push_back(dbias);
    out.norm.dweight.push_back(dweight);
    const double scale = inverse * (norm.weight.defined() ? norm.weight.get(channel) : 1);
    const double share = scale / static_cast<double>(e.n * pixels);
    each_value(norm, 0, channel, [&](Index i, bool) {
      Sum dx;
      dx.add(scale, dv[i]);
      if (call.backward().training) {
        dx.add(-share, dbias);
        dx.add(-share * (norm.x.get(i) - mean) * inverse, dweight);
      }
      out.norm.dx[i] = dx.done(eps);
    });
  }

  const auto add_samples = [&](Index size, const std::function<void(Index, Index, Sum&)>& term) {
    Values values;
    for (Index i = 0; i < size; ++i) {
      Sum sum;
      for (Index n = 0; n < e.n; ++n) term(n, i, sum);
      values.push_back(sum.done(eps));
    }
    return values;
  };
  out.backward.dw1 = add_samples(r * c, [&](Index n, Index i, Sum& sum) {
    sum.add(e.pooled.get(n * c + i % c), dz[n * r + i / c]);
  });
  out.backward.db1 = add_samples(r, [&](Index n, Index i, Sum& sum) { sum.add(1, dz[n * r + i]); });
  out.backward.dw2 = add_samples(r * c, [&](Index n, Index i, Sum& sum) {
    sum.add(activate(e.activation, e.hidden.get(n * r + i % r)), dz2[n * c + i / r]);
  });
  out.backward.db2 =
      add_samples(c, [&](Index n, Index i, Sum& sum) { sum.add(1, dz2[n * c + i]); });
  return out;
}

}  // namespace fusewise::testing

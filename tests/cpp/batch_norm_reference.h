#pragma once

// BatchNorm + activation as plain loops in float64, with the error that each value may be off by.

#include "reference.h"

namespace fusewise::testing {

struct ImageSizes {
  Index s, n, c, h, w;  // s = 0: x has no dimension of streams
  Index streams() const { return std::max<Index>(s, 1); }
  Index pixels() const { return h * w; }
};

/// image() with a dimension of streams in front, if there are any.
inline Tensor images(DType dtype, Layout layout, const ImageSizes& z) {
  if (z.s == 0) return image(dtype, layout, z.n, z.c, z.h, z.w);
  const TensorView one = image(dtype, layout, z.n, z.c, z.h, z.w).view();
  std::vector<Index> strides{std::max<Index>(1, z.n) * one.strides[0]};
  strides.insert(strides.end(), one.strides.begin(), one.strides.begin() + 4);
  return Tensor(dtype, {z.s, z.n, z.c, z.h, z.w}, strides, layout == Layout::misaligned);
}

/// Arguments of one call, forward and backward, by value.
struct BatchNorm {
  ImageSizes sizes;
  Activation activation = Activation::relu;
  bool training = true;
  double momentum = 0.1, eps = 1e-5;
  Tensor x, residual, y, dy, dx, dresidual;
  Tensor weight, bias, running_mean, running_var, dweight, dbias;
  Tensor mean, inverse, group, gradient_group;
  std::vector<std::uint8_t> blanked, passes;
  Index tracked = 4;
  bool counts = true;

  bool masks() const {
    return residual.defined() &&
           (activation == Activation::relu || activation == Activation::relu6);
  }
  bool is_blanked(Index stream_and_sample) const {
    return !blanked.empty() && blanked[stream_and_sample];
  }
  TensorView flags() const {
    if (blanked.empty()) return {};
    if (sizes.s == 0) return {blanked.data(), DType::b8, {}, {sizes.n}};
    return {blanked.data(), DType::b8, {}, {sizes.s, sizes.n}};
  }
  TensorView bits() const {
    if (!masks()) return {};
    return {passes.data(), DType::u8, {}, {static_cast<Index>(passes.size())}};
  }

  BatchNormActForward forward() const {
    BatchNormActForward call;
    call.x = x.view(), call.residual = residual.view(), call.y = y.view();
    call.weight = weight.view(), call.bias = bias.view();
    call.running_mean = running_mean.view(), call.running_var = running_var.view();
    call.blanked = flags(), call.group = group.view(), call.passes = bits();
    call.mean = mean.view(), call.inverse_deviation = inverse.view();
    if (counts) call.num_batches_tracked = {&tracked, DType::i64, {}, {}};
    call.activation = activation, call.training = training;
    call.momentum = momentum, call.eps = eps;
    return call;
  }
  BatchNormActBackward backward() const {
    BatchNormActBackward call;
    call.dy = dy.view(), call.x = x.view();
    call.weight = weight.view(), call.bias = bias.view();
    if (!masks()) call.residual = residual.view();
    call.blanked = flags(), call.group = gradient_group.view(), call.passes = bits();
    call.mean = mean.view(), call.inverse_deviation = inverse.view();
    call.activation = activation;
    call.training = training || !running_mean.defined();
    call.dx = dx.view(), call.dweight = dweight.view(), call.dbias = dbias.view();
    if (residual.defined()) call.dresidual = dresidual.view();
    return call;
  }
};

/// All tensors, inputs filled. y, residual, dy and dresidual have the layout `other`.
inline BatchNorm make_batch_norm(const ImageSizes& z, DType dtype, DType weights, Layout layout,
                                 Layout other, bool residual) {
  BatchNorm call;
  call.sizes = z;
  call.x = images(dtype, layout, z).fill(1, 2);
  call.y = images(dtype, other, z);
  call.dy = images(dtype, other, z).fill(2);
  call.dx = images(dtype, layout, z);
  if (residual) {
    call.residual = images(dtype, other, z).fill(3);
    call.dresidual = images(dtype, other, z);
    call.passes.assign((call.x.numel() + 7) / 8, 0xa5);
  }
  const auto channels = [&](DType type) {
    return z.s == 0 ? Tensor(type, {z.c}) : Tensor(type, {z.s, z.c});
  };
  call.weight = channels(weights).fill(4);
  call.bias = channels(weights).fill(5);
  call.running_mean = channels(weights).fill(6);
  call.running_var = channels(weights).fill(7);
  for (Index i = 0; i < call.running_var.numel(); ++i) {
    call.running_var.set(i, 0.5 + std::fabs(call.running_var.get(i)));
  }
  call.dweight = channels(weights);
  call.dbias = channels(weights);
  call.mean = channels(sum_type(dtype));
  call.inverse = channels(sum_type(dtype));
  return call;
}

inline double batch_norm_activate(Activation kind, double v) {
  if (kind == Activation::identity) return v;
  if (kind == Activation::relu6) return v < 0 ? 0 : v > 6 ? 6 : v;
  return activate(kind, v);
}

struct BatchNormReference {
  Values y, mean, inverse, running_mean, running_var;
  Values dx, dresidual, dweight, dbias;
};

/// Calls body(index of the value, whether it is blanked) for all values of a channel.
template <typename Body>
void each_value(const BatchNorm& call, Index s, Index c, const Body& body) {
  const ImageSizes& z = call.sizes;
  for (Index n = 0; n < z.n; ++n) {
    for (Index p = 0; p < z.pixels(); ++p) {
      body(((s * z.n + n) * z.c + c) * z.pixels() + p, call.is_blanked(s * z.n + n));
    }
  }
}

/// v from a mean and an inverse deviation.
inline Bounded value_before_activation(const BatchNorm& call, Index i, Index channel, Bounded mean,
                                       Bounded inverse) {
  const double eps = epsilon(sum_type(call.x.dtype()));
  const double weight = call.weight.defined() ? call.weight.get(channel) : 1;
  const double d = call.x.get(i) - mean.value, scale = std::fabs(inverse.value * weight);
  Sum v;
  v.add(d * inverse.value, weight);
  if (call.bias.defined()) v.add(call.bias.get(channel));
  if (call.residual.defined()) v.add(call.residual.get(i));
  v.error = mean.error * scale + std::fabs(d * weight) * inverse.error;
  return v.done(eps);
}

inline BatchNormReference batch_norm_forward_reference(const BatchNorm& call) {
  const double eps = epsilon(sum_type(call.x.dtype()));
  const ImageSizes& z = call.sizes;
  const Index channels = z.streams() * z.c;
  BatchNormReference out;
  out.y.resize(call.x.numel());
  for (Index k = 0; k < channels; ++k) {
    const Index s = k / z.c, c = k % z.c;
    const bool own = call.training || !call.running_mean.defined();
    double count = 0, variance = 0;
    Bounded mean{};
    if (!own) {
      mean.value = call.running_mean.get(k), variance = call.running_var.get(k);
    } else if (call.group.defined()) {
      const auto group = [&](Index row) { return call.group.get((3 * s + row) * z.c + c); };
      count = group(0), mean.value = group(1), variance = group(2);
    } else {
      each_value(call, s, c, [&](Index, bool blanked) { count += !blanked; });
      long double sum = 0, magnitude = 0, squares = 0;  // float64 is tested, too
      each_value(call, s, c, [&](Index i, bool blanked) {
        if (blanked) return;
        sum += call.x.get(i);
        magnitude += std::fabs(call.x.get(i));
      });
      const long double exact = count > 0 ? sum / count : 0;
      each_value(call, s, c, [&](Index i, bool blanked) {
        const long double d = blanked ? 0 : call.x.get(i) - exact;
        squares += d * d;
      });
      if (count > 0) {
        mean = {static_cast<double>(exact), 4 * eps * static_cast<double>(magnitude / count)};
        variance = static_cast<double>(squares / count);
      }
    }
    const double inverse = 1 / std::sqrt(variance + call.eps);
    out.mean.push_back(mean);
    out.inverse.push_back({inverse, 4 * eps * inverse});
    if (call.running_mean.defined()) {
      Bounded new_mean{call.running_mean.get(k), 0}, new_var{call.running_var.get(k), 0};
      if (call.training && count > 1) {
        const double factor =
            call.momentum < 0 ? 1 / (static_cast<double>(call.tracked) + 1) : call.momentum;
        const auto blend = [&](Bounded& old, double value, double error) {
          const double kept = (1 - factor) * old.value, added = factor * value;
          old = {kept + added, factor * error + 2 * eps * (std::fabs(kept) + std::fabs(added))};
        };
        blend(new_mean, mean.value, mean.error);
        const double unbiased = variance * count / (count - 1);
        blend(new_var, unbiased, 4 * eps * unbiased);
      }
      out.running_mean.push_back(new_mean);
      out.running_var.push_back(new_var);
    }
    each_value(call, s, c, [&](Index i, bool blanked) {
      if (blanked) return;
      const Bounded v = value_before_activation(call, i, k, mean, out.inverse.back());
      const double y = batch_norm_activate(call.activation, v.value);
      out.y[i] = {y, 1.5 * v.error + 4 * eps * std::fabs(y)};
    });
  }
  return out;
}

/// dv from the decisions that forward took, and from the statistics that it saved.
inline Bounded gradient_before_activation(const BatchNorm& call, Index i, Index channel) {
  const double eps = epsilon(sum_type(call.x.dtype())), dy = call.dy.get(i), y = call.y.get(i);
  const Bounded v = value_before_activation(call, i, channel, {call.mean.get(channel), 0},
                                            {call.inverse.get(channel), 0});
  switch (call.activation) {
    case Activation::relu:
      return {y <= 0 ? 0 : dy, 0};
    case Activation::relu6:
      return {y <= 0 || y >= 6 ? 0 : dy, 0};
    case Activation::identity:
      return {dy, 0};
    default:
      break;
  }
  Bounded dv = activation_gradient(call.activation, v.value, {dy, 0}, eps);
  if (dv.value != 0) dv.error += 0.5 * v.error * std::fabs(dy);
  return dv;
}

inline BatchNormReference batch_norm_backward_reference(const BatchNorm& call) {
  const double eps = epsilon(sum_type(call.x.dtype()));
  const ImageSizes& z = call.sizes;
  BatchNormReference out;
  out.dx.resize(call.x.numel());
  out.dresidual.resize(call.x.numel());
  for (Index k = 0; k < z.streams() * z.c; ++k) {
    const Index s = k / z.c, c = k % z.c;
    const double mean = call.mean.get(k), inverse = call.inverse.get(k);
    double count = 0;
    Sum bias_sum, weight_sum;
    each_value(call, s, c, [&](Index i, bool blanked) {
      if (blanked) return;
      ++count;
      out.dresidual[i] = gradient_before_activation(call, i, k);
      bias_sum.add(1, out.dresidual[i]);
      weight_sum.add((call.x.get(i) - mean) * inverse, out.dresidual[i]);
    });
    Bounded dbias = bias_sum.done(eps), dweight = weight_sum.done(eps);
    out.dbias.push_back(dbias);
    out.dweight.push_back(dweight);
    if (call.gradient_group.defined()) {
      const auto group = [&](Index row) {
        return call.gradient_group.get((3 * s + row) * z.c + c);
      };
      count = group(0), dbias = {group(1), 0}, dweight = {group(2), 0};
    }
    const double scale = inverse * (call.weight.defined() ? call.weight.get(k) : 1);
    each_value(call, s, c, [&](Index i, bool blanked) {
      if (blanked) return;
      Sum dx;
      dx.add(scale, out.dresidual[i]);
      if (call.backward().training) {
        dx.add(-scale / count, dbias);
        dx.add(-scale / count * (call.x.get(i) - mean) * inverse, dweight);
      }
      out.dx[i] = dx.done(eps);
    });
  }
  return out;
}

}  // namespace fusewise::testing

// BatchNorm, residual and activation in plain loops, for any strides and types.

#include "fusewise/batch_norm.h"

#include <algorithm>
#include <cmath>

#include "common/implementation.h"
#include "common/math.h"
#include "common/operators.h"
#include "common/scratch.h"
#include "cpu/threads.h"
#include "cpu/types.h"

namespace fusewise::cpu {
namespace {

using Index = std::int64_t;

/// Sizes and strides of an image tensor, with one stream if it has no such dimension.
struct Images {
  char* data;
  Index sizes[5], strides[5];  // S, N, C, H, W; strides in elements

  explicit Images(const TensorView& t) : data(static_cast<char*>(t.data)) {
    for (int d = 0; d < 5; ++d) {
      const int from = d + t.rank - 5;
      sizes[d] = from < 0 ? 1 : t.sizes[from];
      strides[d] = from < 0 ? 0 : t.strides[from];
    }
  }
  template <typename T>
  T* at(Index s, Index n, Index c, Index h, Index w) const {
    return reinterpret_cast<T*>(data) + s * strides[0] + n * strides[1] + c * strides[2] +
           h * strides[3] + w * strides[4];
  }
};

template <typename T>
T* channel_value(const TensorView& t, Index channels, Index s, Index c) {
  return t.defined() ? static_cast<T*>(t.data) + s * channels + c : nullptr;
}

template <typename T>
T activate(Activation kind, T v) {
  switch (kind) {
    case Activation::relu:
      return math::activate<Activation::relu>(v);
    case Activation::relu6:
      return math::activate<Activation::relu6>(v);
    case Activation::silu:
      return math::activate<Activation::silu>(v);
    case Activation::hardswish:
      return math::activate<Activation::hardswish>(v);
    default:
      return v;
  }
}
template <typename T>
T activation_gradient(Activation kind, T v, T d) {
  switch (kind) {
    case Activation::relu:
      return math::activation_gradient<Activation::relu>(v, d);
    case Activation::relu6:
      return math::activation_gradient<Activation::relu6>(v, d);
    case Activation::silu:
      return math::activation_gradient<Activation::silu>(v, d);
    case Activation::hardswish:
      return math::activation_gradient<Activation::hardswish>(v, d);
    default:
      return d;
  }
}

/// Calls body(n, h, w) for all values of a channel of a stream that are not blanked.
template <typename Body>
void each_value(const Images& x, const TensorView& blanked, Index s, const Body& body) {
  for (Index n = 0; n < x.sizes[1]; ++n) {
    if (blanked.defined() && static_cast<const bool*>(blanked.data)[s * x.sizes[1] + n]) continue;
    for (Index h = 0; h < x.sizes[3]; ++h) {
      for (Index w = 0; w < x.sizes[4]; ++w) body(n, h, w);
    }
  }
}

/// The bit of a value.
Index bit_of(const Images& x, Index s, Index n, Index c, Index h, Index w) {
  const Index pixel = (s * x.sizes[1] + n) * x.sizes[3] * x.sizes[4] + h * x.sizes[4] + w;
  if (x.strides[2] == 1 && x.sizes[2] > 1) return pixel * x.sizes[2] + c;
  return (((s * x.sizes[1] + n) * x.sizes[2] + c) * x.sizes[3] + h) * x.sizes[4] + w;
}

template <typename T>
void run_as(const Context&, const BatchNormActForward& call) {
  const Images x(call.x), y(call.y);
  const Index channels = x.sizes[2];
  if (call.passes.defined())
    std::fill_n(static_cast<char*>(call.passes.data), call.passes.numel(), 0);
  Index tracked = 0;
  if (call.num_batches_tracked.defined()) {
    auto* counter = static_cast<Index*>(call.num_batches_tracked.data);
    if (call.training) ++*counter;
    tracked = *counter;
  }
  for (Index s = 0; s < x.sizes[0]; ++s) {
    for (Index c = 0; c < channels; ++c) {
      T* running_mean = channel_value<T>(call.running_mean, channels, s, c);
      T* running_var = channel_value<T>(call.running_var, channels, s, c);
      T count = 0, mean = 0, variance = 0;
      if (call.group.defined()) {
        const T* group = static_cast<const T*>(call.group.data) + 3 * s * channels + c;
        count = group[0], mean = group[channels], variance = group[2 * channels];
      } else if (call.training || running_mean == nullptr) {
        each_value(x, call.blanked, s, [&](Index n, Index h, Index w) {
          ++count;
          const T value = *x.at<T>(s, n, c, h, w), d = value - mean;
          mean += d / count;
          variance += d * (value - mean);
        });
        variance = count > 0 ? variance / count : 0;
      } else {
        mean = *running_mean, variance = *running_var;
      }
      if (call.training && running_mean != nullptr && count > 1) {
        const T factor = call.momentum < 0 ? T(1) / tracked : T(call.momentum);
        *running_mean += factor * (mean - *running_mean);
        *running_var += factor * (variance * count / (count - 1) - *running_var);
      }
      const T inverse = 1 / std::sqrt(variance + T(call.eps));
      if (call.mean.defined()) {
        *channel_value<T>(call.mean, channels, s, c) = mean;
        *channel_value<T>(call.inverse_deviation, channels, s, c) = inverse;
      }
      const T scale =
          inverse * (call.weight.defined() ? *channel_value<T>(call.weight, channels, s, c) : 1);
      const T shift = call.bias.defined() ? *channel_value<T>(call.bias, channels, s, c) : 0;
      each_value(x, {}, s, [&](Index n, Index h, Index w) {
        const bool blank = call.blanked.defined() &&
                           static_cast<const bool*>(call.blanked.data)[s * x.sizes[1] + n];
        T v = (*x.at<T>(s, n, c, h, w) - mean) * scale + shift;
        if (call.residual.defined()) v += *Images(call.residual).at<T>(s, n, c, h, w);
        *y.at<T>(s, n, c, h, w) = blank ? T(0) : activate(call.activation, v);
        if (call.passes.defined() && !blank && activation_gradient(call.activation, v, T(1)) != 0) {
          const Index bit = bit_of(x, s, n, c, h, w);
          static_cast<unsigned char*>(call.passes.data)[bit / 8] |= 1 << bit % 8;
        }
      });
    }
  }
}

template <typename T>
void run_as(const Context&, const BatchNormActBackward& call) {
  const Images x(call.x), dy(call.dy);
  const Index channels = x.sizes[2];
  for (Index s = 0; s < x.sizes[0]; ++s) {
    for (Index c = 0; c < channels; ++c) {
      const T mean = *channel_value<T>(call.mean, channels, s, c),
              inverse = *channel_value<T>(call.inverse_deviation, channels, s, c);
      const T weight = call.weight.defined() ? *channel_value<T>(call.weight, channels, s, c) : 1;
      const T bias = call.bias.defined() ? *channel_value<T>(call.bias, channels, s, c) : 0;
      const auto gradient = [&](Index n, Index h, Index w) {
        const T d = *dy.at<T>(s, n, c, h, w);
        if (call.passes.defined()) {
          const Index bit = bit_of(x, s, n, c, h, w);
          return static_cast<unsigned char*>(call.passes.data)[bit / 8] >> bit % 8 & 1 ? d : T(0);
        }
        T v = (*x.at<T>(s, n, c, h, w) - mean) * inverse * weight + bias;
        if (call.residual.defined()) v += *Images(call.residual).at<T>(s, n, c, h, w);
        return activation_gradient(call.activation, v, d);
      };
      T count = 0, dbias = 0, dweight = 0;
      each_value(x, call.blanked, s, [&](Index n, Index h, Index w) {
        const T d = gradient(n, h, w);
        ++count;
        dbias += d;
        dweight += d * (*x.at<T>(s, n, c, h, w) - mean) * inverse;
      });
      if (call.dweight.defined()) *channel_value<T>(call.dweight, channels, s, c) = dweight;
      if (call.dbias.defined()) *channel_value<T>(call.dbias, channels, s, c) = dbias;
      if (call.group.defined()) {
        const T* group = static_cast<const T*>(call.group.data) + 3 * s * channels + c;
        count = group[0], dbias = group[channels], dweight = group[2 * channels];
      }
      each_value(x, {}, s, [&](Index n, Index h, Index w) {
        const bool blank = call.blanked.defined() &&
                           static_cast<const bool*>(call.blanked.data)[s * x.sizes[1] + n];
        const T d = blank ? T(0) : gradient(n, h, w);
        if (call.dresidual.defined()) *Images(call.dresidual).at<T>(s, n, c, h, w) = d;
        if (!call.dx.defined()) return;
        T result = d;
        if (call.training) {
          result -= dbias / count + (*x.at<T>(s, n, c, h, w) - mean) * inverse * (dweight / count);
        }
        *Images(call.dx).at<T>(s, n, c, h, w) = blank ? T(0) : weight * inverse * result;
      });
    }
  }
}

template <typename Call>
std::string declines_half(const Context&, const Call& call) {
  const bool wide = call.x.dtype == DType::f32 || call.x.dtype == DType::f64;
  return wide ? "" : "it has loops for float32 and float64 alone";
}
template <typename Call>
void run(const Context& context, const Call& call) {
  if (call.x.dtype == DType::f64) return run_as<double>(context, call);
  run_as<float>(context, call);
}
template <typename Call>
constexpr Implementation<Call> kList[] = {{"loops", declines_half<Call>, run<Call>}};

}  // namespace

Implementations<BatchNormActForward> batch_norm_act_forward() { return kList<BatchNormActForward>; }
Implementations<BatchNormActBackward> batch_norm_act_backward() {
  return kList<BatchNormActBackward>;
}

}  // namespace fusewise::cpu

// LINet's convolution for torch: allocation and the calls; the core does the rest. Compiled once
// per device: FUSEWISE_DEVICE is CPU or CUDA.
//
// This operator is bound by hand. A description lists an operator's tensors one by one, but this
// one has as many as its streams need.
//
// x is one tensor [S + 1, N, C, H, W], the streams and behind them the integrated one, or in the
// first layer S images [N, C_s, H, W]. With `packed` the result is [S + 1, N, K, P, Q], otherwise
// the integrated stream alone.

#include "fusewise/li_conv.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "common/check.h"
#include "common/li_conv.h"
#include "li_layer.h"
#include "text.h"

namespace fusewise::binding {
namespace {

/// The images and the weights of a call.
class Inputs : public LiWeights {
 public:
  Inputs(const std::vector<Tensor>& x, const std::vector<Tensor>& weights,
         const std::vector<Tensor>& mix, const std::optional<Tensor>& previous, bool packed)
      : LiWeights(weights, mix, previous.has_value() ? &*previous : nullptr),
        is_packed_(previous.has_value()) {
    read_images(x);
    if (packed) check_packed(*this);
  }

  DType dtype() const { return streams[0].x.dtype; }
  const TensorView& m() const { return m_; }
  /// Whether x is one tensor for all streams.
  bool is_packed() const { return is_packed_; }

 private:
  void read_images(const std::vector<Tensor>& x) {
    if (!is_packed_) {
      check(x.size() == streams.size(), "x: expected ", streams.size(),
            " images, one per stream, got ", x.size());
      for (std::size_t i = 0; i < x.size(); ++i) {
        in_stream(i, [&] { streams[i].x = view_of("x", x[i]); });
      }
      return;
    }
    check(x.size() == 1, "x: expected one tensor [", streams.size() + 1,
          ", N, C, H, W] beside previous, got ", x.size());
    const TensorView all = view_of("x", x[0]);
    const auto count = static_cast<std::int64_t>(streams.size());
    check(all.rank == 5 && all.sizes[0] == count + 1, "x: expected [", count + 1,
          ", N, C, H, W], got ", all);
    for (std::int64_t i = 0; i < count; ++i) streams[i].x = stream_of(all, i);
    m_ = stream_of(all, count);
  }

  TensorView m_;
  bool is_packed_;
};

/// Sizes of the results. Checks only what it reads; the core checks the rest.
struct ResultSizes {
  std::int64_t streams, n, k, d, p, q;

  template <typename Call>
  explicit ResultSizes(const Call& call) : streams(static_cast<std::int64_t>(call.streams.size())) {
    const LiConvStream& first = call.streams[0];
    in_stream(0, [&] {
      check(first.x.rank == 4, "x: expected [N, C, H, W], got ", first.x);
      check(first.w.rank == 4, "w: expected [K, ", first.x.sizes[1], ", R, R], got ", first.w);
      check(first.mix.rank == 2, "mix: expected [D, ", first.w.sizes[0], "], got ", first.mix);
    });
    check(call.stride >= 1, "stride: expected at least 1, got ", call.stride);
    const auto size = [&](int d) {
      const std::int64_t kernel = first.w.sizes[2];
      return std::max<std::int64_t>(0,
                                    convolved(first.x.sizes[d], kernel, call.stride, call.padding));
    };
    n = first.x.sizes[0], k = first.w.sizes[0], d = first.mix.sizes[0];
    p = size(2), q = size(3);
  }
};

TensorView channels_last_view(const LiConvStream& first,
                              std::initializer_list<std::int64_t> sizes) {
  return channels_last(TensorView(nullptr, first.x.dtype, first.x.device, sizes));
}

/// A new tensor and its view.
std::pair<Tensor, TensorView> new_image(const Tensor& like, TensorView view) {
  Tensor tensor = new_strided(like, view);
  view.data = tensor.mutable_data_ptr();
  return {std::move(tensor), view};
}

template <typename Call>
void set_options(Call& call, Inputs& inputs, std::int64_t stride, std::int64_t padding,
                 ProductMath math, const Text& implementation) {
  call.streams = inputs.streams;
  call.m = inputs.m();
  call.previous = inputs.previous;
  call.stride = stride;
  call.padding = padding;
  call.math = math;
  call.implementation = implementation;
}

/// Returns the result, u unless the result contains it, and the copies of float32 weights.
std::tuple<Tensor, Tensor, Tensor> li_conv_forward(const std::vector<Tensor>& x,
                                                   const std::vector<Tensor>& weights,
                                                   const std::vector<Tensor>& mix,
                                                   const std::optional<Tensor>& previous,
                                                   std::int64_t stride, std::int64_t padding,
                                                   bool packed, bool tf32, bool reduced_sums,
                                                   bool tune, const Text& implementation) {
  check(!x.empty(), "x: expected at least one tensor");
  const Tensor& first = x[0];
  const CallContext context(first);
  Inputs inputs(x, weights, mix, previous, packed);
  WeightCasts casts(context.get(), inputs.dtype());
  casts.add(inputs);
  const Tensor cast = casts.finish(first);
  LiConvForward call;
  set_options(call, inputs, stride, padding, {tf32, reduced_sums, tune}, implementation);
  const ResultSizes s(call);
  const LiConvStream& stream = call.streams[0];
  check_floating("x", first);
  if (packed) {
    auto [all, view] =
        new_image(first, channels_last_view(stream, {s.streams + 1, s.n, s.k, s.p, s.q}));
    call.u = first_streams(view, s.streams);
    call.y = stream_of(view, s.streams);
    li_conv(context.get(), call);
    return {all, new_dense(first, view.dtype, {0}), cast};
  }
  auto [u, u_view] = new_image(first, channels_last_view(stream, {s.streams, s.n, s.k, s.p, s.q}));
  auto [y, y_view] = new_image(first, channels_last_view(stream, {s.n, s.d, s.p, s.q}));
  call.u = u_view;
  call.y = y_view;
  li_conv(context.get(), call);
  return {y, u, cast};
}

/// `u` is what forward returned: the packed result, or the separate u. So is `cast`. Returns the
/// gradients of x, weights, mix and previous, in the order of `needs`.
std::vector<Tensor> li_conv_backward(
    const Tensor& gradient, const Tensor& u, const std::optional<Tensor>& cast,
    const std::vector<Tensor>& x, const std::vector<Tensor>& weights,
    const std::vector<Tensor>& mix, const std::optional<Tensor>& previous, std::int64_t stride,
    std::int64_t padding, bool packed, const std::vector<std::int64_t>& needs, bool tf32,
    bool reduced_sums, bool tune, const Text& implementation) {
  check(!x.empty(), "x: expected at least one tensor");
  const Tensor& first = x[0];
  const CallContext context(first);
  Inputs inputs(x, weights, mix, previous, packed);
  WeightCasts casts(context.get(), inputs.dtype());
  casts.add(inputs);
  casts.finish(first, cast);
  std::vector<LiConvStream>& streams = inputs.streams;
  const auto count = static_cast<std::int64_t>(streams.size());
  check(needs.size() == x.size() + 2 * streams.size() + 1, "needs: expected ",
        x.size() + 2 * streams.size() + 1, " flags, got ", needs.size());
  check_floating("gradient", gradient);
  LiConvBackward call;
  set_options(call, inputs, stride, padding, {tf32, reduced_sums, tune}, implementation);
  const Tensor dy = channels_last_tensor("gradient", gradient);
  const Tensor saved = channels_last_tensor("u", u);
  const TensorView dy_view = view_of("gradient", dy), u_view = view_of("u", saved);
  check(u_view.rank == 5 && u_view.sizes[0] == count + packed, "u: expected what forward saved");
  call.u = first_streams(u_view, count);
  if (packed) {
    check(dy_view.rank == 5 && dy_view.sizes[0] == count + 1, "gradient: expected [", count + 1,
          ", N, K, P, Q], got ", dy_view);
    call.du = first_streams(dy_view, count);
    call.dy = stream_of(dy_view, count);
  } else {
    call.dy = dy_view;
  }

  Gradients gradients(first, needs);
  if (!inputs.is_packed()) {
    for (std::size_t i = 0; i < x.size(); ++i) streams[i].dx = gradients.next(x[i]);
  } else if (gradients.next_is_needed()) {
    const TensorView all = gradients.add(new_strided(first, channels_last(view_of("x", first))));
    for (std::int64_t i = 0; i < count; ++i) streams[i].dx = stream_of(all, i);
    call.dm = stream_of(all, count);
  } else {
    gradients.skip();
  }
  for (std::size_t i = 0; i < streams.size(); ++i) streams[i].dw = gradients.next(weights[i]);
  for (std::size_t i = 0; i < streams.size(); ++i) {
    streams[i].dmix = gradients.next_kernel(mix[i], streams[i].mix);
  }
  if (previous.has_value()) {
    call.dprevious = gradients.next_kernel(*previous, call.previous);
  } else {
    gradients.skip();
  }
  call.streams = streams;
  li_conv(context.get(), call);
  gradients.finish(context.get());
  return gradients.take();
}

std::string li_conv_explain(const std::vector<Tensor>& x, const std::vector<Tensor>& weights,
                            const std::vector<Tensor>& mix, const std::optional<Tensor>& previous,
                            std::int64_t stride, std::int64_t padding, bool backward,
                            const Text& implementation) {
  check(!x.empty(), "x: expected at least one tensor");
  const Tensor& first = x[0];
  const CallContext context(first);
  Inputs inputs(x, weights, mix, previous, false);
  WeightCasts casts(context.get(), inputs.dtype());
  casts.add(inputs);
  casts.finish(first);
  LiConvForward forward;
  set_options(forward, inputs, stride, padding, {}, implementation);
  const ResultSizes s(forward);
  const LiConvStream& stream = forward.streams[0];
  forward.u = channels_last_view(stream, {s.streams, s.n, s.k, s.p, s.q});
  forward.y = channels_last_view(stream, {s.n, s.d, s.p, s.q});
  if (!backward) return to_text(explain(context.get(), forward));
  LiConvBackward call;
  set_options(call, inputs, stride, padding, {}, implementation);
  call.u = forward.u;
  call.dy = forward.y;
  return to_text(explain(context.get(), call));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusewise, FUSEWISE_DEVICE, m) {
  m.impl("_li_conv", TORCH_BOX(&li_conv_forward));
  m.impl("_li_conv_backward", TORCH_BOX(&li_conv_backward));
  m.impl("_li_conv_explain", TORCH_BOX(&li_conv_explain));
}

}  // namespace fusewise::binding

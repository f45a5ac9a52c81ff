// LINet's convolution for torch: allocation and the calls; the core does the rest. Compiled once
// per device: FUSEWISE_DEVICE is CPU or CUDA.
//
// This operator is bound by hand. A description lists an operator's tensors one by one, but this
// one has as many as its streams need.
//
// x is one tensor [S + 1, N, C, H, W], the streams and behind them the integrated one, or in the
// first layer S images [N, C_s, H, W]. With `packed` the result is [S + 1, N, K, P, Q], otherwise
// the integrated stream alone. Weights may be float32 beside half-precision x: they are cast here,
// and so are their gradients.

#include "fusewise/li_conv.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "call.h"
#include "common/check.h"
#include "common/li_conv.h"
#include "text.h"

namespace fusewise::binding {
namespace {

bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

/// Views of the inputs, and the copies that they may need.
class Inputs {
 public:
  Inputs(const std::vector<Tensor>& x, const std::vector<Tensor>& weights,
         const std::vector<Tensor>& mix, const std::optional<Tensor>& previous, bool packed) {
    check(!weights.empty(), "weights: expected at least one");
    check(mix.size() == weights.size(), "mix: expected ", weights.size(), ", one per stream, got ",
          mix.size());
    streams_.resize(weights.size());
    is_packed_ = previous.has_value();
    read_images(x);
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      in_stream(i, [&] {
        streams_[i].w = view_of("w", weights[i]);
        streams_[i].mix = kernel("mix", mix[i]);
      });
    }
    if (is_packed_) previous_ = kernel("previous", *previous);
    const TensorView &w = streams_[0].w, &first = streams_[0].mix;
    check(!packed || w.rank != 4 || first.rank != 2 || w.sizes[0] == first.sizes[0],
          "stream 0: mix: expected [", w.sizes[0], ", ", w.sizes[0],
          "], because all streams are packed into one tensor, got ", first);
  }

  /// Replaces float32 weights beside half-precision x by copies in x's type, and returns them.
  /// `made`: what this has returned for the same inputs.
  Tensor cast_weights(const Context& context, const Tensor& like,
                      const std::optional<Tensor>& made = std::nullopt) {
    const DType dtype = streams_[0].x.dtype;
    std::vector<TensorView*> found;
    const auto look_at = [&](TensorView& weight) {
      if (!weight.defined() || weight.dtype != DType::f32) return;
      weight.dtype = dtype;
      // The core's checks name a weight on another device.
      if (weight.device == context.device && weight.numel() > 0) found.push_back(&weight);
    };
    if (is_half(dtype)) {
      for (LiConvStream& stream : streams_) look_at(stream.mix);  // evenly spaced: see the core
      look_at(previous_);
      for (LiConvStream& stream : streams_) look_at(stream.w);
    }
    constexpr std::int64_t kAlignment = 128;  // elements, 256 bytes
    std::int64_t total = 0;
    for (const TensorView* weight : found) {
      total += (weight->numel() + kAlignment - 1) / kAlignment * kAlignment;
    }
    if (made.has_value()) {
      const TensorView view = view_of("cast", *made);
      check(view.rank == 1 && view.sizes[0] == total && view.strides[0] == 1 &&
                view.dtype == dtype && view.device == context.device,
            "cast: expected what forward returned");
    }
    const Tensor result = made.has_value() ? *made : new_dense(like, dtype, {total});
    copies_.push_back(result);
    auto* memory = static_cast<char*>(result.mutable_data_ptr());
    std::vector<CastPair> pairs;
    for (TensorView* weight : found) {
      TensorView from = *weight;
      from.dtype = DType::f32;
      if (!has_no_gaps(from)) {
        from = view_of("w", copies_.emplace_back(dense(tensor_of(from))));
        weight->strides = from.strides;
      }
      weight->data = memory;
      memory += (weight->numel() + kAlignment - 1) / kAlignment * kAlignment * size_of(dtype);
      pairs.push_back({from, *weight});
    }
    if (!made.has_value()) cast_all(context, pairs);
    return result;
  }

  std::vector<LiConvStream>& streams() { return streams_; }
  const TensorView& m() const { return m_; }
  const TensorView& previous() const { return previous_; }
  /// Whether x is one tensor for all streams.
  bool is_packed() const { return is_packed_; }

 private:
  void read_images(const std::vector<Tensor>& x) {
    if (!is_packed_) {
      check(x.size() == streams_.size(), "x: expected ", streams_.size(),
            " images, one per stream, got ", x.size());
      for (std::size_t i = 0; i < x.size(); ++i) {
        in_stream(i, [&] { streams_[i].x = view_of("x", x[i]); });
      }
      return;
    }
    check(x.size() == 1, "x: expected one tensor [", streams_.size() + 1,
          ", N, C, H, W] beside previous, got ", x.size());
    const TensorView all = view_of("x", x[0]);
    const auto count = static_cast<std::int64_t>(streams_.size());
    check(all.rank == 5 && all.sizes[0] == count + 1, "x: expected [", count + 1,
          ", N, C, H, W], got ", all);
    for (std::int64_t i = 0; i < count; ++i) streams_[i].x = stream_of(all, i);
    m_ = stream_of(all, count);
  }

  /// The weights of a 1x1 convolution as a dense matrix.
  TensorView kernel(const char* name, const Tensor& tensor) {
    const Tensor& held = copies_.emplace_back(dense(tensor));
    TensorView view = view_of(name, held);
    if (view.rank == 4 && view.sizes[2] == 1 && view.sizes[3] == 1) {
      view = {view.data, view.dtype, view.device, {view.sizes[0], view.sizes[1]}};
    }
    return view;
  }

  std::vector<LiConvStream> streams_;
  std::vector<Tensor> copies_;
  TensorView m_, previous_;
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

/// The tensor if it is channels-last without gaps, otherwise such a copy.
Tensor channels_last_tensor(const char* name, const Tensor& tensor) {
  const TensorView view = view_of(name, tensor);
  check(view.rank >= 4, name, ": expected at least 4 dimensions, got ", view);
  if (is_channels_last(view)) return tensor;
  Tensor made = new_strided(tensor, channels_last(view));
  copy(tensor, made);
  return made;
}

/// The first `count` streams of a packed tensor.
TensorView first_streams(TensorView packed, std::int64_t count) {
  packed.sizes[0] = count;
  return packed;
}

template <typename Call>
void set_options(Call& call, Inputs& inputs, std::int64_t stride, std::int64_t padding,
                 ProductMath math, const Text& implementation) {
  call.streams = inputs.streams();
  call.m = inputs.m();
  call.previous = inputs.previous();
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
  const Tensor cast = inputs.cast_weights(context.get(), first);
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

/// Hands out the results of backward: those that are not wanted are empty.
class Gradients {
 public:
  explicit Gradients(const Tensor& like, const std::vector<std::int64_t>& needs)
      : like_(like), dtype_(view_of("x", like).dtype), needs_(needs) {}

  bool next_is_needed() const { return needs_[found_.size()] != 0; }
  void skip() { found_.push_back(new_dense(like_, dtype_, {0})); }
  TensorView add(Tensor tensor) {
    found_.push_back(std::move(tensor));
    return view_of("gradient", found_.back());
  }
  /// Adds the gradient of a float32 weight beside half-precision x, and returns the view of a
  /// gradient in x's type that `finish` casts.
  TensorView add_weight(Tensor tensor) {
    const TensorView wide = add(std::move(tensor));
    if (wide.dtype == dtype_) return wide;
    TensorView half = wide;
    half.dtype = dtype_;
    half.data = halves_.emplace_back(new_strided(like_, half)).mutable_data_ptr();
    casts_.push_back({half, wide});
    return half;
  }
  void finish(const Context& context) { cast_all(context, casts_); }
  /// A gradient like `tensor`. Absent if it is not needed.
  TensorView next(const Tensor& tensor) {
    if (next_is_needed()) return add_weight(new_like(tensor));
    skip();
    return {};
  }
  /// The same for the weights of a 1x1 convolution, as a dense matrix.
  TensorView next_kernel(const Tensor& tensor, const TensorView& matrix) {
    if (!next_is_needed()) {
      skip();
      return {};
    }
    TensorView view = matrix;
    const DType dtype = view_of("mix", tensor).dtype;
    view.data = add_weight(new_dense(tensor, dtype, tensor.sizes())).data;
    return view;
  }
  std::vector<Tensor> take() { return std::move(found_); }

 private:
  const Tensor& like_;
  DType dtype_;
  const std::vector<std::int64_t>& needs_;
  std::vector<Tensor> found_, halves_;
  std::vector<CastPair> casts_;
};

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
  inputs.cast_weights(context.get(), first, cast);
  std::vector<LiConvStream>& streams = inputs.streams();
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
  inputs.cast_weights(context.get(), first);
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

// Checks and public functions of LINet's convolution. It is not described by a table, because it
// has as many tensors as its streams need.

#include "common/li_conv.h"

#include <algorithm>
#include <vector>

#include "common/backends.h"
#include "common/check.h"
#include "common/overlap.h"

namespace fusewise {
namespace {

constexpr bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::f16 || dtype == DType::bf16;
}

/// Compares the type and the device of all tensors with those of the first.
class Kind {
 public:
  Kind(const TensorView& first, Device device) : dtype_(first.dtype), device_(device) {
    check(is_floating(dtype_), "x: expected a floating dtype, got ", dtype_);
  }
  DType dtype() const { return dtype_; }

  void check_tensor(const char* name, const TensorView& t) const {
    check(is_floating(t.dtype), name, ": expected a floating dtype, got ", t.dtype);
    check(t.dtype == dtype_, name, ": expected x's dtype ", dtype_, ", got ", t.dtype);
    check(t.device == device_, name, ": expected a tensor on ", device_, ", got one on ", t.device);
  }

 private:
  DType dtype_;
  Device device_;
};

bool has_sizes(const TensorView& t, std::initializer_list<std::int64_t> sizes) {
  return t.rank == static_cast<int>(sizes.size()) &&
         std::equal(sizes.begin(), sizes.end(), t.sizes.begin());
}

void check_image(const char* name, const TensorView& t, const Kind& kind,
                 std::initializer_list<std::int64_t> sizes) {
  kind.check_tensor(name, t);
  TensorView expected(nullptr, t.dtype, t.device, sizes);
  check(has_sizes(t, sizes), name, ": expected ", expected, ", got ", t);
  check(is_channels_last(t), name, ": expected a channels-last tensor without gaps");
}

/// The gradient of a tensor has its shape and type.
void check_gradient(const char* name, const TensorView& gradient, const TensorView& of,
                    const Kind& kind) {
  if (!gradient.defined()) return;
  kind.check_tensor(name, gradient);
  check(gradient.rank == of.rank &&
            std::equal(of.sizes.begin(), of.sizes.begin() + of.rank, gradient.sizes.begin()),
        name, ": expected ", of, ", got ", gradient);
}

template <typename Call>
LiConvSizes check_inputs(const Call& call, const Kind& kind) {
  LiConvSizes s{};
  s.streams = static_cast<std::int64_t>(call.streams.size());
  s.dtype = kind.dtype();
  check(call.stride >= 1, "stride: expected at least 1, got ", call.stride);
  check(call.padding >= 0, "padding: expected at least 0, got ", call.padding);
  for (std::int64_t i = 0; i < s.streams; ++i) {
    const LiConvStream& stream = call.streams[i];
    in_stream(i, [&] {
      const TensorView &x = stream.x, &w = stream.w, &mix = stream.mix;
      kind.check_tensor("x", x);
      check(x.rank == 4, "x: expected [N, C, H, W], got ", x);
      const std::int64_t channels = x.sizes[1];
      check(std::min({channels, x.sizes[2], x.sizes[3]}) >= 1,
            "x: expected [N, C, H, W] with C, H and W >= 1, got ", x);
      if (i == 0) s.n = x.sizes[0], s.h = x.sizes[2], s.w = x.sizes[3];
      check(x.sizes[0] == s.n && x.sizes[2] == s.h && x.sizes[3] == s.w, "x: expected [", s.n,
            ", C, ", s.h, ", ", s.w, "], as stream 0, got ", x);
      kind.check_tensor("w", w);
      const bool square = w.rank == 4 && w.sizes[1] == channels && w.sizes[2] == w.sizes[3] &&
                          w.sizes[0] >= 1 && w.sizes[2] >= 1;
      if (i == 0) {
        check(square, "w: expected [K, ", channels, ", R, R], got ", w);
        s.k = w.sizes[0], s.r = w.sizes[2];
      }
      check(square && w.sizes[0] == s.k && w.sizes[2] == s.r, "w: expected [", s.k, ", ", channels,
            ", ", s.r, ", ", s.r, "], got ", w);
      kind.check_tensor("mix", mix);
      if (i == 0) {
        check(mix.rank == 2 && mix.sizes[1] == s.k && mix.sizes[0] >= 1, "mix: expected [D, ", s.k,
              "], got ", mix);
        s.d = mix.sizes[0];
      }
      check(has_sizes(mix, {s.d, s.k}), "mix: expected [", s.d, ", ", s.k, "], got ", mix);
      check(is_dense(mix), "mix: expected a dense tensor");
    });
  }
  const bool first_layer = !call.m.defined();
  check(call.previous.defined() != first_layer, "m and previous: expected both or none");
  if (!first_layer) {
    kind.check_tensor("m", call.m);
    const TensorView& m = call.m;
    check(m.rank == 4 && m.sizes[0] == s.n && m.sizes[1] >= 1 && m.sizes[2] == s.h &&
              m.sizes[3] == s.w,
          "m: expected [", s.n, ", E, ", s.h, ", ", s.w, "], got ", m);
    s.e = m.sizes[1];
    kind.check_tensor("previous", call.previous);
    check(has_sizes(call.previous, {s.d, s.e}), "previous: expected [", s.d, ", ", s.e, "], got ",
          call.previous);
    check(is_dense(call.previous), "previous: expected a dense tensor");
  }
  check(first_layer || s.r % 2 == 1, "w: expected an odd kernel size where m is given, got ", s.r);
  check(first_layer || call.padding == s.r / 2, "padding: expected ", s.r / 2, " for a kernel of ",
        s.r, " where m is given, got ", call.padding);
  check(call.padding < s.r, "padding: expected less than the kernel's ", s.r, ", got ",
        call.padding);
  const std::int64_t least = std::max<std::int64_t>(1, s.r - 2 * call.padding);
  check(s.h >= least && s.w >= least, "x: expected H and W >= ", least, " for a kernel of ", s.r,
        " with padding ", call.padding, ", got ", call.streams[0].x);
  s.p = convolved(s.h, s.r, call.stride, call.padding);
  s.q = convolved(s.w, s.r, call.stride, call.padding);
  return s;
}

template <typename Call>
Kind kind_of(const Call& call) {
  check(!call.streams.empty(), "streams: expected at least one");
  const TensorView& first = call.streams[0].x;
  return {first, first.device};
}

template <typename Call>
std::vector<Argument> arguments_of(const Call& call) {
  std::vector<Argument> found{{"m", call.m}, {"previous", call.previous}};
  for (int i = 0; i < static_cast<int>(call.streams.size()); ++i) {
    const LiConvStream& stream = call.streams[i];
    found.push_back({"x", stream.x, i, "stream"});
    found.push_back({"w", stream.w, i, "stream"});
    found.push_back({"mix", stream.mix, i, "stream"});
  }
  return found;
}

void check_memory(const LiConvForward& call) {
  const std::vector<Argument> outputs{{"u", call.u}, {"y", call.y}};
  check_outputs(outputs, arguments_of(call));
}

void check_memory(const LiConvBackward& call) {
  std::vector<Argument> inputs = arguments_of(call);
  inputs.push_back({"u", call.u});
  inputs.push_back({"du", call.du});
  inputs.push_back({"dy", call.dy});
  std::vector<Argument> outputs{{"dm", call.dm}, {"dprevious", call.dprevious}};
  for (int i = 0; i < static_cast<int>(call.streams.size()); ++i) {
    const LiConvStream& stream = call.streams[i];
    outputs.push_back({"dx", stream.dx, i, "stream"});
    outputs.push_back({"dw", stream.dw, i, "stream"});
    outputs.push_back({"dmix", stream.dmix, i, "stream"});
  }
  check_outputs(outputs, inputs);
}

Implementations<LiConvForward> list(Device device, const LiConvForward&) {
  return device.type == DeviceType::cpu ? cpu::li_conv_forward() : cuda::li_conv_forward();
}
Implementations<LiConvBackward> list(Device device, const LiConvBackward&) {
  return device.type == DeviceType::cpu ? cpu::li_conv_backward() : cuda::li_conv_backward();
}

template <typename Call>
void check_call(const Context& context, const Call& call) {
  check_sizes(call);
  check(call.streams[0].x.device == context.device, "stream 0: x: expected a tensor on ",
        context.device, ", got one on ", call.streams[0].x.device);
}

template <typename Call>
void run(const Context& context, const Call& call) {
  check_call(context, call);
  check_memory(call);
  const cuda::CurrentDevice current(context.device);
  run_chosen(list(context.device, call), context, call);
}

template <typename Call>
Candidates explained(const Context& context, const Call& call) {
  check_call(context, call);
  const cuda::CurrentDevice current(context.device);
  return candidates(list(context.device, call), context, call);
}

}  // namespace

LiConvSizes check_sizes(const LiConvForward& call) {
  const Kind kind = kind_of(call);
  const LiConvSizes s = check_inputs(call, kind);
  check_image("u", call.u, kind, {s.streams, s.n, s.k, s.p, s.q});
  check_image("y", call.y, kind, {s.n, s.d, s.p, s.q});
  return s;
}

LiConvSizes check_sizes(const LiConvBackward& call) {
  const Kind kind = kind_of(call);
  const LiConvSizes s = check_inputs(call, kind);
  check_image("u", call.u, kind, {s.streams, s.n, s.k, s.p, s.q});
  if (call.du.defined()) check_image("du", call.du, kind, {s.streams, s.n, s.k, s.p, s.q});
  check_image("dy", call.dy, kind, {s.n, s.d, s.p, s.q});
  for (std::int64_t i = 0; i < s.streams; ++i) {
    const LiConvStream& stream = call.streams[i];
    in_stream(i, [&] {
      check_gradient("dx", stream.dx, stream.x, kind);
      check_gradient("dw", stream.dw, stream.w, kind);
      check_gradient("dmix", stream.dmix, stream.mix, kind);
      check(!stream.dmix.defined() || is_dense(stream.dmix), "dmix: expected a dense tensor");
    });
  }
  if (call.dm.defined() || call.dprevious.defined()) {
    check(call.m.defined(), "dm and dprevious: expected none, because there is no m");
    check_gradient("dm", call.dm, call.m, kind);
    check_gradient("dprevious", call.dprevious, call.previous, kind);
    check(!call.dprevious.defined() || is_dense(call.dprevious),
          "dprevious: expected a dense tensor");
  }
  return s;
}

bool has_no_gaps(const TensorView& t) {
  if (!t.defined()) return true;
  std::int64_t last = 0;
  for (int d = 0; d < t.rank; ++d) last += (t.sizes[d] - 1) * t.strides[d];
  return last + 1 == t.numel();
}

bool is_channels_last(const TensorView& t) {
  if (t.numel() == 0) return true;
  std::int64_t stride = 1;
  for (const int d : {t.rank - 3, t.rank - 1, t.rank - 2, t.rank - 4, t.rank - 5}) {
    if (d < 0) break;
    if (t.sizes[d] > 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

TensorView stream_of(const TensorView& packed, std::int64_t stream) {
  TensorView one = packed;
  if (packed.data != nullptr) {
    one.data = static_cast<char*>(packed.data) + stream * packed.strides[0] * size_of(packed.dtype);
  }
  one.rank = packed.rank - 1;
  for (int d = 0; d < packed.rank; ++d) {
    one.sizes[d] = d < one.rank ? packed.sizes[d + 1] : 0;
    one.strides[d] = d < one.rank ? packed.strides[d + 1] : 0;
  }
  return one;
}

TensorView as_matrix(const TensorView& image) {
  return {image.data,
          image.dtype,
          image.device,
          {image.sizes[0] * image.sizes[2] * image.sizes[3], image.sizes[1]}};
}

TensorView every(std::int64_t t, TensorView image) {
  for (const int d : {2, 3}) {
    image.sizes[d] = (image.sizes[d] + t - 1) / t;
    image.strides[d] *= t;
  }
  return image;
}

void li_conv(const Context& context, const LiConvForward& call) { run(context, call); }
void li_conv(const Context& context, const LiConvBackward& call) { run(context, call); }

Candidates explain(const Context& context, const LiConvForward& call) {
  return explained(context, call);
}
Candidates explain(const Context& context, const LiConvBackward& call) {
  return explained(context, call);
}

}  // namespace fusewise

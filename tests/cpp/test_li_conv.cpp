// LINet's convolution on the CPU against plain loops in float64, with the library's own
// convolutions and with a context's.

#include "fusewise/li_conv.h"

#include "message_of.h"
#include "plain_gemm.h"
#include "reference.h"

namespace fusewise::testing {
namespace {

struct LiSizes {
  Index n = 2, d = 5, k = 5, h = 7, w = 6, kernel = 3, stride = 1, e = 5;
  std::vector<Index> channels{4, 4};
  bool has_m = true, has_du = true;
};

Tensor channels_last(DType dtype, std::vector<Index> sizes) {
  const std::size_t r = sizes.size();
  std::vector<Index> strides(r, 0);
  Index stride = 1;
  for (const std::size_t d : {r - 3, r - 1, r - 2, r - 4}) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  if (r == 5) strides[0] = stride;
  return Tensor(dtype, sizes, strides);
}

struct Stream {
  Tensor x, w, mix, dx, dw, dmix;
};

/// The tensors of a call by value.
struct LiCase {
  LiSizes sizes;
  Index p, q;
  std::vector<Stream> streams;
  Tensor m, previous, u, y, du, dy, dm, dprevious;

  LiCase(const LiSizes& s, DType dtype, Layout layout = Layout::channels_last) : sizes(s) {
    const Index pad = s.kernel / 2;
    p = convolved(s.h, s.kernel, s.stride, pad), q = convolved(s.w, s.kernel, s.stride, pad);
    unsigned seed = 1;
    const auto image_of = [&](Index c) { return image(dtype, layout, s.n, c, s.h, s.w); };
    for (const Index c : s.channels) {
      Stream stream;
      stream.x = image_of(c).fill(seed++);
      stream.dx = image_of(c);
      stream.w = image(dtype, layout, s.k, c, s.kernel, s.kernel).fill(seed++, 0.3);
      stream.dw = image(dtype, layout, s.k, c, s.kernel, s.kernel);
      stream.mix = Tensor(dtype, {s.d, s.k}).fill(seed++, 0.5);
      stream.dmix = Tensor(dtype, {s.d, s.k});
      streams.push_back(stream);
    }
    const auto count = static_cast<Index>(streams.size());
    if (s.has_m) {
      m = image_of(s.e).fill(seed++);
      dm = image_of(s.e);
      previous = Tensor(dtype, {s.d, s.e}).fill(seed++, 0.5);
      dprevious = Tensor(dtype, {s.d, s.e});
    }
    u = channels_last(dtype, {count, s.n, s.k, p, q});
    y = channels_last(dtype, {s.n, s.d, p, q});
    if (s.has_du) du = channels_last(dtype, {count, s.n, s.k, p, q}).fill(seed++);
    dy = channels_last(dtype, {s.n, s.d, p, q}).fill(seed++);
    for (Tensor* t : {&u, &y, &dm, &dprevious}) {
      if (t->defined()) t->poison();
    }
    for (Stream& stream : streams) {
      for (Tensor* t : {&stream.dx, &stream.dw, &stream.dmix}) t->poison();
    }
  }

  std::vector<LiConvStream> views() const {
    std::vector<LiConvStream> made;
    for (const Stream& s : streams) {
      made.push_back(
          {s.x.view(), s.w.view(), s.mix.view(), s.dx.view(), s.dw.view(), s.dmix.view()});
    }
    return made;
  }
  template <typename Call>
  void set(Call& call, std::span<const LiConvStream> views) const {
    call.streams = views;
    call.m = m.view(), call.previous = previous.view();
    call.stride = sizes.stride, call.padding = sizes.kernel / 2;
  }
  LiConvForward forward(std::span<const LiConvStream> views) const {
    LiConvForward call;
    set(call, views);
    call.u = u.view(), call.y = y.view();
    return call;
  }
  LiConvBackward backward(std::span<const LiConvStream> views) const {
    LiConvBackward call;
    set(call, views);
    call.u = u.view(), call.du = du.view(), call.dy = dy.view();
    call.dm = dm.view(), call.dprevious = dprevious.view();
    return call;
  }

  Index at_x(const Tensor& x, Index n, Index c, Index h, Index w) const {
    const auto& s = x.view().sizes;
    return ((n * s[1] + c) * s[2] + h) * s[3] + w;
  }
  /// The pixel of x that tap (r, s) of output pixel (i, j) reads, or -1 in the padding.
  std::pair<Index, Index> read(Index i, Index j, Index r, Index s) const {
    const Index h = i * sizes.stride - sizes.kernel / 2 + r;
    const Index w = j * sizes.stride - sizes.kernel / 2 + s;
    return h < 0 || h >= sizes.h || w < 0 || w >= sizes.w ? std::pair<Index, Index>(-1, -1)
                                                          : std::pair(h, w);
  }
};

/// Calls each(n, k, i, j, c, r, s, h, w) for every product of a stream's convolution.
template <typename Each>
void for_products(const LiCase& t, const Stream& stream, const Each& each) {
  const LiSizes& z = t.sizes;
  const Index channels = stream.x.view().sizes[1];
  for (Index n = 0; n < z.n; ++n)
    for (Index k = 0; k < z.k; ++k)
      for (Index i = 0; i < t.p; ++i)
        for (Index j = 0; j < t.q; ++j)
          for (Index c = 0; c < channels; ++c)
            for (Index r = 0; r < z.kernel; ++r)
              for (Index s = 0; s < z.kernel; ++s) {
                const auto [h, w] = t.read(i, j, r, s);
                if (h >= 0) each(n, k, i, j, c, r, s, h, w);
              }
}

Values done(const std::vector<Sum>& sums, double eps) {
  Values values;
  for (const Sum& sum : sums) values.push_back(sum.done(eps));
  return values;
}

/// Adds the rounding of intermediate results, whose magnitudes are together at most the sum's.
Values with_rounding(const std::vector<Sum>& sums, DType dtype) {
  Values values = done(sums, epsilon(sum_type(dtype)));
  for (std::size_t i = 0; i < sums.size(); ++i) {
    values[i].error += epsilon(dtype) * sums[i].magnitude;
  }
  return values;
}

void expect_forward(const LiCase& t) {
  const DType dtype = t.y.dtype();
  const double eps = epsilon(sum_type(dtype));
  const LiSizes& z = t.sizes;
  const Index pixels = t.p * t.q;
  std::vector<Sum> u(t.u.numel()), y(t.y.numel());
  for (std::size_t i = 0; i < t.streams.size(); ++i) {
    const Stream& stream = t.streams[i];
    Sum* own = u.data() + i * z.n * z.k * pixels;
    for_products(
        t, stream,
        [&](Index n, Index k, Index p, Index q, Index c, Index r, Index s, Index h, Index w) {
          own[((n * z.k + k) * t.p + p) * t.q + q].add(stream.x.get(t.at_x(stream.x, n, c, h, w)),
                                                       stream.w.get(t.at_x(stream.w, k, c, r, s)));
        });
  }
  EXPECT_TRUE(all_close(t.u, done(u, eps))) << "u";
  // From u as it was stored.
  for (Index n = 0; n < z.n; ++n)
    for (Index d = 0; d < z.d; ++d)
      for (Index i = 0; i < pixels; ++i) {
        Sum& sum = y[(n * z.d + d) * pixels + i];
        for (std::size_t s = 0; s < t.streams.size(); ++s)
          for (Index k = 0; k < z.k; ++k) {
            sum.add(t.streams[s].mix.get(d * z.k + k),
                    t.u.get(((static_cast<Index>(s) * z.n + n) * z.k + k) * pixels + i));
          }
        if (!t.m.defined()) continue;
        for (Index e = 0; e < z.e; ++e) {
          sum.add(t.previous.get(d * z.e + e),
                  t.m.get(t.at_x(t.m, n, e, i / t.q * z.stride, i % t.q * z.stride)));
        }
      }
  EXPECT_TRUE(all_close(t.y, done(y, eps))) << "y";
}

void expect_backward(const LiCase& t) {
  const DType dtype = t.y.dtype();
  const double eps = epsilon(sum_type(dtype));
  const LiSizes& z = t.sizes;
  const Index pixels = t.p * t.q;
  for (std::size_t i = 0; i < t.streams.size(); ++i) {
    SCOPED_TRACE(i);
    const Stream& stream = t.streams[i];
    const Index first = static_cast<Index>(i) * z.n * z.k * pixels;
    std::vector<Sum> g(z.n * z.k * pixels), dmix(z.d * z.k);
    for (Index n = 0; n < z.n; ++n)
      for (Index k = 0; k < z.k; ++k)
        for (Index j = 0; j < pixels; ++j) {
          Sum& sum = g[(n * z.k + k) * pixels + j];
          if (t.du.defined()) sum.add(t.du.get(first + (n * z.k + k) * pixels + j));
          for (Index d = 0; d < z.d; ++d) {
            const double dy = t.dy.get((n * z.d + d) * pixels + j);
            sum.add(stream.mix.get(d * z.k + k), dy);
            dmix[d * z.k + k].add(dy, t.u.get(first + (n * z.k + k) * pixels + j));
          }
        }
    EXPECT_TRUE(all_close(stream.dmix, done(dmix, eps))) << "dmix";
    const Values gradient = with_rounding(g, dtype);
    std::vector<Sum> dx(stream.x.numel()), dw(stream.w.numel());
    for_products(
        t, stream,
        [&](Index n, Index k, Index p, Index q, Index c, Index r, Index s, Index h, Index w) {
          const Bounded& dz = gradient[((n * z.k + k) * t.p + p) * t.q + q];
          const Index x = t.at_x(stream.x, n, c, h, w), weight = t.at_x(stream.w, k, c, r, s);
          dx[x].add(stream.w.get(weight), dz);
          dw[weight].add(stream.x.get(x), dz);
        });
    EXPECT_TRUE(all_close(stream.dx, with_rounding(dx, dtype))) << "dx";
    EXPECT_TRUE(all_close(stream.dw, with_rounding(dw, dtype))) << "dw";
  }
  if (!t.m.defined()) return;
  std::vector<Sum> dm(t.m.numel()), dprevious(z.d * z.e);
  for (Index n = 0; n < z.n; ++n)
    for (Index d = 0; d < z.d; ++d)
      for (Index j = 0; j < pixels; ++j)
        for (Index e = 0; e < z.e; ++e) {
          const Index at = t.at_x(t.m, n, e, j / t.q * z.stride, j % t.q * z.stride);
          const double dy = t.dy.get((n * z.d + d) * pixels + j);
          dm[at].add(t.previous.get(d * z.e + e), dy);
          dprevious[d * z.e + e].add(t.m.get(at), dy);
        }
  EXPECT_TRUE(all_close(t.dm, done(dm, eps))) << "dm";
  EXPECT_TRUE(all_close(t.dprevious, done(dprevious, eps))) << "dprevious";
}

void expect_right(LiCase t, const Context& context = {}, std::string_view implementation = {}) {
  const auto views = t.views();
  LiConvForward forward = t.forward(views);
  forward.implementation = implementation;
  li_conv(context, forward);
  expect_forward(t);
  LiConvBackward backward = t.backward(views);
  backward.implementation = implementation;
  li_conv(context, backward);
  expect_backward(t);
}

constexpr DType kTypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16};

TEST(LiConv, EveryTypeAndImplementation) {
  for (const DType dtype : kTypes) {
    SCOPED_TRACE(name_of(dtype));
    const LiCase t({}, dtype);
    const auto views = t.views();
    for (const Candidate& candidate : explain({}, t.forward(views))) {
      SCOPED_TRACE(candidate.name);
      if (candidate.able) expect_right(t, {}, candidate.name);
    }
  }
}

TEST(LiConv, Sizes) {
  const LiSizes each[] = {
      {.stride = 2},
      {.kernel = 1, .stride = 2},
      {.kernel = 1},
      {.h = 8, .w = 9, .kernel = 7, .stride = 2, .channels = {3, 1, 1}, .has_m = false},
      {.n = 1, .d = 3, .k = 7, .h = 1, .w = 1, .channels = {2}},
      {.d = 17, .k = 33, .e = 9, .channels = {5, 5, 5, 5, 5}, .has_du = false},
      {.n = 3, .h = 20, .w = 31, .stride = 3},
  };
  for (const LiSizes& sizes : each) {
    SCOPED_TRACE(&sizes - each);
    for (const DType dtype : {DType::f32, DType::bf16}) expect_right({sizes, dtype});
  }
}

TEST(LiConv, Layouts) {
  for (const Layout layout : {Layout::nchw, Layout::sliced, Layout::channels_last_sliced,
                              Layout::transposed, Layout::misaligned}) {
    SCOPED_TRACE(static_cast<int>(layout));
    expect_right({{.stride = 2}, DType::f32, layout});
    expect_right({{}, DType::f16, layout});
  }
}

/// More pixels than one block of rows has.
TEST(LiConv, ManyBlocks) {
  expect_right({{.n = 1, .d = 3, .k = 2, .h = 90, .w = 110, .e = 3, .channels = {30}}, DType::f64});
}

/// At most as many pixels as channels.
TEST(LiConv, FewPixels) {
  for (const Layout layout : {Layout::channels_last, Layout::nchw, Layout::sliced}) {
    for (const Index stride : {1, 2}) {
      for (const DType dtype : kTypes) {
        SCOPED_TRACE(name_of(dtype));
        expect_right({{.n = 3, .d = 9, .k = 40, .h = 3, .w = 4, .stride = stride}, dtype, layout});
      }
    }
  }
}

TEST(LiConv, GemmOfTheContext) {
  for (const Index kernel : {1, 3}) {
    for (const Index stride : {1, 2}) {
      for (const DType dtype : {DType::f32, DType::f64}) {
        PlainGemm gemm;
        expect_right({{.kernel = kernel, .stride = stride}, dtype}, with(gemm));
        EXPECT_GT(gemm.sums, 0) << "the integration adds to the streams before";
      }
    }
  }
}

TEST(LiConv, OnlyWhatIsWanted) {
  const LiCase all({}, DType::f32);
  const auto views = all.views();
  li_conv({}, all.forward(views));
  li_conv({}, all.backward(views));
  const TensorView absent;
  for (const auto member : {&LiConvStream::dx, &LiConvStream::dw, &LiConvStream::dmix}) {
    LiCase t({}, DType::f32);
    auto some = t.views();
    li_conv({}, t.forward(some));
    for (LiConvStream& stream : some) {
      for (const auto other : {&LiConvStream::dx, &LiConvStream::dw, &LiConvStream::dmix}) {
        if (other != member) stream.*other = absent;
      }
    }
    LiConvBackward call = t.backward(some);
    call.dm = call.dprevious = absent;
    const LiCase before = t;
    li_conv({}, call);
    for (std::size_t i = 0; i < some.size(); ++i) {
      const Stream &got = t.streams[i], &full = all.streams[i], &old = before.streams[i];
      const auto expect_same = [&](auto of, auto name) {
        EXPECT_EQ((got.*of).memory(), (name == member ? full.*of : old.*of).memory());
      };
      expect_same(&Stream::dx, &LiConvStream::dx);
      expect_same(&Stream::dw, &LiConvStream::dw);
      expect_same(&Stream::dmix, &LiConvStream::dmix);
    }
    EXPECT_EQ(t.dm.memory(), before.dm.memory());
  }
}

/// The terms that dx and dm hold are still there, once.
TEST(LiConv, AddsToGradients) {
  struct {
    LiSizes sizes;
    DType dtype;
    Layout layout;
  } const each[] = {
      {{}, DType::f32, Layout::channels_last},
      {{.stride = 2}, DType::f64, Layout::channels_last},
      {{.kernel = 1, .stride = 2}, DType::bf16, Layout::nchw},
      {{.kernel = 1}, DType::f32, Layout::channels_last},
      {{.n = 1, .d = 9, .k = 40, .h = 3, .w = 4}, DType::f32, Layout::channels_last},
      {{.stride = 2}, DType::f16, Layout::channels_last_sliced},
  };
  for (const auto& [sizes, dtype, layout] : each) {
    SCOPED_TRACE(name_of(dtype));
    LiCase plain(sizes, dtype, layout), added(sizes, dtype, layout);
    const auto views = plain.views();
    li_conv({}, plain.forward(views));
    li_conv({}, plain.backward(views));
    const auto sums = added.views();
    li_conv({}, added.forward(sums));
    unsigned seed = 100;
    std::vector<std::pair<Tensor*, const Tensor*>> pairs{{&added.dm, &plain.dm}};
    for (std::size_t i = 0; i < added.streams.size(); ++i) {
      pairs.emplace_back(&added.streams[i].dx, &plain.streams[i].dx);
    }
    std::vector<Values> expected;
    for (const auto& [sum, gradient] : pairs) {
      sum->fill(seed++);
      Values& wanted = expected.emplace_back();
      for (Index i = 0; i < sum->numel(); ++i) {
        const double term = sum->get(i), other = gradient->get(i);
        wanted.push_back({term + other, 2 * epsilon(dtype) * (std::abs(term) + std::abs(other))});
      }
    }
    LiConvBackward call = added.backward(sums);
    call.add = true;
    li_conv({}, call);
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      EXPECT_TRUE(all_close(*pairs[i].first, expected[i])) << i;
    }
    EXPECT_EQ(added.dprevious.memory(), plain.dprevious.memory());
    EXPECT_EQ(added.streams[0].dw.memory(), plain.streams[0].dw.memory());
  }
}

TEST(LiConv, NoSamples) {
  LiCase t({.n = 0}, DType::f32);
  const auto views = t.views();
  li_conv({}, t.forward(views));
  li_conv({}, t.backward(views));
  for (const Stream& stream : t.streams) {
    for (const Tensor* gradient : {&stream.dw, &stream.dmix}) {
      EXPECT_TRUE(all_close(*gradient, Values(gradient->numel(), Bounded{0, 0})));
    }
  }
  EXPECT_TRUE(all_close(t.dprevious, Values(t.dprevious.numel(), Bounded{0, 0})));
}

/// Counts its calls, and gives constants.
class Constants : public Convolution {
 public:
  int forwards = 0, backwards = 0, adds = 0;

  void forward(const TensorView& x, const TensorView& w, std::int64_t stride, std::int64_t padding,
               const TensorView& y) override {
    ++forwards;
    EXPECT_EQ(x.sizes[1], w.sizes[1]);
    EXPECT_EQ(y.sizes[2], convolved(x.sizes[2], w.sizes[2], stride, padding));
    EXPECT_TRUE(y.strides[1] == 1 || y.sizes[1] == 1);
    fill(y, 2);
  }
  void backward(const TensorView& dy, const TensorView&, const TensorView&, std::int64_t,
                std::int64_t, const TensorView& dx, const TensorView& dw, bool add) override {
    ++backwards;
    adds += add;
    EXPECT_TRUE(dy.strides[1] == 1 || dy.sizes[1] == 1);
    if (dx.defined()) fill(dx, 3);
    if (dw.defined()) fill(dw, 4);
  }

 private:
  static void fill(const TensorView& t, float value) {
    std::fill_n(static_cast<float*>(t.data), t.numel(), value);
  }
};

TEST(LiConv, ConvolutionOfTheContext) {
  Constants convolution;
  Context context;
  context.convolution = &convolution;
  LiCase t({}, DType::f32);
  auto views = t.views();
  li_conv(context, t.forward(views));
  EXPECT_EQ(convolution.forwards, 2);
  EXPECT_TRUE(all_close(t.u, Values(t.u.numel(), Bounded{2, 0})));
  views[1].dx = views[1].dw = {};
  li_conv(context, t.backward(views));
  EXPECT_EQ(convolution.backwards, 1);
  EXPECT_EQ(convolution.adds, 0);
  EXPECT_TRUE(all_close(t.streams[0].dx, Values(t.streams[0].dx.numel(), Bounded{3, 0})));
  EXPECT_TRUE(all_close(t.streams[0].dw, Values(t.streams[0].dw.numel(), Bounded{4, 0})));
  LiConvBackward call = t.backward(views);
  call.add = true;
  li_conv(context, call);
  EXPECT_EQ(convolution.adds, 1);
}

/// The library's GEMM is faster there.
TEST(LiConv, ConvolutionsThatAreGemms) {
  const LiSizes each[] = {{.kernel = 1}, {.kernel = 1, .stride = 2}, {.n = 1, .k = 42}};
  for (const LiSizes& sizes : each) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      Constants convolution;
      Context context;
      context.convolution = &convolution;
      expect_right({sizes, dtype}, context);
      EXPECT_EQ(convolution.forwards + convolution.backwards, 0);
    }
  }
}

// Errors. ----------------------------------------------------------------------------------------

class LiConvErrors : public ::testing::Test {
 protected:
  LiCase t{{}, DType::f32};
  std::vector<LiConvStream> views = t.views();

  void expect(const std::string& message) {
    const LiCase before = t;
    EXPECT_EQ(message_of([&] { li_conv({}, forward); }), message);
    if (message.find("memory") == std::string::npos) {
      EXPECT_THROW(explain({}, forward), Error);
    }
    EXPECT_EQ(t.u.memory(), before.u.memory());
    EXPECT_EQ(t.y.memory(), before.y.memory());
    forward = t.forward(views = t.views());
  }

  LiConvForward forward = t.forward(views);
};

TEST_F(LiConvErrors, Shapes) {
  forward.streams = {};
  expect("streams: expected at least one");
  views[1].x.sizes[2] = 6;
  expect("stream 1: x: expected [2, C, 7, 6], as stream 0, got [2, 4, 6, 6]");
  views[0].x.rank = 3;
  expect("stream 0: x: expected [N, C, H, W], got [2, 4, 7]");
  views[0].x.sizes[3] = 0;
  expect("stream 0: x: expected [N, C, H, W] with C, H and W >= 1, got [2, 4, 7, 0]");
  views[0].w.sizes[3] = 2;
  expect("stream 0: w: expected [K, 4, R, R], got [5, 4, 3, 2]");
  views[1].w.sizes[0] = 4;
  expect("stream 1: w: expected [5, 4, 3, 3], got [4, 4, 3, 3]");
  views[0].mix.sizes[1] = 4;
  expect("stream 0: mix: expected [D, 5], got [5, 4]");
  views[1].mix.sizes[0] = 4;
  expect("stream 1: mix: expected [5, 5], got [4, 5]");
  forward.m.sizes[3] = 5;
  expect("m: expected [2, E, 7, 6], got [2, 5, 7, 5]");
  forward.previous.sizes[1] = 4;
  expect("previous: expected [5, 5], got [5, 4]");
  forward.previous = {};
  expect("m and previous: expected both or none");
  forward.u.sizes[0] = 3;
  expect("u: expected [2, 2, 5, 7, 6], got [3, 2, 5, 7, 6]");
  forward.y.strides = t.m.view().strides;
  forward.y.strides[1] = 2;
  expect("y: expected a channels-last tensor without gaps");
}

TEST_F(LiConvErrors, Numbers) {
  forward.stride = 0;
  expect("stride: expected at least 1, got 0");
  forward.padding = -1;
  expect("padding: expected at least 0, got -1");
  forward.padding = 0;
  expect("padding: expected 1 for a kernel of 3 where m is given, got 0");
  t = LiCase({.h = 2, .has_m = false}, DType::f32);
  forward = t.forward(views = t.views());
  forward.padding = std::int64_t{1} << 62;
  expect("padding: expected less than the kernel's 3, got 4611686018427387904");
  forward.padding = 0;
  expect("x: expected H and W >= 3 for a kernel of 3 with padding 0, got [2, 4, 2, 6]");
}

TEST_F(LiConvErrors, Kinds) {
  views[1].x.dtype = DType::f64;
  expect("stream 1: x: expected x's dtype float32, got float64");
  views[1].w.dtype = DType::i64;
  expect("stream 1: w: expected a floating dtype, got int64");
  views[1].mix.device = {DeviceType::cuda, 0};
  expect("stream 1: mix: expected a tensor on cpu, got one on cuda:0");
  forward.u = forward.y;
  expect("u: expected [2, 2, 5, 7, 6], got [2, 5, 7, 6]");
  forward.y.data = forward.m.data;
  expect("y: expected memory that no other tensor of the call uses, got memory that overlaps m");
  views[1].x.data = forward.u.data;
  expect(
      "u: expected memory that no other tensor of the call uses, got memory that overlaps "
      "stream 1: x");
  forward.implementation = "none";
  const std::string message = message_of([&] { li_conv({}, forward); });
  EXPECT_EQ(message.rfind("implementation: there is none named 'none'", 0), 0u) << message;
}

TEST_F(LiConvErrors, Backward) {
  LiConvBackward call = t.backward(views);
  call.dy = {};
  EXPECT_NE(message_of([&] { li_conv({}, call); }).find("dy: expected"), std::string::npos);
  call = t.backward(views);
  views[1].dw.sizes[0] = 4;
  EXPECT_EQ(message_of([&] { li_conv({}, call); }),
            "stream 1: dw: expected [5, 4, 3, 3], got [4, 4, 3, 3]");
  t = LiCase({.has_m = false}, DType::f32);
  call = t.backward(views = t.views());
  call.dm = t.streams[0].dx.view();
  EXPECT_EQ(message_of([&] { li_conv({}, call); }),
            "dm and dprevious: expected none, because there is no m");
}

}  // namespace
}  // namespace fusewise::testing

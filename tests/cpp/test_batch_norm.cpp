// BatchNorm + activation on the CPU, every implementation that this machine has against plain loops
// in float64.

#include <thread>

#include "batch_norm_reference.h"
#include "message_of.h"

namespace fusewise::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

/// Runs a loop on as many threads as it was told, each range on a thread of its own.
class Fixed : public Executor {
 public:
  explicit Fixed(int threads) : threads_(threads) {}
  int threads() const override { return threads_; }
  void parallel_for(std::int64_t count, Body body, void* state) override {
    std::vector<std::thread> running;
    for (int t = 0; t < threads_; ++t) {
      const Index begin = count * t / threads_, end = count * (t + 1) / threads_;
      if (begin < end) running.emplace_back([=] { body(begin, end, state); });
    }
    for (std::thread& thread : running) thread.join();
  }

 private:
  int threads_;
};

void run_forward(BatchNorm& call, std::string_view implementation, const Context& context = {}) {
  BatchNormActForward arguments = call.forward();
  arguments.implementation = implementation;
  batch_norm_act(context, arguments);
}
void run_backward(BatchNorm& call, std::string_view implementation, const Context& context = {}) {
  BatchNormActBackward arguments = call.backward();
  arguments.implementation = implementation;
  batch_norm_act(context, arguments);
}

void expect_close(const Tensor& got, const Values& expected, const char* name) {
  if (!got.defined()) return;
  EXPECT_TRUE(all_close(got, expected)) << name;
}

/// Runs both directions. Backward uses what forward saved.
void expect_right(BatchNorm& call, std::string_view implementation, const Context& context = {}) {
  BatchNormReference expected = batch_norm_forward_reference(call);
  const Index tracked = call.tracked + call.training;
  run_forward(call, implementation, context);
  expect_close(call.y, expected.y, "y");
  expect_close(call.mean, expected.mean, "mean");
  expect_close(call.inverse, expected.inverse, "inverse_deviation");
  expect_close(call.running_mean, expected.running_mean, "running_mean");
  expect_close(call.running_var, expected.running_var, "running_var");
  EXPECT_EQ(call.tracked, tracked);

  expected = batch_norm_backward_reference(call);
  run_backward(call, implementation, context);
  expect_close(call.dx, expected.dx, "dx");
  expect_close(call.dweight, expected.dweight, "dweight");
  expect_close(call.dbias, expected.dbias, "dbias");
  if (call.residual.defined()) expect_close(call.dresidual, expected.dresidual, "dresidual");
}

BatchNorm make(const ImageSizes& sizes, DType dtype = DType::f32, Layout layout = Layout::nchw,
               bool residual = true) {
  return make_batch_norm(sizes, dtype, dtype, layout, layout, residual);
}

std::vector<std::string> available() {
  const BatchNorm call = make({0, 2, 1, 1, 1});
  std::vector<std::string> names;
  for (const Candidate& candidate : explain(Context{}, call.forward())) {
    if (candidate.declined.empty()) names.push_back(candidate.name);
  }
  return names;
}

class BatchNormOnCpu : public ::testing::TestWithParam<std::string> {};

std::string case_name(const BatchNorm& call, int layout = -1, int other = -1) {
  const ImageSizes& z = call.sizes;
  std::string name = "S, N, C, H, W =";
  for (const Index size : {z.s, z.n, z.c, z.h, z.w}) name += " " + std::to_string(size);
  return name + "; " + name_of(call.x.dtype()) + ", weights " + name_of(call.weight.dtype()) +
         ", " + name_of(call.activation) + (call.residual.defined() ? ", residual" : "") +
         (call.training ? ", training" : "") + ", layouts " + std::to_string(layout) + " and " +
         std::to_string(other);
}

struct Types {
  DType data, weights;
};
constexpr Types kTypes[] = {{DType::f32, DType::f32},   {DType::f64, DType::f64},
                            {DType::f16, DType::f16},   {DType::f16, DType::f32},
                            {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};
constexpr DType kData[] = {DType::f32, DType::f64, DType::f16, DType::bf16};
constexpr Layout kNative[] = {Layout::nchw, Layout::channels_last};

TEST_P(BatchNormOnCpu, EveryTypeAndLayout) {
  int turn = 0;
  for (const Types types : kTypes) {
    for (const Layout layout : kLayouts) {
      for (const Layout other : kLayouts) {
        const ImageSizes sizes{turn % 3 == 0 ? 2 : 0, 3, 19, 5, 7};
        BatchNorm call =
            make_batch_norm(sizes, types.data, types.weights, layout, other, turn % 4 != 0);
        call.activation = kBatchNormActivations[turn++ % std::size(kBatchNormActivations)];
        SCOPED_TRACE(case_name(call, static_cast<int>(layout), static_cast<int>(other)));
        expect_right(call, GetParam());
      }
    }
  }
}

TEST_P(BatchNormOnCpu, EveryActivationAndMode) {
  for (const DType dtype : kData) {
    for (const Layout layout : kNative) {
      for (const Activation activation : kBatchNormActivations) {
        for (const bool residual : {false, true}) {
          for (const int mode : {0, 1, 2, 3}) {
            BatchNorm call = make({0, 2, 17, 6, 3}, dtype, layout, residual);
            call.activation = activation;
            call.training = mode % 2 == 0;
            if (mode >= 2) call.running_mean = call.running_var = Tensor();
            SCOPED_TRACE(case_name(call, static_cast<int>(layout)));
            expect_right(call, GetParam());
          }
        }
      }
    }
  }
}

TEST_P(BatchNormOnCpu, EverySize) {
  const ImageSizes all[] = {
      {0, 2, 1, 1, 1},   {0, 1, 1, 7, 5},   {0, 5, 3, 1, 1},   {0, 37, 65, 1, 1}, {2, 3, 17, 7, 5},
      {3, 2, 65, 7, 5},  {1, 4, 3, 7, 5},   {0, 1, 2, 70, 91}, {0, 2, 65, 31, 9}, {0, 9, 16, 4, 4},
      {0, 2, 300, 3, 7}, {2, 1, 3, 67, 64}, {0, 200, 3, 7, 7}};
  int turn = 0;
  for (const DType dtype : kData) {
    for (const ImageSizes& sizes : all) {
      for (const Layout layout : kNative) {
        BatchNorm call = make(sizes, dtype, layout, turn % 3 != 0);
        call.activation = kBatchNormActivations[turn++ % std::size(kBatchNormActivations)];
        SCOPED_TRACE(case_name(call, static_cast<int>(layout)));
        expect_right(call, GetParam());
      }
    }
  }
}

TEST_P(BatchNormOnCpu, StatisticsDoNotCancel) {
  struct Case {
    DType dtype;
    double mean, deviation, first;
  };
  for (const Case& c : {Case{DType::f32, 1e4, 1e-2, 1e4},
                        {DType::f32, 1e4, 1e-2, 0},
                        {DType::f32, -3, 0, -3},
                        {DType::f16, 1000, 1, 1000},
                        {DType::bf16, 100, 1, 100},
                        {DType::f64, 1e4, 1e-2, 1e4}}) {
    for (const Layout layout : kNative) {
      BatchNorm call = make({0, 4, 5, 30, 31}, c.dtype, layout);
      for (Index i = 0; i < call.x.numel(); ++i) {
        call.x.set(i, c.mean + c.deviation * call.x.get(i) / 2);
      }
      for (Index channel = 0; channel < 5; ++channel) call.x.set(channel * 930, c.first);
      SCOPED_TRACE(case_name(call, static_cast<int>(layout)));
      expect_right(call, GetParam());
    }
  }
}

TEST_P(BatchNormOnCpu, BlankedSamplesDoNotMatter) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::sliced}) {
      for (const ImageSizes& sizes : {ImageSizes{3, 3, 9, 3, 5}, {3, 3, 9, 1, 1}}) {
        for (const bool training : {true, false}) {
          BatchNorm call = make(sizes, dtype, layout);
          call.training = training;
          // The second stream keeps one sample, the third one none.
          call.blanked = {0, 1, 0, 1, 0, 1, 1, 1, 1};
          const Index volume = sizes.c * sizes.pixels();
          for (Index i = 0; i < call.x.numel(); ++i) {
            if (!call.blanked[i / volume]) continue;
            call.x.set(i, kNaN);
            call.residual.set(i, kNaN);
            call.dy.set(i, kNaN);
          }
          SCOPED_TRACE(case_name(call, static_cast<int>(layout)));
          expect_right(call, GetParam());
        }
      }
    }
  }
}

TEST_P(BatchNormOnCpu, StatisticsOfAGroup) {
  for (const Layout layout : kNative) {
    for (const Index samples : {2, 0}) {
      BatchNorm call = make({2, samples, 5, 3, 3}, DType::f32, layout);
      call.group = Tensor(DType::f32, {2, 3, 5}).fill(8);
      call.gradient_group = Tensor(DType::f32, {2, 3, 5}).fill(9);
      for (Index i = 0; i < 30; ++i) {
        const Index row = i / 5 % 3;
        if (row == 0) call.group.set(i, 40), call.gradient_group.set(i, 40);
        if (row == 2) call.group.set(i, 0.5 + std::fabs(call.group.get(i)));
      }
      expect_right(call, GetParam());
    }
  }
}

/// A group of one process: its own parts give what a call without a group gives.
TEST_P(BatchNormOnCpu, PartsOfAGroup) {
  for (const DType dtype : kData) {
    for (const Layout layout : kNative) {
      BatchNorm call = make({2, 3, 5, 3, 3}, dtype, layout);
      call.blanked = {0, 1, 0, 0, 0, 0};
      call.activation = Activation::silu;
      const DType wide = sum_type(dtype);
      call.group = Tensor(wide, {2, 3, 5});
      BatchNormStatistics own{.x = call.x.view(),
                              .blanked = call.flags(),
                              .statistics = call.group.view(),
                              .implementation = GetParam()};
      batch_norm_statistics(Context{}, own);
      for (Index i = 0; i < 10; ++i) EXPECT_EQ(call.group.get(i / 5 * 15 + i % 5), i < 5 ? 18 : 27);
      const Tensor group = call.group;
      call.group = {};
      BatchNormReference expected = batch_norm_forward_reference(call);
      call.group = group;
      run_forward(call, GetParam());
      expect_close(call.y, expected.y, "y");
      expect_close(call.running_var, expected.running_var, "running_var");

      expected = batch_norm_backward_reference(call);
      const Tensor sums(wide, {2, 3, 5});
      BatchNormActBackward first = call.backward();
      first.dx = first.dresidual = {};
      first.dgroup = sums.view();
      first.implementation = GetParam();
      batch_norm_act(Context{}, first);
      expect_close(call.dweight, expected.dweight, "dweight");
      call.gradient_group = sums;
      run_backward(call, GetParam());
      expect_close(call.dx, expected.dx, "dx");
      expect_close(call.dresidual, expected.dresidual, "dresidual");
    }
  }
}

TEST_P(BatchNormOnCpu, MomentumAndCounter) {
  BatchNorm call = make({0, 3, 5, 3, 3});
  call.momentum = -1;  // the mean over all calls
  for (int step = 0; step < 3; ++step) expect_right(call, GetParam());
  EXPECT_EQ(call.tracked, 7);
  call.momentum = 0.1;
  call.counts = false;
  run_forward(call, GetParam());
  EXPECT_EQ(call.tracked, 7);
}

TEST_P(BatchNormOnCpu, NoSamples) {
  for (const Layout layout : kNative) {
    for (const bool training : {true, false}) {
      BatchNorm call = make({0, 0, 5, 3, 3}, DType::f32, layout);
      call.training = training;
      call.dweight.poison();
      call.dbias.poison();
      expect_right(call, GetParam());
    }
  }
}

TEST_P(BatchNormOnCpu, WithoutWeightsAndBias) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const int absent : {1, 2, 3}) {
      BatchNorm call = make({0, 3, 7, 3, 5}, dtype);
      if (absent & 1) call.weight = call.dweight = Tensor();
      if (absent & 2) call.bias = call.dbias = Tensor();
      expect_right(call, GetParam());
      call.running_mean = call.running_var = Tensor();
      expect_right(call, GetParam());
    }
  }
}

TEST_P(BatchNormOnCpu, EveryGradientAlone) {
  for (const Activation activation : kBatchNormActivations) {
    for (const bool training : {true, false}) {
      BatchNorm all = make({0, 3, 7, 3, 5});
      all.activation = activation;
      all.training = training;
      run_forward(all, GetParam());
      run_backward(all, GetParam());
      for (Tensor BatchNorm::* wanted :
           {&BatchNorm::dx, &BatchNorm::dweight, &BatchNorm::dbias, &BatchNorm::dresidual}) {
        BatchNorm one = all;
        one.dx = one.dweight = one.dbias = one.dresidual = Tensor();
        one.*wanted = all.*wanted;
        (one.*wanted).poison();
        run_backward(one, GetParam());
        EXPECT_EQ((one.*wanted).memory(), (all.*wanted).memory());
      }
    }
  }
}

TEST_P(BatchNormOnCpu, GradientsPassWhereTheRoundedOutputSaysSo) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Activation activation : {Activation::relu, Activation::relu6}) {
      for (const bool residual : {false, true}) {
        for (const double bias : {0, 6}) {
          BatchNorm call = make_batch_norm({0, 4, 3, 9, 9}, dtype, DType::f32, Layout::nchw,
                                           Layout::nchw, residual);
          call.activation = activation;
          const double small = bias > 0 ? 0.01 : dtype == DType::f16 ? 4e-8 : 1e-40;
          for (Index c = 0; c < 3; ++c) call.weight.set(c, small), call.bias.set(c, bias);
          for (Index i = 0; residual && i < call.x.numel(); ++i) {
            call.residual.set(i, call.residual.get(i) * small);
          }
          SCOPED_TRACE(case_name(call));
          expect_right(call, GetParam());
        }
      }
    }
  }
}

/// Every byte of every output, after forward and backward.
std::vector<std::uint8_t> all_bytes(BatchNorm call, std::string_view implementation,
                                    const Context& context) {
  run_forward(call, implementation, context);
  run_backward(call, implementation, context);
  std::vector<std::uint8_t> bytes = call.passes;
  for (const Tensor* t : {&call.y, &call.mean, &call.inverse, &call.running_mean, &call.running_var,
                          &call.dx, &call.dresidual, &call.dweight, &call.dbias}) {
    bytes.insert(bytes.end(), t->memory().begin(), t->memory().end());
  }
  return bytes;
}

TEST_P(BatchNormOnCpu, TheSameBitsWhoeverRunsIt) {
  for (const ImageSizes& sizes : {ImageSizes{0, 3, 65, 13, 11}, {2, 5, 3, 33, 31}}) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::sliced}) {
      const BatchNorm call = make(sizes, DType::f32, layout);
      Context context;
      const auto once = all_bytes(call, GetParam(), context);
      EXPECT_EQ(all_bytes(call, GetParam(), context), once) << "again";
      for (const int threads : {1, 3, 16, 64}) {
        Fixed executor(threads);
        context.executor = &executor;
        EXPECT_EQ(all_bytes(call, GetParam(), context), once) << threads << " threads";
      }
    }
  }
}

TEST_P(BatchNormOnCpu, NaNAndInfinityStayInTheirChannel) {
  for (const Layout layout : kNative) {
    for (const DType dtype : kData) {
      for (const double bad : {kNaN, kInf, -kInf}) {
        BatchNorm call = make({0, 3, 19, 5, 7}, dtype, layout);
        call.x.set(700, bad);
        SCOPED_TRACE(case_name(call, static_cast<int>(layout)));
        expect_right(call, GetParam());
      }
    }
  }
}

TEST_P(BatchNormOnCpu, LargeOutputs) {
  // Large enough for stores that bypass the caches, at addresses that suit them and that do not.
  constexpr Index kSide = 1024, kCount = 2 * kSide * kSide;
  std::vector<double> x(kCount), memory(2 * kCount + 16), statistics(4, 0.5);
  for (Index i = 0; i < kCount; ++i) x[i] = static_cast<double>(i % 1009) / 500 - 1;
  const auto run = [&](bool channels_last, double* to) {
    const auto view = [&](const double* data) {
      const TensorView planes(data, DType::f64, {}, {1, 2, kSide, kSide});
      const TensorView rows(data, DType::f64, {}, {1, 2, kSide, kSide}, {kCount, 1, 2 * kSide, 2});
      return channels_last ? rows : planes;
    };
    BatchNormActForward forward;
    forward.x = view(x.data());
    forward.y = view(to);
    forward.mean = {statistics.data(), DType::f64, {}, {2}};
    forward.inverse_deviation = {statistics.data() + 2, DType::f64, {}, {2}};
    forward.training = true;
    forward.implementation = GetParam();
    batch_norm_act(Context{}, forward);
    BatchNormActBackward backward;
    backward.x = backward.dy = forward.x;
    backward.mean = forward.mean;
    backward.inverse_deviation = forward.inverse_deviation;
    backward.training = true;
    backward.dx = view(to + kCount);
    backward.implementation = GetParam();
    batch_norm_act(Context{}, backward);
    return std::vector<double>(to, to + 2 * kCount);
  };
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  double* aligned = memory.data() + (64 - address % 64) % 64 / sizeof(double);
  for (const bool channels_last : {false, true}) {
    EXPECT_EQ(run(channels_last, aligned), run(channels_last, aligned + 1));
  }
}

INSTANTIATE_TEST_SUITE_P(All, BatchNormOnCpu, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

TEST(BatchNormList, FastestFirstAndPortableAlways) {
  const BatchNorm call = make({0, 2, 1, 1, 1});
  for (const Candidates& list :
       {explain(Context{}, call.forward()), explain(Context{}, call.backward())}) {
    ASSERT_EQ(list.size(), 3u);
    EXPECT_EQ(list[0].name, "avx512");
    EXPECT_EQ(list[1].name, "avx2");
    EXPECT_EQ(list[2].name, "portable");
    EXPECT_TRUE(list[2].declined.empty());
  }
}

/// What forward says about a call that `spoil` made bad. Nothing may be written then.
template <typename Spoil>
std::string forward_message(const Spoil& spoil) {
  BatchNorm call = make({0, 2, 3, 2, 2});
  const BatchNorm before = call;
  BatchNormActForward arguments = call.forward();
  spoil(arguments);
  const std::string message = message_of([&] { batch_norm_act(Context{}, arguments); });
  for (Tensor BatchNorm::* t : {&BatchNorm::y, &BatchNorm::running_mean, &BatchNorm::running_var,
                                &BatchNorm::mean, &BatchNorm::inverse}) {
    EXPECT_EQ((call.*t).memory(), (before.*t).memory());
  }
  EXPECT_EQ(call.passes, before.passes);
  EXPECT_EQ(call.tracked, before.tracked);
  return message;
}

template <typename Spoil>
std::string backward_message(const Spoil& spoil) {
  const BatchNorm call = make({0, 2, 3, 2, 2});
  BatchNormActBackward arguments = call.backward();
  spoil(arguments);
  const std::string message = message_of([&] { batch_norm_act(Context{}, arguments); });
  const BatchNorm fresh = make({0, 2, 3, 2, 2});
  for (Tensor BatchNorm::* t :
       {&BatchNorm::dx, &BatchNorm::dresidual, &BatchNorm::dweight, &BatchNorm::dbias}) {
    EXPECT_EQ((call.*t).memory(), (fresh.*t).memory());
  }
  return message;
}

TEST(BatchNormErrors, Forward) {
  using F = BatchNormActForward;
  const auto expect = [](const char* message, const auto& spoil) {
    EXPECT_EQ(forward_message(spoil), message);
  };
  expect("x: expected [S, N, C, H, W] or [N, C, H, W], got [2, 3, 2]", [](F& f) { f.x.rank = 3; });
  expect("x: expected a floating dtype, got int64", [](F& f) { f.x.dtype = DType::i64; });
  expect("residual: expected x's shape [2, 3, 2, 2], got [2, 4, 2, 2]",
         [](F& f) { f.residual.sizes[1] = 4; });
  expect("residual: expected x's dtype float32, got float16",
         [](F& f) { f.residual.dtype = DType::f16; });
  expect("weight: expected [3], got [2]", [](F& f) { f.weight.sizes[0] = 2; });
  expect("running_var: expected running_mean's dtype float32, got float64",
         [](F& f) { f.running_var.dtype = DType::f64; });
  expect("running_mean and running_var: expected both or none", [](F& f) { f.running_var = {}; });
  expect(
      "running_mean: expected memory that no other tensor of the call uses, got memory that "
      "overlaps running_var",
      [](F& f) { f.running_var.data = f.running_mean.data; });
  expect("blanked: expected dtype bool, got uint8",
         [](F& f) { f.blanked = {f.y.data, DType::u8, {}, {2}}; });
  expect("blanked: expected [2], got [3]",
         [](F& f) { f.blanked = {f.y.data, DType::b8, {}, {3}}; });
  expect("group: expected [3, 3], got [2, 3]",
         [](F& f) { f.group = {f.x.data, DType::f32, {}, {2, 3}}; });
  expect("num_batches_tracked: expected a tensor where momentum is None, got none",
         [](F& f) { f.momentum = -1, f.num_batches_tracked = {}; });
  expect("mean, inverse_deviation and passes: expected all of them or none, got 2",
         [](F& f) { f.passes = {}; });
  expect("activation: expected 'identity', 'relu', 'relu6', 'silu' or 'hardswish', got 'gelu'",
         [](F& f) { f.activation = Activation::gelu; });
  expect("y: expected memory that no other tensor of the call uses, got memory that overlaps x",
         [](F& f) { f.y.data = f.x.data; });
  EXPECT_EQ(forward_message([](F& f) {
              f.implementation = "loops";
            }).find("implementation: there is none named 'loops'; 'avx512' "),
            0u);
  BatchNorm one = make({0, 1, 3, 1, 1});
  EXPECT_EQ(message_of([&] { batch_norm_act(Context{}, one.forward()); }),
            "x: expected more than 1 value per channel when training, got [1, 3, 1, 1]");
}

TEST(BatchNormErrors, Backward) {
  using B = BatchNormActBackward;
  const auto expect = [](const char* message, const auto& spoil) {
    EXPECT_EQ(backward_message(spoil), message);
  };
  expect("dy: expected x's shape [2, 3, 2, 2], got [2, 3, 2, 1]", [](B& b) { b.dy.sizes[3] = 1; });
  expect("mean: is missing", [](B& b) { b.mean = {}; });
  expect("passes: is missing, which forward saves if it has a residual",
         [](B& b) { b.passes = {}; });
  expect("mean, inverse_deviation and passes: expected all of them or none, got 2",
         [](B& b) { b.passes = b.dresidual = {}, b.residual = b.x; });
  expect("residual: expected forward's, whose gradient is wanted",
         [](B& b) { b.passes = {}, b.activation = Activation::silu; });
  expect("dgroup: expected [3, 3], got [3, 2]",
         [](B& b) { b.dgroup = {b.dx.data, DType::f32, {}, {3, 2}}; });
  expect("dweight: expected weight's dtype float32, got float16",
         [](B& b) { b.dweight.dtype = DType::f16; });
  expect("dx: expected memory that no other tensor of the call uses, got memory that overlaps x",
         [](B& b) { b.dx.data = b.x.data; });
}

}  // namespace
}  // namespace fusewise::testing

// BatchNorm + activation + Squeeze-and-Excitation on the CPU, every implementation that this
// machine has against plain loops in float64.

#include <thread>

#include "batch_norm_excite_reference.h"
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

void run_forward(BatchNormExcite& call, std::string_view implementation,
                 const Context& context = {}) {
  BatchNormExciteForward arguments = call.forward();
  arguments.implementation = implementation;
  batch_norm_excite(context, arguments);
}
void run_backward(BatchNormExcite& call, std::string_view implementation,
                  const Context& context = {}) {
  BatchNormExciteBackward arguments = call.backward();
  arguments.implementation = implementation;
  batch_norm_excite(context, arguments);
}

void expect_close(const Tensor& got, const Values& expected, const char* name) {
  if (!got.defined()) return;
  EXPECT_TRUE(all_close(got, expected)) << name;
}

void expect_forward(BatchNormExcite& call, std::string_view implementation,
                    const Context& context = {}) {
  const BatchNormExciteReference expected = batch_norm_excite_forward_reference(call);
  const Index tracked = call.norm.tracked + (call.norm.training && call.norm.counts);
  run_forward(call, implementation, context);
  expect_close(call.excite.y, expected.forward.y, "y");
  expect_close(call.norm.mean, expected.norm.mean, "mean");
  expect_close(call.norm.inverse, expected.norm.inverse, "inverse_deviation");
  expect_close(call.norm.running_mean, expected.norm.running_mean, "running_mean");
  expect_close(call.norm.running_var, expected.norm.running_var, "running_var");
  expect_close(call.excite.pooled, expected.forward.pooled, "pooled");
  expect_close(call.excite.hidden, expected.forward.hidden, "hidden");
  expect_close(call.excite.gates, expected.forward.gates, "gates");
  EXPECT_EQ(call.norm.tracked, tracked);
}

/// Backward uses what forward saved, and its reference too.
void expect_backward(BatchNormExcite& call, std::string_view implementation,
                     const Context& context = {}) {
  const BatchNormExciteReference expected = batch_norm_excite_backward_reference(call);
  run_backward(call, implementation, context);
  expect_close(call.norm.dx, expected.norm.dx, "dx");
  expect_close(call.norm.dweight, expected.norm.dweight, "dweight");
  expect_close(call.norm.dbias, expected.norm.dbias, "dbias");
  expect_close(call.excite.dw1, expected.backward.dw1, "dw1");
  expect_close(call.excite.db1, expected.backward.db1, "db1");
  expect_close(call.excite.dw2, expected.backward.dw2, "dw2");
  expect_close(call.excite.db2, expected.backward.db2, "db2");
}

void expect_right(BatchNormExcite& call, std::string_view implementation,
                  const Context& context = {}) {
  expect_forward(call, implementation, context);
  expect_backward(call, implementation, context);
}

BatchNormExcite make(Sizes sizes, DType dtype = DType::f32, Layout layout = Layout::nchw) {
  return make_batch_norm_excite(sizes, dtype, dtype, layout, layout);
}

std::vector<std::string> available() {
  const BatchNormExcite call = make({2, 1, 1, 1, 1});
  std::vector<std::string> names;
  for (const Candidate& candidate : explain(Context{}, call.forward())) {
    if (candidate.declined.empty()) names.push_back(candidate.name);
  }
  return names;
}

class BatchNormExciteOnCpu : public ::testing::TestWithParam<std::string> {};

std::string case_name(const BatchNormExcite& call, Layout layout, Layout other) {
  const SqueezeExcite& e = call.excite;
  std::string name = "N, C, R, H, W =";
  for (const Index size : {e.n, e.c, e.r, e.h, e.w}) name.append(" ").append(std::to_string(size));
  return name + "; " + name_of(call.norm.x.dtype()) + ", weights " + name_of(e.w1.dtype()) + ", " +
         name_of(call.norm.activation) + " and " + name_of(e.activation) +
         (call.norm.training ? ", training" : "") + ", layouts " +
         std::to_string(static_cast<int>(layout)) + " and " +
         std::to_string(static_cast<int>(other));
}
std::string case_name(const BatchNormExcite& call, Layout layout) {
  return case_name(call, layout, layout);
}

struct Types {
  DType data, weights;
};
constexpr Types kTypes[] = {{DType::f32, DType::f32},   {DType::f64, DType::f64},
                            {DType::f16, DType::f16},   {DType::f16, DType::f32},
                            {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};
constexpr DType kData[] = {DType::f32, DType::f64, DType::f16, DType::bf16};
constexpr Layout kNative[] = {Layout::nchw, Layout::channels_last};

TEST_P(BatchNormExciteOnCpu, EveryTypeAndLayout) {
  int turn = 0;
  for (const Types types : kTypes) {
    for (const Layout layout : kLayouts) {
      for (const Layout other : kLayouts) {
        BatchNormExcite call =
            make_batch_norm_excite({3, 19, 5, 5, 7}, types.data, types.weights, layout, other);
        call.norm.training = turn++ % 3 != 0;
        SCOPED_TRACE(case_name(call, layout, other));
        expect_right(call, GetParam());
      }
    }
  }
}

TEST_P(BatchNormExciteOnCpu, EverySize) {
  const Sizes all[] = {
      {2, 1, 1, 1, 1},      {9, 65, 3, 1, 1},   {3, 3, 1, 9, 11},   {1, 1, 4, 40, 33},
      {2, 48, 12, 19, 19},  {9, 65, 17, 7, 7},  {5, 130, 33, 3, 2}, {2, 24, 6, 31, 30},
      {1, 300, 20, 12, 12}, {17, 16, 4, 4, 4},  {2, 600, 70, 1, 9}, {3, 257, 64, 8, 1},
      {1, 96, 4, 64, 65},   {3, 40, 2, 61, 47}, {2, 3, 2, 90, 91},
  };
  for (const DType dtype : kData) {
    for (const Sizes& sizes : all) {
      for (const Layout layout : kNative) {
        BatchNormExcite call = make(sizes, dtype, layout);
        SCOPED_TRACE(case_name(call, layout));
        expect_right(call, GetParam());
      }
    }
  }
}

TEST_P(BatchNormExciteOnCpu, EveryFunctionAndMode) {
  for (const DType dtype : kData) {
    for (const Layout layout : kNative) {
      for (const Activation activation : kBatchNormActivations) {
        for (const Activation hidden : kSqueezeExciteActivations) {
          for (const Gate gate : kGates) {
            for (const int mode : {0, 1, 2, 3}) {
              BatchNormExcite call = make({3, 17, 5, 6, 3}, dtype, layout);
              call.norm.activation = activation;
              call.excite.activation = hidden;
              call.excite.gate = gate;
              call.norm.bias.fill(9, 3);  // far enough for both ends of relu6 and hardswish
              call.excite.b1.fill(8, 4);  // and for those of the hidden activation
              call.excite.b2.fill(7, 4);  // and of hardsigmoid
              call.norm.training = mode % 2 == 0;
              if (mode >= 2) call.norm.running_mean = call.norm.running_var = Tensor();
              SCOPED_TRACE(case_name(call, layout));
              expect_right(call, GetParam());
            }
          }
        }
      }
    }
  }
}

TEST_P(BatchNormExciteOnCpu, WithoutWeightsAndBiases) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (int absent = 1; absent < 16; ++absent) {
      BatchNormExcite call = make({3, 7, 4, 3, 5}, dtype);
      if (absent & 1) call.norm.weight = call.norm.dweight = Tensor();
      if (absent & 2) call.norm.bias = call.norm.dbias = Tensor();
      if (absent & 4) call.excite.b1 = call.excite.db1 = Tensor();
      if (absent & 8) call.excite.b2 = call.excite.db2 = Tensor();
      SCOPED_TRACE(absent);
      expect_right(call, GetParam());
    }
  }
}

TEST_P(BatchNormExciteOnCpu, WithoutSavedTensors) {
  for (const bool training : {true, false}) {
    for (const Layout layout : kNative) {
      BatchNormExcite call = make({5, 20, 5, 6, 6}, DType::f32, layout);
      call.norm.training = training;
      const BatchNormExcite saving = call;
      call.norm.mean = call.norm.inverse = Tensor();
      call.excite.pooled = call.excite.hidden = call.excite.gates = Tensor();
      expect_forward(call, GetParam());
      BatchNormExcite same = saving;
      run_forward(same, GetParam());
      EXPECT_EQ(call.excite.y.memory(), same.excite.y.memory());
      EXPECT_EQ(call.norm.running_var.memory(), same.norm.running_var.memory());
    }
  }
}

TEST_P(BatchNormExciteOnCpu, ConvolutionWeights) {
  BatchNormExcite call = make({2, 20, 5, 6, 6});
  call.excite.w1 = Tensor(DType::f32, {5, 20, 1, 1}).fill(3, 0.2);
  call.excite.w2 = Tensor(DType::f32, {20, 5, 1, 1}).fill(5, 0.4);
  call.excite.dw1 = Tensor(DType::f32, {5, 20, 1, 1});
  call.excite.dw2 = Tensor(DType::f32, {20, 5, 1, 1});
  expect_right(call, GetParam());
}

TEST_P(BatchNormExciteOnCpu, MomentumAndCounter) {
  BatchNormExcite call = make({3, 5, 2, 3, 3});
  call.norm.momentum = -1;  // the mean over all calls
  for (int step = 0; step < 3; ++step) expect_right(call, GetParam());
  EXPECT_EQ(call.norm.tracked, 7);
  call.norm.momentum = 0.1;
  call.norm.counts = false;
  expect_forward(call, GetParam());
  EXPECT_EQ(call.norm.tracked, 7);
}

TEST_P(BatchNormExciteOnCpu, EveryChoiceOfGradients) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::transposed}) {
    for (const bool training : {true, false}) {
      BatchNormExcite all = make({4, 20, 5, 6, 7}, DType::f32, layout);
      all.norm.training = training;
      run_forward(all, GetParam());
      const BatchNormExciteReference expected = batch_norm_excite_backward_reference(all);
      for (int absent = 0; absent < 128; ++absent) {
        SCOPED_TRACE(absent);
        BatchNormExcite call = all;
        if (absent & 1) call.norm.dx = Tensor();
        if (absent & 2) call.norm.dweight = Tensor();
        if (absent & 4) call.norm.dbias = Tensor();
        if (absent & 8) call.excite.dw1 = Tensor();
        if (absent & 16) call.excite.db1 = Tensor();
        if (absent & 32) call.excite.dw2 = Tensor();
        if (absent & 64) call.excite.db2 = Tensor();
        run_backward(call, GetParam());
        expect_close(call.norm.dx, expected.norm.dx, "dx");
        expect_close(call.norm.dweight, expected.norm.dweight, "dweight");
        expect_close(call.norm.dbias, expected.norm.dbias, "dbias");
        expect_close(call.excite.dw1, expected.backward.dw1, "dw1");
        expect_close(call.excite.db1, expected.backward.db1, "db1");
        expect_close(call.excite.dw2, expected.backward.dw2, "dw2");
        expect_close(call.excite.db2, expected.backward.db2, "db2");
      }
    }
  }
}

TEST_P(BatchNormExciteOnCpu, ExpandedGradient) {
  for (const Layout layout : kNative) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      BatchNormExcite call = make({3, 20, 5, 6, 7}, dtype, layout);
      run_forward(call, GetParam());
      call.excite.dy = Tensor(dtype, {3, 20, 6, 7}, {0, 0, 0, 0}).fill(2);
      expect_backward(call, GetParam());
      call.excite.dy = Tensor(dtype, {3, 20, 6, 7}, {20, 1, 0, 0}).fill(2);
      expect_backward(call, GetParam());
    }
  }
}

TEST_P(BatchNormExciteOnCpu, EmptyBatch) {
  for (const Layout layout : kNative) {
    for (const bool training : {true, false}) {
      BatchNormExcite call = make({0, 20, 5, 6, 7}, DType::f32, layout);
      call.norm.training = training;
      const Tensor mean = call.norm.running_mean, var = call.norm.running_var;
      for (Tensor* t : {&call.norm.dweight, &call.norm.dbias, &call.excite.dw1, &call.excite.db1,
                        &call.excite.dw2, &call.excite.db2}) {
        t->poison();
      }
      expect_right(call, GetParam());  // the reference's sums over nothing are zero
      EXPECT_EQ(call.norm.running_mean.memory(), mean.memory());
      EXPECT_EQ(call.norm.running_var.memory(), var.memory());
    }
  }
}

/// Every byte of every output, after forward and backward.
std::vector<std::uint8_t> all_bytes(BatchNormExcite call, std::string_view implementation,
                                    const Context& context) {
  run_forward(call, implementation, context);
  run_backward(call, implementation, context);
  const BatchNorm& norm = call.norm;
  const SqueezeExcite& excite = call.excite;
  std::vector<std::uint8_t> bytes;
  for (const Tensor* t :
       {&excite.y, &norm.mean, &norm.inverse, &norm.running_mean, &norm.running_var, &excite.pooled,
        &excite.hidden, &excite.gates, &norm.dx, &norm.dweight, &norm.dbias, &excite.dw1,
        &excite.db1, &excite.dw2, &excite.db2}) {
    bytes.insert(bytes.end(), t->memory().begin(), t->memory().end());
  }
  return bytes;
}

TEST_P(BatchNormExciteOnCpu, TheSameBitsWhoeverRunsIt) {
  const Sizes all[] = {{1, 70, 9, 40, 41},  {3, 96, 8, 33, 31},   {8, 40, 6, 12, 12},
                       {5, 336, 100, 9, 9}, {2, 1000, 250, 7, 7}, {7, 3, 2, 90, 91}};
  for (const Sizes& sizes : all) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::sliced}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const BatchNormExcite call = make(sizes, dtype, layout);
        SCOPED_TRACE(case_name(call, layout));
        Context context;
        const auto once = all_bytes(call, GetParam(), context);
        EXPECT_EQ(all_bytes(call, GetParam(), context), once) << "again";
        for (const int threads : {1, 2, 3, 8, 16, 64}) {
          Fixed executor(threads);
          context.executor = &executor;
          EXPECT_EQ(all_bytes(call, GetParam(), context), once) << threads << " threads";
        }
      }
    }
  }
}

TEST_P(BatchNormExciteOnCpu, RightOnAnyNumberOfThreads) {
  for (const int threads : {1, 2, 5}) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::transposed}) {
      Fixed executor(threads);
      Context context;
      context.executor = &executor;
      BatchNormExcite call = make({3, 96, 24, 33, 31}, DType::f32, layout);
      expect_right(call, GetParam(), context);
    }
  }
}

TEST_P(BatchNormExciteOnCpu, LargeOutputs) {
  // Large enough for stores that bypass the caches, at addresses that suit them and that do not.
  for (const Layout layout : {Layout::channels_last, Layout::misaligned}) {
    BatchNormExcite call = make({2, 64, 4, 131, 130}, DType::f64, layout);
    call.norm.activation = Activation::relu;
    expect_right(call, GetParam());
  }
}

/// In training a channel with a NaN is NaN in every sample, and so are all gates. In inference the
/// other samples stay as they are.
TEST_P(BatchNormExciteOnCpu, NaNAndInfinityPropagate) {
  for (const Layout layout : kNative) {
    for (const DType dtype : kData) {
      for (const double bad : {kNaN, kInf, -kInf}) {
        for (const Activation activation : kBatchNormActivations) {
          for (const Gate gate : kGates) {
            for (const bool training : {true, false}) {
              BatchNormExcite call = make({3, 19, 5, 5, 7}, dtype, layout);
              call.norm.activation = activation;
              call.excite.activation = Activation::relu;
              call.excite.gate = gate;
              call.norm.training = training;
              BatchNormExcite gradient = call;
              SCOPED_TRACE(case_name(call, layout) + ", " + std::to_string(bad));
              call.norm.x.set(700, bad);  // in the second sample
              expect_right(call, GetParam());
              run_forward(gradient, GetParam());
              gradient.excite.dy.set(700, bad);
              expect_backward(gradient, GetParam());
            }
          }
        }
      }
    }
  }
}

/// Where relu, relu6 and hardswish are closed, not even a NaN of the gradient passes.
TEST_P(BatchNormExciteOnCpu, ClosedActivationsSelect) {
  for (const Layout layout : kNative) {
    for (const Activation activation :
         {Activation::relu, Activation::relu6, Activation::hardswish}) {
      BatchNormExcite call = make({2, 5, 3, 4, 4}, DType::f32, layout);
      call.norm.activation = activation;
      for (Index c = 0; c < 5; ++c) call.norm.bias.set(c, -100);
      run_forward(call, GetParam());
      for (Index i = 0; i < call.excite.gates.numel(); ++i) call.excite.gates.set(i, kNaN);
      run_backward(call, GetParam());
      for (const Tensor* t : {&call.norm.dx, &call.norm.dweight, &call.norm.dbias}) {
        for (Index i = 0; i < t->numel(); ++i) EXPECT_EQ(t->get(i), 0) << i;
      }
      EXPECT_TRUE(std::isnan(call.excite.db2.get(0)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, BatchNormExciteOnCpu, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

TEST(BatchNormExciteList, FastestFirstAndPortableAlways) {
  const BatchNormExcite call = make({2, 1, 1, 1, 1});
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
  BatchNormExcite call = make({2, 3, 4, 2, 2});
  const BatchNormExcite before = call;
  BatchNormExciteForward arguments = call.forward();
  spoil(arguments);
  const std::string message = message_of([&] { batch_norm_excite(Context{}, arguments); });
  for (Tensor BatchNorm::* t :
       {&BatchNorm::running_mean, &BatchNorm::running_var, &BatchNorm::mean, &BatchNorm::inverse}) {
    EXPECT_EQ((call.norm.*t).memory(), (before.norm.*t).memory());
  }
  for (Tensor SqueezeExcite::* t :
       {&SqueezeExcite::y, &SqueezeExcite::pooled, &SqueezeExcite::hidden, &SqueezeExcite::gates}) {
    EXPECT_EQ((call.excite.*t).memory(), (before.excite.*t).memory());
  }
  EXPECT_EQ(call.norm.tracked, before.norm.tracked);
  return message;
}

template <typename Spoil>
std::string backward_message(const Spoil& spoil) {
  const BatchNormExcite call = make({2, 3, 4, 2, 2});
  const BatchNormExcite before = call;
  BatchNormExciteBackward arguments = call.backward();
  spoil(arguments);
  const std::string message = message_of([&] { batch_norm_excite(Context{}, arguments); });
  for (Tensor BatchNorm::* t : {&BatchNorm::dx, &BatchNorm::dweight, &BatchNorm::dbias}) {
    EXPECT_EQ((call.norm.*t).memory(), (before.norm.*t).memory());
  }
  for (Tensor SqueezeExcite::* t :
       {&SqueezeExcite::dw1, &SqueezeExcite::db1, &SqueezeExcite::dw2, &SqueezeExcite::db2}) {
    EXPECT_EQ((call.excite.*t).memory(), (before.excite.*t).memory());
  }
  return message;
}

TEST(BatchNormExciteErrors, Forward) {
  using F = BatchNormExciteForward;
  const auto expect = [](const char* message, const auto& spoil) {
    EXPECT_EQ(forward_message(spoil), message);
  };
  expect("x: expected [N, C, H, W], got [2, 3, 2]", [](F& f) { f.x.rank = 3; });
  expect("x: expected a floating dtype, got int64", [](F& f) { f.x.dtype = DType::i64; });
  expect("weight: expected [3], got [2]", [](F& f) { f.weight.sizes[0] = 2; });
  expect("bias: expected running_mean's dtype float32, got float16",
         [](F& f) { f.bias.dtype = DType::f16; });
  expect("w1: expected [R, 3] or [R, 3, 1, 1], got [4, 2]", [](F& f) { f.w1.sizes[1] = 2; });
  expect("w2: is missing", [](F& f) { f.w2 = {}; });
  expect("w2: expected [3, 4] or [3, 4, 1, 1], got [3, 5]", [](F& f) { f.w2.sizes[1] = 5; });
  expect("y: expected x's shape [2, 3, 2, 2], got [2, 3, 2, 1]", [](F& f) { f.y.sizes[3] = 1; });
  expect("running_mean and running_var: expected both or none", [](F& f) { f.running_var = {}; });
  expect("num_batches_tracked: expected a tensor where momentum is None, got none",
         [](F& f) { f.momentum = -1, f.num_batches_tracked = {}; });
  expect("mean, inverse_deviation, pooled, hidden and gates: expected all of them or none, got 4",
         [](F& f) { f.pooled = {}; });
  expect("activation: expected 'identity', 'relu', 'relu6', 'silu' or 'hardswish', got 'gelu'",
         [](F& f) { f.activation = Activation::gelu; });
  expect("hidden_activation: expected 'silu', 'relu' or 'hardswish', got 'relu6'",
         [](F& f) { f.hidden_activation = Activation::relu6; });
  expect("y: expected memory that no other tensor of the call uses, got memory that overlaps x",
         [](F& f) { f.y.data = f.x.data; });
  EXPECT_EQ(message_of([] {
              const BatchNormExcite one = make({1, 3, 4, 1, 1});
              batch_norm_excite(Context{}, one.forward());
            }),
            "x: expected more than 1 value per channel when training, got [1, 3, 1, 1]");
}

TEST(BatchNormExciteErrors, Backward) {
  using B = BatchNormExciteBackward;
  const auto expect = [](const char* message, const auto& spoil) {
    EXPECT_EQ(backward_message(spoil), message);
  };
  expect("dy: expected x's shape [2, 3, 2, 2], got [2, 3, 2, 1]", [](B& b) { b.dy.sizes[3] = 1; });
  expect("mean: is missing", [](B& b) { b.mean = {}; });
  expect("gates: is missing", [](B& b) { b.gates = {}; });
  expect("dweight: expected weight's dtype float32, got float16",
         [](B& b) { b.dweight.dtype = DType::f16; });
  expect("dw1: expected w1's shape [4, 3], got [4, 2]", [](B& b) { b.dw1.sizes[1] = 2; });
  expect("dx: expected memory that no other tensor of the call uses, got memory that overlaps x",
         [](B& b) { b.dx.data = b.x.data; });
}

}  // namespace
}  // namespace fusewise::testing

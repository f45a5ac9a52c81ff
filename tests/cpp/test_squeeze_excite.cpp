// Squeeze-and-Excitation on the CPU, every implementation that this machine has against plain
// loops in float64.

#include <atomic>
#include <thread>

#include "reference.h"

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

/// What forward saves, computed by the reference: backward is tested on its own.
void save(SqueezeExcite& call) {
  const ForwardReference saved = forward_reference(call);
  for (Index i = 0; i < call.pooled.numel(); ++i) call.pooled.set(i, saved.pooled[i].value);
  for (Index i = 0; i < call.hidden.numel(); ++i) call.hidden.set(i, saved.hidden[i].value);
  for (Index i = 0; i < call.gates.numel(); ++i) call.gates.set(i, saved.gates[i].value);
}

void run_forward(SqueezeExcite& call, std::string_view implementation,
                 const Context& context = {}) {
  SqueezeExciteForward arguments = call.forward();
  arguments.implementation = implementation;
  squeeze_excite(context, arguments);
}

void run_backward(SqueezeExcite& call, std::string_view implementation,
                  const Context& context = {}) {
  SqueezeExciteBackward arguments = call.backward();
  arguments.implementation = implementation;
  squeeze_excite(context, arguments);
}

void expect_close(const Tensor& got, const Values& expected, const char* name) {
  if (!got.defined()) return;
  EXPECT_TRUE(all_close(got, expected)) << name;
}

void expect_forward(SqueezeExcite& call, std::string_view implementation,
                    const Context& context = {}) {
  const ForwardReference expected = forward_reference(call);
  run_forward(call, implementation, context);
  expect_close(call.y, expected.y, "y");
  expect_close(call.pooled, expected.pooled, "pooled");
  expect_close(call.hidden, expected.hidden, "hidden");
  expect_close(call.gates, expected.gates, "gates");
}

void expect_backward(SqueezeExcite& call, std::string_view implementation,
                     const Context& context = {}) {
  save(call);
  const BackwardReference expected = backward_reference(call);
  run_backward(call, implementation, context);
  expect_close(call.dx, expected.dx, "dx");
  expect_close(call.dw1, expected.dw1, "dw1");
  expect_close(call.db1, expected.db1, "db1");
  expect_close(call.dw2, expected.dw2, "dw2");
  expect_close(call.db2, expected.db2, "db2");
}

SqueezeExcite make(Sizes sizes, DType dtype = DType::f32, Layout layout = Layout::nchw) {
  return make_squeeze_excite(sizes, dtype, dtype, layout, layout);
}

std::vector<std::string> available() {
  SqueezeExcite call = make({1, 1, 1, 1, 1});
  std::vector<std::string> names;
  for (const Candidate& candidate : explain(Context{}, call.forward())) {
    if (candidate.declined.empty()) names.push_back(candidate.name);
  }
  return names;
}

class SqueezeExciteOnCpu : public ::testing::TestWithParam<std::string> {};

std::string case_name(const Sizes& s, DType dtype, DType weights, int layout, int other) {
  return "N, C, R, H, W = " + std::to_string(s.n) + ", " + std::to_string(s.c) + ", " +
         std::to_string(s.r) + ", " + std::to_string(s.h) + ", " + std::to_string(s.w) + "; " +
         name_of(dtype) + ", weights " + name_of(weights) + ", layouts " + std::to_string(layout) +
         " and " + std::to_string(other);
}

struct Types {
  DType data, weights;
};
constexpr Types kTypes[] = {{DType::f32, DType::f32},   {DType::f64, DType::f64},
                            {DType::f16, DType::f16},   {DType::f16, DType::f32},
                            {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};

TEST_P(SqueezeExciteOnCpu, EveryTypeAndLayout) {
  for (const Types types : kTypes) {
    for (const Layout layout : kLayouts) {
      for (const Layout other : kLayouts) {
        const Sizes sizes{3, 19, 5, 5, 7};
        SCOPED_TRACE(case_name(sizes, types.data, types.weights, static_cast<int>(layout),
                               static_cast<int>(other)));
        SqueezeExcite call = make_squeeze_excite(sizes, types.data, types.weights, layout, other);
        expect_forward(call, GetParam());
        expect_backward(call, GetParam());
      }
    }
  }
}

TEST_P(SqueezeExciteOnCpu, EverySize) {
  const Sizes all[] = {
      {1, 1, 1, 1, 1},      {2, 65, 3, 1, 1},   {3, 3, 1, 9, 11},   {1, 1, 4, 40, 33},
      {2, 48, 12, 19, 19},  {9, 65, 17, 7, 7},  {5, 130, 33, 3, 2}, {2, 24, 6, 31, 30},
      {1, 300, 20, 12, 12}, {17, 16, 4, 4, 4},  {2, 600, 70, 1, 9}, {3, 257, 64, 8, 1},
      {1, 96, 4, 64, 65},   {3, 40, 2, 61, 47},
  };
  for (const Types types : kTypes) {
    for (const Sizes& sizes : all) {
      for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
        SCOPED_TRACE(case_name(sizes, types.data, types.weights, static_cast<int>(layout), -1));
        SqueezeExcite call = make_squeeze_excite(sizes, types.data, types.weights, layout, layout);
        expect_forward(call, GetParam());
        expect_backward(call, GetParam());
      }
    }
  }
}

TEST_P(SqueezeExciteOnCpu, EveryFunction) {
  for (const Activation activation : kSqueezeExciteActivations) {
    for (const Gate gate : {Gate::sigmoid, Gate::hardsigmoid}) {
      for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
        SqueezeExcite call = make({4, 21, 6, 4, 5}, dtype);
        call.activation = activation;
        call.gate = gate;
        call.b1.fill(8, 4);  // far enough for hardswish to reach both ends
        call.b2.fill(7, 4);  // and for hardsigmoid
        expect_forward(call, GetParam());
        expect_backward(call, GetParam());
      }
    }
  }
}

TEST_P(SqueezeExciteOnCpu, HardswishAtItsKinks) {
  const double below = std::nextafter(-3.f, -4.f), inside = std::nextafter(3.f, 2.f);
  const double all[] = {-3, 3, below, inside, 0, kInf, -kInf, kNaN};
  for (const DType dtype : {DType::f32, DType::f64, DType::f16}) {
    SqueezeExcite call = make({1, 6, 8, 2, 2}, dtype);
    call.activation = Activation::hardswish;
    call.gate = Gate::hardsigmoid;
    save(call);
    for (Index i = 0; i < 8; ++i) call.hidden.set(i, all[i]);
    const BackwardReference expected = backward_reference(call);
    run_backward(call, GetParam());
    expect_close(call.db1, expected.db1, "db1");
    for (const Index closed : {0, 2, 6}) EXPECT_EQ(call.db1.get(closed), 0) << closed;
    for (const Index open : {1, 5, 7}) EXPECT_NE(call.db1.get(open), 0) << open;
  }
}

TEST_P(SqueezeExciteOnCpu, WithoutBiases) {
  for (const int absent : {1, 2, 3}) {
    SqueezeExcite call = make({2, 20, 5, 6, 6});
    if (absent & 1) call.b1 = {};
    if (absent & 2) call.b2 = {};
    expect_forward(call, GetParam());
  }
}

TEST_P(SqueezeExciteOnCpu, WithoutSavedTensors) {
  SqueezeExcite call = make({5, 20, 5, 6, 6});
  call.pooled = call.hidden = call.gates = {};
  expect_forward(call, GetParam());
}

TEST_P(SqueezeExciteOnCpu, ConvolutionWeights) {
  SqueezeExcite call = make({2, 20, 5, 6, 6});
  call.w1 = Tensor(DType::f32, {5, 20, 1, 1}).fill(3, 0.2);
  call.w2 = Tensor(DType::f32, {20, 5, 1, 1}).fill(5, 0.4);
  call.dw1 = Tensor(DType::f32, {5, 20, 1, 1});
  call.dw2 = Tensor(DType::f32, {20, 5, 1, 1});
  expect_forward(call, GetParam());
  expect_backward(call, GetParam());
}

TEST_P(SqueezeExciteOnCpu, EveryChoiceOfGradients) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::transposed}) {
    for (int absent = 0; absent < 32; ++absent) {
      SCOPED_TRACE(absent);
      SqueezeExcite call = make({4, 20, 5, 6, 7}, DType::f32, layout);
      if (absent & 1) call.dx = {};
      if (absent & 2) call.dw1 = {};
      if (absent & 4) call.db1 = {};
      if (absent & 8) call.dw2 = {};
      if (absent & 16) call.db2 = {};
      expect_backward(call, GetParam());
    }
  }
}

TEST_P(SqueezeExciteOnCpu, ExpandedGradient) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    SqueezeExcite call = make({3, 20, 5, 6, 7}, DType::f32, layout);
    call.dy = Tensor(DType::f32, {3, 20, 6, 7}, {0, 0, 0, 0}).fill(2);
    expect_backward(call, GetParam());
    call.dy = Tensor(DType::f32, {3, 20, 6, 7}, {20, 1, 0, 0}).fill(2);
    expect_backward(call, GetParam());
  }
}

TEST_P(SqueezeExciteOnCpu, EmptyBatch) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    SqueezeExcite call = make({0, 20, 5, 6, 7}, DType::f32, layout);
    expect_forward(call, GetParam());
    expect_backward(call, GetParam());  // the reference's sums over nothing are zero
  }
}

/// Every byte of every output, after forward and backward.
std::vector<std::uint8_t> all_bytes(SqueezeExcite call, std::string_view implementation,
                                    const Context& context) {
  run_forward(call, implementation, context);
  run_backward(call, implementation, context);
  std::vector<std::uint8_t> bytes;
  for (const Tensor* t : {&call.y, &call.pooled, &call.hidden, &call.gates, &call.dx, &call.dw1,
                          &call.db1, &call.dw2, &call.db2}) {
    bytes.insert(bytes.end(), t->memory().begin(), t->memory().end());
  }
  return bytes;
}

TEST_P(SqueezeExciteOnCpu, TheSameBitsWhoeverRunsIt) {
  const Sizes all[] = {{1, 70, 9, 40, 41},  {3, 96, 8, 33, 31},   {8, 40, 6, 12, 12},
                       {5, 336, 100, 9, 9}, {2, 1000, 250, 7, 7}, {7, 3, 2, 90, 91}};
  for (const Sizes& sizes : all) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::sliced}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        SCOPED_TRACE(case_name(sizes, dtype, dtype, static_cast<int>(layout), -1));
        const SqueezeExcite call = make(sizes, dtype, layout);
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

TEST_P(SqueezeExciteOnCpu, RightOnAnyNumberOfThreads) {
  for (const int threads : {1, 2, 5}) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::transposed}) {
      Fixed executor(threads);
      Context context;
      context.executor = &executor;
      SqueezeExcite call = make({3, 96, 24, 33, 31}, DType::f32, layout);
      expect_forward(call, GetParam(), context);
      expect_backward(call, GetParam(), context);
    }
  }
}

TEST_P(SqueezeExciteOnCpu, LargeOutputs) {
  // Large enough for stores that bypass the caches, at addresses that do not suit them.
  for (const Layout layout : {Layout::channels_last_sliced, Layout::misaligned}) {
    SqueezeExcite call = make({2, 63, 4, 191, 180}, DType::f32, layout);
    expect_forward(call, GetParam());
    expect_backward(call, GetParam());
  }
}

TEST_P(SqueezeExciteOnCpu, NaNAndInfinityPropagate) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
      for (const double bad : {kNaN, kInf, -kInf}) {
        for (const Activation activation : kSqueezeExciteActivations) {
          for (const Gate gate : {Gate::sigmoid, Gate::hardsigmoid}) {
            SqueezeExcite call = make({3, 19, 5, 5, 7}, dtype, layout);
            call.activation = activation;
            call.gate = gate;
            call.x.set(700, bad);  // in the second sample
            SCOPED_TRACE(bad);
            expect_forward(call, GetParam());
            expect_backward(call, GetParam());
            SqueezeExcite gradient = make({3, 19, 5, 5, 7}, dtype, layout);
            gradient.activation = activation;
            gradient.gate = gate;
            gradient.dy.set(700, bad);
            expect_backward(gradient, GetParam());
          }
        }
      }
    }
  }
}

TEST_P(SqueezeExciteOnCpu, HalfTypesRoundAsTheyShould) {
  // y = x * g with g = 1 (hardsigmoid far out): every half value must come back as it was.
  for (const DType dtype : {DType::f16, DType::bf16}) {
    SqueezeExcite call = make({1, 1, 1, 256, 256}, dtype);
    call.gate = Gate::hardsigmoid;
    call.w2.set(0, 0);
    call.b2.set(0, 8);
    for (Index i = 0; i < 0x10000; ++i) {
      const double value = half_value(static_cast<std::uint16_t>(i), dtype);
      call.x.set(i, std::fabs(value) < 1e30 ? value : 0);  // the pooled value stays finite
    }
    call.w1.set(0, 0);
    run_forward(call, GetParam());
    for (Index i = 0; i < 0x10000; ++i) ASSERT_EQ(call.y.get(i), call.x.get(i)) << i;

    // A third of every value: the rounding, overflow-free and into the subnormal range.
    call.b2.set(0, -1);
    run_forward(call, GetParam());
    const double gate = call.gates.get(0);
    for (Index i = 0; i < 0x10000; ++i) {
      const double product = static_cast<float>(call.x.get(i) * gate);
      ASSERT_EQ(half_bits(call.y.get(i), dtype), half_bits(product, dtype)) << call.x.get(i);
    }
  }
}

TEST_P(SqueezeExciteOnCpu, SeveralThreadsAtOnce) {
  const SqueezeExcite call = make({4, 48, 12, 21, 20});
  const auto expected = all_bytes(call, GetParam(), Context{});
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (int i = 0; i < 10; ++i) wrong += all_bytes(call, GetParam(), Context{}) != expected;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(All, SqueezeExciteOnCpu, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

TEST(SqueezeExciteList, FastestFirstAndPortableAlways) {
  SqueezeExcite call = make({1, 1, 1, 1, 1});
  for (const Candidates& list :
       {explain(Context{}, call.forward()), explain(Context{}, call.backward())}) {
    ASSERT_EQ(list.size(), 3u);
    EXPECT_EQ(list[0].name, "avx512");
    EXPECT_EQ(list[1].name, "avx2");
    EXPECT_EQ(list[2].name, "portable");
    EXPECT_TRUE(list[2].declined.empty());
    int chosen = 0;
    for (const Candidate& candidate : list) {
      chosen += candidate.chosen;
      if (!candidate.declined.empty()) {
        EXPECT_EQ(candidate.declined.find("this CPU has no "), 0u);
      }
    }
    EXPECT_EQ(chosen, 1);
  }
}

}  // namespace
}  // namespace fusewise::testing

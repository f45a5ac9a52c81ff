// The autoencoder on the CPU, every implementation that this machine has against plain loops in
// float64.

#include <atomic>
#include <thread>

#include "autoencoder_reference.h"

namespace fusewise::testing {
namespace {

constexpr AutoencoderSizes kDefault{64, 5, 32, 64};
constexpr AutoencoderSizes kOdd{7, 3, 5, 9};
constexpr Index kBasis = 4;

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

void run(AutoencoderCase& call, int output, std::string_view implementation,
         const Context& context = {}) {
  AutoencoderForward forward = call.forward(output);
  forward.implementation = implementation;
  autoencoder(context, forward);
  AutoencoderBackward backward = call.backward(output);
  backward.implementation = implementation;
  autoencoder(context, backward);
}

void expect_right(AutoencoderCase& call, int output, std::string_view implementation) {
  const AutoencoderReference expected = autoencoder_reference(call, output);
  run(call, output, implementation);
  if (output == 0) {
    EXPECT_TRUE(near(call.y, expected.y)) << "y";
  }
  if (output == 1) {
    EXPECT_TRUE(near(call.latent, expected.latent)) << "latent";
  }
  if (output == 2) {
    EXPECT_TRUE(near(call.score, expected.score)) << "score";
  }
  EXPECT_TRUE(near(call.dx, expected.dx)) << "dx";
  for (std::size_t i = 0; i < call.gradients.size(); ++i) {
    EXPECT_TRUE(near(call.gradients[i], expected.gradients[i])) << kAutoencoderWeights[i].name;
  }
}

std::vector<std::string> available() {
  std::vector<std::string> names;
  const AutoencoderCase call = make_autoencoder(1, kOdd, DType::f32, DType::f32);
  for (const Candidate& candidate : explain(Context{}, call.forward(0))) {
    if (candidate.able) names.push_back(candidate.name);
  }
  return names;
}

class AutoencoderOnCpu : public ::testing::TestWithParam<std::string> {};

struct Types {
  DType data, weights;
};
constexpr Types kTypes[] = {{DType::f32, DType::f32},   {DType::f64, DType::f64},
                            {DType::f16, DType::f16},   {DType::f16, DType::f32},
                            {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};

TEST_P(AutoencoderOnCpu, EveryTypeLayoutAndOutput) {
  for (const Types types : kTypes) {
    for (const RowLayout layout : kRowLayouts) {
      for (int output = 0; output < 3; ++output) {
        SCOPED_TRACE(std::string(name_of(types.data)) + ", weights " + name_of(types.weights) +
                     ", layout " + std::to_string(static_cast<int>(layout)) + ", output " +
                     std::to_string(output));
        AutoencoderCase call = make_autoencoder(21, kOdd, types.data, types.weights, layout);
        expect_right(call, output, GetParam());
      }
    }
  }
}

TEST_P(AutoencoderOnCpu, EverySize) {
  constexpr AutoencoderSizes kAll[] = {kDefault,        {3, 1, 4, 2},  {16, 2, 16, 16},
                                       {33, 2, 17, 70}, {2, 9, 3, 40}, {130, 1, 40, 12}};
  for (const AutoencoderSizes& size : kAll) {
    for (const Index rows : {1, 8, 33, 70}) {
      SCOPED_TRACE(std::to_string(size.n_mels) + " mels, " + std::to_string(rows) + " rows");
      AutoencoderCase call = make_autoencoder(rows, size, DType::f64, DType::f64);
      expect_right(call, 0, GetParam());
      expect_right(call, 2, GetParam());
    }
  }
}

TEST_P(AutoencoderOnCpu, NoRows) {
  AutoencoderCase call = make_autoencoder(0, kOdd, DType::f32, DType::f32);
  for (int output = 0; output < 3; ++output) expect_right(call, output, GetParam());
}

TEST_P(AutoencoderOnCpu, TheSameBitsWithAndWithoutTheProjection) {
  for (int output = 0; output < 3; ++output) {
    AutoencoderCase with = make_autoencoder(70, kOdd, DType::f16, DType::f32), without = with;
    without.projection = {};
    run(with, output, GetParam());
    run(without, output, GetParam());
    EXPECT_EQ(with.dx.memory(), without.dx.memory());
    for (std::size_t i = 0; i < with.gradients.size(); ++i) {
      EXPECT_EQ(with.gradients[i].memory(), without.gradients[i].memory());
    }
  }
}

TEST_P(AutoencoderOnCpu, OnlyTheWantedGradients) {
  for (int output = 0; output < 3; ++output) {
    AutoencoderCase all = make_autoencoder(40, kOdd, DType::f32, DType::f32);
    run(all, output, GetParam());
    for (std::size_t wanted = 0; wanted <= all.gradients.size(); ++wanted) {
      AutoencoderCase call = make_autoencoder(40, kOdd, DType::f32, DType::f32);
      AutoencoderBackward backward = call.backward(output);
      backward.projection = {};
      backward.implementation = GetParam();
      backward.dx = {};
      backward.gradients = {};
      const bool none = wanted == all.gradients.size();
      if (!none) {
        backward.gradients.*kAutoencoderWeights[wanted].weight = call.gradients[wanted].view();
      }
      autoencoder(Context{}, backward);
      if (!none) {
        EXPECT_EQ(call.gradients[wanted].memory(), all.gradients[wanted].memory());
      }
    }
    AutoencoderCase call = make_autoencoder(40, kOdd, DType::f32, DType::f32);
    AutoencoderBackward backward = call.backward(output);
    backward.projection = {};
    backward.implementation = GetParam();
    backward.gradients = {};
    autoencoder(Context{}, backward);
    EXPECT_EQ(call.dx.memory(), all.dx.memory());
  }
}

TEST_P(AutoencoderOnCpu, ShortRowsOfTheBasis) {
  for (const double length : {0.0, 1e-20, 1e-13}) {
    AutoencoderCase call = make_autoencoder(9, kOdd, DType::f64, DType::f64);
    for (Index i = 0; i < 27; ++i) {
      call.weights[kBasis].set(i, length * call.weights[kBasis].get(i));
    }
    for (int output = 0; output < 3; ++output) expect_right(call, output, GetParam());
  }
}

/// Every byte of every output.
std::vector<std::uint8_t> all_bytes(AutoencoderCase call, std::string_view implementation,
                                    const Context& context) {
  std::vector<std::uint8_t> bytes;
  for (int output = 0; output < 3; ++output) {
    run(call, output, implementation, context);
    for (const Tensor* t : {&call.y, &call.latent, &call.score, &call.dx}) {
      bytes.insert(bytes.end(), t->memory().begin(), t->memory().end());
    }
    for (const Tensor& t : call.gradients) {
      bytes.insert(bytes.end(), t.memory().begin(), t.memory().end());
    }
  }
  return bytes;
}

TEST_P(AutoencoderOnCpu, TheSameBitsWhoeverRunsIt) {
  for (const Index rows : {1, 30, 64, 300, 2500}) {
    const AutoencoderCase call = make_autoencoder(rows, kOdd, DType::f32, DType::f32);
    Context context;
    const auto once = all_bytes(call, GetParam(), context);
    EXPECT_EQ(all_bytes(call, GetParam(), context), once) << "again";
    for (const int threads : {1, 2, 3, 16}) {
      Fixed executor(threads);
      context.executor = &executor;
      EXPECT_EQ(all_bytes(call, GetParam(), context), once) << threads << " threads";
    }
  }
}

TEST_P(AutoencoderOnCpu, WeightsThatChange) {
  AutoencoderCase call = make_autoencoder(5, kOdd, DType::f32, DType::f32);
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < call.weights.size(); ++i) {
      call.weights[i].set(0, call.weights[i].get(0) + 0.25);
      expect_right(call, 0, GetParam());
    }
  }
}

TEST_P(AutoencoderOnCpu, InfinitiesMeetAsInTheFormula) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  // In dy, where dz is a sum of both infinities, and in the decoder, where y is one of them.
  for (const double value : {kInf, -kInf}) {
    AutoencoderCase poisoned = make_autoencoder(40, kOdd, DType::f64, DType::f64);
    poisoned.dy.set(100, value);
    expect_right(poisoned, 0, GetParam());
  }
  AutoencoderCase call = make_autoencoder(40, kOdd, DType::f64, DType::f64);
  call.weights[9].set(4, -kInf);
  run(call, 0, GetParam());
  const AutoencoderReference expected = autoencoder_reference(call, 0);
  EXPECT_TRUE(near(call.y, expected.y));
}

TEST_P(AutoencoderOnCpu, APoisonedRowStaysAlone) {
  const AutoencoderCase clean = make_autoencoder(40, kOdd, DType::f32, DType::f32);
  AutoencoderCase call = clean, right = clean;
  call.x.set(21 * 11 + 4, std::numeric_limits<double>::quiet_NaN());
  run(call, 0, GetParam());
  run(right, 0, GetParam());
  for (Index i = 0; i < call.y.numel(); ++i) {
    if (i / 21 == 11) {
      EXPECT_TRUE(std::isnan(call.y.get(i)) && std::isnan(call.dx.get(i)));
    } else {
      EXPECT_TRUE(call.y.get(i) == right.y.get(i) && call.dx.get(i) == right.dx.get(i));
    }
  }
}

TEST_P(AutoencoderOnCpu, SeveralThreadsAtOnce) {
  const AutoencoderCase call = make_autoencoder(100, kOdd, DType::f32, DType::f32);
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

/// While a loop waits, it runs another call on the same thread, as work-stealing threads do.
TEST_P(AutoencoderOnCpu, AnExecutorMayReenter) {
  const AutoencoderCase call = make_autoencoder(300, kOdd, DType::f32, DType::f32);
  AutoencoderCase other = make_autoencoder(400, kOdd, DType::f32, DType::f32);
  for (Tensor& weight : other.weights) weight.set(0, weight.get(0) + 1);
  const auto expected = all_bytes(call, GetParam(), Context{});
  struct Reentrant : Executor {
    const AutoencoderCase* other;
    std::string implementation;
    int depth = 0;
    int threads() const override { return 3; }
    void parallel_for(std::int64_t count, Body body, void* state) override {
      for (std::int64_t i = 0; i < count; ++i) {
        body(i, i + 1, state);
        if (depth > 0) continue;
        ++depth;
        Context inner;
        inner.executor = this;
        all_bytes(*other, implementation, inner);
        --depth;
      }
    }
  } executor;
  executor.other = &other;
  executor.implementation = GetParam();
  Context context;
  context.executor = &executor;
  EXPECT_EQ(all_bytes(call, GetParam(), context), expected);
}

INSTANTIATE_TEST_SUITE_P(All, AutoencoderOnCpu, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

/// The reference's own gradients, against differences of its outputs.
TEST(AutoencoderReferenceLoops, GradientsAreThoseOfTheOutputs) {
  AutoencoderCase call = make_autoencoder(3, {4, 2, 3, 3}, DType::f64, DType::f64);
  const auto loss = [&](int output) {
    const AutoencoderReference found = autoencoder_reference(call, output);
    double sum = 0;
    for (std::size_t i = 0; i < found.y.size() && output == 0; ++i) {
      sum += found.y[i] * call.dy.get(i);
    }
    for (std::size_t i = 0; i < found.latent.size() && output == 1; ++i) {
      sum += found.latent[i] * call.dlatent.get(i);
    }
    for (std::size_t i = 0; i < found.score.size() && output == 2; ++i) {
      sum += found.score[i] * call.dscore.get(i);
    }
    return sum;
  };
  for (int output = 0; output < 3; ++output) {
    const AutoencoderReference found = autoencoder_reference(call, output);
    const auto check = [&](Tensor& t, const std::vector<double>& gradient) {
      for (Index i = 0; i < t.numel(); ++i) {
        const double before = t.get(i), step = 1e-5;
        t.set(i, before + step);
        const double above = loss(output);
        t.set(i, before - step);
        const double below = loss(output);
        t.set(i, before);
        EXPECT_NEAR((above - below) / (2 * step), gradient[i],
                    1e-6 + 1e-6 * std::fabs(gradient[i]));
      }
    };
    check(call.x, found.dx);
    for (std::size_t i = 0; i < call.weights.size(); ++i)
      check(call.weights[i], found.gradients[i]);
  }
}

}  // namespace
}  // namespace fusewise::testing

// Linear + activation on the CPU, every implementation that this machine has against plain loops in
// float64.

#include <atomic>
#include <thread>

#include "linear_reference.h"

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

template <typename Call>
void run(Call call, std::string_view implementation, const Context& context = {}) {
  call.implementation = implementation;
  linear_act(context, call);
}

/// With the call's own z and dz, where it has them.
template <typename Call>
void run_given(const LinearAct& tensors, const Call& call, std::string_view implementation) {
  GivenGemm gemm(tensors);
  Context context;
  if (tensors.z.defined() || tensors.dz.defined()) context.gemm = &gemm;
  run(call, implementation, context);
}

void expect_forward(LinearAct& call, std::string_view implementation) {
  const Values z = z_reference(call);
  run_given(call, call.forward(), implementation);
  expect_forward_results(call, z);
}

/// From what the reference keeps.
void expect_backward(LinearAct& call, std::string_view implementation) {
  keep(call);
  const LinearGradients expected = gradient_reference(call);
  run(call.backward(), implementation);
  expect_backward_results(call, expected);
}

void expect_both(LinearAct call, std::string_view implementation) {
  expect_forward(call, implementation);
  expect_backward(call, implementation);
}

std::vector<std::string> available() {
  const LinearAct call = make_linear_act({1, 1, 1}, DType::f32, Activation::relu);
  std::vector<std::string> names;
  for (const Candidate& candidate : explain(Context{}, call.forward())) {
    if (candidate.declined.empty()) names.push_back(candidate.name);
  }
  return names;
}

class LinearActOnCpu : public ::testing::TestWithParam<std::string> {};

TEST_P(LinearActOnCpu, EveryTypeAndForm) {
  const MatrixSizes sizes{11, 19, 21};
  for (const DType dtype : kFloating) {
    for (const Form x : kOperands) {
      for (const Form w : kOperands) {
        for (const Form dy : kForms) {
          const Activation activation = dy == Form::sliced ? Activation::relu : Activation::gelu;
          SCOPED_TRACE(case_name(sizes, dtype, activation, x, w, dy));
          expect_both(make_linear_act(sizes, dtype, activation, x, w, dy), GetParam());
        }
      }
    }
  }
}

TEST_P(LinearActOnCpu, EveryActivationAndSize) {
  const MatrixSizes all[] = {{1, 1, 1},    {3, 65, 3},  {65, 3, 129}, {129, 8, 1},
                             {70, 129, 7}, {5, 33, 65}, {200, 31, 2}, {2, 300, 40}};
  for (const DType dtype : kFloating) {
    for (const Activation activation : kActivations) {
      for (const MatrixSizes& sizes : all) {
        SCOPED_TRACE(case_name(sizes, dtype, activation, Form::dense, Form::dense, Form::dense));
        expect_both(make_linear_act(sizes, dtype, activation), GetParam());
      }
    }
  }
}

TEST_P(LinearActOnCpu, NothingToDo) {
  for (const MatrixSizes& sizes : {MatrixSizes{0, 5, 4}, {3, 0, 4}, {3, 5, 0}, {0, 0, 0}}) {
    for (const Activation activation : kActivations) {
      for (const Form form : {Form::dense, Form::columns}) {
        SCOPED_TRACE(case_name(sizes, DType::f32, activation, form, form, form));
        // Sums over nothing are zero, and so the bias alone is left of z.
        expect_both(make_linear_act(sizes, DType::f32, activation, form, form, form), GetParam());
      }
    }
  }
}

TEST_P(LinearActOnCpu, WithoutBiasAndWithNothingKept) {
  for (const Activation activation : kActivations) {
    LinearAct call = make_linear_act({9, 21, 7}, DType::f32, activation);
    call.b = {};
    expect_forward(call, GetParam());
    call.kept = {};
    expect_forward(call, GetParam());
  }
}

TEST_P(LinearActOnCpu, OutputsInForms) {
  for (const Form form : kRows) {
    for (const Activation activation : kActivations) {
      LinearAct call = make_linear_act({9, 21, 7}, DType::f16, activation);
      call.y = matrix(DType::f16, form, 9, 21);
      if (call.kept.defined()) {
        const bool bits = activation == Activation::relu;
        call.kept = matrix(bits ? DType::u8 : DType::f16, form, 9, bits ? 3 : 21);
      }
      expect_both(call, GetParam());
    }
  }
}

/// z is exact, so that only the activation's own error is left.
TEST_P(LinearActOnCpu, AZOfTheCallers) {
  for (const DType dtype : kFloating) {
    for (const Activation activation : kActivations) {
      SCOPED_TRACE(name_of(activation));
      LinearAct call = make_linear_act({9, 21, 7}, dtype, activation);
      call.z = Tensor(dtype, {9, 21}).fill(7);
      call.b = {};
      expect_forward(call, GetParam());
    }
  }
}

TEST_P(LinearActOnCpu, GradientInPlace) {
  for (const Activation activation : kActivations) {
    for (const Form form : {Form::dense, Form::sliced, Form::stepped}) {
      LinearAct call =
          make_linear_act({9, 21, 7}, DType::f32, activation, Form::dense, Form::dense, form);
      keep(call);
      const LinearGradients expected = gradient_reference(call);
      LinearActBackward backward = call.backward();
      backward.overwrite_dy = true;
      run(backward, GetParam());
      if (form != Form::stepped) {
        EXPECT_TRUE(all_close(call.dy, expected.dz)) << name_of(activation);
      }
      expect_backward_results(call, expected);
    }
  }
}

TEST_P(LinearActOnCpu, ReluToldByItsOutput) {
  for (const DType dtype : kFloating) {
    LinearAct call = make_linear_act({9, 21, 7}, dtype, Activation::relu);
    call.kept = Tensor(dtype, {9, 21});
    keep(call);
    call.kept.set(3, 0.0);
    call.kept.set(4, -0.0);
    call.kept.set(5, kNaN);
    const LinearGradients expected = gradient_reference(call);
    run(call.backward(), GetParam());
    expect_backward_results(call, expected);
  }
}

TEST_P(LinearActOnCpu, EveryChoiceOfGradients) {
  for (const Activation activation : kActivations) {
    for (const Form dy : {Form::dense, Form::stepped}) {
      for (int wanted = 0; wanted < 8; ++wanted) {
        SCOPED_TRACE(wanted);
        LinearAct call =
            make_linear_act({70, 21, 7}, DType::f32, activation, Form::dense, Form::dense, dy);
        if (!(wanted & 1)) call.dx = {};
        if (!(wanted & 2)) call.dw = {};
        if (!(wanted & 4)) call.db = {};
        keep(call);
        const LinearGradients expected = gradient_reference(call);
        LinearActBackward backward = call.backward();
        if (!call.dw.defined()) backward.x = {};
        if (!call.dx.defined()) backward.w = {};
        run(backward, GetParam());
        expect_backward_results(call, expected);
      }
    }
  }
}

TEST_P(LinearActOnCpu, NaNInfinityAndZero) {
  for (const DType dtype : kFloating) {
    for (const Activation activation : kActivations) {
      for (const double value : {kNaN, kInf, -kInf, 0.0, -0.0}) {
        SCOPED_TRACE(value);
        LinearAct call = make_linear_act({5, 19, 7}, dtype, activation);
        call.z = Tensor(dtype, {5, 19}).fill(7);
        call.b = {};
        for (Index i = 0; i < 19; ++i) call.z.set(19 + i, value);
        expect_forward(call, GetParam());

        LinearAct gradient = make_linear_act({5, 19, 7}, dtype, activation);
        gradient.dy.set(40, value);
        expect_backward(gradient, GetParam());
        gradient = make_linear_act({5, 19, 7}, dtype, activation);
        gradient.x.set(8, value);
        expect_both(gradient, GetParam());
      }
    }
  }
}

/// Every byte of every output, after forward and backward.
std::vector<std::uint8_t> all_bytes(LinearAct call, std::string_view implementation,
                                    const Context& context) {
  run(call.forward(), implementation, context);
  run(call.backward(), implementation, context);
  std::vector<std::uint8_t> bytes;
  for (const Tensor* t : {&call.y, &call.kept, &call.dx, &call.dw, &call.db}) {
    bytes.insert(bytes.end(), t->memory().begin(), t->memory().end());
  }
  return bytes;
}

TEST_P(LinearActOnCpu, TheSameBitsWhoeverRunsIt) {
  for (const MatrixSizes& sizes : {MatrixSizes{333, 70, 40}, {7, 300, 90}, {3000, 5, 3}}) {
    for (const Activation activation : {Activation::relu, Activation::gelu}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const LinearAct call = make_linear_act(sizes, dtype, activation);
        Context context;
        const auto once = all_bytes(call, GetParam(), context);
        EXPECT_EQ(all_bytes(call, GetParam(), context), once) << "again";
        for (const int threads : {1, 2, 3, 8}) {
          Fixed executor(threads);
          context.executor = &executor;
          EXPECT_EQ(all_bytes(call, GetParam(), context), once) << threads << " threads";
        }
      }
    }
  }
}

TEST_P(LinearActOnCpu, SeveralThreadsAtOnce) {
  const LinearAct call = make_linear_act({100, 70, 40}, DType::f32, Activation::silu);
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

INSTANTIATE_TEST_SUITE_P(All, LinearActOnCpu, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

TEST(LinearActList, FastestFirstAndPortableAlways) {
  const LinearAct call = make_linear_act({1, 1, 1}, DType::f32, Activation::relu);
  for (const Candidates& list :
       {explain(Context{}, call.forward()), explain(Context{}, call.backward())}) {
    ASSERT_EQ(list.size(), 3u);
    EXPECT_EQ(list[0].name, "avx512");
    EXPECT_EQ(list[2].name, "portable");
    EXPECT_TRUE(list[2].able);
    int chosen = 0;
    for (const Candidate& candidate : list) chosen += candidate.chosen;
    EXPECT_EQ(chosen, 1);
  }
}

// The functions themselves. ----------------------------------------------------------------------

/// Every implementation on a z of the test's own, against the C library in float64.
class ActivationsOnCpu : public LinearActOnCpu {};

constexpr double kUnderflow = 1e-36;  // silu of -89: the exponential overflows, in torch too

std::vector<double> interesting() {
  std::vector<double> values{0.0, -0.0, kNaN, kInf, -kInf};
  for (double z = 1e-30; z < 1e30; z *= 1.37) values.insert(values.end(), {z, -z});
  for (double z = -105; z < 105; z += 0.0137) values.push_back(static_cast<float>(z));
  return values;
}

TEST_P(ActivationsOnCpu, AgreeWithTheCLibrary) {
  const std::vector<double> values = interesting();
  const auto count = static_cast<Index>(values.size());
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const Activation activation : kActivations) {
      SCOPED_TRACE(name_of(activation));
      LinearAct call = make_linear_act({1, count, 1}, dtype, activation);
      call.z = Tensor(dtype, {1, count});
      call.b = {};
      for (Index i = 0; i < count; ++i) call.z.set(i, values[i]);
      call.kept = {};
      run_given(call, call.forward(), GetParam());
      const double eps = epsilon(dtype);
      for (Index i = 0; i < count; ++i) {
        const double z = call.z.get(i), right = linear_activate(activation, z);
        // Of gelu's the factor 1 + erf is exact to an epsilon of 1; the rest is relative.
        const bool factor = activation == Activation::gelu || activation == Activation::gelu_tanh;
        const double error = 4 * eps * std::fabs(factor ? z : right) + kUnderflow;
        ASSERT_TRUE(is_close(call.y.get(i), {right, error}, dtype))
            << z << " gives " << call.y.get(i) << ", not " << right;
        if (z == 0) {
          ASSERT_EQ(std::signbit(call.y.get(i)), std::signbit(right)) << z;
        }
      }
    }
  }
}

TEST_P(ActivationsOnCpu, SlopesAgreeWithTheCLibrary) {
  const std::vector<double> values = interesting();
  const auto count = static_cast<Index>(values.size());
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const Activation activation :
         {Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
      SCOPED_TRACE(name_of(activation));
      LinearAct call = make_linear_act({1, count, 1}, dtype, activation);
      call.dz = Tensor(dtype, {1, count});
      for (Index i = 0; i < count; ++i) {
        call.kept.set(i, values[i]);
        call.dy.set(i, 1);
      }
      call.dw = call.db = {};
      run_given(call, call.backward(), GetParam());
      for (Index i = 0; i < count; ++i) {
        const double z = call.kept.get(i), got = call.dz.get(i);
        if (std::isinf(z)) continue;  // 0 times infinity somewhere, as in torch
        const Bounded slope = linear_slope(activation, z);
        // Far out the formula runs into 0 times infinity in its own type, and torch's does too.
        if (std::fabs(z) > 1e10) continue;
        ASSERT_TRUE(
            is_close(got, {slope.value, 8 * epsilon(dtype) * slope.error + kUnderflow}, dtype))
            << z << " gives " << got << ", not " << slope.value;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ActivationsOnCpu, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace fusewise::testing

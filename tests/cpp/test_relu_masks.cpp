// ReLU on the CPU, every implementation that this machine has: its bits and its gradients exactly,
// for every number of columns around the widths of vectors and bytes, and at zero.

#include "linear_reference.h"

namespace fusewise::testing {
namespace {

constexpr Index kRowCount = 3;

std::vector<std::string> available() {
  const LinearAct call = make_linear_act({1, 1, 1}, DType::f32, Activation::relu);
  std::vector<std::string> names;
  for (const Candidate& candidate : explain(Context{}, call.forward())) {
    if (candidate.able) names.push_back(candidate.name);
  }
  return names;
}

/// With a z of its own. All values are small whole numbers, their sums exact in every type.
LinearAct make(Index columns, DType dtype) {
  LinearAct call = make_linear_act({kRowCount, columns, 1}, dtype, Activation::relu);
  call.z = Tensor(dtype, {kRowCount, columns});
  call.dz = Tensor(dtype, {kRowCount, columns});
  call.b = call.dw = {};
  for (Index i = 0; i < kRowCount * columns; ++i) {
    call.z.set(i, (i * 7 + columns) % 5 - 2.0);
    call.dy.set(i, i % 11 + 1.0);
  }
  return call;
}

class ReluOnCpu : public ::testing::TestWithParam<std::string> {
 protected:
  void expect_exact(const LinearAct& call) {
    LinearActForward forward = call.forward();
    forward.implementation = GetParam();
    GivenGemm gemm(call);
    Context context;
    context.gemm = &gemm;
    linear_act(context, forward);
    differentiate(call);
    std::vector<double> sums(call.n);
    for (Index i = 0; i < call.m * call.n; ++i) {
      const double z = call.z.get(i), gradient = z > 0 ? call.dy.get(i) : 0;
      ASSERT_EQ(bit_at(call.kept, i / call.n, i % call.n), z > 0) << "bit " << i << ", z " << z;
      ASSERT_EQ(call.y.get(i), z > 0 ? z : 0) << "y " << i;
      ASSERT_EQ(call.dz.get(i), gradient) << "dz " << i << ", z " << z;
      sums[i % call.n] += gradient;
    }
    for (Index j = 0; j < call.n; ++j) ASSERT_EQ(call.db.get(j), sums[j]) << "db " << j;
    ASSERT_TRUE(call.kept.guards_hold() && call.dz.guards_hold());
  }
  /// Backward, with dz.
  void differentiate(const LinearAct& call) {
    GivenGemm gemm(call);
    Context context;
    context.gemm = &gemm;
    LinearActBackward backward = call.backward();
    backward.implementation = GetParam();
    linear_act(context, backward);
  }
};

TEST_P(ReluOnCpu, EveryNumberOfColumns) {
  for (const DType dtype : kFloating) {
    for (Index columns = 1; columns <= 33; ++columns) {
      SCOPED_TRACE(std::string(name_of(dtype)) + ", " + std::to_string(columns) + " columns");
      expect_exact(make(columns, dtype));
    }
  }
}

TEST_P(ReluOnCpu, IsClosedAtZero) {
  for (const DType dtype : kFloating) {
    for (const double zero : {0.0, -0.0}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + ", " + std::to_string(zero));
      LinearAct call = make(21, dtype);
      for (Index i = 0; i < call.z.numel(); ++i) call.z.set(i, zero);
      expect_exact(call);

      // Without bits, the output tells.
      call.kept = Tensor(dtype, {kRowCount, 21});
      for (Index i = 0; i < call.kept.numel(); ++i) call.kept.set(i, zero);
      differentiate(call);
      for (Index i = 0; i < call.dz.numel(); ++i) ASSERT_EQ(call.dz.get(i), 0);
      for (Index j = 0; j < call.n; ++j) ASSERT_EQ(call.db.get(j), 0);
    }
  }
}

/// Squeeze-and-Excitation's hidden units at zero: nothing behind them gets a gradient.
TEST_P(ReluOnCpu, IsClosedAtZeroInsideOfSqueezeExcite) {
  for (const DType dtype : kFloating) {
    SqueezeExcite call =
        make_squeeze_excite({2, 5, 3, 4, 4}, dtype, dtype, Layout::nchw, Layout::nchw);
    call.activation = Activation::relu;
    for (Index i = 0; i < call.w1.numel(); ++i) call.w1.set(i, 0);
    for (Index i = 0; i < call.b1.numel(); ++i) call.b1.set(i, 0);
    SqueezeExciteForward forward = call.forward();
    forward.implementation = GetParam();
    squeeze_excite(Context{}, forward);
    for (Index i = 0; i < call.hidden.numel(); ++i) ASSERT_EQ(call.hidden.get(i), 0);
    SqueezeExciteBackward backward = call.backward();
    backward.implementation = GetParam();
    squeeze_excite(Context{}, backward);
    for (Index i = 0; i < call.dw1.numel(); ++i) ASSERT_EQ(call.dw1.get(i), 0) << "dw1 " << i;
    for (Index i = 0; i < call.db1.numel(); ++i) ASSERT_EQ(call.db1.get(i), 0) << "db1 " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReluOnCpu, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace fusewise::testing

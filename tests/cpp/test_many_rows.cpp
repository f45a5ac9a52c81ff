// Sums over many rows on the CPU, every implementation that this machine has: more rows than one
// chunk, one group or one block of any kernel takes.

#include "autoencoder_reference.h"
#include "linear_reference.h"

namespace fusewise::testing {
namespace {

constexpr Index kRowCounts[] = {64, 65, 700, 3000, 20000};

std::vector<std::string> available() {
  const LinearAct call = make_linear_act({1, 1, 1}, DType::f32, Activation::relu);
  std::vector<std::string> names;
  for (const Candidate& candidate : explain(Context{}, call.forward())) {
    if (candidate.able) names.push_back(candidate.name);
  }
  return names;
}

class ManyRowsOnCpu : public ::testing::TestWithParam<std::string> {};

/// Of whole numbers, whose sums are exact in float32, and so right to the last bit.
TEST_P(ManyRowsOnCpu, GradientsOfLinear) {
  for (const DType dtype : kFloating) {
    for (const Index rows : kRowCounts) {
      SCOPED_TRACE(std::string(name_of(dtype)) + ", " + std::to_string(rows) + " rows");
      const Index n = 5, k = 3;
      LinearAct call = make_linear_act({rows, n, k}, dtype, Activation::identity);
      std::mt19937 engine(1);  // no period: a row that stands for another is seen
      for (Index i = 0; i < rows * n; ++i) call.dy.set(i, engine() % 8);
      for (Index i = 0; i < rows * k; ++i) call.x.set(i, engine() % 4 - 1.0);
      LinearActBackward backward = call.backward();
      backward.implementation = GetParam();
      linear_act(Context{}, backward);
      Tensor dw(dtype, {n, k}), db(dtype, {n});  // for the rounding of their type
      for (Index j = 0; j < n; ++j) {
        double sum = 0;
        for (Index row = 0; row < rows; ++row) sum += call.dy.get(row * n + j);
        db.set(j, sum);
        for (Index p = 0; p < k; ++p) {
          double product = 0;
          for (Index row = 0; row < rows; ++row) {
            product += call.dy.get(row * n + j) * call.x.get(row * k + p);
          }
          dw.set(j * k + p, product);
        }
      }
      for (Index j = 0; j < n; ++j) EXPECT_EQ(call.db.get(j), db.get(j)) << "db " << j;
      for (Index i = 0; i < n * k; ++i) EXPECT_EQ(call.dw.get(i), dw.get(i)) << "dw " << i;
    }
  }
}

/// Longer than a segment of a sum of the own GEMM, beside enough columns for all threads. Of whole
/// numbers, as above.
TEST_P(ManyRowsOnCpu, LongSumsOfLinear) {
  const Index m = 17, n = 1030, k = 4500;
  std::mt19937 engine(1);
  std::vector<int> x(m * k), w(n * k);
  for (int& each : x) each = static_cast<int>(engine() % 8);
  for (int& each : w) each = static_cast<int>(engine() % 4) - 1;
  for (const DType dtype : {DType::f32, DType::f64}) {
    SCOPED_TRACE(name_of(dtype));
    LinearAct call = make_linear_act({m, n, k}, dtype, Activation::identity);
    call.b = {};
    for (Index i = 0; i < m * k; ++i) call.x.set(i, x[i]);
    for (Index i = 0; i < n * k; ++i) call.w.set(i, w[i]);
    LinearActForward forward = call.forward();
    forward.implementation = GetParam();
    linear_act(Context{}, forward);
    Index wrong = 0;
    for (Index row = 0; row < m; ++row) {
      for (Index j = 0; j < n; ++j) {
        int sum = 0;
        for (Index i = 0; i < k; ++i) sum += x[row * k + i] * w[j * k + i];
        wrong += call.y.get(row * n + j) != sum;
      }
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST_P(ManyRowsOnCpu, GradientsOfTheAutoencoder) {
  for (const Index rows : kRowCounts) {
    SCOPED_TRACE(std::to_string(rows) + " rows");
    AutoencoderCase call = make_autoencoder(rows, {7, 3, 5, 9}, DType::f64, DType::f64);
    const AutoencoderReference expected = autoencoder_reference(call, 0);
    AutoencoderForward forward = call.forward(0);
    forward.implementation = GetParam();
    autoencoder(Context{}, forward);
    AutoencoderBackward backward = call.backward(0);
    backward.implementation = GetParam();
    autoencoder(Context{}, backward);
    EXPECT_TRUE(near(call.dx, expected.dx)) << "dx";
    for (std::size_t i = 0; i < call.gradients.size(); ++i) {
      EXPECT_TRUE(near(call.gradients[i], expected.gradients[i])) << kAutoencoderWeights[i].name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ManyRowsOnCpu, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace fusewise::testing

// BatchNorm + activation + max-pool on the CPU: every type, layout, size and implementation.

#include "batch_norm_pool_reference.h"
#include "message_of.h"

namespace fusewise::testing {
namespace {

struct Sizes {
  Index n, c, h, w;
};
constexpr Sizes kSizes[] = {
    {2, 4, 6, 5}, {1, 1, 7, 8}, {3, 19, 3, 3}, {2, 70, 9, 12}, {2, 3, 1, 1}};

std::vector<std::string> available() {
  const PoolProblem p(DType::f32, Layout::nchw, Layout::nchw, 2, 1, 2, 2);
  std::vector<std::string> names;
  for (const Candidate& each : explain(Context{}, p.forward())) {
    if (each.able) names.push_back(each.name);
  }
  return names;
}

class BatchNormPoolOnCpu : public ::testing::TestWithParam<std::string> {};

/// What BatchNorm + activation and a max-pool give; y bit by bit.
void expect_right(PoolProblem p, const std::string& implementation) {
  const auto run = [&](auto call) {
    call.implementation = implementation;
    if constexpr (requires { call.choices; })
      batch_norm_act_pool(Context{}, call);
    else
      batch_norm_act(Context{}, call);
  };
  run(p.plain_forward());
  run(p.forward());
  p.expect_pooled();
  EXPECT_TRUE(p.y.guards_hold());
  run(p.backward());
  EXPECT_TRUE(p.dx.guards_hold());
  const Tensor dx = p.dx, dweight = p.dweight, dbias = p.dbias;
  p.unpool();
  run(p.plain_backward());
  // The order of the sums follows from the layouts of all tensors.
  expect_near(dx, p.dx, 4, "dx");
  expect_near(dweight, p.dweight, 16, "dweight");
  expect_near(dbias, p.dbias, 16, "dbias");
}

TEST_P(BatchNormPoolOnCpu, EveryTypeLayoutAndSize) {
  for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
    for (const Layout layout : kLayouts) {
      for (const Layout other : kLayouts) {
        for (const Sizes& z : kSizes) {
          SCOPED_TRACE(std::string(name_of(dtype)) + " " +
                       std::to_string(static_cast<int>(layout)) + " " +
                       std::to_string(static_cast<int>(other)) + " C " + std::to_string(z.c));
          PoolProblem p(dtype, layout, other, z.n, z.c, z.h, z.w);
          p.training = (z.c + static_cast<int>(layout)) % 3 != 0;
          p.activation = kBatchNormActivations[static_cast<int>(other) % 5];
          expect_right(p, GetParam());
        }
      }
    }
  }
}

/// Rows that are longer than the pieces into which the other passes cut images.
TEST_P(BatchNormPoolOnCpu, LongRows) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::channels_last_sliced}) {
    expect_right(PoolProblem(DType::f32, layout, layout, 1, 2, 3, 9000), GetParam());
    expect_right(PoolProblem(DType::f32, layout, layout, 2, 600, 2, 50), GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(All, BatchNormPoolOnCpu, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

TEST(BatchNormPool, NothingIsSavedWithoutBackward) {
  PoolProblem p(DType::f32, Layout::channels_last, Layout::channels_last, 2, 5, 6, 6);
  BatchNormActPoolForward call = p.forward();
  call.mean = call.inverse_deviation = call.choices = {};
  batch_norm_act_pool(Context{}, call);
  const Tensor y = p.y;
  p.y.poison();
  p.running_mean = Tensor(DType::f32, {5}).fill(5);
  batch_norm_act_pool(Context{}, p.forward());
  EXPECT_EQ(p.y.memory(), y.memory());
}

TEST(BatchNormPool, Errors) {
  const auto message = [](const auto& spoil) {
    const PoolProblem p(DType::f32, Layout::nchw, Layout::nchw, 2, 3, 5, 4);
    BatchNormActPoolForward call = p.forward();
    spoil(call);
    return message_of([&] { batch_norm_act_pool(Context{}, call); });
  };
  using F = BatchNormActPoolForward;
  EXPECT_EQ(message([](F& f) { f.y.sizes[2] = 5; }), "y: expected [2, 3, 3, 2], got [2, 3, 5, 2]");
  EXPECT_EQ(message([](F& f) { f.choices.sizes[0] = 35; }), "choices: expected [36], got [35]");
  EXPECT_EQ(message([](F& f) { f.choices.dtype = DType::b8; }),
            "choices: expected dtype uint8, got bool");
  EXPECT_EQ(message([](F& f) { f.choices = {}; }),
            "mean, inverse_deviation and choices: expected all of them or none, got 2");
  EXPECT_EQ(message([](F& f) { f.running_var = {}; }),
            "running_mean and running_var: expected both or none");
  const PoolProblem p(DType::f32, Layout::nchw, Layout::nchw, 2, 3, 5, 4);
  BatchNormActPoolBackward call = p.backward();
  call.dy.sizes[3] = 4;
  EXPECT_EQ(message_of([&] { batch_norm_act_pool(Context{}, call); }),
            "dy: expected [2, 3, 3, 2], got [2, 3, 3, 4]");
}

}  // namespace
}  // namespace fusewise::testing

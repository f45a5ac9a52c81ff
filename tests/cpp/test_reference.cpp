// The tests' own tools: a comparator that lets a wrong answer through tests nothing.

#include "reference.h"

namespace fusewise::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(Comparator, FiniteValues) {
  EXPECT_TRUE(is_close(1, {1, 0}, DType::f32));
  EXPECT_TRUE(is_close(1 + 1e-9, {1, 0}, DType::f32));
  EXPECT_FALSE(is_close(1 + 1e-6, {1, 0}, DType::f32));
  EXPECT_TRUE(is_close(1 + 1e-6, {1, 1e-6}, DType::f32));
  EXPECT_TRUE(is_close(1.0004, {1, 0}, DType::f16));
  EXPECT_FALSE(is_close(1.001, {1, 0}, DType::f16));
  EXPECT_TRUE(is_close(1.003, {1, 0}, DType::bf16));
  EXPECT_FALSE(is_close(1.005, {1, 0}, DType::bf16));
  EXPECT_FALSE(is_close(1 + 1e-15, {1, 0}, DType::f64));
  EXPECT_TRUE(is_close(0, {0, 0}, DType::f64));
  EXPECT_FALSE(is_close(-1, {1, 0.1}, DType::bf16));
}

TEST(Comparator, NaNAndInfinity) {
  EXPECT_TRUE(is_close(kNaN, {kNaN, 0}, DType::f32));
  EXPECT_FALSE(is_close(kNaN, {1, 1}, DType::f32));
  EXPECT_FALSE(is_close(kNaN, {1, kInf}, DType::f32));
  EXPECT_FALSE(is_close(kNaN, {kInf, 0}, DType::f32));
  EXPECT_FALSE(is_close(1, {kNaN, kNaN}, DType::f32));
  EXPECT_TRUE(is_close(kInf, {kInf, 0}, DType::f32));
  EXPECT_FALSE(is_close(-kInf, {kInf, 0}, DType::f32));
  EXPECT_FALSE(is_close(1, {kInf, kInf}, DType::f32));
  EXPECT_FALSE(is_close(kInf, {1, 1}, DType::f32));
  EXPECT_FALSE(is_close(1, {1, kNaN}, DType::f32)) << "a bound that is NaN accepts nothing";
}

TEST(Comparator, WholeTensors) {
  Tensor t(DType::f32, {2, 2});
  for (Index i = 0; i < 4; ++i) t.set(i, static_cast<double>(i));
  EXPECT_TRUE(all_close(t, {{0, 0}, {1, 0}, {2, 0}, {3, 0}}));
  EXPECT_FALSE(all_close(t, {{0, 0}, {1, 0}, {2, 0}, {3.1, 0}}));
  EXPECT_FALSE(all_close(t, {{0, 0}, {1, 0}, {2, 0}}));
  t.set(2, kNaN);
  EXPECT_FALSE(all_close(t, {{0, 0}, {1, 0}, {2, 0}, {3, 0}}));
  EXPECT_TRUE(all_close(t, {{0, 0}, {1, 0}, {kNaN, 0}, {3, 0}}));
}

TEST(Comparator, SeesWritesBetweenTheElements) {
  Tensor t(DType::f32, {2}, {2});
  t.set(0, 1);
  t.set(1, 2);
  EXPECT_TRUE(all_close(t, {{1, 0}, {2, 0}}));
  static_cast<float*>(t.view().data)[1] = 0;
  EXPECT_FALSE(all_close(t, {{1, 0}, {2, 0}}));
}

TEST(Reference, HalfTypesRoundToNearestEven) {
  EXPECT_EQ(half_bits(1, DType::f16), 0x3c00);
  EXPECT_EQ(half_bits(-2, DType::f16), 0xc000);
  EXPECT_EQ(half_bits(1 + 0x1p-11, DType::f16), 0x3c00);
  EXPECT_EQ(half_bits(1 + 3 * 0x1p-11, DType::f16), 0x3c02);
  EXPECT_EQ(half_bits(65519, DType::f16), 0x7bff);
  EXPECT_EQ(half_bits(65520, DType::f16), 0x7c00);
  EXPECT_EQ(half_bits(0x1p-24, DType::f16), 0x0001);
  EXPECT_EQ(half_bits(0x1p-25, DType::f16), 0x0000);
  EXPECT_EQ(half_bits(1, DType::bf16), 0x3f80);
  EXPECT_EQ(half_bits(1 + 0x1p-8, DType::bf16), 0x3f80);
  EXPECT_EQ(half_bits(1 + 3 * 0x1p-8, DType::bf16), 0x3f82);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const double value = half_value(static_cast<std::uint16_t>(bits), dtype);
      if (std::isnan(value)) continue;
      ASSERT_EQ(half_bits(value, dtype), bits);
    }
    EXPECT_TRUE(std::isnan(half_value(half_bits(kNaN, dtype), dtype)));
  }
}

TEST(Reference, KnownValues) {
  // One pixel, one channel, everything can be done by hand: z = 2 * 3 + 1, g = hardsigmoid(-0.5).
  SqueezeExcite call =
      make_squeeze_excite({1, 1, 1, 1, 1}, DType::f64, DType::f64, Layout::nchw, Layout::nchw);
  call.activation = Activation::relu;
  call.gate = Gate::hardsigmoid;
  call.x.set(0, 3);
  call.w1.set(0, 2);
  call.b1.set(0, 1);
  call.w2.set(0, -0.5);
  call.b2.set(0, 3);
  const ForwardReference forward = forward_reference(call);
  EXPECT_EQ(forward.hidden[0].value, 7);
  EXPECT_DOUBLE_EQ(forward.gates[0].value, 2.5 / 6);
  EXPECT_DOUBLE_EQ(forward.y[0].value, 7.5 / 6);

  call.pooled.set(0, 3);
  call.hidden.set(0, 7);
  call.gates.set(0, 2.5 / 6);
  call.dy.set(0, 6);
  const BackwardReference backward = backward_reference(call);  // dz2 = 6 * 3 / 6, dz = 3 * -0.5
  EXPECT_DOUBLE_EQ(backward.db2[0].value, 3);
  EXPECT_DOUBLE_EQ(backward.dw2[0].value, 21);
  EXPECT_DOUBLE_EQ(backward.db1[0].value, -1.5);
  EXPECT_DOUBLE_EQ(backward.dw1[0].value, -4.5);
  EXPECT_DOUBLE_EQ(backward.dx[0].value, 2.5 - 3);
}

}  // namespace
}  // namespace fusewise::testing

// The tests' own tools: a comparator that lets a wrong answer through tests nothing.

#include <utility>

#include "autoencoder_reference.h"
#include "linear_reference.h"

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

// Wrong results of whole operators. --------------------------------------------------------------

/// As an implementation without any error but rounding would fill it.
void store(Tensor& to, const Values& values) {
  for (Index i = 0; i < to.numel(); ++i) to.set(i, values[i].value);
}

/// The element whose |value| is nearest to the root of the mean square.
Index typical(const Tensor& t) {
  double sum = 0;
  for (Index i = 0; i < t.numel(); ++i) sum += t.get(i) * t.get(i);
  const double wanted = std::sqrt(sum / static_cast<double>(t.numel()));
  Index nearest = 0;
  for (Index i = 1; i < t.numel(); ++i) {
    const double off = std::fabs(std::fabs(t.get(i)) - wanted);
    if (off < std::fabs(std::fabs(t.get(nearest)) - wanted)) nearest = i;
  }
  return nearest;
}

/// What is right passes; zeros, a tenth too much, and one wrong element do not.
template <typename Close>
void expect_refuses(Tensor t, const Close& close, const char* name) {
  SCOPED_TRACE(name);
  EXPECT_TRUE(close(t));
  Tensor wrong = t;
  for (Index i = 0; i < t.numel(); ++i) wrong.set(i, 0);
  EXPECT_FALSE(close(wrong)) << "zeros";
  for (Index i = 0; i < t.numel(); ++i) wrong.set(i, 1.1 * t.get(i));
  EXPECT_FALSE(close(wrong)) << "a tenth too much";
  const Index place = typical(t);
  wrong = t;
  wrong.set(place, -t.get(place));
  EXPECT_FALSE(close(wrong)) << "one with the other sign";
  wrong.set(place, 0);
  EXPECT_FALSE(close(wrong)) << "one is missing";
}

void expect_refuses(Tensor t, const Values& right, const char* name) {
  store(t, right);
  expect_refuses(t, [&](const Tensor& got) { return bool(all_close(got, right)); }, name);
}

TEST(Comparator, RefusesWrongLinearLayers) {
  for (const DType dtype : kFloating) {
    for (const Activation activation : kActivations) {
      for (const MatrixSizes& sizes : {MatrixSizes{11, 19, 21}, {33, 65, 100}}) {
        SCOPED_TRACE(case_name(sizes, dtype, activation, Form::dense, Form::dense, Form::dense));
        LinearAct call = make_linear_act(sizes, dtype, activation);
        const Values z = z_reference(call);
        expect_refuses(call.y, y_reference(call, z), "y");
        keep(call);
        if (call.kept.defined() && call.kept.dtype() != DType::u8) {
          expect_refuses(call.kept, z, "kept");
        }
        const LinearGradients right = gradient_reference(call);
        expect_refuses(Tensor(dtype, {sizes.m, sizes.n}), right.dz, "dz");
        expect_refuses(call.dx, right.dx, "dx");
        expect_refuses(call.dw, right.dw, "dw");
        expect_refuses(call.db, right.db, "db");
      }
    }
  }
}

TEST(Comparator, RefusesWrongDecisionsOfRelu) {
  for (const DType dtype : kFloating) {
    LinearAct call = make_linear_act({11, 19, 21}, dtype, Activation::relu);
    const Values z = z_reference(call);
    keep(call);
    EXPECT_TRUE(bits_right(call.kept, z, call.n));
    Index undecided = 0;
    for (Index i = 0; i < call.m * call.n; ++i) {
      // No type of the data makes room: only the rounding of sums does.
      undecided += std::fabs(z[i].value) <= 1e-4;
      std::uint8_t& byte = *byte_at(call.kept, i / call.n, i % call.n / 8);
      const auto bit = static_cast<std::uint8_t>(1 << i % call.n % 8);
      byte ^= bit;
      if (std::fabs(z[i].value) > 1e-4) {
        EXPECT_FALSE(bits_right(call.kept, z, call.n)) << i;
      }
      byte ^= bit;
    }
    EXPECT_LE(undecided, 1);
  }
}

TEST(Comparator, RefusesWrongSqueezeExcitation) {
  for (const DType dtype : kFloating) {
    for (const Activation activation : {Activation::silu, Activation::relu}) {
      SCOPED_TRACE(name_of(dtype));
      SqueezeExcite call =
          make_squeeze_excite({3, 8, 4, 5, 5}, dtype, dtype, Layout::nchw, Layout::nchw);
      call.activation = activation;
      const ForwardReference forward = forward_reference(call);
      expect_refuses(call.y, forward.y, "y");
      store(call.pooled, forward.pooled);
      store(call.hidden, forward.hidden);
      store(call.gates, forward.gates);
      const BackwardReference backward = backward_reference(call);
      expect_refuses(call.dx, backward.dx, "dx");
      expect_refuses(call.dw1, backward.dw1, "dw1");
      expect_refuses(call.db1, backward.db1, "db1");
      expect_refuses(call.dw2, backward.dw2, "dw2");
      expect_refuses(call.db2, backward.db2, "db2");
    }
  }
}

TEST(Comparator, RefusesAWrongAutoencoder) {
  for (const DType dtype : kFloating) {
    for (const int output : {0, 1, 2}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + ", output " + std::to_string(output));
      const AutoencoderCase call = make_autoencoder(7, {6, 3, 4, 5}, dtype, dtype);
      const AutoencoderReference right = autoencoder_reference(call, output);
      const auto refuses = [](Tensor t, const std::vector<double>& values, const char* name) {
        for (Index i = 0; i < t.numel(); ++i) t.set(i, values[i]);
        expect_refuses(t, [&](const Tensor& got) { return bool(near(got, values)); }, name);
      };
      refuses(call.y, right.y, "y");
      refuses(call.latent, right.latent, "latent");
      refuses(call.score, right.score, "score");
      refuses(call.dx, right.dx, "dx");
      for (std::size_t i = 0; i < call.gradients.size(); ++i) {
        const bool decoder = i >= 9;
        if (output != 1 || !decoder) refuses(call.gradients[i], right.gradients[i], "a weight");
      }
    }
  }
}

TEST(Comparator, GuardsThatWereOverwrittenAreSeen) {
  Tensor tensor(DType::f32, {2, 3}, {5, 1}, 1);  // one element before, two between the rows
  tensor.fill(1);
  EXPECT_TRUE(tensor.guards_hold());
  const std::size_t elements[] = {0, 4, 5, 9};  // before, between and after the rows
  for (const std::size_t element : elements) {
    std::uint8_t& byte = tensor.memory()[element * sizeof(float) + 3];
    const std::uint8_t before = std::exchange(byte, 0);
    EXPECT_FALSE(tensor.guards_hold()) << element;
    byte = before;
  }
}

}  // namespace
}  // namespace fusewise::testing

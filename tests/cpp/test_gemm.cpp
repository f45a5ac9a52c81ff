// The context's GEMM: what linear_act and mlp ask it for, and what they do with its answers.

#include <stdexcept>

#include "fusewise/mlp.h"
#include "linear_reference.h"
#include "plain_gemm.h"

namespace fusewise::testing {
namespace {

void expect_both(LinearAct call, Gemm& gemm) {
  const Values z = z_reference(call);
  linear_act(with(gemm), call.forward());
  expect_forward_results(call, z);
  keep(call);
  const LinearGradients expected = gradient_reference(call);
  linear_act(with(gemm), call.backward());
  expect_backward_results(call, expected);
}

TEST(CallersGemm, IsAskedForWhatIsPromised) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const MatrixSizes& sizes : {MatrixSizes{11, 19, 21}, {1, 5, 3}, {5, 1, 3}, {5, 3, 1}}) {
      for (const Form x : kOperands) {
        for (const Form dy : kForms) {
          for (const Activation activation : {Activation::identity, Activation::gelu}) {
            SCOPED_TRACE(case_name(sizes, dtype, activation, x, x, dy));
            PlainGemm gemm;
            expect_both(make_linear_act(sizes, dtype, activation, x, x, dy), gemm);
            EXPECT_EQ(gemm.calls, 3);
          }
        }
      }
    }
  }
}

/// Of many columns, the activation's pass adds the bias; it must never be lost or added twice.
TEST(CallersGemm, TheBiasIsAddedOnce) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const Activation activation : kActivations) {
      for (const Index columns : {255, 256, 275}) {
        for (const bool keeps : {false, true}) {
          SCOPED_TRACE(std::string(name_of(activation)) + ", columns: " + std::to_string(columns));
          LinearAct call = make_linear_act({3, columns, 5}, dtype, activation);
          if (!keeps) call.kept = {};
          const Values z = z_reference(call);
          PlainGemm gemm;
          for (const Context& context : {with(gemm), Context{}}) {
            linear_act(context, call.forward());
            expect_forward_results(call, z);
          }
        }
      }
    }
  }
}

TEST(CallersGemm, IsNotAskedForNothing) {
  for (const MatrixSizes& sizes : {MatrixSizes{0, 5, 4}, {3, 0, 4}, {3, 5, 0}}) {
    PlainGemm gemm;
    expect_both(make_linear_act(sizes, DType::f32, Activation::relu), gemm);
    EXPECT_LE(gemm.calls, 1) << "one of the three has no size of 0";
  }
}

TEST(CallersGemm, MayDecline) {
  for (const DType dtype : kFloating) {
    PlainGemm gemm;
    gemm.declines = [](const TensorView& d) { return d.dtype != DType::f64; };
    const LinearAct call = make_linear_act({9, 21, 7}, dtype, Activation::relu);
    expect_both(call, gemm);
    EXPECT_EQ(gemm.calls, 3);
    EXPECT_EQ(gemm.declined, dtype == DType::f64 ? 0 : 3);
  }
}

template <typename Exception>
class FailingGemm : public Gemm {
 public:
  bool multiply(const TensorView&, const TensorView&, const TensorView&,
                const TensorView& d) override {
    if (d.sizes[1] == 4) throw Exception("out of order");
    return false;
  }
};

/// A stack of two, the second with four columns.
struct Stack {
  LinearAct first = make_linear_act({3, 5, 6}, DType::f32, Activation::relu);
  LinearAct second = make_linear_act({3, 4, 5}, DType::f32, Activation::gelu);
  std::vector<MlpLayer> layers{
      {first.w.view(), first.b.view(), first.y.view(), {}, first.dw.view(), first.db.view()},
      {second.w.view(), second.b.view(), second.y.view(), second.kept.view(), second.dw.view(),
       second.db.view()}};

  MlpForward forward() const {
    MlpForward call;
    call.x = first.x.view(), call.layers = layers;
    call.final_activation = Activation::gelu;
    return call;
  }
  MlpBackward backward() const {
    MlpBackward call;
    call.dy = second.dy.view(), call.x = first.x.view(), call.layers = layers;
    call.final_activation = Activation::gelu;
    return call;
  }
};

TEST(CallersGemm, ItsExceptionsPassThrough) {
  const Stack stack;
  FailingGemm<std::runtime_error> fails;
  FailingGemm<OutOfMemory> no_memory;
  EXPECT_THROW(linear_act(with(fails), stack.second.forward()), std::runtime_error);
  EXPECT_THROW(linear_act(with(no_memory), stack.second.forward()), OutOfMemory);
  EXPECT_THROW(mlp(with(fails), stack.forward()), std::runtime_error);
  EXPECT_THROW(mlp(with(no_memory), stack.forward()), OutOfMemory);
}

TEST(CallersGemm, MultipliesForStacks) {
  PlainGemm gemm;
  const Stack stack;
  mlp(with(gemm), stack.forward());
  EXPECT_EQ(gemm.calls, 2);
  mlp(with(gemm), stack.backward());
  EXPECT_EQ(gemm.calls, 5) << "dx of the first layer is not wanted";
}

// What runs in a stack. --------------------------------------------------------------------------

TEST(MlpList, IsThatOfEachLayer) {
  const Stack stack;
  const Candidates one = explain(Context{}, stack.first.forward());
  for (const auto& found :
       {explain(Context{}, stack.forward()), explain(Context{}, stack.backward())}) {
    ASSERT_EQ(found.size(), 2u);
    for (const Candidates& list : found) {
      ASSERT_EQ(list.size(), one.size());
      for (std::size_t i = 0; i < one.size(); ++i) {
        EXPECT_EQ(list[i].name, one[i].name);
        EXPECT_EQ(list[i].chosen, one[i].chosen);
      }
    }
  }
}

TEST(MlpList, HasNothingForALayerWithoutGradients) {
  Stack stack;
  stack.layers[0].dw = stack.layers[0].db = {};
  const std::vector<Candidates> found = explain(Context{}, stack.backward());
  EXPECT_TRUE(found[0].empty());
  EXPECT_FALSE(found[1].empty());
}

TEST(MlpList, OneCanBeForced) {
  const Stack stack;
  const auto expect_forced = [](auto call) {
    call.implementation = "portable";
    for (const Candidates& list : explain(Context{}, call)) EXPECT_TRUE(list.back().chosen);
    mlp(Context{}, call);
    call.implementation = "fastest";
    std::string message;
    try {
      mlp(Context{}, call);
    } catch (const Error& error) {
      message = error.what();
    }
    EXPECT_NE(message.find(": implementation: there is none named 'fastest'"), std::string::npos)
        << message;
  };
  expect_forced(stack.forward());
  expect_forced(stack.backward());
}

}  // namespace
}  // namespace fusewise::testing

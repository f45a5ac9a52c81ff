// Stacks of linear + activation on the CPU: each layer against plain loops in float64.

#include "fusewise/mlp.h"

#include "linear_reference.h"
#include "message_of.h"

namespace fusewise::testing {
namespace {

/// A stack by value. Layer i maps widths[i] to widths[i + 1].
struct Stack {
  std::vector<LinearAct> steps;
  Activation activation, final_activation;
  Tensor dx;

  Stack(Index rows, std::vector<Index> widths, DType dtype, Activation hidden, Activation last,
        bool bits_everywhere = false)
      : activation(hidden), final_activation(last) {
    const std::size_t layers = widths.size() - 1;
    for (std::size_t i = 0; i < layers; ++i) {
      const bool is_last = i + 1 == layers;
      const MatrixSizes sizes{rows, widths[i + 1], widths[i]};
      LinearAct step = make_linear_act(sizes, dtype, is_last ? last : hidden);
      step.w.fill(20 + static_cast<unsigned>(i), 1 / std::sqrt(widths[i] + 1));
      step.b.fill(30 + static_cast<unsigned>(i), 0.5);
      if (!is_last && hidden == Activation::relu && !bits_everywhere) step.kept = {};
      steps.push_back(step);
    }
    dx = Tensor(dtype, {rows, widths[0]});
  }

  std::vector<MlpLayer> layers() const {
    std::vector<MlpLayer> made;
    for (const LinearAct& step : steps) {
      made.push_back({step.w.view(), step.b.view(), step.y.view(), step.kept.view(), step.dw.view(),
                      step.db.view()});
    }
    return made;
  }
  void forward(const Context& context = {}) const {
    const std::vector<MlpLayer> all = layers();
    MlpForward call;
    call.x = steps[0].x.view(), call.layers = all;
    call.activation = activation, call.final_activation = final_activation;
    mlp(context, call);
  }
  void backward(const Context& context = {}) const {
    const std::vector<MlpLayer> all = layers();
    MlpBackward call;
    call.dy = steps.back().dy.view(), call.x = steps[0].x.view(), call.layers = all;
    call.activation = activation, call.final_activation = final_activation;
    call.dx = dx.view();
    mlp(context, call);
  }
};

/// Each layer from what the one below has really given, and backward from what is really kept.
void expect_right(Stack stack) {
  stack.forward();
  for (std::size_t i = 0; i < stack.steps.size(); ++i) {
    SCOPED_TRACE(i);
    if (i > 0) stack.steps[i].x = stack.steps[i - 1].y;
    expect_forward_results(stack.steps[i], z_reference(stack.steps[i]));
  }
  const Stack before = stack;
  stack.backward();
  EXPECT_EQ(stack.steps.back().dy.memory(), before.steps.back().dy.memory());
  Values gradient;  // of the layer's y, with its errors
  for (std::size_t i = stack.steps.size(); i-- > 0;) {
    SCOPED_TRACE(i);
    LinearAct& step = stack.steps[i];
    EXPECT_EQ(step.y.memory(), before.steps[i].y.memory());
    LinearAct expected = step;
    if (!expected.kept.defined() && expected.activation == Activation::relu) expected.kept = step.y;
    // dy of this layer is what the one above computed; its error goes on through this one.
    const LinearGradients right =
        i + 1 < stack.steps.size() ? gradient_reference(expected, stored(gradient, step.y.dtype()))
                                   : gradient_reference(expected);
    EXPECT_TRUE(all_close(step.dw, right.dw)) << "dw";
    EXPECT_TRUE(all_close(step.db, right.db)) << "db";
    gradient = right.dx;
  }
  EXPECT_TRUE(all_close(stack.dx, gradient)) << "dx";
}

TEST(Mlp, EveryActivation) {
  for (const DType dtype : kFloating) {
    for (const Activation hidden : kActivations) {
      for (const Activation last : kActivations) {
        SCOPED_TRACE(std::string(name_of(hidden)) + " " + name_of(last));
        expect_right(Stack(7, {9, 17, 5, 6}, dtype, hidden, last));
      }
    }
  }
}

TEST(Mlp, EveryDepth) {
  for (std::vector<Index> widths : {std::vector<Index>{3, 4},
                                    {1, 1, 1},
                                    {65, 3, 129, 8},
                                    {3, 40, 5, 8},
                                    {5, 5, 5, 5, 5, 5, 5}}) {
    expect_right(Stack(9, widths, DType::f64, Activation::relu, Activation::identity));
    expect_right(Stack(9, widths, DType::f64, Activation::relu, Activation::relu, true));
    expect_right(Stack(9, widths, DType::f64, Activation::silu, Activation::gelu));
  }
}

TEST(Mlp, NothingToDo) {
  for (std::vector<Index> widths : {std::vector<Index>{3, 4, 2}, {0, 4, 2}, {3, 0, 2}, {3, 4, 0}}) {
    expect_right(Stack(0, widths, DType::f32, Activation::relu, Activation::identity));
    expect_right(Stack(3, widths, DType::f32, Activation::gelu, Activation::relu));
  }
}

TEST(Mlp, OnlyWhatIsWanted) {
  const Stack full(6, {5, 7, 4, 3}, DType::f32, Activation::gelu, Activation::identity);
  full.forward();
  full.backward();
  for (int wanted = 0; wanted < 128; ++wanted) {
    SCOPED_TRACE(wanted);
    Stack some(6, {5, 7, 4, 3}, DType::f32, Activation::gelu, Activation::identity);
    some.forward();
    for (int i = 0; i < 3; ++i) {
      if (!(wanted >> (2 * i) & 1)) some.steps[i].dw = {};
      if (!(wanted >> (2 * i + 1) & 1)) some.steps[i].db = {};
    }
    if (!(wanted >> 6 & 1)) some.dx = {};
    some.backward();
    for (int i = 0; i < 3; ++i) {
      if (some.steps[i].dw.defined()) {
        EXPECT_EQ(some.steps[i].dw.memory(), full.steps[i].dw.memory());
      }
      if (some.steps[i].db.defined()) {
        EXPECT_EQ(some.steps[i].db.memory(), full.steps[i].db.memory());
      }
    }
    if (some.dx.defined()) {
      EXPECT_EQ(some.dx.memory(), full.dx.memory());
    }
  }
}

TEST(Mlp, WithoutBiases) {
  Stack stack(6, {5, 7, 4}, DType::f32, Activation::relu, Activation::identity);
  for (LinearAct& step : stack.steps) step.b = {};
  expect_right(stack);
}

// Errors: the layer is named, and nothing at all has run. ----------------------------------------

void expect_refused(const Stack& stack, const std::string& start, bool backward = false) {
  const Stack before = stack;
  const std::string message = message_of([&] { backward ? stack.backward() : stack.forward(); });
  EXPECT_EQ(message.substr(0, start.size()), start) << message;
  for (std::size_t i = 0; i < stack.steps.size(); ++i) {
    EXPECT_EQ(stack.steps[i].y.memory(), before.steps[i].y.memory());
    EXPECT_EQ(stack.steps[i].dw.memory(), before.steps[i].dw.memory());
    EXPECT_EQ(stack.steps[i].db.memory(), before.steps[i].db.memory());
  }
  EXPECT_EQ(stack.dx.memory(), before.dx.memory());
}

TEST(MlpErrors, TheLayerIsNamed) {
  const Stack good(6, {5, 7, 4}, DType::f32, Activation::gelu, Activation::relu);
  Stack bad = good;
  bad.steps[1].w = Tensor(DType::f32, {4, 8});
  expect_refused(bad, "layer 1: w: expected [N, 7]");
  bad = good;
  bad.steps[0].b = Tensor(DType::f32, {6});
  expect_refused(bad, "layer 0: b: expected [7]");
  bad = good;
  bad.steps[1].y = Tensor(DType::f64, {6, 4});
  expect_refused(bad, "layer 1: y: expected x's dtype float32, got float64");
  bad = good;
  bad.steps[0].dw = Tensor(DType::f32, {7, 6});
  expect_refused(bad, "layer 0: dw: expected w's shape [7, 5], got [7, 6]", true);
  bad = good;
  bad.steps[1].kept = {};
  expect_refused(bad, "layer 1: kept: is missing", true);
  bad = good;
  bad.steps[0].kept = {};  // y tells what relu needs, but not what gelu does
  expect_refused(bad, "layer 0: kept: is missing", true);
  bad = good;
  bad.steps[0].y = {};
  expect_refused(bad, "layer 0: y: ", true);
}

TEST(MlpErrors, NoLayers) {
  EXPECT_EQ(message_of([] { mlp(Context{}, MlpForward{}); }), "layers: expected at least one");
  EXPECT_EQ(message_of([] { mlp(Context{}, MlpBackward{}); }), "layers: expected at least one");
}

}  // namespace
}  // namespace fusewise::testing

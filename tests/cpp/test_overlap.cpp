// Outputs with memory that is not theirs alone: every operator refuses them before it writes.

#include <gtest/gtest.h>

#include "autoencoder_reference.h"
#include "common/overlap.h"
#include "fusewise/error.h"
#include "fusewise/mlp.h"
#include "linear_reference.h"
#include "message_of.h"
#include "reference.h"

namespace fusewise::testing {
namespace {

float memory[4096];

TensorView at(Index offset, std::initializer_list<Index> sizes,
              std::initializer_list<Index> strides) {
  return TensorView(memory + offset, DType::f32, {}, sizes, strides);
}

TEST(Overlap, OfATensorWithItself) {
  EXPECT_FALSE(may_overlap_itself(at(0, {3, 4}, {4, 1})));
  EXPECT_FALSE(may_overlap_itself(at(0, {3, 4}, {1, 3})));
  EXPECT_FALSE(may_overlap_itself(at(11, {3, 4}, {-4, -1})));
  EXPECT_FALSE(may_overlap_itself(at(0, {1, 4}, {0, 1})));
  EXPECT_FALSE(may_overlap_itself(at(0, {0, 4}, {0, 0})));
  EXPECT_FALSE(may_overlap_itself(at(0, {2, 3, 4}, {12, 1, 3})));
  EXPECT_TRUE(may_overlap_itself(at(0, {3, 4}, {0, 1})));
  EXPECT_TRUE(may_overlap_itself(at(0, {3, 4}, {3, 1})));
  EXPECT_TRUE(may_overlap_itself(at(0, {2, 2, 2}, {4, 1, 1})));
}

TEST(Overlap, OfTwoTensors) {
  const TensorView a = at(100, {4, 6}, {10, 1});  // 100 ... 135
  EXPECT_TRUE(may_overlap(a, a));
  EXPECT_FALSE(may_overlap(a, at(136, {4}, {1})));
  EXPECT_TRUE(may_overlap(a, at(135, {4}, {1})));
  EXPECT_FALSE(may_overlap(a, at(96, {4}, {1})));
  EXPECT_TRUE(may_overlap(a, at(97, {4}, {1})));
  // The same going backwards.
  EXPECT_TRUE(may_overlap(a, at(138, {4}, {-1})));
  EXPECT_FALSE(may_overlap(a, at(139, {4}, {-1})));
  // The other columns of the same rows, and one column too many.
  EXPECT_FALSE(may_overlap(a, at(106, {4, 4}, {10, 1})));
  EXPECT_TRUE(may_overlap(a, at(106, {4, 5}, {10, 1})));
  EXPECT_TRUE(may_overlap(a, at(105, {4, 4}, {10, 1})));
  EXPECT_FALSE(may_overlap(at(106, {4, 4}, {10, 1}), a));
  EXPECT_FALSE(may_overlap(a, at(126, {4, 4}, {10, 1})));
  EXPECT_FALSE(may_overlap(a, at(66, {9, 4}, {10, 1})));
  EXPECT_TRUE(may_overlap(a, at(66, {9, 5}, {10, 1})));
  // Channels of one channels-last image; neighbours wrap around the end of a pixel.
  EXPECT_FALSE(may_overlap(at(0, {2, 3, 5}, {40, 8, 1}), at(5, {2, 3, 3}, {40, 8, 1})));
  EXPECT_TRUE(may_overlap(at(0, {2, 3, 5}, {40, 8, 1}), at(4, {2, 3, 3}, {40, 8, 1})));
  EXPECT_TRUE(may_overlap(at(0, {2, 3, 5}, {40, 8, 1}), at(5, {2, 3, 4}, {40, 8, 1})));
  // Nothing is known of other strides, and nothing overlaps what is empty.
  EXPECT_TRUE(may_overlap(at(0, {4}, {2}), at(1, {3}, {3})));
  EXPECT_FALSE(may_overlap(a, at(100, {0, 6}, {10, 1})));
}

/// Against sets of addresses, for all small pairs.
TEST(Overlap, IsNeverMissed) {
  const Index strides[] = {-3, 0, 1, 2, 3, 5};
  const auto touched = [](const TensorView& t) {
    std::vector<bool> found(200);
    for (Index i = 0; i < t.sizes[0]; ++i) {
      for (Index j = 0; j < t.sizes[1]; ++j) {
        found[static_cast<float*>(t.data) - memory + i * t.strides[0] + j * t.strides[1]] = true;
      }
    }
    return found;
  };
  for (const Index s : strides) {
    for (const Index t : strides) {
      const TensorView a = at(60, {3, 2}, {s, t});
      const std::vector<bool> of_a = touched(a);
      if (std::count(of_a.begin(), of_a.end(), true) < 6) {
        EXPECT_TRUE(may_overlap_itself(a)) << s << ", " << t;
      }
      for (Index offset = 30; offset < 90; ++offset) {
        for (const Index u : strides) {
          for (const Index v : strides) {
            const TensorView b = at(offset, {2, 3}, {u, v});
            const std::vector<bool> of_b = touched(b);
            bool shared = false;
            for (std::size_t i = 0; i < of_a.size(); ++i) shared = shared || (of_a[i] && of_b[i]);
            if (shared) {
              ASSERT_TRUE(may_overlap(a, b)) << s << t << offset << u << v;
            }
          }
        }
      }
    }
  }
}

// Every operator. --------------------------------------------------------------------------------

struct Views {
  std::vector<TensorView*> outputs, inputs;
};

/// The call as it is, then each output in the place of each other tensor, and with a stride of 0.
/// `views` points at a call's tensors, `run` runs it.
template <typename Call, typename ViewsOf, typename Run>
void expect_apart(Call call, const ViewsOf& views_of, const Run& run) {
  EXPECT_EQ(message_of([&] { run(call); }), "nothing was thrown");
  const Views views = views_of(call);
  for (std::size_t o = 0; o < views.outputs.size(); ++o) {
    TensorView& output = *views.outputs[o];
    const TensorView good = output;
    const auto expect_refused = [&](const TensorView& other) {
      if (&other == &output) return;
      output.data = other.data;
      const std::string message = message_of([&] { run(call); });
      EXPECT_NE(
          message.find(
              ": expected memory that no other tensor of the call uses, got memory that overlaps "),
          std::string::npos)
          << "output " << o << ": " << message;
      output = good;
    };
    for (const TensorView* other : views.outputs) expect_refused(*other);
    for (const TensorView* other : views.inputs) expect_refused(*other);
    for (int d = 0; d < output.rank; ++d) {
      if (output.sizes[d] == 1) continue;
      output.strides[d] = 0;
      const std::string message = message_of([&] { run(call); });
      EXPECT_NE(message.find(": expected "), std::string::npos) << message;
      output = good;
    }
  }
}

TEST(OverlapRefused, SqueezeExcite) {
  const SqueezeExcite tensors =
      make_squeeze_excite({2, 6, 3, 4, 5}, DType::f32, DType::f32, Layout::nchw, Layout::nchw);
  const auto run = [](const auto& call) { squeeze_excite(Context{}, call); };
  expect_apart(
      tensors.forward(),
      [](SqueezeExciteForward& call) {
        return Views{{&call.y, &call.pooled, &call.hidden, &call.gates},
                     {&call.x, &call.w1, &call.b1, &call.w2, &call.b2}};
      },
      run);
  expect_apart(
      tensors.backward(),
      [](SqueezeExciteBackward& call) {
        return Views{
            {&call.dx, &call.dw1, &call.db1, &call.dw2, &call.db2},
            {&call.dy, &call.x, &call.w1, &call.w2, &call.pooled, &call.hidden, &call.gates}};
      },
      run);
  // An image that overlaps itself without a stride of 0.
  SqueezeExciteForward call = tensors.forward();
  call.y.strides[0] -= 1;
  EXPECT_EQ(message_of([&] { run(call); }),
            "y: expected an output whose elements do not overlap in memory; check its strides");
}

TEST(OverlapRefused, LinearAct) {
  const auto run = [](const auto& call) { linear_act(Context{}, call); };
  for (const Activation activation : {Activation::relu, Activation::gelu}) {
    LinearAct tensors = make_linear_act({5, 7, 6}, DType::f32, activation);
    expect_apart(
        tensors.forward(),
        [](LinearActForward& call) { return Views{{&call.y}, {&call.x, &call.w, &call.b}}; }, run);
    expect_apart(
        tensors.forward(),
        [](LinearActForward& call) { return Views{{&call.kept}, {&call.x, &call.w, &call.b}}; },
        run);
    expect_apart(
        tensors.backward(),
        [](LinearActBackward& call) {
          return Views{{&call.dx, &call.dw, &call.db}, {&call.dy, &call.x, &call.w, &call.kept}};
        },
        run);
    LinearActBackward in_place = tensors.backward();
    in_place.overwrite_dy = true;
    expect_apart(
        in_place,
        [](LinearActBackward& call) { return Views{{&call.dy}, {&call.x, &call.w, &call.kept}}; },
        run);
  }
}

TEST(OverlapRefused, ColumnsOfOneMatrixAreApart) {
  Tensor both(DType::f32, {5, 13});
  both.fill(1);
  LinearAct tensors = make_linear_act({5, 7, 6}, DType::f32, Activation::identity);
  LinearActForward call = tensors.forward();
  call.x = TensorView(both.view().data, DType::f32, {}, {5, 6}, {13, 1});
  call.y = TensorView(static_cast<float*>(call.x.data) + 6, DType::f32, {}, {5, 7}, {13, 1});
  linear_act(Context{}, call);
  call.y.data = static_cast<float*>(call.x.data) + 5;
  EXPECT_THROW(linear_act(Context{}, call), Error);
}

TEST(OverlapRefused, Mlp) {
  struct Stack {
    std::vector<MlpLayer> layers;
    TensorView x, dy, dx;
  };
  std::vector<LinearAct> steps;
  Stack stack;
  const Index widths[] = {6, 7, 6, 7};
  for (int i = 0; i < 3; ++i) {
    steps.push_back(make_linear_act({5, widths[i + 1], widths[i]}, DType::f32, Activation::silu));
  }
  for (const LinearAct& step : steps) {
    stack.layers.push_back({step.w.view(), step.b.view(), step.y.view(), step.kept.view(),
                            step.dw.view(), step.db.view()});
  }
  stack.x = steps[0].x.view(), stack.dy = steps[2].dy.view(), stack.dx = steps[0].dx.view();
  const auto forward = [](const Stack& s) {
    MlpForward call;
    call.x = s.x, call.layers = s.layers;
    call.activation = call.final_activation = Activation::silu;
    mlp(Context{}, call);
  };
  const auto backward = [](const Stack& s) {
    MlpBackward call;
    call.x = s.x, call.dy = s.dy, call.dx = s.dx, call.layers = s.layers;
    call.activation = call.final_activation = Activation::silu;
    mlp(Context{}, call);
  };
  for (std::size_t i = 0; i < 3; ++i) {
    // Each y against all but those that are no neighbours.
    expect_apart(
        stack,
        [&](Stack& s) {
          Views views{{&s.layers[i].y}, {&s.x}};
          for (std::size_t j = 0; j < 3; ++j) {
            for (TensorView MlpLayer::* each : {&MlpLayer::w, &MlpLayer::b, &MlpLayer::kept}) {
              if (j != i || each != &MlpLayer::kept) views.inputs.push_back(&(s.layers[j].*each));
            }
            if (j + 1 == i || j == i + 1) views.inputs.push_back(&s.layers[j].y);
          }
          return views;
        },
        forward);
    expect_apart(
        stack,
        [&](Stack& s) {
          Views views{{&s.layers[i].kept}, {&s.x}};
          for (std::size_t j = 0; j < 3; ++j) {
            for (TensorView MlpLayer::* each : {&MlpLayer::w, &MlpLayer::b, &MlpLayer::y}) {
              if (j != i || each != &MlpLayer::y) views.inputs.push_back(&(s.layers[j].*each));
            }
          }
          return views;
        },
        forward);
  }
  Stack reused = stack;
  reused.layers[2].y = reused.layers[0].y;
  EXPECT_EQ(message_of([&] { forward(reused); }), "nothing was thrown");
  forward(stack);
  expect_apart(
      stack,
      [](Stack& s) {
        Views views{{&s.dx}, {&s.x, &s.dy}};
        for (MlpLayer& layer : s.layers) {
          for (TensorView* each : {&layer.dw, &layer.db}) views.outputs.push_back(each);
          for (TensorView* each : {&layer.w, &layer.y, &layer.kept}) views.inputs.push_back(each);
        }
        return views;
      },
      backward);
}

TEST(OverlapRefused, Autoencoder) {
  const AutoencoderCase tensors = make_autoencoder(9, {6, 3, 4, 5}, DType::f32, DType::f32);
  const auto run = [](const auto& call) { autoencoder(Context{}, call); };
  const auto weights_of = [](AutoencoderWeights& weights, std::vector<TensorView*>& views) {
    for (const auto& [weight, name, state, shape] : kAutoencoderWeights) {
      views.push_back(&(weights.*weight));
    }
  };
  for (int output = 0; output < 3; ++output) {
    expect_apart(
        tensors.forward(output),
        [&](AutoencoderForward& call) {
          Views views{{&call.projection}, {&call.x}};
          views.outputs.push_back(output == 0 ? &call.y : output == 1 ? &call.latent : &call.score);
          weights_of(call.weights, views.inputs);
          return views;
        },
        run);
    expect_apart(
        tensors.backward(output),
        [&](AutoencoderBackward& call) {
          Views views{{&call.dx}, {&call.x, &call.projection}};
          views.inputs.push_back(output == 0   ? &call.dy
                                 : output == 1 ? &call.dlatent
                                               : &call.dscore);
          weights_of(call.weights, views.inputs);
          weights_of(call.gradients, views.outputs);
          return views;
        },
        run);
  }
}

}  // namespace
}  // namespace fusewise::testing

// What a bad argument of the autoencoder gets: an error that names it, and no output touched.

#include "autoencoder_reference.h"
#include "message_of.h"

namespace fusewise::testing {
namespace {

constexpr AutoencoderSizes kSizes{6, 3, 4, 5};

AutoencoderCase make(DType dtype = DType::f32) { return make_autoencoder(2, kSizes, dtype, dtype); }

template <typename Call>
void expect_error(const AutoencoderCase& tensors, const Call& call, const std::string& start) {
  const std::string message = message_of([&] { autoencoder(Context{}, call); });
  EXPECT_EQ(message.substr(0, start.size()), start) << message;
  EXPECT_THROW(explain(Context{}, call), Error);
  const AutoencoderCase fresh = make(tensors.x.dtype());
  EXPECT_EQ(tensors.y.memory(), fresh.y.memory());
  EXPECT_EQ(tensors.latent.memory(), fresh.latent.memory());
  EXPECT_EQ(tensors.score.memory(), fresh.score.memory());
  EXPECT_EQ(tensors.dx.memory(), fresh.dx.memory());
  for (std::size_t i = 0; i < fresh.gradients.size(); ++i) {
    EXPECT_EQ(tensors.gradients[i].memory(), fresh.gradients[i].memory());
  }
}

TEST(AutoencoderErrors, EachArgument) {
  const AutoencoderCase tensors = make();
  for (int output = 0; output < 3; ++output) {
    AutoencoderForward forward = tensors.forward(output);
    AutoencoderBackward backward = tensors.backward(output);
    const auto check = [&](auto& call, TensorView& view, const std::string& name) {
      const TensorView good = view;
      for (int way = 0; way < 3; ++way) {
        SCOPED_TRACE(name);
        if (way == 0) view.rank = TensorView::kMaxRank;
        if (way == 1) view.device = {DeviceType::cuda, 0};
        if (way == 2) view.data = nullptr;
        expect_error(
            tensors, call,
            name + (way == 2 ? ": expected a pointer to its data, got null" : ": expected"));
        view = good;
      }
    };
    check(forward, forward.x, "x");
    check(backward, backward.x, "x");
    check(backward, backward.dx, "dx");
    check(forward, forward.projection, "projection");
    check(backward, backward.projection, "projection");
    const char* outputs[] = {"y", "latent", "score"};
    TensorView* forward_outputs[] = {&forward.y, &forward.latent, &forward.score};
    TensorView* gradients[] = {&backward.dy, &backward.dlatent, &backward.dscore};
    check(forward, *forward_outputs[output], outputs[output]);
    check(backward, *gradients[output], std::string("d") + outputs[output]);
    for (const auto& [weight, name, state, shape] : kAutoencoderWeights) {
      check(forward, forward.weights.*weight, name);
      check(backward, backward.weights.*weight, name);
      check(backward, backward.gradients.*weight, std::string("d") + name);
    }
  }
}

TEST(AutoencoderErrors, MissingArguments) {
  const AutoencoderCase tensors = make();
  AutoencoderForward forward = tensors.forward(0);
  forward.x = {};
  expect_error(tensors, forward, "x: is missing");
  for (const auto& [weight, name, state, shape] : kAutoencoderWeights) {
    forward = tensors.forward(0);
    forward.weights.*weight = {};
    expect_error(tensors, forward, std::string(name) + ": is missing");
  }
  forward = tensors.forward(0);
  forward.y = {};
  expect_error(tensors, forward, "y, latent and score: expected exactly one of them, got 0");
  forward = tensors.forward(0);
  forward.score = tensors.score.view();
  expect_error(tensors, forward, "y, latent and score: expected exactly one of them, got 2");
  AutoencoderBackward backward = tensors.backward(1);
  backward.dlatent = {};
  expect_error(tensors, backward, "dy, dlatent and dscore: expected exactly one of them, got 0");
}

TEST(AutoencoderErrors, SizesThatDoNotFit) {
  const AutoencoderCase tensors = make();
  AutoencoderForward call = tensors.forward(0);
  call.x.sizes[1] = 17;
  expect_error(tensors, call, "x: expected [N, 18] or [N, 3, 6], got [2, 17]");
  call = tensors.forward(0);
  call.x.rank = 3;
  call.x.sizes = {2, 6, 3};
  expect_error(tensors, call, "x: expected [N, 18] or [N, 3, 6], got [2, 6, 3]");
  call.x.sizes = {2, 3, 5};
  expect_error(tensors, call, "x: expected [N, 18] or [N, 3, 6], got [2, 3, 5]");
  call = tensors.forward(0);
  call.y.sizes[0] = 3;
  expect_error(tensors, call, "y: expected x's shape [2, 18], got [3, 18]");
  call = tensors.forward(0);
  call.weights.basis.sizes[1] = 16;
  expect_error(tensors, call, "basis: expected [L, F * 5], got [4, 16]");
  call = tensors.forward(0);
  call.weights.encoder_weight.sizes[0] = 0;
  expect_error(tensors, call, "encoder_weight: expected [S, M] with S and M >= 1, got [0, 6]");
  call = tensors.forward(0);
  call.weights.decoder_weight.sizes[1] = 6;
  expect_error(tensors, call, "decoder_weight: expected [6, 5], got [6, 6]");
  AutoencoderForward score = tensors.forward(2);
  score.score.sizes[0] = 3;
  expect_error(tensors, score, "score: expected [2], got [3]");
}

TEST(AutoencoderErrors, TypesThatDoNotGoTogether) {
  const AutoencoderCase tensors = make(), half = make(DType::f16);
  AutoencoderForward call = tensors.forward(0);
  call.weights.mid_bias.dtype = DType::f16;
  expect_error(tensors, call, "mid_bias: expected norm_weight's dtype float32, got float16");
  call = tensors.forward(0);
  for (const auto& [weight, name, state, shape] : kAutoencoderWeights) {
    (call.weights.*weight).dtype = DType::f16;
  }
  expect_error(tensors, call, "norm_weight: expected x's dtype float32, got float16");
  call = half.forward(2);
  call.score.dtype = DType::f16;
  expect_error(half, call, "score: expected dtype float32, got float16");
  AutoencoderBackward backward = tensors.backward(0);
  backward.gradients.basis.dtype = DType::f64;
  expect_error(tensors, backward, "dbasis: expected norm_weight's dtype float32, got float64");
}

TEST(AutoencoderErrors, WeightsMustBeDense) {
  const AutoencoderCase tensors = make();
  AutoencoderForward call = tensors.forward(0);
  call.weights.mid_weight.strides = {1, 4};
  expect_error(tensors, call, "mid_weight: expected a dense tensor");
  AutoencoderBackward backward = tensors.backward(0);
  backward.gradients.norm_bias.strides = {2};
  expect_error(tensors, backward, "dnorm_bias: expected a dense tensor");
}

TEST(AutoencoderErrors, UnknownImplementation) {
  const AutoencoderCase tensors = make();
  AutoencoderForward call = tensors.forward(0);
  call.implementation = "fastest";
  expect_error(tensors, call, "implementation: there is none named 'fastest'");
}

}  // namespace
}  // namespace fusewise::testing

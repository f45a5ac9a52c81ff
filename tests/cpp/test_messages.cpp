// The text that a mistake gets, one of each family. tests/python/test_messages.py holds the same
// texts against PyTorch's side.

#include <vector>

#include "fusewise/fusewise.h"
#include "gtest/gtest.h"
#include "message_of.h"

namespace fusewise::testing {
namespace {

/// float32 zeros that nobody writes.
TensorView zeros(std::initializer_list<std::int64_t> sizes) {
  static std::vector<float> memory(1024);
  return TensorView(memory.data(), DType::f32, {}, sizes);
}

TEST(Messages, SqueezeExcite) {
  SqueezeExciteForward call;
  call.x = call.y = zeros({2, 6, 4, 5});
  call.w1 = zeros({3, 5});
  call.w2 = zeros({6, 3});
  EXPECT_EQ(message_of([&] { squeeze_excite(Context{}, call); }),
            "w1: expected [R, 6] or [R, 6, 1, 1], got [3, 5]");
}

TEST(Messages, LinearAct) {
  LinearActForward call;
  call.x = zeros({3, 6});
  call.w = zeros({4, 5});
  call.y = zeros({3, 4});
  EXPECT_EQ(message_of([&] { linear_act(Context{}, call); }), "w: expected [N, 6], got [4, 5]");
  call.x = zeros({});
  EXPECT_EQ(message_of([&] { linear_act(Context{}, call); }), "x: expected [..., K], got []");
}

TEST(Messages, Mlp) {
  MlpLayer layers[2];
  layers[0].w = zeros({5, 6}), layers[0].y = zeros({3, 5});
  layers[1].w = zeros({4, 6}), layers[1].y = zeros({3, 4});
  MlpForward call;
  call.x = zeros({3, 6});
  call.layers = layers;
  EXPECT_EQ(message_of([&] { mlp(Context{}, call); }), "layer 1: w: expected [N, 5], got [4, 6]");
}

TEST(Messages, Autoencoder) {
  AutoencoderForward call;
  for (const AutoencoderWeightName& weight : kAutoencoderWeights) {
    call.weights.*weight.weight = zeros({6});
  }
  call.weights.encoder_weight = zeros({5});
  call.x = call.y = zeros({2, 18});
  EXPECT_EQ(message_of([&] { autoencoder(Context{}, call); }),
            "encoder_weight: expected [S, M], got [5]");
}

TEST(Messages, LiConv) {
  LiConvStream streams[2];
  for (LiConvStream& stream : streams) {
    stream.x = zeros({2, 6, 5, 4});
    stream.w = zeros({4, 6, 3, 3});
    stream.mix = zeros({4, 4});
  }
  LiConvForward call;
  call.streams = streams;
  call.padding = 1;
  streams[1].w = zeros({5, 6, 3, 3});
  EXPECT_EQ(message_of([&] { li_conv(Context{}, call); }),
            "stream 1: w: expected [4, 6, 3, 3], got [5, 6, 3, 3]");
  streams[1].w = streams[0].w;
  streams[1].mix = zeros({3, 4});
  EXPECT_EQ(message_of([&] { li_conv(Context{}, call); }),
            "stream 1: mix: expected [4, 4], got [3, 4]");
}

}  // namespace
}  // namespace fusewise::testing

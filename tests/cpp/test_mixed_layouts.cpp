// Squeeze-and-Excitation on the CPU with x and dy in equal and different layouts: images so large
// that one of them is copied piece by piece, and so many channels that rows are taken together.

#include "reference.h"

namespace fusewise::testing {
namespace {

std::vector<std::string> available() {
  const SqueezeExcite call =
      make_squeeze_excite({1, 1, 1, 1, 1}, DType::f32, DType::f32, Layout::nchw, Layout::nchw);
  std::vector<std::string> names;
  for (const Candidate& candidate : explain(Context{}, call.forward())) {
    if (candidate.able) names.push_back(candidate.name);
  }
  return names;
}

class MixedLayoutsOnCpu : public ::testing::TestWithParam<std::string> {};

/// Both ways, from what forward itself saves.
void expect_right(SqueezeExcite call, std::string_view implementation) {
  const ForwardReference forward = forward_reference(call);
  SqueezeExciteForward to = call.forward();
  to.implementation = implementation;
  squeeze_excite(Context{}, to);
  EXPECT_TRUE(all_close(call.y, forward.y)) << "y";
  const BackwardReference backward = backward_reference(call);
  SqueezeExciteBackward from = call.backward();
  from.implementation = implementation;
  squeeze_excite(Context{}, from);
  EXPECT_TRUE(all_close(call.dx, backward.dx)) << "dx";
  EXPECT_TRUE(all_close(call.dw1, backward.dw1)) << "dw1";
  EXPECT_TRUE(all_close(call.db2, backward.db2)) << "db2";
}

TEST_P(MixedLayoutsOnCpu, OfLargeImages) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    for (const Layout other : {Layout::channels_last, Layout::nchw, Layout::transposed}) {
      SCOPED_TRACE("layouts " + std::to_string(static_cast<int>(layout)) + " and " +
                   std::to_string(static_cast<int>(other)));
      const Sizes sizes{3, 37, 4, 56, 56};
      expect_right(make_squeeze_excite(sizes, DType::f32, DType::f32, layout, other), GetParam());
    }
  }
}

/// Rows of so many channels are summed up four at a time.
TEST_P(MixedLayoutsOnCpu, OfManyChannels) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    for (const Layout other : {Layout::channels_last, Layout::nchw}) {
      SCOPED_TRACE("layouts " + std::to_string(static_cast<int>(layout)) + " and " +
                   std::to_string(static_cast<int>(other)));
      const Sizes sizes{2, 1043, 3, 3, 3};
      expect_right(make_squeeze_excite(sizes, DType::f32, DType::f32, layout, other), GetParam());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MixedLayoutsOnCpu, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace fusewise::testing

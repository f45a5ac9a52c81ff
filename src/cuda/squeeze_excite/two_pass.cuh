#pragma once

#include <string>

#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {

std::string two_pass_declines(const Context& context, const SqueezeExciteForward& call);
std::string two_pass_declines(const Context& context, const SqueezeExciteBackward& call);
std::string two_pass_yields(const TensorView& x);
void two_pass_run(const Context& context, const SqueezeExciteForward& call);
void two_pass_run(const Context& context, const SqueezeExciteBackward& call);

/// How a sample is split into blocks.
enum class Cut {
  channels,  ///< channels-last, a block has a range of channels of every pixel
  pixels,    ///< channels-last, a block has a range of pixels with all channels
  planes,    ///< NCHW, a block has a range of channel planes
};

struct TwoPassPlan {
  Cut cut;
  int per_block;  ///< channels, pixels or planes
};

/// With an explicit plan, for experiments.
void two_pass_run(const Context& context, const SqueezeExciteForward& call, TwoPassPlan plan);
void two_pass_run(const Context& context, const SqueezeExciteBackward& call, TwoPassPlan plan);

}  // namespace fusewise::cuda

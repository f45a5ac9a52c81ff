// The CUDA implementations of Squeeze-and-Excitation, fastest first.

#include "common/implementation.h"
#include "cuda/squeeze_excite/batched.cuh"
#include "cuda/squeeze_excite/cluster.cuh"
#include "cuda/squeeze_excite/general.cuh"
#include "cuda/squeeze_excite/two_pass.cuh"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cuda {
namespace {

template <typename Call>
constexpr Implementation<Call> kList[] = {
    {"batched", [](const Context&, const Call& call) { return batched_declines(call); },
     batched_run, batched_yields},
    {"cluster", cluster_declines, cluster_run},
    {"two_pass", two_pass_declines, two_pass_run,
     [](const Context&, const Call& call) { return two_pass_yields(call.x); }},
    {"general", [](const Context&, const Call&) { return std::string(); }, general_run}};

}  // namespace

Implementations<SqueezeExciteForward> squeeze_excite_forward() {
  return kList<SqueezeExciteForward>;
}

Implementations<SqueezeExciteBackward> squeeze_excite_backward() {
  return kList<SqueezeExciteBackward>;
}

}  // namespace fusewise::cuda

// What Squeeze-and-Excitation has on CUDA, fastest first.

#include "common/backends.h"
#include "cuda/squeeze_excite/cluster.cuh"
#include "cuda/squeeze_excite/general.cuh"
#include "cuda/squeeze_excite/two_pass.cuh"

namespace fusewise::cuda {
namespace {

template <typename Call>
constexpr Implementation<Call> kCluster{"cluster", cluster_declines, cluster_run, cluster_yields};

template <typename Call>
constexpr Implementation<Call> kTwoPass{"two_pass", two_pass_declines, two_pass_run};

template <typename Call>
constexpr Implementation<Call> kGeneral{
    "general", [](const Context&, const Call&) { return std::string(); }, general_run};

template <typename Call>
Implementations<Call> all() {
  static constexpr Implementation<Call> list[] = {kCluster<Call>, kTwoPass<Call>, kGeneral<Call>};
  return list;
}

}  // namespace

Implementations<SqueezeExciteForward> squeeze_excite_forward() {
  return all<SqueezeExciteForward>();
}

Implementations<SqueezeExciteBackward> squeeze_excite_backward() {
  return all<SqueezeExciteBackward>();
}

}  // namespace fusewise::cuda

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
constexpr Implementation<Call> kBatched{
    "batched", [](const Context&, const Call& call) { return batched_declines(call); }, batched_run,
    batched_yields};

template <typename Call>
constexpr Implementation<Call> kTwoPass{
    "two_pass", two_pass_declines, two_pass_run,
    [](const Context&, const Call& call) { return two_pass_yields(call.x); }};

template <typename Call>
constexpr Implementation<Call> kGeneral{
    "general", [](const Context&, const Call&) { return std::string(); }, general_run};

/// Why cluster is not chosen: two_pass is faster, and it can take the call.
std::string yield_to_two_passes(const Context& context, const SqueezeExciteBackward& call) {
  std::string reason = cluster_yields(context, call);
  if (!reason.empty() && !two_pass_declines(context, call).empty()) reason.clear();
  return reason;
}

}  // namespace

Implementations<SqueezeExciteForward> squeeze_excite_forward() {
  using Call = SqueezeExciteForward;
  static constexpr Implementation<Call> list[] = {
      kBatched<Call>, {"cluster", cluster_declines, cluster_run}, kTwoPass<Call>, kGeneral<Call>};
  return list;
}

Implementations<SqueezeExciteBackward> squeeze_excite_backward() {
  using Call = SqueezeExciteBackward;
  static constexpr Implementation<Call> list[] = {
      kBatched<Call>,
      {"cluster", cluster_declines, cluster_run, yield_to_two_passes},
      kTwoPass<Call>,
      kGeneral<Call>};
  return list;
}

}  // namespace fusewise::cuda

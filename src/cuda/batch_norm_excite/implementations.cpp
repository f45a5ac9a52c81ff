// The CUDA implementations of BatchNorm + activation + Squeeze-and-Excitation, fastest first.

#include "common/operators.h"
#include "cuda/batch_norm_excite/composed.h"
#include "cuda/batch_norm_excite/general.cuh"

namespace fusewise::cuda {
namespace {

template <typename Call>
std::string takes_all(const Context&, const Call&) {
  return {};
}

constexpr Implementation<BatchNormExciteForward> kForward[] = {
    {"composed", takes_all, composed_run, composed_yields}, {"general", takes_all, general_run}};

constexpr Implementation<BatchNormExciteBackward> kBackward[] = {
    {"general", takes_all, general_run}};

}  // namespace

Implementations<BatchNormExciteForward> batch_norm_excite_forward() { return kForward; }
Implementations<BatchNormExciteBackward> batch_norm_excite_backward() { return kBackward; }

}  // namespace fusewise::cuda

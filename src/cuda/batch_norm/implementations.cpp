// The CUDA implementations of BatchNorm + activation, fastest first.

#include "common/operators.h"
#include "cuda/batch_norm/columns.cuh"
#include "cuda/batch_norm/general.cuh"
#include "cuda/batch_norm/planes.cuh"
#include "cuda/batch_norm/pool.cuh"
#include "cuda/batch_norm/resident.cuh"
#include "cuda/batch_norm/two_pass.cuh"

namespace fusewise::cuda {
namespace {

template <typename Call>
constexpr Implementation<Call> kList[] = {
    {"columns", columns_declines, columns_run},
    {"resident", resident_declines, resident_run},
    {"planes", planes_declines, planes_run},
    {"two_pass", two_pass_declines, two_pass_run},
    {"general", [](const Context&, const Call&) { return std::string(); }, general_run}};

template <typename Call>
constexpr Implementation<Call> kPoolList[] = {
    {"channels_last", pool_channels_last_declines, pool_channels_last_run},
    {"general", [](const Context&, const Call&) { return std::string(); }, pool_general_run}};

constexpr Implementation<BatchNormStatistics> kStatistics[] = {
    {"two_pass", two_pass_declines, two_pass_run},
    {"general", [](const Context&, const BatchNormStatistics&) { return std::string(); },
     general_run}};

}  // namespace

Implementations<BatchNormActForward> batch_norm_act_forward() { return kList<BatchNormActForward>; }
Implementations<BatchNormActBackward> batch_norm_act_backward() {
  return kList<BatchNormActBackward>;
}
Implementations<BatchNormActPoolForward> batch_norm_act_pool_forward() {
  return kPoolList<BatchNormActPoolForward>;
}
Implementations<BatchNormActPoolBackward> batch_norm_act_pool_backward() {
  return kPoolList<BatchNormActPoolBackward>;
}
Implementations<BatchNormStatistics> batch_norm_statistics() { return kStatistics; }

}  // namespace fusewise::cuda

#include "cuda/squeeze_excite/batched.cuh"

#include <type_traits>

#include "common/divide.h"
#include "common/scratch.h"
#include "cuda/device.h"
#include "cuda/squeeze_excite/arguments.cuh"
#include "cuda/squeeze_excite/batched_kernels.cuh"
#include "cuda/squeeze_excite/cluster.cuh"
#include "cuda/squeeze_excite/images.h"
#include "cuda/squeeze_excite/two_pass.cuh"

namespace fusewise::cuda {
namespace {

using batched::Arguments;

/// Whether all tiles of the largest launch, with the most slices, are few enough.
bool products_fit(const TensorView& x, std::int64_t r) {
  const std::int64_t n = divide_up(x.sizes[0], 32), c = divide_up(x.sizes[1], 32);
  const std::int64_t hidden = divide_up(r, 32), most = std::int64_t{1} << 27;
  return hidden < most && n * hidden < most && n * c + 2 * hidden * c < most;
}

std::string declines(std::initializer_list<const TensorView*> images, std::int64_t r,
                     std::initializer_list<const TensorView*> vectors) {
  const TensorView& x = **images.begin();
  if (size_of(x.dtype) != 2) return "it takes half-precision images only";
  std::string reason = dense_images_decline(images);
  if (!reason.empty()) return reason;
  if (!is_channels_last(x)) return "it takes channels-last images only";
  for (const TensorView* vector : vectors) {
    if (vector->defined() && !is_aligned(*vector)) {
      return "a saved tensor does not start on a 16-byte boundary";
    }
  }
  if (!products_fit(x, r)) return "its GEMMs have too many tiles for one launch";
  return {};
}

std::int64_t padded(std::int64_t r) { return divide_up(r, 4) * 4; }

template <typename Call>
BatchedProblem problem_of(const Call& call) {
  return {call.x.sizes[0],
          call.x.sizes[1],
          call.x.sizes[2] * call.x.sizes[3],
          call.w1.sizes[0],
          static_cast<int>(size_of(call.w1.dtype)),
          std::is_same_v<Call, SqueezeExciteBackward>};
}

template <typename Call>
std::string yields(const Context& context, const Call& call) {
  const DeviceLimits& limits = limits_of(context.device);
  const double mine =
      expected_batched_time(problem_of(call), limits.l2_cache, limits.multiprocessors);
  if (cluster_declines(context, call).empty()) {
    if (cluster_expected_time(context, call) < mine) {
      return "'cluster' is faster where every sample's own products are small";
    }
  } else if (two_pass_declines(context, call).empty()) {
    if (expected_two_pass_time(problem_of(call), limits.l2_cache) < mine) {
      return "'two_pass' is faster where every sample's own products are small";
    }
  }
  return {};
}

/// The arguments of both directions without those of the images.
template <typename Call>
Arguments products_of(const Call& call) {
  auto a = shared_arguments<Arguments>(call);
  a.n = static_cast<int>(call.x.sizes[0]);
  a.stride = static_cast<int>(padded(a.r));
  return a;
}

}  // namespace

std::string batched_declines(const SqueezeExciteForward& call) {
  return declines({&call.x, &call.y}, call.w1.sizes[0], {&call.gates});
}

std::string batched_declines(const SqueezeExciteBackward& call) {
  if (!call.dx.defined()) return "dx is not needed, so no image is read twice";
  return declines({&call.x, &call.dy, &call.dx}, call.w1.sizes[0], {&call.gates});
}

std::string batched_yields(const Context& context, const SqueezeExciteForward& call) {
  return yields(context, call);
}

std::string batched_yields(const Context& context, const SqueezeExciteBackward& call) {
  return yields(context, call);
}

void batched_run(const Context& context, const SqueezeExciteForward& call) {
  auto a = arguments_of<Arguments>(call);
  a.n = static_cast<int>(call.x.sizes[0]);
  a.stride = static_cast<int>(padded(a.r));
  const std::int64_t channels = std::int64_t{a.n} * a.c, units = std::int64_t{a.n} * a.stride;
  const bool saves = call.gates.defined();
  const Scratch<float> scratch(context, units + (saves ? 0 : 2 * channels));
  a.activated = scratch.data();
  if (!saves) {
    a.gates = scratch.data() + units;
    a.pooled = a.gates + channels;
  }
  batched::sum_images(context, call.x.dtype, a, false);
  batched::excite(context, call.w1.dtype, a, false);
  batched::open_gates(context, call.w1.dtype, a);
  batched::scale_images(context, call.x.dtype, a, false);
}

void batched_run(const Context& context, const SqueezeExciteBackward& call) {
  auto a = products_of(call);
  a.kept = call.dy.data;
  a.extra = call.x.data;
  a.out = call.dx.data;
  a.dw1 = call.dw1.data;
  a.db1 = call.db1.data;
  a.dw2 = call.dw2.data;
  a.db2 = call.db2.data;
  const std::int64_t channels = std::int64_t{a.n} * a.c, units = std::int64_t{a.n} * a.stride;
  const Scratch<float> scratch(context, 2 * channels + 2 * units);
  a.dz2 = scratch.data();
  a.offsets = a.dz2 + channels;
  a.dz1 = a.offsets + channels;
  a.activated = a.dz1 + units;
  batched::sum_images(context, call.x.dtype, a, true);
  batched::excite(context, call.w1.dtype, a, true);
  batched::compute_gradients(context, call.w1.dtype, a);
  batched::scale_images(context, call.x.dtype, a, true);
}

bool batched_products_take(const TensorView& x, const TensorView& w1) {
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  const std::int64_t n = x.sizes[0], c = x.sizes[1], r = w1.sizes[0];
  return x.dtype != DType::f64 && n > 0 && n < kMost && c < kMost && r < kMost &&
         x.sizes[2] * x.sizes[3] < (std::int64_t{1} << 30) && products_fit(x, r);
}

void batched_products(const Context& context, const SqueezeExciteForward& call, float* pooled,
                      float* gates) {
  auto a = products_of(call);
  a.b1 = call.b1.data;
  a.b2 = call.b2.data;
  a.pooled = pooled;
  a.gates = gates;
  const Scratch<float> activated(context, std::int64_t{a.n} * a.stride);
  a.activated = activated.data();
  batched::excite(context, call.w1.dtype, a, false);
  batched::open_gates(context, call.w1.dtype, a);
}

void batched_products(const Context& context, const SqueezeExciteBackward& call, float* dz2,
                      float* offsets) {
  auto a = products_of(call);
  a.dw1 = call.dw1.data;
  a.db1 = call.db1.data;
  a.dw2 = call.dw2.data;
  a.db2 = call.db2.data;
  a.dz2 = dz2;
  a.offsets = offsets;
  const std::int64_t units = std::int64_t{a.n} * a.stride;
  const Scratch<float> scratch(context, 2 * units);
  a.dz1 = scratch.data();
  a.activated = a.dz1 + units;
  batched::excite(context, call.w1.dtype, a, true);
  batched::compute_gradients(context, call.w1.dtype, a);
}

}  // namespace fusewise::cuda

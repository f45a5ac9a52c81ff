// Squeeze-and-Excitation as a sequence of plain kernels: any GPU, any type, any strides, any size.
// Memory: forward reads x twice and writes y; backward reads dy twice, x once and writes dx. The
// second pass begins with what the first one read last, which is still in L2.
// Bound by memory bandwidth when large, by its four (backward: five) launches when small.

#include "cuda/squeeze_excite/general.cuh"

#include "common/scratch.h"
#include "cuda/image_passes.cuh"
#include "cuda/squeeze_excite/excitation.cuh"

namespace fusewise::cuda {
namespace {

using passes::Index;

constexpr int kResident = 3;

/// Sums of a.
template <typename A>
struct Sum {
  static constexpr int kImages = 1, kValues = 0, kSums = 1, kResident = cuda::kResident;

  template <typename Values, int kCount, int kWidth>
  __device__ __forceinline__ void add(const Values&, const A (&a)[kCount], const A (&)[kCount],
                                      A (&sums)[1][kWidth]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) sums[0][k % kWidth] += a[k];
  }
};

/// Sums of a * b.
template <typename A>
struct SumOfProducts {
  static constexpr int kImages = 2, kValues = 0, kSums = 1, kResident = cuda::kResident;

  template <typename Values, int kCount, int kWidth>
  __device__ __forceinline__ void add(const Values&, const A (&a)[kCount], const A (&b)[kCount],
                                      A (&sums)[1][kWidth]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) sums[0][k % kWidth] += a[k] * b[k];
  }
};

/// a * gate + offset. Without offsets, nothing is added: -0 + 0 would be 0.
template <typename A>
struct Scale {
  static constexpr int kImages = 1, kValues = 2, kResident = cuda::kResident;
  const A *gates, *offsets;  ///< [N, C]; offsets may be null
  Index c;

  __device__ __forceinline__ void values(Index sample, Index channel, A (&to)[kValues]) const {
    const Index at = sample * c + channel;
    to[0] = gates[at];
    to[1] = offsets ? offsets[at] : A(0);
  }
  template <typename Values, int kCount>
  __device__ __forceinline__ void map(const Values& values, const A (&a)[kCount],
                                      const A (&)[kCount], A (&out)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const A scaled = a[k] * values(0, k);
      out[k] = offsets ? scaled + values(1, k) : scaled;
    }
  }
};

template <typename A>
A* data_of(const TensorView& t) {
  return static_cast<A*>(t.data);
}

}  // namespace

void general_run(const Context& context, const SqueezeExciteForward& call) {
  const passes::Plan plan = passes::plan_for(context, {&call.x, &call.y}, kResident);
  const passes::Shape& s = plan.shape;
  dispatch_dtype(call.x.dtype, [&]<typename T>(T) {
    using A = Accumulator<T>;
    const Scratch<A> sums(context, s.n * s.chunks * s.c);
    const Scratch<A> own_gates(context, call.gates.defined() ? 0 : s.n * s.c);
    A* const gates = call.gates.defined() ? data_of<A>(call.gates) : own_gates.data();
    passes::sum_images<T>(
        {.context = context, .plan = plan, .a = call.x, .b = call.x, .follows = false},
        "summing over pixels", Sum<A>{}, sums.data());
    excite(context, call, {sums.data(), s.chunks, s.c}, gates);
    passes::map_images<T>(
        {.context = context, .plan = plan, .a = call.x, .b = call.x, .reversed = true}, "scaling",
        Scale<A>{gates, nullptr, s.c}, call.y);
  });
}

void general_run(const Context& context, const SqueezeExciteBackward& call) {
  const bool want_dx = call.dx.defined();
  const passes::Plan plan =
      want_dx ? passes::plan_for(context, {&call.x, &call.dy, &call.dx}, kResident)
              : passes::plan_for(context, {&call.x, &call.dy}, kResident);
  const passes::Shape& s = plan.shape;
  const WeightGradientVectors vectors(context, call, /*always=*/true);
  dispatch_dtype(call.x.dtype, [&]<typename T>(T) {
    using A = Accumulator<T>;
    const Scratch<A> sums(context, s.n * s.chunks * s.c), offsets(context, want_dx ? s.n * s.c : 0);
    passes::sum_images<T>(
        {.context = context, .plan = plan, .a = call.dy, .b = call.x, .follows = false},
        "summing over pixels", SumOfProducts<A>{}, sums.data());
    excite(context, call, {sums.data(), s.chunks, s.c}, vectors, offsets.data());
    if (!want_dx) return;
    passes::map_images<T>(
        {.context = context, .plan = plan, .a = call.dy, .b = call.dy, .reversed = true}, "scaling",
        Scale<A>{data_of<A>(call.gates), offsets.data(), s.c}, call.dx);
  });
  vectors.run(context, call);
}

}  // namespace fusewise::cuda

// BatchNorm + activation + max-pool on the GPU against the CPU, whose tests are exact. Tests named
// Short* are small enough for compute-sanitizer.

#include "batch_norm_pool_reference.h"
#include "gpu.h"

namespace fusewise::testing {
namespace {

class CudaBatchNormPool : public NeedsGpu {};

using Members = TensorsOnGpu<PoolProblem>::Members;
using P = PoolProblem;
const Members kAll = {&P::x,    &P::y,       &P::dy,     &P::dx,           &P::weight,
                      &P::bias, &P::dweight, &P::dbias,  &P::running_mean, &P::running_var,
                      &P::mean, &P::inverse, &P::choices};

class OnGpu : public TensorsOnGpu<PoolProblem> {
 public:
  OnGpu(PoolProblem& host, const Members& outputs) : TensorsOnGpu(host, kAll, outputs) {}

  BatchNormActPoolForward forward() const {
    BatchNormActPoolForward call = host_.forward();
    for (TensorView* view : {&call.x, &call.y, &call.weight, &call.bias, &call.running_mean,
                             &call.running_var, &call.mean, &call.inverse_deviation, &call.choices})
      move(*view);
    return call;
  }
  BatchNormActPoolBackward backward() const {
    BatchNormActPoolBackward call = host_.backward();
    for (TensorView* view :
         {&call.x, &call.dy, &call.weight, &call.bias, &call.mean, &call.inverse_deviation,
          &call.choices, &call.dx, &call.dweight, &call.dbias})
      move(*view);
    return call;
  }
};

template <typename Call>
bool takes(const char* name, Call call) {
  call.implementation = name;
  try {
    explain(on_gpu(), call);
  } catch (const Error&) {
    return false;
  }
  return true;
}

/// Says whether the implementation took the case, both ways.
bool expect_right(const char* name, const PoolProblem& problem) {
  PoolProblem host = problem;
  batch_norm_act_pool(Context{}, host.forward());
  batch_norm_act_pool(Context{}, host.backward());
  PoolProblem found = problem;
  const Members outputs = {&P::y,       &P::mean,         &P::inverse,
                           &P::choices, &P::running_mean, &P::running_var};
  OnGpu gpu(found, {&P::y});
  if (!takes(name, gpu.forward())) return false;
  BatchNormActPoolForward forward = gpu.forward();
  forward.implementation = name;
  batch_norm_act_pool(on_gpu(), forward);
  gpu.fetch(outputs);
  expect_near(found.y, host.y, 8, "y");
  expect_near(found.running_var, host.running_var, 8, "running_var");
  // With the CPU's decisions.
  found = host;
  const Members gradients = {&P::dx, &P::dweight, &P::dbias};
  OnGpu again(found, gradients);
  BatchNormActPoolBackward backward = again.backward();
  backward.implementation = name;
  batch_norm_act_pool(on_gpu(), backward);
  again.fetch(gradients);
  expect_near(found.dx, host.dx, 8, "dx");
  expect_near(found.dweight, host.dweight, 64, "dweight");
  expect_near(found.dbias, host.dbias, 64, "dbias");
  return true;
}

TEST_F(CudaBatchNormPool, ShortEveryTypeLayoutAndActivation) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    for (const Layout layout : kLayouts) {
      for (const Layout other : kLayouts) {
        PoolProblem p(dtype, layout, other, 2, 16, 7, 6);
        p.activation = kBatchNormActivations[static_cast<int>(other) % 5];
        p.training = other != Layout::sliced;
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(static_cast<int>(layout)) +
                     " " + std::to_string(static_cast<int>(other)));
        EXPECT_TRUE(expect_right("general", p));
        const bool fits = layout == Layout::channels_last && other == layout;
        EXPECT_TRUE(expect_right("channels_last", p) || !fits || dtype == DType::f64);
      }
    }
  }
}

TEST_F(CudaBatchNormPool, EverySize) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    for (const Index channels : {1, 3, 8, 64, 72, 520}) {
      for (const Index side : {1, 2, 5, 16, 57}) {
        const PoolProblem p(DType::f16, layout, layout, 3, channels, side, side + 1);
        SCOPED_TRACE(std::to_string(channels) + " channels, side " + std::to_string(side));
        EXPECT_TRUE(expect_right("general", p));
        expect_right("channels_last", p);
      }
    }
  }
}

TEST_F(CudaBatchNormPool, RerunsAreBitIdentical) {
  for (const char* name : {"channels_last", "general"}) {
    PoolProblem first(DType::f16, Layout::channels_last, Layout::channels_last, 8, 64, 30, 30);
    PoolProblem second = first;
    for (PoolProblem* p : {&first, &second}) {
      OnGpu gpu(*p, {});
      BatchNormActPoolForward forward = gpu.forward();
      BatchNormActPoolBackward backward = gpu.backward();
      forward.implementation = backward.implementation = name;
      batch_norm_act_pool(on_gpu(), forward);
      batch_norm_act_pool(on_gpu(), backward);
      gpu.fetch(kAll);
    }
    for (const auto member : kAll) {
      EXPECT_EQ((first.*member).memory(), (second.*member).memory());
    }
  }
}

}  // namespace
}  // namespace fusewise::testing

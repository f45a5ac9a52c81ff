#pragma once

// Squeeze-and-Excitation on the GPU: its tensors there, and every implementation against plain
// loops in float64. Tests named Short* are small enough for compute-sanitizer and reach every
// kernel between them.

#include <functional>
#include <set>
#include <string>

#include "cuda/device.h"
#include "gpu.h"
#include "reference.h"

namespace fusewise::testing {

class CudaSqueezeExcite : public NeedsGpu {};

// Tensors on the GPU. ----------------------------------------------------------------------------

using Tensors = TensorsOnGpu<SqueezeExcite>::Members;

inline const Tensors kAll = {
    &SqueezeExcite::x,      &SqueezeExcite::w1,    &SqueezeExcite::b1,  &SqueezeExcite::w2,
    &SqueezeExcite::b2,     &SqueezeExcite::y,     &SqueezeExcite::dy,  &SqueezeExcite::pooled,
    &SqueezeExcite::hidden, &SqueezeExcite::gates, &SqueezeExcite::dx,  &SqueezeExcite::dw1,
    &SqueezeExcite::db1,    &SqueezeExcite::dw2,   &SqueezeExcite::db2,
};
inline const Tensors kForwardOutputs = {&SqueezeExcite::y, &SqueezeExcite::pooled,
                                        &SqueezeExcite::hidden, &SqueezeExcite::gates};
inline const Tensors kBackwardOutputs = {&SqueezeExcite::dx, &SqueezeExcite::dw1,
                                         &SqueezeExcite::db1, &SqueezeExcite::dw2,
                                         &SqueezeExcite::db2};

class OnGpu : public TensorsOnGpu<SqueezeExcite> {
 public:
  OnGpu(SqueezeExcite& host, const Tensors& outputs) : TensorsOnGpu(host, kAll, outputs) {}

  SqueezeExciteForward forward() const {
    SqueezeExciteForward call = host_.forward();
    for (TensorView* view : {&call.x, &call.w1, &call.b1, &call.w2, &call.b2, &call.y, &call.pooled,
                             &call.hidden, &call.gates}) {
      move(*view);
    }
    return call;
  }
  SqueezeExciteBackward backward() const {
    SqueezeExciteBackward call = host_.backward();
    for (TensorView* view : {&call.dy, &call.x, &call.w1, &call.w2, &call.pooled, &call.hidden,
                             &call.gates, &call.dx, &call.dw1, &call.db1, &call.dw2, &call.db2}) {
      move(*view);
    }
    return call;
  }
};

// Running and comparing. -------------------------------------------------------------------------

using RunForward = std::function<void(const Context&, const SqueezeExciteForward&)>;
using RunBackward = std::function<void(const Context&, const SqueezeExciteBackward&)>;

/// Forces an implementation by name.
inline auto forced(const char* name) {
  return [name](const Context& context, auto call) {
    call.implementation = name;
    squeeze_excite(context, call);
  };
}

/// Whether it takes the call when it is forced to.
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

inline void save(SqueezeExcite& call, const ForwardReference& saved) {
  for (Index i = 0; i < call.pooled.numel(); ++i) call.pooled.set(i, saved.pooled[i].value);
  for (Index i = 0; i < call.hidden.numel(); ++i) call.hidden.set(i, saved.hidden[i].value);
  for (Index i = 0; i < call.gates.numel(); ++i) call.gates.set(i, saved.gates[i].value);
}

inline void expect_close(const Tensor& got, const Values& expected, const char* name) {
  if (!got.defined()) return;
  EXPECT_TRUE(all_close(got, expected)) << name;
}

inline void expect_forward(SqueezeExcite call, const ForwardReference& expected,
                           const RunForward& run) {
  OnGpu gpu(call, kForwardOutputs);
  run(on_gpu(), gpu.forward());
  gpu.fetch(kForwardOutputs);
  expect_close(call.y, expected.y, "y");
  expect_close(call.pooled, expected.pooled, "pooled");
  expect_close(call.hidden, expected.hidden, "hidden");
  expect_close(call.gates, expected.gates, "gates");
}

/// `call` has what forward saves.
inline void expect_backward(SqueezeExcite call, const BackwardReference& expected,
                            const RunBackward& run) {
  OnGpu gpu(call, kBackwardOutputs);
  run(on_gpu(), gpu.backward());
  gpu.fetch(kBackwardOutputs);
  expect_close(call.dx, expected.dx, "dx");
  expect_close(call.dw1, expected.dw1, "dw1");
  expect_close(call.db1, expected.db1, "db1");
  expect_close(call.dw2, expected.dw2, "dw2");
  expect_close(call.db2, expected.db2, "db2");
}

/// Those that ran, as "forward cluster". `general` always has to.
using Names = std::set<std::string>;
inline constexpr const char* kNames[] = {"batched", "cluster", "two_pass", "general"};

inline Names expect_forwards(SqueezeExcite& call, const ForwardReference& expected) {
  Names ran;
  for (const char* name : kNames) {
    SCOPED_TRACE(std::string("forward ") + name);
    if (!takes(name, OnGpu(call, {}).forward())) continue;
    expect_forward(call, expected, forced(name));
    ran.insert(std::string("forward ") + name);
  }
  EXPECT_TRUE(ran.contains("forward general"));
  return ran;
}

inline Names expect_backwards(SqueezeExcite& call, const ForwardReference& saved) {
  save(call, saved);
  const BackwardReference expected = backward_reference(call);
  Names ran;
  for (const char* name : kNames) {
    SCOPED_TRACE(std::string("backward ") + name);
    if (!takes(name, OnGpu(call, {}).backward())) continue;
    expect_backward(call, expected, forced(name));
    ran.insert(std::string("backward ") + name);
  }
  EXPECT_TRUE(ran.contains("backward general"));
  return ran;
}

/// Both ways, with every implementation that takes the call.
inline Names expect_both(SqueezeExcite call) {
  const ForwardReference expected = forward_reference(call);
  Names ran = expect_forwards(call, expected);
  ran.merge(expect_backwards(call, expected));
  return ran;
}

inline bool has_clusters() { return cuda::limits_of(kGpu).capability >= 90; }

// Problems. --------------------------------------------------------------------------------------

struct Types {
  DType data, weights;
};
inline constexpr Types kTypes[] = {{DType::f32, DType::f32},   {DType::f64, DType::f64},
                                   {DType::f16, DType::f16},   {DType::f16, DType::f32},
                                   {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};
inline constexpr Types kShortTypes[] = {{DType::f32, DType::f32},
                                        {DType::f16, DType::f16},
                                        {DType::f16, DType::f32},
                                        {DType::bf16, DType::bf16},
                                        {DType::bf16, DType::f32}};

/// What takes dense, aligned float32 or half images of a size that suits the GPU, with a multiple
/// of eight channels.
inline Names all_names(Types types, Layout layout) {
  Names all{"forward two_pass", "forward general", "backward two_pass", "backward general"};
  if (has_clusters()) all.merge(Names{"forward cluster", "backward cluster"});
  if (size_of(types.data) == 2 && layout == Layout::channels_last) {
    all.merge(Names{"forward batched", "backward batched"});
  }
  return all;
}

inline std::string case_name(const Sizes& s, Types types, Layout layout, Layout other) {
  return "N, C, R, H, W = " + std::to_string(s.n) + ", " + std::to_string(s.c) + ", " +
         std::to_string(s.r) + ", " + std::to_string(s.h) + ", " + std::to_string(s.w) + "; " +
         name_of(types.data) + ", weights " + name_of(types.weights) + ", layouts " +
         std::to_string(static_cast<int>(layout)) + " and " +
         std::to_string(static_cast<int>(other));
}

inline SqueezeExcite make(Sizes sizes, DType dtype = DType::f32, Layout layout = Layout::nchw) {
  return make_squeeze_excite(sizes, dtype, dtype, layout, layout);
}

/// Both ways for one layout of all images; says what ran.
inline Names expect_case(Sizes sizes, Types types, Layout layout) {
  SCOPED_TRACE(case_name(sizes, types, layout, layout));
  return expect_both(make_squeeze_excite(sizes, types.data, types.weights, layout, layout));
}

}  // namespace fusewise::testing

// Squeeze-and-Excitation on the GPU: what bad calls are told.

#include "message_of.h"
#include "squeeze_excite_gpu.h"

namespace fusewise::testing {
namespace {

template <typename Call>
void expect_error(const Call& call, const std::string& start) {
  const std::string message = message_of([&] { squeeze_excite(on_gpu(), call); });
  EXPECT_EQ(message.substr(0, start.size()), start) << message;
  EXPECT_THROW(explain(on_gpu(), call), Error);
}

template <typename Call>
struct Argument {
  TensorView Call::* view;
  const char* name;
};

/// Spoils one argument after another; the error begins with its name.
template <typename Call>
void spoil_each(const std::vector<Argument<Call>>& arguments, const Call& good) {
  for (const Argument<Call>& argument : arguments) {
    const std::string name = argument.name;
    Call call = good;
    TensorView& bad = call.*argument.view;
    bad.device = {};
    expect_error(call, name + ": expected a tensor on cuda:0, got one on cpu");
    bad.device = {DeviceType::cuda, 1};
    expect_error(call, name + ": expected a tensor on cuda:0, got one on cuda:1");
    bad = good.*argument.view;
    bad.sizes[bad.rank] = 2;
    bad.strides[bad.rank++] = 1;
    expect_error(call, name + ": expected");
    if (name == "x") continue;  // x says what the others must be
    bad = good.*argument.view;
    bad.sizes[name == "w1" ? 1 : 0] += 1;  // and the first size of W1 says what R is
    expect_error(call, name + ": expected");
    bad = good.*argument.view;
    bad.dtype = DType::f64;
    expect_error(call, name + ": expected");
  }
}

TEST_F(CudaSqueezeExcite, BadArgumentsOfForwardAreNamed) {
  using Call = SqueezeExciteForward;
  SqueezeExcite tensors = make({2, 8, 3, 4, 5});
  OnGpu gpu(tensors, kForwardOutputs);
  const Call good = gpu.forward();
  spoil_each<Call>({{&Call::x, "x"},
                    {&Call::w1, "w1"},
                    {&Call::b1, "b1"},
                    {&Call::w2, "w2"},
                    {&Call::b2, "b2"},
                    {&Call::y, "y"},
                    {&Call::pooled, "pooled"},
                    {&Call::hidden, "hidden"},
                    {&Call::gates, "gates"}},
                   good);
  Call call = good;
  call.y = {};
  expect_error(call, "y: is missing");
  call = good;
  call.gates = {};
  expect_error(call, "pooled, hidden and gates: expected all of them or none");
  call = good;
  call.implementation = "fastest";
  expect_error(call, "implementation: there is none named 'fastest'");
  gpu.fetch({});  // no output was touched
}

TEST_F(CudaSqueezeExcite, BadArgumentsOfBackwardAreNamed) {
  using Call = SqueezeExciteBackward;
  SqueezeExcite tensors = make({2, 8, 3, 4, 5});
  OnGpu gpu(tensors, kBackwardOutputs);
  const Call good = gpu.backward();
  spoil_each<Call>({{&Call::dy, "dy"},
                    {&Call::x, "x"},
                    {&Call::w1, "w1"},
                    {&Call::w2, "w2"},
                    {&Call::pooled, "pooled"},
                    {&Call::hidden, "hidden"},
                    {&Call::gates, "gates"},
                    {&Call::dx, "dx"},
                    {&Call::dw1, "dw1"},
                    {&Call::db1, "db1"},
                    {&Call::dw2, "dw2"},
                    {&Call::db2, "db2"}},
                   good);
  Call call = good;
  call.dy = {};
  expect_error(call, "dy: is missing");
  call = good;
  call.implementation = "avx2";
  expect_error(call, "implementation: there is none named 'avx2'");
  gpu.fetch({});  // no output was touched
}

TEST_F(CudaSqueezeExcite, WhoIsForcedAndDeclinesSaysWhy) {
  SqueezeExcite wide = make({2, 8, 3, 4, 5}, DType::f64);
  OnGpu gpu(wide, kForwardOutputs);
  SqueezeExciteForward call = gpu.forward();
  call.implementation = "two_pass";
  expect_error(call, "implementation: 'two_pass' cannot run this call; ");
  const Candidates list = explain(on_gpu(), gpu.forward());
  const char* names[] = {"batched", "cluster", "two_pass", "general"};
  ASSERT_EQ(list.size(), std::size(names));
  for (std::size_t i = 0; i < list.size(); ++i) {
    EXPECT_EQ(list[i].name, names[i]);
    EXPECT_EQ(list[i].declined.empty(), list[i].name == "general");
    EXPECT_EQ(list[i].chosen, list[i].name == "general");
  }
  gpu.fetch({});
}

}  // namespace
}  // namespace fusewise::testing

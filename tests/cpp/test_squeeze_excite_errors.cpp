// What a bad argument gets: an error that names it, and no output touched.

#include "message_of.h"
#include "reference.h"

namespace fusewise::testing {
namespace {

SqueezeExcite make(DType dtype = DType::f32) {
  return make_squeeze_excite({2, 6, 3, 4, 5}, dtype, dtype, Layout::nchw, Layout::nchw);
}

template <typename Call>
void expect_error(const SqueezeExcite& tensors, const Call& call, const std::string& start) {
  const std::string message = message_of([&] { squeeze_excite(Context{}, call); });
  EXPECT_EQ(message.substr(0, start.size()), start) << message;
  EXPECT_THROW(explain(Context{}, call), Error);
  // Outputs were never filled: each still holds what it was made with.
  const SqueezeExcite fresh = make(tensors.x.dtype());
  EXPECT_EQ(tensors.y.memory(), fresh.y.memory());
  EXPECT_EQ(tensors.pooled.memory(), fresh.pooled.memory());
  EXPECT_EQ(tensors.hidden.memory(), fresh.hidden.memory());
  EXPECT_EQ(tensors.gates.memory(), fresh.gates.memory());
  EXPECT_EQ(tensors.dx.memory(), fresh.dx.memory());
  EXPECT_EQ(tensors.dw1.memory(), fresh.dw1.memory());
  EXPECT_EQ(tensors.db1.memory(), fresh.db1.memory());
  EXPECT_EQ(tensors.dw2.memory(), fresh.dw2.memory());
  EXPECT_EQ(tensors.db2.memory(), fresh.db2.memory());
}

/// Spoils one argument of forward (or of backward) and expects the error.
template <typename Call>
struct Spoil {
  TensorView Call::* argument;
  const char* name;
};

constexpr Spoil<SqueezeExciteForward> kForward[] = {
    {&SqueezeExciteForward::x, "x"},           {&SqueezeExciteForward::w1, "w1"},
    {&SqueezeExciteForward::b1, "b1"},         {&SqueezeExciteForward::w2, "w2"},
    {&SqueezeExciteForward::b2, "b2"},         {&SqueezeExciteForward::y, "y"},
    {&SqueezeExciteForward::pooled, "pooled"}, {&SqueezeExciteForward::hidden, "hidden"},
    {&SqueezeExciteForward::gates, "gates"},
};

constexpr Spoil<SqueezeExciteBackward> kBackward[] = {
    {&SqueezeExciteBackward::dy, "dy"},         {&SqueezeExciteBackward::x, "x"},
    {&SqueezeExciteBackward::w1, "w1"},         {&SqueezeExciteBackward::w2, "w2"},
    {&SqueezeExciteBackward::pooled, "pooled"}, {&SqueezeExciteBackward::hidden, "hidden"},
    {&SqueezeExciteBackward::gates, "gates"},   {&SqueezeExciteBackward::dx, "dx"},
    {&SqueezeExciteBackward::dw1, "dw1"},       {&SqueezeExciteBackward::db1, "db1"},
    {&SqueezeExciteBackward::dw2, "dw2"},       {&SqueezeExciteBackward::db2, "db2"},
};

template <typename Call, std::size_t kCount>
void spoil_each(const Spoil<Call> (&arguments)[kCount], const SqueezeExcite& tensors,
                const Call& good) {
  for (const Spoil<Call>& spoil : arguments) {
    SCOPED_TRACE(spoil.name);
    const std::string name = std::string(spoil.name) + ": ";
    const TensorView& view = good.*spoil.argument;
    Call call = good;
    TensorView& bad = call.*spoil.argument;

    bad.rank = view.rank + 1;
    bad.sizes[view.rank] = 2;
    bad.strides[view.rank] = 1;
    expect_error(tensors, call, name + "expected");

    bad = view;
    bad.device = {DeviceType::cuda, 0};
    expect_error(tensors, call, name + "expected a tensor on cpu, got one on cuda:0");

    bad = view;
    bad.data = nullptr;
    expect_error(tensors, call, name + "expected a pointer to its data, got null");

    if (name != "x: ") {  // x says what the others must be
      bad = view;
      // W1's first size says what R is: there, only the second can be wrong.
      const int dimension = name == "w1: " || name == "y: " || name == "dy: " ? 1 : 0;
      bad.sizes[dimension] += 1;
      expect_error(tensors, call, name + "expected");

      bad = view;
      bad.dtype = DType::f64;
      expect_error(tensors, call, name + "expected");
    }
  }
}

TEST(SqueezeExciteErrors, EachArgumentOfForward) {
  const SqueezeExcite tensors = make();
  spoil_each(kForward, tensors, tensors.forward());
}

TEST(SqueezeExciteErrors, EachArgumentOfBackward) {
  const SqueezeExcite tensors = make();
  spoil_each(kBackward, tensors, tensors.backward());
}

TEST(SqueezeExciteErrors, MissingArguments) {
  const SqueezeExcite tensors = make();
  const auto forward = [&](TensorView SqueezeExciteForward::* argument, const char* message) {
    SqueezeExciteForward call = tensors.forward();
    call.*argument = {};
    expect_error(tensors, call, message);
  };
  forward(&SqueezeExciteForward::x, "x: is missing");
  forward(&SqueezeExciteForward::w1, "w1: is missing");
  forward(&SqueezeExciteForward::w2, "w2: is missing");
  forward(&SqueezeExciteForward::y, "y: is missing");
  forward(&SqueezeExciteForward::pooled, "pooled, hidden and gates: expected all of them or none");
  forward(&SqueezeExciteForward::gates, "pooled, hidden and gates: expected all of them or none");
  const auto backward = [&](TensorView SqueezeExciteBackward::* argument, const char* message) {
    SqueezeExciteBackward call = tensors.backward();
    call.*argument = {};
    expect_error(tensors, call, message);
  };
  backward(&SqueezeExciteBackward::dy, "dy: is missing");
  backward(&SqueezeExciteBackward::x, "x: is missing");
  backward(&SqueezeExciteBackward::w1, "w1: is missing");
  backward(&SqueezeExciteBackward::w2, "w2: is missing");
  backward(&SqueezeExciteBackward::pooled, "pooled: is missing");
  backward(&SqueezeExciteBackward::hidden, "hidden: is missing");
  backward(&SqueezeExciteBackward::gates, "gates: is missing");
}

TEST(SqueezeExciteErrors, NothingToPool) {
  const SqueezeExcite tensors = make();
  SqueezeExciteForward call = tensors.forward();
  call.x.sizes[1] = 0;
  expect_error(tensors, call, "x: expected [N, C, H, W] with C, H and W >= 1, got [2, 0, 4, 5]");
  for (const int dimension : {2, 3}) {
    call = tensors.forward();
    call.x.sizes[dimension] = 0;
    expect_error(tensors, call, "x: expected [N, C, H, W] with C, H and W >= 1, got [2, 6, ");
  }
  call = tensors.forward();
  call.w1.sizes[0] = 0;
  expect_error(tensors, call, "w1: expected [R, 6] or [R, 6, 1, 1] with R >= 1, got [0, 6]");
}

TEST(SqueezeExciteErrors, WeightsMustBeDense) {
  const SqueezeExcite tensors = make();
  SqueezeExciteForward call = tensors.forward();
  call.w1.strides = {1, 3};
  expect_error(tensors, call, "w1: expected a dense tensor");
  call = tensors.forward();
  call.b2.strides = {2};
  expect_error(tensors, call, "b2: expected a dense tensor");
  SqueezeExciteBackward backward = tensors.backward();
  backward.dw2.strides = {4, 1};
  expect_error(tensors, backward, "dw2: expected a dense tensor");
  backward = tensors.backward();
  backward.gates.strides = {1, 2};
  expect_error(tensors, backward, "gates: expected a dense tensor");
}

TEST(SqueezeExciteErrors, TypesThatDoNotGoTogether) {
  const SqueezeExcite tensors = make();
  SqueezeExciteForward call = tensors.forward();
  call.w1.dtype = DType::f16;
  expect_error(tensors, call, "w1: expected x's dtype float32, got float16");
  const SqueezeExcite half = make(DType::f16);
  call = half.forward();
  call.w1.dtype = DType::bf16;
  expect_error(half, call, "w1: expected x's dtype float16, or float32, got bfloat16");
  call = half.forward();
  call.pooled.dtype = DType::f16;
  expect_error(half, call, "pooled: expected dtype float32, got float16");
}

TEST(SqueezeExciteErrors, UnknownImplementation) {
  const SqueezeExcite tensors = make();
  SqueezeExciteForward call = tensors.forward();
  call.implementation = "fastest";
  expect_error(tensors, call, "implementation: there is none named 'fastest'");
}

TEST(SqueezeExciteErrors, NoMemory) {
  struct None : Allocator {
    void* allocate(std::size_t) override { throw OutOfMemory("none left"); }
    void deallocate(void*) noexcept override {}
  } allocator;
  Context context;
  context.allocator = &allocator;
  const SqueezeExcite tensors = make(), fresh = make();
  EXPECT_THROW(squeeze_excite(context, tensors.forward()), OutOfMemory);
  EXPECT_THROW(squeeze_excite(context, tensors.backward()), OutOfMemory);
  EXPECT_EQ(tensors.y.memory(), fresh.y.memory());
  EXPECT_EQ(tensors.dx.memory(), fresh.dx.memory());
  EXPECT_EQ(tensors.dw1.memory(), fresh.dw1.memory());
}

}  // namespace
}  // namespace fusewise::testing

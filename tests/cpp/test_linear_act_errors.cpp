// What a bad argument of linear_act and mlp gets: an error that names it, and no output touched.

#include "linear_reference.h"
#include "message_of.h"

namespace fusewise::testing {
namespace {

LinearAct make(Activation activation = Activation::relu, DType dtype = DType::f32) {
  return make_linear_act({4, 6, 5}, dtype, activation);
}

template <typename Call>
void expect_error(const LinearAct& tensors, const Call& call, const std::string& start) {
  const LinearAct before = tensors;
  const std::string message = message_of([&] { linear_act(Context{}, call); });
  EXPECT_EQ(message.substr(0, start.size()), start) << message;
  EXPECT_THROW(explain(Context{}, call), Error);
  for (const auto member :
       {&LinearAct::x, &LinearAct::w, &LinearAct::b, &LinearAct::y, &LinearAct::kept,
        &LinearAct::dy, &LinearAct::dx, &LinearAct::dw, &LinearAct::db}) {
    EXPECT_EQ((tensors.*member).memory(), (before.*member).memory());
  }
}

template <typename Call>
struct Spoil {
  TensorView Call::* argument;
  const char* name;
};

constexpr Spoil<LinearActForward> kForward[] = {
    {&LinearActForward::x, "x"}, {&LinearActForward::w, "w"},       {&LinearActForward::b, "b"},
    {&LinearActForward::y, "y"}, {&LinearActForward::kept, "kept"},
};
constexpr Spoil<LinearActBackward> kBackward[] = {
    {&LinearActBackward::dy, "dy"}, {&LinearActBackward::x, "x"},
    {&LinearActBackward::w, "w"},   {&LinearActBackward::kept, "kept"},
    {&LinearActBackward::dx, "dx"}, {&LinearActBackward::dw, "dw"},
    {&LinearActBackward::db, "db"},
};

template <typename Call, std::size_t kCount>
void spoil_each(const Spoil<Call> (&arguments)[kCount], const LinearAct& tensors,
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

    if (name == "x: ") continue;  // says what the others must be
    // w's first size says what N is: there, only the second can be wrong.
    bad = view;
    bad.sizes[name == "w: " ? 1 : 0] += 1;
    bad.strides[0] += 1;
    expect_error(tensors, call, name + "expected");
    bad = view;
    bad.dtype = DType::f64;
    expect_error(tensors, call, name + "expected");
  }
}

TEST(LinearActErrors, EachArgumentOfForward) {
  const LinearAct tensors = make();
  spoil_each(kForward, tensors, tensors.forward());
}

TEST(LinearActErrors, EachArgumentOfBackward) {
  const LinearAct tensors = make();
  spoil_each(kBackward, tensors, tensors.backward());
}

TEST(LinearActErrors, MissingArguments) {
  const LinearAct tensors = make();
  const auto forward = [&](TensorView LinearActForward::* argument, const char* message) {
    LinearActForward call = tensors.forward();
    call.*argument = {};
    expect_error(tensors, call, message);
  };
  forward(&LinearActForward::x, "x: is missing");
  forward(&LinearActForward::w, "w: is missing");
  forward(&LinearActForward::y, "y: is missing");
  const auto backward = [&](TensorView LinearActBackward::* argument, const char* message) {
    LinearActBackward call = tensors.backward();
    call.*argument = {};
    expect_error(tensors, call, message);
  };
  backward(&LinearActBackward::dy, "dy: is missing");
  backward(&LinearActBackward::x, "x: is missing");
  backward(&LinearActBackward::w, "w: is missing");
  backward(&LinearActBackward::kept, "kept: is missing");
}

TEST(LinearActErrors, FormsThatProductsDoNotTake) {
  const LinearAct tensors = make();
  for (const std::array<std::int64_t, TensorView::kMaxRank> strides :
       {std::array<std::int64_t, 6>{10, 2}, {0, 1}, {0, 0}, {1, 1}}) {
    LinearActForward call = tensors.forward();
    call.x.strides = strides;
    expect_error(tensors, call, "x: expected contiguous rows or columns");
    call = tensors.forward();
    call.w.strides = strides;
    expect_error(tensors, call, "w: expected contiguous rows or columns");
    call = tensors.forward();
    call.y.strides = strides;
    expect_error(tensors, call, "y: expected contiguous rows");
    LinearActBackward backward = tensors.backward();
    backward.dx.strides = strides;
    expect_error(tensors, backward, "dx: expected contiguous rows or columns");
  }
  LinearActForward call = tensors.forward();
  call.y.strides = {1, 4};
  expect_error(tensors, call, "y: expected contiguous rows, got strides [1, 4]");
  call = tensors.forward();
  call.b.strides = {2};
  expect_error(tensors, call, "b: expected a dense tensor");
}

TEST(LinearActErrors, BytesAreNoData) {
  const LinearAct tensors = make();
  LinearActForward call = tensors.forward();
  call.x.dtype = DType::u8;
  expect_error(tensors, call, "x: expected a floating dtype, got uint8");
  call = tensors.forward();
  call.y.dtype = DType::u8;
  expect_error(tensors, call, "y: expected a floating dtype, got uint8");
  LinearActBackward backward = tensors.backward();
  backward.dy.dtype = DType::u8;
  expect_error(tensors, backward, "dy: expected a floating dtype, got uint8");
}

TEST(LinearActErrors, WhatIsKept) {
  const LinearAct bits = make();
  LinearActForward call = bits.forward();
  call.kept = bits.dy.view();
  expect_error(bits, call, "kept: expected [4, 1], got [4, 6]");
  call.kept = TensorView(bits.dy.view().data, DType::f32, {}, {4, 1});
  expect_error(bits, call, "kept: expected dtype uint8, got float32");
  call = bits.forward();
  call.activation = Activation::identity;
  expect_error(bits, call, "kept: expected no tensor where activation is 'identity'");
  call = bits.forward();
  call.activation = Activation::gelu;
  expect_error(bits, call, "kept: expected a floating dtype, got uint8");
  LinearActBackward backward = bits.backward();
  backward.activation = Activation::silu;
  expect_error(bits, backward, "kept: expected");
}

TEST(LinearActErrors, UnknownImplementation) {
  const LinearAct tensors = make();
  LinearActForward call = tensors.forward();
  call.implementation = "fastest";
  expect_error(tensors, call, "implementation: there is none named 'fastest'");
}

struct NoMemory : Allocator {
  void* allocate(std::size_t) override { throw OutOfMemory("none left"); }
  void deallocate(void*) noexcept override {}
};

TEST(LinearActErrors, NoMemoryForBackward) {
  NoMemory allocator;
  Context context;
  context.allocator = &allocator;
  LinearAct tensors = make(Activation::gelu);
  const LinearAct before = tensors;
  EXPECT_THROW(linear_act(context, tensors.backward()), OutOfMemory);
  EXPECT_EQ(tensors.dx.memory(), before.dx.memory());
  EXPECT_EQ(tensors.dw.memory(), before.dw.memory());
  EXPECT_EQ(tensors.db.memory(), before.db.memory());
}

TEST(LinearActErrors, HardswishIsOfSqueezeAndExcitationAlone) {
  const std::string said =
      "activation: expected 'identity', 'relu', 'gelu', 'gelu_tanh' or 'silu', got 'hardswish'";
  LinearAct tensors = make(Activation::gelu);
  tensors.activation = Activation::hardswish;
  expect_error(tensors, tensors.forward(), said);
  expect_error(tensors, tensors.backward(), said);
}

TEST(Activations, HaveNames) {
  for (const Activation activation : kActivations) {
    EXPECT_EQ(activation_from(name_of(activation)), activation);
  }
  for (const char* wrong : {"", "Relu", "gelu ", "tanh"}) {
    EXPECT_THROW(activation_from(wrong), Error);
  }
}

}  // namespace
}  // namespace fusewise::testing

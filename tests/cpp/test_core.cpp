// Views, names, and how an implementation is chosen.

#include <gtest/gtest.h>

#include "common/check.h"
#include "common/implementation.h"
#include "common/scratch.h"
#include "fusewise/fusewise.h"
#include "message_of.h"

/// Under AddressSanitizer, let an allocation that is too large fail as it does elsewhere.
extern "C" [[gnu::visibility("default")]] const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}

namespace fusewise {
namespace {

using testing::message_of;

TEST(TensorView, DenseStrides) {
  const TensorView t(nullptr, DType::f32, {}, {2, 3, 4});
  EXPECT_TRUE(t.defined());
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.numel(), 24);
  EXPECT_EQ(t.strides[0], 12);
  EXPECT_EQ(t.strides[1], 4);
  EXPECT_EQ(t.strides[2], 1);
  EXPECT_EQ(t.shape(), "[2, 3, 4]");
}

TEST(TensorView, Absent) {
  EXPECT_FALSE(TensorView().defined());
  EXPECT_TRUE(TensorView(nullptr, DType::f32, {}, {}).defined());
  EXPECT_EQ(TensorView(nullptr, DType::f32, {}, {}).numel(), 1);
  EXPECT_EQ(TensorView(nullptr, DType::f32, {}, {3, 0}).numel(), 0);
}

TEST(TensorView, RefusesWrongNumberOfStridesAndDimensions) {
  EXPECT_THROW(TensorView(nullptr, DType::f32, {}, {2, 3}, {1}), Error);
  EXPECT_THROW(TensorView(nullptr, DType::f32, {}, {1, 1, 1, 1, 1, 1, 1}), Error);
}

TEST(Names, Types) {
  EXPECT_STREQ(name_of(DType::f32), "float32");
  EXPECT_STREQ(name_of(DType::f64), "float64");
  EXPECT_STREQ(name_of(DType::f16), "float16");
  EXPECT_STREQ(name_of(DType::bf16), "bfloat16");
  EXPECT_EQ(size_of(DType::f64), 8);
  EXPECT_EQ(size_of(DType::f32), 4);
  EXPECT_EQ(size_of(DType::f16), 2);
  EXPECT_EQ(size_of(DType::bf16), 2);
  EXPECT_EQ(name_of(Device{}), "cpu");
  EXPECT_EQ(name_of(Device{DeviceType::cuda, 1}), "cuda:1");
}

TEST(Names, ActivationAndGate) {
  EXPECT_EQ(activation_from("silu"), Activation::silu);
  EXPECT_EQ(activation_from("relu"), Activation::relu);
  EXPECT_EQ(activation_from("hardswish", kSqueezeExciteActivations), Activation::hardswish);
  EXPECT_EQ(gate_from("sigmoid"), Gate::sigmoid);
  EXPECT_EQ(gate_from("hardsigmoid"), Gate::hardsigmoid);
  for (const Activation each : kActivations) EXPECT_EQ(activation_from(name_of(each)), each);
  EXPECT_EQ(message_of([] { activation_from("tanh"); }),
            "activation: expected 'identity', 'relu', 'gelu', 'gelu_tanh' or 'silu', got 'tanh'");
  EXPECT_EQ(message_of([] { activation_from("hardswish"); }),
            "activation: expected 'identity', 'relu', 'gelu', 'gelu_tanh' or 'silu', got "
            "'hardswish'");
  EXPECT_EQ(message_of([] { activation_from("gelu", kSqueezeExciteActivations); }),
            "activation: expected 'silu', 'relu' or 'hardswish', got 'gelu'");
  EXPECT_EQ(message_of([] { gate_from(""); }), "gate: expected 'sigmoid' or 'hardsigmoid', got ''");
}

TEST(Check, ThrowsTheWholeSentence) {
  EXPECT_NO_THROW(check(true, "never"));
  EXPECT_EQ(message_of([] { check(false, "x: expected ", 2, ", got ", 3); }),
            "x: expected 2, got 3");
}

struct Choice {
  int number = 0;
  std::string_view implementation = {};
};

int ran = 0;

const Implementation<Choice> kChoices[] = {
    {"even",
     [](const Context&, const Choice& c) -> std::string {
       return c.number % 2 == 0 ? "" : "the number is odd";
     },
     [](const Context&, const Choice&) { ran = 2; },
     [](const Context&, const Choice& c) -> std::string {
       return c.number == 100 ? "a hundred is better positive" : "";
     }},
    {"positive",
     [](const Context&, const Choice& c) -> std::string {
       return c.number > 0 ? "" : "the number is not positive";
     },
     [](const Context&, const Choice&) { ran = 1; }},
};

int run(Choice choice) {
  ran = 0;
  run_chosen<Choice>(kChoices, Context{}, choice);
  return ran;
}

TEST(Implementations, TheFirstThatTakesTheCallRuns) {
  EXPECT_EQ(run({4}), 2);
  EXPECT_EQ(run({3}), 1);
  EXPECT_EQ(run({4, "positive"}), 1);
}

TEST(Implementations, TheListSaysWhy) {
  const Candidates list = candidates<Choice>(kChoices, Context{}, {3});
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0].name, "even");
  EXPECT_EQ(list[0].declined, "the number is odd");
  EXPECT_FALSE(list[0].chosen);
  EXPECT_FALSE(list[0].able);
  EXPECT_EQ(list[1].declined, "");
  EXPECT_TRUE(list[1].chosen);
  const Candidates forced = candidates<Choice>(kChoices, Context{}, {4, "positive"});
  EXPECT_FALSE(forced[0].chosen);
  EXPECT_TRUE(forced[1].chosen);
}

TEST(Implementations, WhoYieldsCanStillBeForced) {
  EXPECT_EQ(run({100}), 1);
  EXPECT_EQ(run({100, "even"}), 2);
  const Candidates list = candidates<Choice>(kChoices, Context{}, {100});
  EXPECT_EQ(list[0].declined, "a hundred is better positive");
  EXPECT_TRUE(list[0].able);
}

TEST(Implementations, NothingIsChosenSilently) {
  const std::string none = message_of([] { run({-1}); });
  EXPECT_TRUE(none.starts_with("implementation: none can run this call; ")) << none;
  EXPECT_NE(none.find("the number is odd"), std::string::npos) << none;
  EXPECT_NE(none.find("the number is not positive"), std::string::npos) << none;
  const std::string forced = message_of([] { run({3, "even"}); });
  EXPECT_TRUE(forced.starts_with("implementation: 'even' cannot run this call; ")) << forced;
  EXPECT_NE(forced.find("'even' declines: the number is odd"), std::string::npos) << forced;
  EXPECT_NE(forced.find("'positive' would take it"), std::string::npos) << forced;
  const std::string unknown = message_of([] { run({3, "odd"}); });
  EXPECT_NE(unknown.find("there is none named 'odd'"), std::string::npos) << unknown;
  EXPECT_EQ(ran, 0);
}

TEST(Scratch, IsAligned) {
  const Context context;
  const Scratch<float> some(context, 3), none(context, 0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(some.data()) % 256, 0u);
  EXPECT_EQ(none.data(), nullptr);
}

TEST(Scratch, ComesFromTheContextsAllocatorAndGoesBack) {
  struct Counting : Allocator {
    int held = 0;
    alignas(256) char memory[1024];
    void* allocate(std::size_t) override { return ++held, memory; }
    void deallocate(void*) noexcept override { --held; }
  } allocator;
  Context context;
  context.allocator = &allocator;
  {
    const Scratch<float> some(context, 3);
    EXPECT_EQ(allocator.held, 1);
  }
  EXPECT_EQ(allocator.held, 0);
}

TEST(Scratch, TooMuchIsAnErrorOfItsOwn) {
  try {
    const Context context;
    const Scratch<char> scratch(context, std::int64_t{1} << 60);
    FAIL();
  } catch (const OutOfMemory& error) {  // Python knows it by these words
    EXPECT_EQ(std::string(error.what()).find("out of memory: "), 0u) << error.what();
  }
}

}  // namespace
}  // namespace fusewise

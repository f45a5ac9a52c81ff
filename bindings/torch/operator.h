#pragma once

// An operator for torch, from its description alone: schemas, the memory of results, the calls.
//
//   _NAME(inputs, choices, flags, save, implementation) -> (output, saved)
//   _NAME_backward(gradient, inputs that backward reads, saved, choices, flags, needed,
//                  implementation) -> gradients of the inputs whose bits are set in `needed`
//   _NAME_explain(inputs, choices, flags, backward, implementation) -> text
//   _NAME_description() -> text
//
// `saved` is the one tensor that forward saves, or several one after another; empty where `save` is
// false.

#include <torch/csrc/stable/library.h>

#include <array>
#include <string>
#include <vector>

#include "call.h"
#include "common/check.h"
#include "common/operator.h"
#include "text.h"

namespace fusewise::binding {

/// Room for the tensors of an operator, of which the last stays absent, and for its choices.
inline constexpr std::size_t kMostTensors = 32, kMostChoices = 4;

/// What a call has brought along and what it will give back, for an operator and one direction.
template <const auto& kOperator, typename Call>
class TorchCall {
  using Operator = std::remove_cvref_t<decltype(kOperator)>;
  using Rule = std::remove_cvref_t<decltype(kOperator.tensors[0])>;
  static constexpr bool kBackward = std::is_same_v<Call, typename Operator::Backward>;

 public:
  Call call;

  /// Takes over all values on the stack, in the schema's order, before anything can fail: what is
  /// left there would never be freed.
  explicit TorchCall(StableIValue* stack) : next_(stack) {
    if constexpr (kBackward) gradient_ = take<Tensor>();
    for (std::size_t i = 0; i < kOperator.tensors.size(); ++i) {
      const Rule& t = kOperator.tensors[i];
      if (!is_input(t) || place(t) == nullptr) continue;
      tensors_[i] = t.role == Role::input ? take<Tensor>() : take<std::optional<Tensor>>();
    }
    if constexpr (kBackward) saved_ = take<Tensor>();
    for (std::size_t i = 0; i < kOperator.rules.choices.size(); ++i) words_[i] = take<Text>();
    for (const auto& flag : kOperator.flags) {
      if constexpr (kBackward) {
        flag.backward(call) = take<bool>();
      } else {
        flag.forward(call) = take<bool>();
      }
    }
    if constexpr (kBackward) {
      mode_ = take<std::int64_t>();
    } else {
      mode_ = take<bool>() ? 1 : 0;
    }
    implementation_ = take<Text>();
    call.implementation = implementation_;
  }

  /// `save`, `backward` or `needed`.
  std::int64_t mode() const { return mode_; }
  const Tensor& first() const { return *tensors_[0]; }
  const Text& word(std::size_t choice) const { return words_[choice]; }

  /// Points the call at its inputs, and checks them.
  void read_inputs(Device device) {
    for (std::size_t i = 0; i < kOperator.tensors.size(); ++i) {
      const Rule& t = kOperator.tensors[i];
      if (!tensors_[i].has_value()) continue;
      if (t.layout == Layout::dense) tensors_[i] = dense(*tensors_[i]);
      place(t)(call) = view_of(t.name, *tensors_[i]);
    }
    for (std::size_t i = 0; i < kOperator.rules.choices.size(); ++i) {
      check_choice(kOperator.rules.choices[i], words_[i]);
      if (i >= kOperator.choices.size()) continue;
      if constexpr (kBackward) {
        kOperator.choices[i].set_backward(call, words_[i]);
      } else {
        kOperator.choices[i].set_forward(call, words_[i]);
      }
    }
    sizes_ = check_tensors(kOperator.rules,
                           GivenTensors(kOperator, call, GivenTensors::Which::inputs), device);
  }

  /// Whether the call's choices lead to this output.
  bool is_output(const Rule& t) const {
    return t.role == Role::output && (*t.with == 0 || words_[0] == t.with);
  }

  /// A result without data: an output, or the gradient of an input.
  TensorView foreseen_result(const Rule& t) const {
    if (const std::size_t like = model_of(t); tensors_[like].has_value()) {
      return place(kOperator.tensors[like])(const_cast<Call&>(call));
    }
    return foreseen(t);
  }
  Tensor new_result(const Rule& t) const {
    const std::size_t like = model_of(t);
    if (tensors_[like].has_value() && t.layout == Layout::any) return new_like(*tensors_[like]);
    return new_dense(foreseen_result(t));
  }

  TensorView foreseen_saved() const {
    TensorView all;
    for (const Rule& t : kOperator.tensors) {
      if (!is_saved(t)) continue;
      const TensorView one = foreseen(t);
      if (!all.defined()) {
        all = one;
        continue;
      }
      all.sizes[0] = all.numel() + one.numel();
      all.strides[0] = all.rank = 1;
    }
    return all;
  }
  Tensor new_saved() const { return new_dense(foreseen_saved()); }
  Tensor nothing_saved() const { return binding::new_dense(first(), DType::f32, {0}); }
  void point_at_saved(const TensorView& saved) {
    auto* data = static_cast<char*>(saved.data);
    for (const Rule& t : kOperator.tensors) {
      if (!is_saved(t)) continue;
      TensorView& view = place(t)(call) = foreseen(t);
      view.data = data;
      data += view.numel() * size_of(view.dtype);
    }
  }

  /// Of backward: points the call at what came from forward and at the gradient that comes in, and
  /// checks these.
  void read_saved_and_gradient(Device device) {
    for (const Rule& t : kOperator.tensors) {
      if (is_output(t)) t.gradient(call) = view_of("gradient", *gradient_);
    }
    saved_ = dense(*saved_);  // hooks on saved tensors may bring back any strides
    const TensorView saved = view_of("saved", *saved_), expected = foreseen_saved();
    check(saved.device == device, "saved: expected a tensor on ", device, ", got one on ",
          saved.device);
    check(saved.dtype == expected.dtype && saved.numel() == expected.numel(),
          "saved: expected the ", expected.numel(), " ", expected.dtype,
          " values that forward saved, got ", saved.numel(), " of ", saved.dtype);
    point_at_saved(saved);
    check_tensors(kOperator.rules, GivenTensors(kOperator, call), device);
  }

 private:
  template <typename Value>
  Value take() {
    return torch::stable::detail::to<Value>(*next_++);
  }

  static Member<Call> place(const Rule& t) {
    if constexpr (kBackward) {
      return t.backward;
    } else {
      return t.forward;
    }
  }

  /// The tensor whose shape this result has; where there is none, one that is absent.
  std::size_t model_of(const Rule& t) const {
    const bool named = t.shape[0] >= 'a';
    for (std::size_t i = 0; i < kOperator.tensors.size(); ++i) {
      const Rule& other = kOperator.tensors[i];
      if (named ? std::string_view(other.name) == t.shape : &other == &t) return i;
    }
    return kMostTensors - 1;
  }

  TensorView foreseen(const Rule& t) const {
    const TensorView first_view = place(kOperator.tensors[0])(const_cast<Call&>(call));
    DType weight = first_view.dtype;
    for (const Rule& other : kOperator.tensors) {
      if (other.type != Type::weight || place(other) == nullptr) continue;
      weight = place(other)(const_cast<Call&>(call)).dtype;
      break;
    }
    return fusewise::foreseen(t, sizes_, first_view.dtype, weight, first_view.device);
  }

  Tensor new_dense(const TensorView& view) const {
    return binding::new_dense(first(), view.dtype,
                              {view.sizes.begin(), view.sizes.begin() + view.rank});
  }

  StableIValue* next_;
  std::array<std::optional<Tensor>, kMostTensors> tensors_;  // by the rules' order
  std::optional<Tensor> gradient_, saved_;
  std::array<Text, kMostChoices> words_;
  std::int64_t mode_ = 0;
  Text implementation_;
  Sizes sizes_;
};

template <const auto& kOperator>
class OperatorBinding {
  using Operator = std::remove_cvref_t<decltype(kOperator)>;
  using ForwardCall = TorchCall<kOperator, typename Operator::Forward>;
  using BackwardCall = TorchCall<kOperator, typename Operator::Backward>;

 public:
  /// suffix: "", "_backward" or "_explain".
  static std::string schema(std::string_view suffix) {
    const bool backward = suffix == "_backward", explains = suffix == "_explain";
    std::string arguments = backward ? "Tensor gradient" : "";
    const auto add = [&](const char* type, const char* name) {
      if (!arguments.empty()) arguments += ", ";
      arguments.append(type).append(" ").append(name);
    };
    for (const auto& t : kOperator.tensors) {
      if (!is_input(t) || (backward && t.backward == nullptr)) continue;
      add(t.role == Role::input ? "Tensor" : "Tensor?", t.name);
    }
    if (backward) add("Tensor", "saved");
    for (const ChoiceRule& choice : kOperator.rules.choices) add("str", choice.name);
    for (const char* flag : kOperator.rules.flags) add("bool", flag);
    add(backward ? "int" : "bool", backward ? "needed" : explains ? "backward" : "save");
    add("str", "implementation");
    const char* result = backward ? "Tensor[]" : explains ? "str" : "(Tensor, Tensor)";
    return std::string("_") + kOperator.rules.name + std::string(suffix) + "(" + arguments +
           ") -> " + result;
  }

  static std::string description() {
    std::array<bool, kMostTensors> read{}, differentiable{};
    for (std::size_t i = 0; i < kOperator.tensors.size(); ++i) {
      read[i] = kOperator.tensors[i].backward != nullptr;
      differentiable[i] = kOperator.tensors[i].gradient != nullptr;
    }
    return text_of(kOperator.rules, read, differentiable);
  }

  static void forward(StableIValue* stack, std::uint64_t, std::uint64_t) {
    ForwardCall torch_call(stack);
    const CallContext context(torch_call.first());
    torch_call.read_inputs(context.get().device);
    std::optional<Tensor> output;
    for (const auto& t : kOperator.tensors) {
      if (!torch_call.is_output(t)) continue;
      output = torch_call.new_result(t);
      t.forward(torch_call.call) = view_of(t.name, *output);
    }
    const bool save = torch_call.mode() != 0;
    const Tensor saved = save ? torch_call.new_saved() : torch_call.nothing_saved();
    if (save) torch_call.point_at_saved(view_of("saved", saved));
    run_checked(kOperator, context.get(), torch_call.call);
    stack[0] = torch::stable::detail::from(*output);
    stack[1] = torch::stable::detail::from(saved);
  }

  static void backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
    BackwardCall torch_call(stack);
    const CallContext context(torch_call.first());
    torch_call.read_inputs(context.get().device);
    torch_call.read_saved_and_gradient(context.get().device);
    std::vector<Tensor> results;
    int input = 0;
    for (const auto& t : kOperator.tensors) {
      if (!is_input(t) || (torch_call.mode() >> input++ & 1) == 0) continue;
      results.push_back(torch_call.new_result(t));
      t.gradient(torch_call.call) = view_of(t.name, results.back());
    }
    run_checked(kOperator, context.get(), torch_call.call);
    stack[0] = torch::stable::detail::from(results);
  }

  /// Answers from shapes and pointers alone: results are taken to lie as they would.
  static void explain(StableIValue* stack, std::uint64_t, std::uint64_t) {
    ForwardCall torch_call(stack);
    const CallContext context(torch_call.first());
    torch_call.read_inputs(context.get().device);
    static char somewhere alignas(256)[256];
    TensorView saved = torch_call.foreseen_saved();
    saved.data = somewhere;
    torch_call.point_at_saved(saved);
    for (const auto& t : kOperator.tensors) {
      if (!torch_call.is_output(t)) continue;
      TensorView& view = t.forward(torch_call.call) = torch_call.foreseen_result(t);
      if (view.data == nullptr) view.data = somewhere;
    }
    std::string text;
    if (torch_call.mode() == 0) {
      text = to_text(fusewise::explain(kOperator, context.get(), torch_call.call));
    } else {
      text = to_text(fusewise::explain(kOperator, context.get(), backward_of(torch_call)));
    }
    stack[0] = torch::stable::detail::from(text);
  }

 private:
  /// All gradients of a forward call.
  static typename Operator::Backward backward_of(ForwardCall& torch_call) {
    typename Operator::Forward& forward = torch_call.call;
    typename Operator::Backward call;
    for (const auto& t : kOperator.tensors) {
      const TensorView& view = t.forward(forward);
      if (t.backward != nullptr) t.backward(call) = view;
      if (t.gradient != nullptr) t.gradient(call) = view;
    }
    for (std::size_t i = 0; i < kOperator.choices.size(); ++i) {
      kOperator.choices[i].set_backward(call, torch_call.word(i));
    }
    for (const auto& flag : kOperator.flags) flag.backward(call) = flag.forward(forward);
    call.implementation = forward.implementation;
    return call;
  }
};

template <const auto& kOperator>
void define(torch::stable::detail::StableLibrary& library) {
  using Binding = OperatorBinding<kOperator>;
  check(kOperator.tensors.size() < kMostTensors && kOperator.rules.choices.size() <= kMostChoices,
        kOperator.rules.name, ": more tensors or choices than the binding has room for");
  for (const char* suffix : {"", "_backward", "_explain"}) {
    library.def(Binding::schema(suffix).c_str());
  }
  library.def((std::string("_") + kOperator.rules.name + "_description() -> str").c_str());
}

template <const auto& kOperator>
void implement(torch::stable::detail::StableLibrary& library) {
  using Binding = OperatorBinding<kOperator>;
  const std::string name = std::string("_") + kOperator.rules.name;
  library.impl(name.c_str(), &Binding::forward);
  library.impl((name + "_backward").c_str(), &Binding::backward);
  library.impl((name + "_explain").c_str(), &Binding::explain);
}

}  // namespace fusewise::binding

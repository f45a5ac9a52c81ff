#pragma once

// Defines an operator for torch from its description alone: schemas, allocation of results, the
// calls.
//
//   _NAME(inputs, choices, flags, numbers, save, implementation) -> [output], or [output, saved]
//   for
//        `save`; (output, saved) if it also writes inputs: torch.compile takes no lists there
//   _NAME_backward(gradient, inputs that backward reads, saved, choices, flags, needed,
//                  implementation) -> gradients of the inputs whose bits are set in `needed`
//   _NAME_explain(inputs, choices, flags, save, backward, implementation) -> text
//   _NAME_description() -> text
//
// `saved` is the one tensor that forward saves, or several, one after another. It is empty if the
// operator saves nothing.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "common/check.h"
#include "common/divide.h"
#include "common/operator.h"
#include "text.h"

namespace fusewise::binding {

/// Capacity for an operator's tensors, of which the last stays absent, and for its choices.
inline constexpr std::size_t kMostTensors = 32, kMostChoices = 4;

/// A new tensor and the core's view of it. If the core cannot write to the tensor's strides, the
/// view is that of a dense copy.
struct Result {
  Tensor tensor;
  TensorView view;
  std::optional<Tensor> copy;
};

inline StableIValue list_of(std::vector<Tensor> tensors) {
  StableListHandle list = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(tensors.size(), &list));
  for (Tensor& tensor : tensors) {
    const StableIValue value = torch::stable::detail::from(tensor.release());
    TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, value));
  }
  return torch::stable::detail::from(list);
}

/// The arguments and results of one call, for one operator and one direction.
template <const auto& kOperator, typename Call>
class TorchCall {
  using Operator = std::remove_cvref_t<decltype(kOperator)>;
  using Rule = std::remove_cvref_t<decltype(kOperator.tensors[0])>;
  static constexpr bool kBackward = std::is_same_v<Call, typename Operator::Backward>;

 public:
  Call call;

  /// Takes over all values on the stack, in the schema's order, before anything can fail. Values
  /// left there would never be freed.
  explicit TorchCall(StableIValue* stack, bool explains = false) : next_(stack) {
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
    if constexpr (!kBackward) {
      for (const auto number : kOperator.numbers) number(call) = take<double>();
    }
    if constexpr (kBackward) {
      mode_ = take<std::int64_t>();
    } else {
      mode_ = take<bool>() ? 1 : 0;
    }
    if (explains) explains_backward_ = take<bool>();
    implementation_ = take<Text>();
    call.implementation = implementation_;
  }

  bool saves() const { return mode_ != 0; }
  bool explains_backward() const { return explains_backward_; }
  const Tensor& first() const { return *tensors_[0]; }

  /// Points the call at its inputs, for backward also at the incoming gradient, and checks them.
  void read_inputs(Device device) {
    for (std::size_t i = 0; i < kOperator.tensors.size(); ++i) {
      const Rule& t = kOperator.tensors[i];
      if (!tensors_[i].has_value()) continue;
      if (t.type == Type::flags) check_dtype(t.name, *tensors_[i], DType::b8);
      if (t.type == Type::counter) check_dtype(t.name, *tensors_[i], DType::i64);
      TensorView& view = place(t)(call);
      if (is_read(t)) {
        auto copy = point_at(view, t.name, *tensors_[i], t.layout, has_leading(t.shape));
        check(!copy.has_value() || t.role != Role::updated, t.name, ": expected a dense tensor");
        hold(std::move(copy));
      } else {
        point_at_shape(view, t, *tensors_[i]);
      }
    }
    if constexpr (kBackward) {
      check_floating("gradient", *gradient_);
      for (const Rule& t : kOperator.tensors) {
        if (!is_output(t)) continue;
        hold(point_at(t.gradient(call), "gradient", *gradient_, Layout::any, has_leading(t.shape)));
      }
    }
    for (std::size_t i = 0; i < kOperator.rules.choices.size(); ++i) {
      const std::size_t value = check_choice(kOperator.rules.choices[i], words_[i]);
      if (i < kOperator.choices.size()) kOperator.choices[i].set(call, value);
    }
    sizes_ = check_tensors(kOperator.rules,
                           GivenTensors(kOperator, call, GivenTensors::Which::inputs), device);
    if constexpr (!kBackward) {
      if (kOperator.check_more != nullptr) kOperator.check_more(call);
    }
  }

  /// Whether the call's choices select this output.
  bool is_output(const Rule& t) const { return t.role == Role::output && is_with(t, words_[0]); }
  bool is_needed(std::size_t input) const { return (mode_ >> input & 1) != 0; }

  /// An output, or the gradient of an input.
  Result new_result(const Rule& t) const {
    const std::size_t like = model_of(t);
    if (!tensors_[like].has_value()) {
      TensorView view = foreseen(t);
      if (t.layout == Layout::any && has_adjacent_channels(first())) {
        view = channels_last(view);
        return viewed(new_strided(first(), view), view);
      }
      if (!has_leading(t.shape)) return new_dense(view);
      return viewed(new_with_last(first(), view.dtype, view.sizes[view.rank - 1]), view);
    }
    const TensorView& view = place(kOperator.tensors[like])(const_cast<Call&>(call));
    if (t.layout == Layout::dense) return new_dense(view);
    if (tensors_[like]->is_contiguous()) return viewed(new_like(*tensors_[like]), view);
    Result result{new_like(*tensors_[like]), {}, {}};
    result.copy = point_at(result.view, t.name, result.tensor, t.layout, has_leading(t.shape));
    return result;
  }

  /// One tensor for all that is saved, in the type of the first.
  TensorView foreseen_saved() const {
    TensorView all;
    for (const Rule& t : kOperator.tensors) {
      if (!is_saved_now(t)) continue;
      const TensorView one = foreseen(t);
      if (!all.defined()) {
        all = one;
        continue;
      }
      all.sizes[0] = all.numel() + elements(one, all.dtype);
      all.strides[0] = all.rank = 1;
    }
    return all.defined() ? all : nothing();
  }
  Result new_saved() const { return new_dense(foreseen_saved()); }
  Tensor new_nothing() const { return new_dense(nothing()).tensor; }
  void point_at_saved(void* saved) {
    auto* data = static_cast<char*>(saved);
    std::optional<DType> first;
    for (const Rule& t : kOperator.tensors) {
      if (!is_saved_now(t)) continue;
      TensorView& view = place(t)(call) = foreseen(t);
      view.data = data;
      if (!first.has_value()) first = view.dtype;
      data += elements(view, *first) * size_of(*first);
    }
  }

  /// Backward only: points the call at the tensors that forward saved, and checks them.
  void read_saved(Device device) {
    saved_ = dense(*saved_);  // hooks on saved tensors may return any strides
    const TensorView saved = view_of("saved", *saved_);
    // Backward does not get every input on which it depends what forward saved.
    saved_all_ = saved.numel() == foreseen_saved().numel();
    const TensorView expected = foreseen_saved();
    check(saved.device == device, "saved: expected a tensor on ", device, ", got one on ",
          saved.device);
    check(saved.dtype == expected.dtype && saved.numel() == expected.numel(),
          "saved: expected the ", expected.numel(), " ", expected.dtype,
          " values that forward saved, got ", saved.numel(), " of ", saved.dtype);
    point_at_saved(saved.data);
  }

 private:
  static TensorView nothing() { return {nullptr, DType::f32, {}, {0}}; }

  /// How many elements of another type the tensor takes.
  static std::int64_t elements(const TensorView& t, DType dtype) {
    return divide_up(t.numel() * size_of(t.dtype), size_of(dtype));
  }

  /// Whether a call with these inputs and choices saves the tensor.
  bool is_saved_now(const Rule& t) const {
    if (!is_saved(t) || !is_with(t, words_[0])) return false;
    if (kBackward && *t.given != 0) return saved_all_;
    for (std::size_t i = 0; *t.given != 0 && i < kOperator.tensors.size(); ++i) {
      if (kOperator.tensors[i].name == std::string_view(t.given)) return tensors_[i].has_value();
    }
    return true;
  }

  /// Keeps a copy alive for the duration of the call.
  void hold(std::optional<Tensor> copy) {
    if (copy.has_value()) copies_.push_back(*std::move(copy));
  }

  /// Whether the core reads the contents of an input. For backward this may depend on `needed`.
  bool is_read(const Rule& t) const {
    if constexpr (kBackward) {
      std::size_t input = 0;
      for (const Rule& other : kOperator.tensors) {
        if (!is_input(other)) continue;
        if (t.only_for != nullptr && other.gradient == t.only_for) return is_needed(input);
        ++input;
      }
    }
    return true;
  }
  /// If nobody reads the contents, only the shape matters, so any strides are allowed.
  static void point_at_shape(TensorView& view, const Rule& t, const Tensor& tensor) {
    if (has_leading(t.shape)) {
      join_leading(t.name, tensor, view);
    } else {
      view = view_of(t.name, tensor);
    }
    view.strides[0] = view.sizes[1];
    view.strides[1] = 1;
  }

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

  /// Index of the tensor whose shape this result has. If there is none, index of an absent one.
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
      const TensorView given = place(other)(const_cast<Call&>(call));
      if (!given.defined()) continue;
      weight = given.dtype;
      break;
    }
    return fusewise::foreseen(t, sizes_, first_view.dtype, weight, first_view.device);
  }

  Result new_dense(const TensorView& view) const {
    return viewed(binding::new_dense(first(), view.dtype, std::span(view.sizes.data(), view.rank)),
                  view);
  }
  /// A new tensor whose view is known but for its data.
  static Result viewed(Tensor tensor, TensorView view) {
    view.data = tensor.mutable_data_ptr();
    return {std::move(tensor), view, {}};
  }

  StableIValue* next_;
  std::array<std::optional<Tensor>, kMostTensors> tensors_;  // in the rules' order
  std::optional<Tensor> gradient_, saved_;
  std::vector<Tensor> copies_;
  std::array<Text, kMostChoices> words_;
  std::int64_t mode_ = 0;  // `save`, or `needed`
  bool explains_backward_ = false;
  bool saved_all_ = true;  // backward only
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
    char updated = 'a';
    const auto add = [&](const char* type, const char* name) {
      if (!arguments.empty()) arguments += ", ";
      arguments.append(type).append(" ").append(name);
    };
    for (const auto& t : kOperator.tensors) {
      if (!is_input(t) || (backward && t.backward == nullptr)) continue;
      if (t.role == Role::updated && !explains) {
        add((std::string("Tensor(") + updated++ + "!)?").c_str(), t.name);
      } else {
        add(t.role == Role::input ? "Tensor" : "Tensor?", t.name);
      }
    }
    if (backward) add("Tensor", "saved");
    for (const ChoiceRule& choice : kOperator.rules.choices) add("str", choice.name);
    for (const char* flag : kOperator.rules.flags) add("bool", flag);
    if (!backward) {
      for (const char* number : kOperator.rules.numbers) add("float", number);
    }
    add(backward ? "int" : "bool", backward ? "needed" : "save");
    if (explains) add("bool", "backward");
    add("str", "implementation");
    return std::string("_") + kOperator.rules.name + std::string(suffix) + "(" + arguments +
           ") -> " +
           (explains        ? "str"
            : updated > 'a' ? "(Tensor, Tensor)"
                            : "Tensor[]");
  }

  static std::string description() {
    std::array<BackwardUse, kMostTensors> uses;
    for (std::size_t i = 0; i < kOperator.tensors.size(); ++i) {
      const auto& t = kOperator.tensors[i];
      uses[i] = {.read = t.backward != nullptr, .differentiable = t.gradient != nullptr};
      for (const auto& other : kOperator.tensors) {
        if (t.only_for != nullptr && other.gradient == t.only_for) uses[i].only_for = other.name;
      }
    }
    return text_of(kOperator.rules, uses);
  }

  static void forward(StableIValue* stack, std::uint64_t, std::uint64_t) {
    ForwardCall torch_call(stack);
    const CallContext context(torch_call.first());
    std::vector<Tensor> results = prepare(torch_call, context, torch_call.saves());
    run_checked(kOperator, context.get(), torch_call.call);
    if (!updates()) {
      stack[0] = list_of(std::move(results));
      return;
    }
    if (results.size() == 1) results.push_back(torch_call.new_nothing());
    for (std::size_t i = 0; i < 2; ++i) {
      stack[i] = torch::stable::detail::from(results[i].release());
    }
  }

  static void backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
    BackwardCall torch_call(stack);
    const CallContext context(torch_call.first());
    torch_call.read_inputs(context.get().device);
    torch_call.read_saved(context.get().device);
    std::vector<Tensor> results;
    results.reserve(kOperator.tensors.size());
    std::vector<std::pair<std::size_t, Tensor>> copies;  // of results that the core cannot write
    std::size_t input = 0;
    for (const auto& t : kOperator.tensors) {
      if (!is_input(t) || !torch_call.is_needed(input++)) continue;
      check(t.gradient != nullptr, t.name, ": expected no gradient to be needed, got one");
      Result result = torch_call.new_result(t);
      t.gradient(torch_call.call) = result.view;
      if (result.copy.has_value()) copies.emplace_back(results.size(), *std::move(result.copy));
      results.push_back(std::move(result.tensor));
    }
    if (kOperator.check_backward != nullptr) kOperator.check_backward(torch_call.call);
    run_checked(kOperator, context.get(), torch_call.call);
    for (const auto& [place, copy] : copies) binding::copy(copy, results[place]);
    stack[0] = list_of(std::move(results));
  }

  /// Explaining may require measurements, so it allocates tensors like those of the call.
  static void explain(StableIValue* stack, std::uint64_t, std::uint64_t) {
    ForwardCall torch_call(stack, true);
    const CallContext context(torch_call.first());
    const bool backward = torch_call.explains_backward();
    const auto results = prepare(torch_call, context, torch_call.saves() || backward);
    std::string text;
    if (backward) {
      text = explain_backward(torch_call, context.get());
    } else {
      text = to_text(fusewise::explain(kOperator, context.get(), torch_call.call));
    }
    stack[0] = torch::stable::detail::from(text);
  }

 private:
  /// Whether forward writes inputs.
  static bool updates() {
    return std::ranges::any_of(kOperator.tensors,
                               [](const auto& t) { return t.role == Role::updated; });
  }

  /// Prepares a forward call for running. Returns its output and, for `save`, the saved tensor.
  static std::vector<Tensor> prepare(ForwardCall& torch_call, const CallContext& context,
                                     bool save) {
    torch_call.read_inputs(context.get().device);
    std::vector<Tensor> results;
    results.reserve(2);
    for (const auto& t : kOperator.tensors) {
      if (!torch_call.is_output(t)) continue;
      Result output = torch_call.new_result(t);
      t.forward(torch_call.call) = output.view;
      results.push_back(std::move(output.tensor));
    }
    if (save) {
      Result saved = torch_call.new_saved();
      torch_call.point_at_saved(saved.view.data);
      results.push_back(std::move(saved.tensor));
    }
    return results;
  }

  /// Explains backward with all gradients wanted.
  static std::string explain_backward(ForwardCall& torch_call, const Context& context) {
    typename Operator::Forward& forward = torch_call.call;
    typename Operator::Backward call;
    std::vector<Result> held;
    held.reserve(kOperator.tensors.size());
    for (const auto& t : kOperator.tensors) {
      const TensorView& view = t.forward(forward);
      if (!view.defined()) continue;
      if (t.backward != nullptr) t.backward(call) = view;
      if (t.gradient == nullptr) continue;
      if (t.role == Role::output) {
        t.gradient(call) = view;
        continue;
      }
      t.gradient(call) = held.emplace_back(torch_call.new_result(t)).view;
    }
    for (std::size_t i = 0; i < kOperator.choices.size(); ++i) {
      const char* word = kOperator.choices[i].word(forward);
      kOperator.choices[i].set(call, check_choice(kOperator.rules.choices[i], word));
    }
    for (const auto& flag : kOperator.flags) flag.backward(call) = flag.forward(forward);
    call.implementation = forward.implementation;
    return to_text(fusewise::explain(kOperator, context, call));
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

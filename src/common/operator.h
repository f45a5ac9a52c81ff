#pragma once

// An operator: its rules, where its tensors are in the structs of forward and backward, and its
// implementations. Every public function of an operator is `run` or `explain`, at the end of this
// file.

#include "common/backends.h"
#include "common/description.h"
#include "common/implementation.h"

namespace fusewise {

/// Accessor of one tensor of a call.
template <typename Call>
using Member = TensorView& (*)(Call&);

template <typename Call, auto... kPath>
auto& member_at(Call& call) {
  return (call.*....*kPath);
}

template <typename Class, typename Value>
Class class_of(Value Class::*);

/// at<&Call::x>, or at<&Call::weights, &Weights::basis>.
template <auto kFirst, auto... kRest>
inline constexpr auto at = &member_at<decltype(class_of(kFirst)), kFirst, kRest...>;

template <typename Forward, typename Backward>
struct OperatorTensor : TensorRule {
  Member<Forward> forward;
  Member<Backward> backward = nullptr;  ///< null if backward does not read it
  Member<Backward> gradient = nullptr;  ///< null if there is none
  /// Set if backward reads the tensor only for this gradient. If the gradient is not wanted, the
  /// tensor may be absent.
  Member<Backward> only_for = nullptr;
};

/// The rules of a list of tensors, in the form that OperatorRules refers to.
template <typename F, typename B, std::size_t kCount>
constexpr std::array<const TensorRule*, kCount> rules_of(
    const std::array<OperatorTensor<F, B>, kCount>& tensors) {
  std::array<const TensorRule*, kCount> rules;
  for (std::size_t i = 0; i < kCount; ++i) rules[i] = &tensors[i];
  return rules;
}

/// The names of a list of enum values, in the form that ChoiceRule refers to.
template <const auto& kValues>
inline constexpr auto kNames = [] {
  std::array<const char*, std::size(kValues)> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = name_of(kValues[i]);
  return names;
}();

/// A string among the arguments with a fixed set of values. In the structs it is an enum.
template <typename Forward, typename Backward>
struct OperatorChoice {
  void (*set_forward)(Forward&, std::size_t value);  ///< `value`: index among the choice's names
  void (*set_backward)(Backward&, std::size_t value);
  const char* (*forward)(const Forward&);
  const char* (*backward)(const Backward&);

  void set(Forward& call, std::size_t value) const { set_forward(call, value); }
  void set(Backward& call, std::size_t value) const { set_backward(call, value); }
  const char* word(const Forward& call) const { return forward(call); }
  const char* word(const Backward& call) const { return backward(call); }
};

/// The choice among `kValues` that these members of the structs hold.
template <const auto& kValues, auto kForward, auto kBackward>
constexpr auto choice_in() {
  using F = decltype(class_of(kForward));
  using B = decltype(class_of(kBackward));
  return OperatorChoice<F, B>{
      [](F& call, std::size_t value) { call.*kForward = kValues[value]; },
      [](B& call, std::size_t value) { call.*kBackward = kValues[value]; },
      [](const F& call) { return name_of(call.*kForward); },
      [](const B& call) { return name_of(call.*kBackward); },
  };
}

template <typename Forward, typename Backward>
struct OperatorFlag {
  bool& (*forward)(Forward&);
  bool& (*backward)(Backward&);
};

/// A number among the arguments of forward.
template <typename Forward>
using OperatorNumber = double& (*)(Forward&);

/// The Backward of an operator that has none.
struct NoBackward {};

template <typename ForwardCall, typename BackwardCall>
struct Operator {
  using Forward = ForwardCall;
  using Backward = BackwardCall;

  OperatorRules rules;
  std::span<const OperatorTensor<Forward, Backward>> tensors;
  std::span<const OperatorChoice<Forward, Backward>> choices = {};  ///< in the rules' order
  std::span<const OperatorFlag<Forward, Backward>> flags = {};      ///< in the rules' order
  std::span<const OperatorNumber<Forward>> numbers = {};            ///< in the rules' order
  /// Throws Error if forward breaks a rule that the table does not have. Null: there is none.
  void (*check_more)(const Forward&) = nullptr;
  void (*check_backward)(const Backward&) = nullptr;  ///< the same for backward
  Implementations<Forward> (*forward_on_cpu)();
  Implementations<Forward> (*forward_on_cuda)();
  Implementations<Backward> (*backward_on_cpu)() = nullptr;
  Implementations<Backward> (*backward_on_cuda)() = nullptr;

  Implementations<Forward> list(Device device, const Forward&) const {
    return device.type == DeviceType::cpu ? forward_on_cpu() : forward_on_cuda();
  }
  Implementations<Backward> list(Device device, const Backward&) const {
    return device.type == DeviceType::cpu ? backward_on_cpu() : backward_on_cuda();
  }
};

inline bool is_input(const TensorRule& rule) {
  return rule.role == Role::input || rule.role == Role::optional_input ||
         rule.role == Role::updated;
}
inline bool is_saved(const TensorRule& rule) {
  return rule.role == Role::saved || rule.role == Role::optional_saved;
}

/// The name of the first choice's value in a call. Empty if the structs do not have it.
template <typename F, typename B, typename Call>
std::string_view first_word(const Operator<F, B>& op, const Call& call) {
  return op.choices.empty() ? std::string_view() : op.choices[0].word(call);
}

/// The tensors of a call with their rules, in fixed storage. First the tensors that determine the
/// sizes, which are those that are read; then those that are written.
class GivenTensors {
 public:
  /// The inputs of backward include the incoming gradient.
  enum class Which { all, inputs };

  template <typename F, typename B>
  GivenTensors(const Operator<F, B>& op, const F& call, Which which = Which::all) {
    const std::string_view word = first_word(op, call);
    for (const auto& t : op.tensors) {
      if (which == Which::inputs && !is_input(t)) continue;
      const bool required = t.role == Role::input || (t.role == Role::output && *t.with == 0);
      const bool written = !is_input(t) || t.role == Role::updated;
      add(word, {&t, &t.forward(const_cast<F&>(call)), false, written, required});
    }
    refuse_unexpected(op.rules, word);
  }
  template <typename F, typename B>
  GivenTensors(const Operator<F, B>& op, const B& call, Which which = Which::all) {
    B& tensors = const_cast<B&>(call);
    const std::string_view word = first_word(op, call);
    const auto add_read = [&](const auto& t) {
      const bool wanted = t.only_for == nullptr || t.only_for(tensors).defined();
      const bool required = t.role == Role::input || (t.role == Role::saved && *t.given == 0);
      add(word, {&t, &t.backward(tensors), false, false, required && wanted});
    };
    for (const auto& t : op.tensors) {
      if (t.backward != nullptr && is_input(t)) add_read(t);
    }
    for (const auto& t : op.tensors) {
      if (t.gradient == nullptr || t.role != Role::output) continue;
      add(word, {&t, &t.gradient(tensors), true, overwrites_gradient(call), *t.with == 0});
    }
    if (which == Which::inputs) return;
    for (const auto& t : op.tensors) {
      if (t.backward != nullptr && is_saved(t)) add_read(t);
    }
    refuse_unexpected(op.rules, word);
    for (const auto& t : op.tensors) {
      if (t.gradient == nullptr || t.role == Role::output) continue;
      add(word, {&t, &t.gradient(tensors), true, true, false});
    }
  }
  operator std::span<const GivenTensor>() const { return {given_.data(), count_}; }

 private:
  /// Whether backward may use the memory of the incoming gradient for its own computation.
  template <typename B>
  static bool overwrites_gradient(const B& call) {
    if constexpr (requires { call.overwrite_dy; }) {
      return call.overwrite_dy;
    } else {
      return false;
    }
  }

  void add(std::string_view word, const GivenTensor& given) {
    if (!is_with(*given.rule, word)) {
      if (given.view->defined()) unexpected_ = given;
      return;
    }
    check(count_ < kMost, given.rule->name, ": a call has more tensors than there is room for");
    given_[count_++] = given;
  }

  /// No error if another rule accepts the tensor: rules for different values of a choice may share
  /// one.
  void refuse_unexpected(const OperatorRules& rules, std::string_view word) const {
    if (unexpected_.view == nullptr) return;
    for (std::size_t i = 0; i < count_; ++i) {
      if (given_[i].view == unexpected_.view) return;
    }
    fail_unexpected(rules, unexpected_, word);
  }

  static constexpr std::size_t kMost = 40;
  std::array<GivenTensor, kMost> given_;
  std::size_t count_ = 0;
  GivenTensor unexpected_{};  // the last tensor that was passed without a rule for this call
};

/// Throws Error if a call breaks any rule except those about the memory of its outputs.
template <typename F, typename B, typename Call>
void check_call(const Operator<F, B>& op, Device device, const Call& call) {
  for (std::size_t i = 0; i < op.choices.size(); ++i) {
    check_choice(op.rules.choices[i], op.choices[i].word(call));
  }
  check_tensors(op.rules, GivenTensors(op, call), device);
  if constexpr (std::is_same_v<Call, F>) {
    if (op.check_more != nullptr) op.check_more(call);
  } else {
    if (op.check_backward != nullptr) op.check_backward(call);
  }
}

/// Runs a call that passed its checks.
template <typename F, typename B, typename Call>
void run_checked(const Operator<F, B>& op, const Context& context, const Call& call) {
  const cuda::CurrentDevice current(context.device);
  run_chosen(op.list(context.device, call), context, call);
}

template <typename F, typename B, typename Call>
Candidates explain_checked(const Operator<F, B>& op, const Context& context, const Call& call) {
  const cuda::CurrentDevice current(context.device);
  return candidates(op.list(context.device, call), context, call);
}

template <typename F, typename B, typename Call>
void run(const Operator<F, B>& op, const Context& context, const Call& call) {
  check_call(op, context.device, call);
  check_memory(GivenTensors(op, call));
  run_checked(op, context, call);
}

template <typename F, typename B, typename Call>
Candidates explain(const Operator<F, B>& op, const Context& context, const Call& call) {
  check_call(op, context.device, call);
  return explain_checked(op, context, call);
}

}  // namespace fusewise

#pragma once

// An operator: its rules, where its tensors lie in the structs of forward and backward, and who
// computes it. Every public function of an operator is one of the three at the end.

#include "common/backends.h"
#include "common/description.h"

namespace fusewise {

/// A tensor of a call.
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
  Member<Backward> backward = nullptr;  ///< null where backward does not read it
  Member<Backward> gradient = nullptr;  ///< null where there is none
};

/// The rules of a list of tensors, as OperatorRules refers to them.
template <typename F, typename B, std::size_t kCount>
constexpr std::array<const TensorRule*, kCount> rules_of(
    const std::array<OperatorTensor<F, B>, kCount>& tensors) {
  std::array<const TensorRule*, kCount> rules;
  for (std::size_t i = 0; i < kCount; ++i) rules[i] = &tensors[i];
  return rules;
}

/// A word among the arguments: how it gets into the structs.
template <typename Forward, typename Backward>
struct OperatorChoice {
  void (*set_forward)(Forward&, std::string_view);
  void (*set_backward)(Backward&, std::string_view);
};

template <typename Forward, typename Backward>
struct OperatorFlag {
  bool& (*forward)(Forward&);
  bool& (*backward)(Backward&);
};

template <typename ForwardCall, typename BackwardCall>
struct Operator {
  using Forward = ForwardCall;
  using Backward = BackwardCall;

  OperatorRules rules;
  std::span<const OperatorTensor<Forward, Backward>> tensors;
  std::span<const OperatorChoice<Forward, Backward>> choices = {};  ///< in the rules' order
  std::span<const OperatorFlag<Forward, Backward>> flags = {};      ///< in the rules' order
  Implementations<Forward> (*forward_on_cpu)();
  Implementations<Forward> (*forward_on_cuda)();
  Implementations<Backward> (*backward_on_cpu)();
  Implementations<Backward> (*backward_on_cuda)();

  Implementations<Forward> list(Device device, const Forward&) const {
    return device.type == DeviceType::cpu ? forward_on_cpu() : forward_on_cuda();
  }
  Implementations<Backward> list(Device device, const Backward&) const {
    return device.type == DeviceType::cpu ? backward_on_cpu() : backward_on_cuda();
  }
};

inline bool is_input(const TensorRule& rule) {
  return rule.role == Role::input || rule.role == Role::optional_input;
}
inline bool is_saved(const TensorRule& rule) {
  return rule.role == Role::saved || rule.role == Role::optional_saved;
}

/// The tensors of a call with their rules, in a fixed room.
class GivenTensors {
 public:
  enum class Which { all, inputs };

  template <typename F, typename B>
  GivenTensors(const Operator<F, B>& op, const F& call, Which which = Which::all) {
    for (const auto& t : op.tensors) {
      if (which == Which::inputs && !is_input(t)) continue;
      const bool written = !is_input(t);
      add(t, t.forward(const_cast<F&>(call)), false, written,
          t.role == Role::input || (t.role == Role::output && *t.with == 0));
    }
  }
  template <typename F, typename B>
  GivenTensors(const Operator<F, B>& op, const B& call, Which which = Which::all) {
    B& tensors = const_cast<B&>(call);
    for (const auto& t : op.tensors) {
      if (t.backward == nullptr || (which == Which::inputs && !is_input(t))) continue;
      add(t, t.backward(tensors), false, false, t.role == Role::input || t.role == Role::saved);
    }
    if (which == Which::inputs) return;
    for (const auto& t : op.tensors) {
      if (t.gradient == nullptr) continue;
      const bool comes_in = t.role == Role::output;
      add(t, t.gradient(tensors), true, !comes_in, comes_in && *t.with == 0);
    }
  }
  operator std::span<const GivenTensor>() const { return {given_.data(), count_}; }

 private:
  void add(const TensorRule& rule, const TensorView& view, bool gradient, bool written,
           bool required) {
    check(count_ < kMost, rule.name, ": a call has more tensors than there is room for");
    given_[count_++] = {&rule, &view, gradient, written, required};
  }

  static constexpr std::size_t kMost = 40;
  std::array<GivenTensor, kMost> given_;
  std::size_t count_ = 0;
};

/// Runs a call that passed its checks.
template <typename F, typename B, typename Call>
void run_checked(const Operator<F, B>& op, const Context& context, const Call& call) {
  const cuda::CurrentDevice current(context.device);
  run_chosen(op.list(context.device, call), context, call);
}

template <typename F, typename B, typename Call>
void run(const Operator<F, B>& op, const Context& context, const Call& call) {
  const GivenTensors given(op, call);
  check_tensors(op.rules, given, context.device);
  check_memory(given);
  run_checked(op, context, call);
}

template <typename F, typename B, typename Call>
Candidates explain(const Operator<F, B>& op, const Context& context, const Call& call) {
  check_tensors(op.rules, GivenTensors(op, call), context.device);
  const cuda::CurrentDevice current(context.device);
  return candidates(op.list(context.device, call), context, call);
}

}  // namespace fusewise

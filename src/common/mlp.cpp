// The stack of linear layers: in order for forward, in reverse for backward.

#include "fusewise/mlp.h"

#include <algorithm>

#include "common/check.h"
#include "common/linear_act.h"
#include "common/overlap.h"
#include "common/scratch.h"

namespace fusewise {
namespace {

/// A layer's call of linear_act.
template <typename Call>
struct Step {
  std::size_t layer;
  Call call;
};

template <typename Call>
void check_stack(const Call& call) {
  check(!call.layers.empty(), "layers: expected at least one");
  const ChoiceRule& rule = kLinearAct.rules.choices[0];
  check_choice({"activation", rule.values}, name_of(call.activation));
  check_choice({"final_activation", rule.values}, name_of(call.final_activation));
}

template <typename LayerCall, typename Call>
LayerCall layer_call(const Call& call, std::size_t layer) {
  LayerCall made;
  made.w = call.layers[layer].w;
  made.activation = layer + 1 == call.layers.size() ? call.final_activation : call.activation;
  made.math = call.math;
  made.implementation = call.implementation;
  return made;
}

template <typename Call>
void check_each(const Context& context, const std::vector<Step<Call>>& steps) {
  for (const Step<Call>& step : steps) {
    in_layer(step.layer, [&] { check_call(kLinearAct, context.device, step.call); });
  }
}

template <typename Call>
void run_each(const Context& context, const std::vector<Step<Call>>& steps) {
  for (const Step<Call>& step : steps) {
    in_layer(step.layer, [&] { run_checked(kLinearAct, context, step.call); });
  }
}

template <typename Call>
std::vector<Candidates> explain_each(const Context& context, const std::vector<Step<Call>>& steps,
                                     std::size_t layers) {
  std::vector<Candidates> found(layers);
  for (const Step<Call>& step : steps) {
    found[step.layer] =
        in_layer(step.layer, [&] { return explain_checked(kLinearAct, context, step.call); });
  }
  return found;
}

/// The steps of a checked call, from the first layer up.
class ForwardSteps {
 public:
  ForwardSteps(const Context& context, const MlpForward& call) {
    check_stack(call);
    TensorView x = call.x;
    steps_.reserve(call.layers.size());
    for (std::size_t i = 0; i < call.layers.size(); ++i) {
      const MlpLayer& layer = call.layers[i];
      steps_.push_back({i, layer_call<LinearActForward>(call, i)});
      LinearActForward& step = steps_.back().call;
      step.x = x;
      step.b = layer.b;
      step.y = layer.y;
      step.kept = layer.kept;
      x = layer.y;
    }
    check_each(context, steps_);
  }
  const auto& get() const { return steps_; }

 private:
  std::vector<Step<LinearActForward>> steps_;
};

/// The layers that have work to do: from `first` up. No layer below it wants a gradient.
struct Reach {
  std::size_t first;
  std::int64_t even = 0, odd = 0;  // bytes of the largest dx of layers with even and odd numbers

  explicit Reach(const MlpBackward& call) : first(call.dx.defined() ? 0 : call.layers.size()) {
    for (std::size_t i = 0; i < call.layers.size(); ++i) {
      const MlpLayer& layer = call.layers[i];
      if (layer.dw.defined() || layer.db.defined()) first = std::min(first, i);
      if (i + 1 == call.layers.size()) break;
      check(layer.y.rank == 2, "layer ", i, ": y: expected 2 dimensions [M, K], got ", layer.y);
      if (i < first) continue;
      std::int64_t& largest = i % 2 == 0 ? odd : even;  // the layer above computes its gradient
      largest = std::max(largest, layer.y.numel() * size_of(layer.y.dtype));
    }
  }
};

/// The steps of a checked call, from the last layer down. The gradients between layers alternate
/// between two buffers.
class BackwardSteps {
 public:
  BackwardSteps(const Context& context, const MlpBackward& call)
      : reach_(call), even_(context, reach_.even), odd_(context, reach_.odd) {
    check_stack(call);
    TensorView dy = call.dy;
    steps_.reserve(call.layers.size());
    for (std::size_t i = call.layers.size(); i-- > reach_.first;) {
      const MlpLayer& layer = call.layers[i];
      const bool last = i + 1 == call.layers.size();
      steps_.push_back({i, layer_call<LinearActBackward>(call, i)});
      LinearActBackward& step = steps_.back().call;
      step.dy = dy;
      step.overwrite_dy = !last;
      step.x = i == 0 ? call.x : call.layers[i - 1].y;
      if (step.activation != Activation::identity) {
        step.kept = is_kept(step.activation, last) ? layer.kept : layer.y;
      }
      step.dw = layer.dw;
      step.db = layer.db;
      if (i == 0) {
        step.dx = call.dx;
      } else if (i > reach_.first) {
        const TensorView& below = call.layers[i - 1].y;
        step.dx = TensorView((i % 2 == 0 ? even_ : odd_).data(), below.dtype, below.device,
                             {below.sizes[0], below.sizes[1]});
      }
      dy = step.dx;
    }
    check_each(context, steps_);
  }
  const auto& get() const { return steps_; }

 private:
  Reach reach_;
  Scratch<char> even_, odd_;
  std::vector<Step<LinearActBackward>> steps_;
};

/// The y of non-adjacent layers may share memory. No other outputs may overlap.
void check_memory(const MlpForward& call) {
  const int layers = static_cast<int>(call.layers.size());
  std::vector<Argument> inputs{{"x", call.x}}, outputs, kept;
  for (int i = 0; i < layers; ++i) {
    const MlpLayer& layer = call.layers[i];
    inputs.push_back({"w", layer.w, i});
    inputs.push_back({"b", layer.b, i});
    outputs.push_back({"y", layer.y, i});
    kept.push_back({"kept", layer.kept, i});
  }
  check_outputs(kept, inputs);
  check_outputs(kept, outputs);
  const std::span<const Argument> y = outputs;
  for (int i = 0; i < layers; ++i) {
    check_outputs(y.subspan(i, 1), inputs);
    if (i > 0) check_outputs(y.subspan(i, 1), y.subspan(i - 1, 1));
  }
}

void check_memory(const MlpBackward& call) {
  std::vector<Argument> inputs{{"dy", call.dy}, {"x", call.x}}, outputs{{"dx", call.dx}};
  for (int i = 0; i < static_cast<int>(call.layers.size()); ++i) {
    const MlpLayer& layer = call.layers[i];
    inputs.push_back({"w", layer.w, i});
    inputs.push_back({"y", layer.y, i});
    inputs.push_back({"kept", layer.kept, i});
    outputs.push_back({"dw", layer.dw, i});
    outputs.push_back({"db", layer.db, i});
  }
  check_outputs(outputs, inputs);
}

template <typename Steps, typename Call>
void run(const Context& context, const Call& call) {
  const Steps steps(context, call);
  check_memory(call);
  // If the forced implementation declines any layer, throw before anything is written.
  if (!call.implementation.empty()) explain_each(context, steps.get(), call.layers.size());
  run_each(context, steps.get());
}

}  // namespace

void mlp(const Context& context, const MlpForward& call) { run<ForwardSteps>(context, call); }
void mlp(const Context& context, const MlpBackward& call) { run<BackwardSteps>(context, call); }

std::vector<Candidates> explain(const Context& context, const MlpForward& call) {
  return explain_each(context, ForwardSteps(context, call).get(), call.layers.size());
}

std::vector<Candidates> explain(const Context& context, const MlpBackward& call) {
  return explain_each(context, BackwardSteps(context, call).get(), call.layers.size());
}

}  // namespace fusewise

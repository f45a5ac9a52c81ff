// The stack of linear maps: one after the other forward, and back again.

#include "fusewise/mlp.h"

#include <algorithm>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/linear_act.h"
#include "common/overlap.h"
#include "common/scratch.h"

namespace fusewise {
namespace {

template <typename Call>
Activation activation_of(const Call& call, std::size_t layer) {
  return layer + 1 == call.layers.size() ? call.final_activation : call.activation;
}

/// The message of a layer's error, with the layer's number in front.
template <typename Body>
void in_layer(std::size_t layer, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    fail("layer ", layer, ": ", error.what());
  }
}

std::vector<LinearActForward> steps_of(const MlpForward& call) {
  std::vector<LinearActForward> steps;
  TensorView x = call.x;
  for (std::size_t i = 0; i < call.layers.size(); ++i) {
    const MlpLayer& layer = call.layers[i];
    LinearActForward& step = steps.emplace_back();
    step.x = x;
    step.w = layer.w;
    step.b = layer.b;
    step.activation = activation_of(call, i);
    step.math = call.math;
    step.y = layer.y;
    step.kept = layer.kept;
    x = layer.y;
  }
  return steps;
}

/// Which layers have work to do: from `first` up. Nothing below it wants a gradient.
struct Reach {
  std::size_t first;
  std::int64_t widest = 0;  // elements of the largest gradient between two of them

  explicit Reach(const MlpBackward& call) : first(call.dx.defined() ? 0 : call.layers.size()) {
    for (std::size_t i = 0; i < call.layers.size(); ++i) {
      const MlpLayer& layer = call.layers[i];
      if (layer.dw.defined() || layer.db.defined()) first = std::min(first, i);
      if (i >= first && i + 1 < call.layers.size()) widest = std::max(widest, layer.y.numel());
    }
  }
};

/// From the last layer down. The gradients between them alternate between two buffers: dz may take
/// the place of dy.
std::vector<LinearActBackward> steps_of(const MlpBackward& call, const Reach& reach, void* even,
                                        void* odd) {
  std::vector<LinearActBackward> steps;
  TensorView dy = call.dy;
  for (std::size_t i = call.layers.size(); i-- > reach.first;) {
    const MlpLayer& layer = call.layers[i];
    const bool last = i + 1 == call.layers.size();
    LinearActBackward& step = steps.emplace_back();
    step.dy = dy;
    step.x = i == 0 ? call.x : call.layers[i - 1].y;
    step.w = layer.w;
    step.activation = activation_of(call, i);
    const bool told_by_y = !last && step.activation == Activation::relu;
    step.kept = !layer.kept.defined() && told_by_y ? layer.y : layer.kept;
    step.math = call.math;
    step.dw = layer.dw;
    step.db = layer.db;
    if (!last && step.activation != Activation::identity) step.dz = dy;
    if (i == 0) {
      step.dx = call.dx;
    } else if (i > reach.first) {
      const TensorView& below = call.layers[i - 1].y;
      step.dx = TensorView(i % 2 == 0 ? even : odd, below.dtype, below.device,
                           {below.sizes[0], below.sizes[1]});
    }
    dy = step.dx;
  }
  return steps;
}

/// A stack's tensors by name, each of a layer with the layer's number in front.
class Arguments {
 public:
  explicit Arguments(std::size_t layers) { names_.reserve(kMostOfALayer * layers); }

  void add(const char* name, const TensorView& view) { found_.push_back({name, view}); }
  void add(std::size_t layer, const char* name, const TensorView& view) {
    if (!view.defined()) return;
    names_.push_back("layer " + std::to_string(layer) + ": " + name);
    add(names_.back().c_str(), view);
  }
  operator std::span<const Argument>() const { return found_; }

 private:
  static constexpr std::size_t kMostOfALayer = 3;
  std::vector<std::string> names_;  // never moved, because arguments point into it
  std::vector<Argument> found_;
};

/// Layers that are not neighbours may have their y in the same memory; all else is apart.
void check_memory(const MlpForward& call) {
  const std::size_t layers = call.layers.size();
  Arguments inputs(layers), outputs(layers), kept(layers);
  inputs.add("x", call.x);
  for (std::size_t i = 0; i < layers; ++i) {
    inputs.add(i, "w", call.layers[i].w);
    inputs.add(i, "b", call.layers[i].b);
    outputs.add(i, "y", call.layers[i].y);
    kept.add(i, "kept", call.layers[i].kept);
  }
  check_outputs(kept, inputs);
  check_outputs(kept, outputs);
  const std::span<const Argument> y = outputs;
  for (std::size_t i = 0; i < layers; ++i) {
    check_outputs(y.subspan(i, 1), inputs);
    if (i > 0) check_outputs(y.subspan(i, 1), y.subspan(i - 1, 1));
  }
}

void check_memory(const MlpBackward& call) {
  const std::size_t layers = call.layers.size();
  Arguments inputs(layers), outputs(layers);
  inputs.add("dy", call.dy);
  inputs.add("x", call.x);
  outputs.add("dx", call.dx);
  for (std::size_t i = 0; i < layers; ++i) {
    inputs.add(i, "w", call.layers[i].w);
    inputs.add(i, "y", call.layers[i].y);
    inputs.add(i, "kept", call.layers[i].kept);
    outputs.add(i, "dw", call.layers[i].dw);
    outputs.add(i, "db", call.layers[i].db);
  }
  check_outputs(outputs, inputs);
}

}  // namespace

void mlp(const Context& context, const MlpForward& call) {
  check(!call.layers.empty(), "layers: expected at least one");
  const std::vector<LinearActForward> steps = steps_of(call);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    in_layer(i, [&] { check_call(context, steps[i]); });
  }
  check_memory(call);
  for (const LinearActForward& step : steps) linear_act(context, step);
}

void mlp(const Context& context, const MlpBackward& call) {
  check(!call.layers.empty(), "layers: expected at least one");
  for (std::size_t i = 0; i < call.layers.size(); ++i) {
    check(call.layers[i].y.rank == 2, "layer ", i, ": y: expected 2 dimensions [M, K], got ",
          call.layers[i].y);
  }
  const Reach reach(call);
  const std::int64_t bytes = reach.widest * size_of(call.dy.dtype);
  const Scratch<char> even(context, bytes), odd(context, bytes);
  const std::vector<LinearActBackward> steps = steps_of(call, reach, even.data(), odd.data());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    in_layer(call.layers.size() - 1 - i, [&] { check_call(context, steps[i]); });
  }
  check_memory(call);
  for (const LinearActBackward& step : steps) linear_act(context, step);
}

}  // namespace fusewise

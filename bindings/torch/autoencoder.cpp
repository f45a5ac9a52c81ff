// The autoencoder for torch: allocation and the call; the core does the checks.
// Compiled once for each device: FUSEWISE_DEVICE is CPU or CUDA.

#include "fusewise/autoencoder.h"

#include <torch/csrc/stable/library.h>

#include "call.h"
#include "common/check.h"
#include "text.h"

namespace fusewise::binding {
namespace {

constexpr std::size_t kWeights = std::size(kAutoencoderWeights);

/// The weights in the order of kAutoencoderWeights, dense; keeps copies alive.
struct Weights {
  std::vector<Tensor> tensors;
  AutoencoderWeights views;

  explicit Weights(const std::vector<Tensor>& given) {
    check(given.size() == kWeights, "weights: expected ", kWeights, ", got ", given.size());
    tensors.reserve(kWeights);
    for (std::size_t i = 0; i < kWeights; ++i) {
      tensors.push_back(dense(given[i]));
      views.*kAutoencoderWeights[i].weight = view_of(kAutoencoderWeights[i].name, tensors.back());
    }
  }
};

enum class Output { reconstruction, latent, score };

Output output_from(const Text& name) {
  if (name == "reconstruction") return Output::reconstruction;
  if (name == "latent") return Output::latent;
  if (name == "score") return Output::score;
  fail("output: expected 'reconstruction', 'latent' or 'score', got '", name, "'");
}

DType score_dtype(DType x) { return x == DType::f64 ? DType::f64 : DType::f32; }

std::int64_t latent_of(const AutoencoderWeights& weights) {
  return weights.basis.rank > 0 ? weights.basis.sizes[0] : 0;
}

/// Uninitialised; what nobody checked yet gets a shape that the core will refuse.
Tensor new_output(Output output, const Tensor& x, const AutoencoderForward& call) {
  if (output == Output::reconstruction) return new_like(x);
  const std::int64_t rows = x.dim() > 0 ? x.size(0) : 0;
  if (output == Output::score) return new_dense(x, score_dtype(call.x.dtype), {rows});
  return new_dense(x, call.x.dtype, {rows, latent_of(call.weights)});
}

template <typename Call>
TensorView& place_of(Call& call, Output output) {
  if constexpr (std::is_same_v<Call, AutoencoderForward>) {
    if (output == Output::reconstruction) return call.y;
    return output == Output::latent ? call.latent : call.score;
  } else {
    if (output == Output::reconstruction) return call.dy;
    return output == Output::latent ? call.dlatent : call.dscore;
  }
}

/// What every call has; it refers to the arguments.
template <typename Call>
Call call_on(const Tensor& x, const Weights& weights, bool tf32, const Text& implementation) {
  Call call;
  call.x = view_of("x", x);
  call.weights = weights.views;
  call.tf32 = tf32;
  call.implementation = implementation;
  return call;
}

/// The result, and behind it the projection where that is to be saved.
std::vector<Tensor> forward(const Tensor& x, const std::vector<Tensor>& weights, const Text& output,
                            bool tf32, bool save, const Text& implementation) {
  const CallContext context(x);
  const Weights dense_weights(weights);
  const Output which = output_from(output);
  auto call = call_on<AutoencoderForward>(x, dense_weights, tf32, implementation);
  std::vector<Tensor> results;
  results.reserve(2);
  results.push_back(new_output(which, x, call));
  place_of(call, which) = view_of("result", results.back());
  if (save) {
    const std::int64_t rows = x.dim() > 0 ? x.size(0) : 0;
    results.push_back(new_dense(x, score_dtype(call.x.dtype), {rows, latent_of(call.weights)}));
    call.projection = view_of("projection", results.back());
  }
  autoencoder(context.get(), call);
  return results;
}

/// `needed`: bit 0 stands for x, bit 1 + i for weight i. The gradients of these, and no others.
std::vector<Tensor> backward(const Tensor& gradient, const Tensor& x,
                             const std::vector<Tensor>& weights, const Tensor& projection,
                             const Text& output, bool tf32, std::int64_t needed,
                             const Text& implementation) {
  const CallContext context(x);
  const Weights dense_weights(weights);
  const Output which = output_from(output);
  auto call = call_on<AutoencoderBackward>(x, dense_weights, tf32, implementation);
  const char* names[] = {"dy", "dlatent", "dscore"};
  place_of(call, which) = view_of(names[static_cast<int>(which)], gradient);
  const Tensor projection_dense = dense(projection);  // hooks may bring back any strides
  call.projection = view_of("projection", projection_dense);

  std::vector<Tensor> results;
  results.reserve(1 + kWeights);
  if ((needed & 1) != 0) {
    results.push_back(new_like(x));
    call.dx = view_of("dx", results.back());
  }
  for (std::size_t i = 0; i < kWeights; ++i) {
    if ((needed >> (1 + i) & 1) == 0) continue;
    const auto& [weight, name, state, shape] = kAutoencoderWeights[i];
    const TensorView& like = call.weights.*weight;
    results.push_back(
        new_dense(x, like.dtype, {like.sizes.begin(), like.sizes.begin() + like.rank}));
    call.gradients.*weight = view_of(name, results.back());
  }
  autoencoder(context.get(), call);
  return results;
}

/// Answers from shapes and pointers alone: results are taken to lie as x does.
std::string explain_call(const Tensor& x, const std::vector<Tensor>& weights, const Text& output,
                         bool tf32, bool backward, const Text& implementation) {
  const CallContext context(x);
  const Weights dense_weights(weights);
  const Output which = output_from(output);
  auto forward = call_on<AutoencoderForward>(x, dense_weights, tf32, implementation);
  const Tensor result = new_output(which, x, forward);
  if (!backward) {
    place_of(forward, which) = view_of("result", result);
    return to_text(explain(context.get(), forward));
  }
  auto call = call_on<AutoencoderBackward>(x, dense_weights, tf32, implementation);
  call.dx = call.x;
  call.gradients = call.weights;
  place_of(call, which) = view_of("result", result);
  return to_text(explain(context.get(), call));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusewise, FUSEWISE_DEVICE, m) {
  m.impl("_autoencoder", TORCH_BOX(&forward));
  m.impl("_autoencoder_backward", TORCH_BOX(&backward));
  m.impl("_autoencoder_explain", TORCH_BOX(&explain_call));
}

}  // namespace fusewise::binding

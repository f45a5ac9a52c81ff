// Description and public functions of the autoencoder.

#include "common/operators.h"

#include <utility>

#include "common/check.h"
#include "fusewise/safetensors.h"

namespace fusewise {
namespace {

using F = AutoencoderForward;
using B = AutoencoderBackward;

constexpr std::size_t kWeights = std::size(kAutoencoderWeights);

template <std::size_t kWeight>
constexpr OperatorTensor<F, B> weight_tensor() {
  constexpr const AutoencoderWeightName& w = kAutoencoderWeights[kWeight];
  return {{w.name, Role::input, w.shape, Type::weight, Layout::dense},
          at<&F::weights, w.weight>,
          at<&B::weights, w.weight>,
          at<&B::gradients, w.weight>};
}

template <std::size_t... kIndices>
constexpr auto make_tensors(std::index_sequence<kIndices...>) {
  return std::array{
      OperatorTensor<F, B>{{"x", Role::input, "N FM | N F M", Type::data, Layout::any},
                           at<&F::x>,
                           at<&B::x>,
                           at<&B::dx>},
      weight_tensor<kIndices>()...,
      OperatorTensor<F, B>{{"y", Role::output, "x", Type::data, Layout::any, "reconstruction"},
                           at<&F::y>,
                           nullptr,
                           at<&B::dy>},
      OperatorTensor<F, B>{{"latent", Role::output, "N L", Type::data, Layout::any, "latent"},
                           at<&F::latent>,
                           nullptr,
                           at<&B::dlatent>},
      OperatorTensor<F, B>{{"score", Role::output, "N", Type::statistics, Layout::any, "score"},
                           at<&F::score>,
                           nullptr,
                           at<&B::dscore>},
      OperatorTensor<F, B>{
          {"projection", Role::optional_saved, "N L", Type::statistics, Layout::dense},
          at<&F::projection>,
          at<&B::projection>}};
}

constexpr auto kTensors = make_tensors(std::make_index_sequence<kWeights>{});
constexpr auto kRules = rules_of(kTensors);
constexpr const char* kOutputs[] = {"reconstruction", "latent", "score"};
constexpr ChoiceRule kChoices[] = {{"output", kOutputs}};
constexpr const char* kFlagNames[] = {"tf32"};
constexpr OperatorFlag<F, B> kFlags[] = {{at<&F::tf32>, at<&B::tf32>}};
constexpr const char* kOrder[] = {"encoder_weight", "basis"};

/// The weights have passed the checks.
AutoencoderSizes sizes_of(const AutoencoderWeights& weights) {
  const TensorView &encoder = weights.encoder_weight, &basis = weights.basis;
  return {encoder.sizes[1], basis.sizes[1] / encoder.sizes[0], basis.sizes[0], encoder.sizes[0]};
}

}  // namespace

constexpr Operator<F, B> kAutoencoder{
    .rules = {.name = "autoencoder",
              .tensors = kRules,
              .choices = kChoices,
              .flags = kFlagNames,
              .positive = "MFLS",
              .order = kOrder},
    .tensors = kTensors,
    .choices = {},
    .flags = kFlags,
    .forward_on_cpu = cpu::autoencoder_forward,
    .forward_on_cuda = cuda::autoencoder_forward,
    .backward_on_cpu = cpu::autoencoder_backward,
    .backward_on_cuda = cuda::autoencoder_backward,
};

AutoencoderSizes autoencoder_sizes(const AutoencoderWeights& weights) {
  const auto all = std::span(kTensors).subspan<1, kWeights>();
  std::array<GivenTensor, kWeights> given;
  for (std::size_t i = 0; i < kWeights; ++i) {
    given[i] = {&all[i], &(weights.*kAutoencoderWeights[i].weight), false, false, true};
  }
  check_tensors(kAutoencoder.rules, given, weights.encoder_weight.device);
  return sizes_of(weights);
}

AutoencoderWeights autoencoder_weights(const Safetensors& file) {
  AutoencoderWeights weights;
  for (const auto& [weight, name, state, shape] : kAutoencoderWeights)
    weights.*weight = file.at(state);
  try {
    autoencoder_sizes(weights);
  } catch (const Error& error) {  // it has our name; users of a file know the state dict's
    const std::string message = error.what();
    const std::string argument = message.substr(0, message.find(':'));
    for (const auto& [weight, name, state, shape] : kAutoencoderWeights) {
      if (argument == name) fail("'", state, "'", message.substr(argument.size()));
    }
    throw;
  }
  return weights;
}

void autoencoder(const Context& context, const AutoencoderForward& call) {
  run(kAutoencoder, context, call);
}
void autoencoder(const Context& context, const AutoencoderBackward& call) {
  run(kAutoencoder, context, call);
}
Candidates explain(const Context& context, const AutoencoderForward& call) {
  return explain(kAutoencoder, context, call);
}
Candidates explain(const Context& context, const AutoencoderBackward& call) {
  return explain(kAutoencoder, context, call);
}

}  // namespace fusewise

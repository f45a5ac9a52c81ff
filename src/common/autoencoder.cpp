// The autoencoder's front door: every check, then the choice of an implementation.

#include "fusewise/autoencoder.h"

#include <array>

#include "common/backends.h"
#include "common/check.h"
#include "common/overlap.h"
#include "fusewise/safetensors.h"

namespace fusewise {
namespace {

void check_present(const char* name, const TensorView& t, Device device) {
  check(t.defined(), name, ": is missing");
  check_device(name, t, device);
}

void check_dtype(const char* name, const TensorView& t, DType dtype, const char* as) {
  check(t.dtype == dtype, name, ": expected dtype ", dtype, as, ", got ", t.dtype);
}

/// The shape that each weight must have.
TensorView expected_shape(AutoencoderWeight weight, const AutoencoderSizes& size) {
  using W = AutoencoderWeights;
  const auto is = [&](AutoencoderWeight other) { return weight == other; };
  const auto shape = [](std::initializer_list<std::int64_t> sizes) {
    return TensorView(nullptr, DType::f32, Device{}, sizes);
  };
  if (is(&W::norm_weight) || is(&W::norm_bias) || is(&W::decoder_bias)) return shape({size.n_mels});
  if (is(&W::encoder_weight)) return shape({size.slice_latent, size.n_mels});
  if (is(&W::encoder_bias)) return shape({size.slice_latent});
  if (is(&W::basis)) return shape({size.latent, size.frames * size.slice_latent});
  if (is(&W::mid_weight)) return shape({size.latent, size.latent});
  if (is(&W::decoder_weight)) return shape({size.n_mels, size.slice_latent});
  return shape({size.latent});
}

void check_shape(const char* name, const TensorView& t, const TensorView& expected) {
  check(t.rank == expected.rank && t.sizes == expected.sizes, name, ": expected ", expected,
        ", got ", t);
}

/// From the two matrices that show them all.
AutoencoderSizes read_sizes(const AutoencoderWeights& weights) {
  const TensorView &encoder = weights.encoder_weight, &basis = weights.basis;
  check(encoder.defined(), "encoder_weight: is missing");
  check(encoder.rank == 2 && encoder.sizes[0] >= 1 && encoder.sizes[1] >= 1,
        "encoder_weight: expected [S, M] with S and M >= 1, got ", encoder);
  check(basis.defined(), "basis: is missing");
  const std::int64_t slice = encoder.sizes[0];
  check(
      basis.rank == 2 && basis.sizes[0] >= 1 && basis.sizes[1] >= 1 && basis.sizes[1] % slice == 0,
      "basis: expected [L, F * ", slice, "] with L and F >= 1, got ", basis);
  return {encoder.sizes[1], basis.sizes[1] / slice, basis.sizes[0], slice};
}

AutoencoderSizes check_weights(const AutoencoderWeights& weights, Device device) {
  const AutoencoderSizes size = read_sizes(weights);
  for (const auto& [weight, name, state] : kAutoencoderWeights) {
    const TensorView& t = weights.*weight;
    check_present(name, t, device);
    check_shape(name, t, expected_shape(weight, size));
    check_dtype(name, t, weights.encoder_weight.dtype, " as the other weights");
    check_dense(name, t);
  }
  return size;
}

void check_rows(const char* name, const TensorView& t, const TensorView& like, Device device) {
  check_present(name, t, device);
  check(t.rank == like.rank && t.sizes == like.sizes, name, ": expected x's shape ", like, ", got ",
        t);
  check_dtype(name, t, like.dtype, " as x");
}

void check_latent(const char* name, const TensorView& t, const TensorView& x, std::int64_t latent,
                  Device device) {
  check_present(name, t, device);
  check(t.rank == 2 && t.sizes[0] == x.sizes[0] && t.sizes[1] == latent, name, ": expected [",
        x.sizes[0], ", ", latent, "], got ", t);
  check_dtype(name, t, x.dtype, " as x");
}

void check_score(const char* name, const TensorView& t, const TensorView& x, Device device) {
  check_present(name, t, device);
  check(t.rank == 1 && t.sizes[0] == x.sizes[0], name, ": expected [", x.sizes[0], "], got ", t);
  check_dtype(name, t, x.dtype == DType::f64 ? DType::f64 : DType::f32, "");
}

void check_projection(const TensorView& t, const TensorView& x, std::int64_t latent,
                      Device device) {
  if (!t.defined()) return;
  check_present("projection", t, device);
  check(t.rank == 2 && t.sizes[0] == x.sizes[0] && t.sizes[1] == latent, "projection: expected [",
        x.sizes[0], ", ", latent, "], got ", t);
  check_dtype("projection", t, x.dtype == DType::f64 ? DType::f64 : DType::f32, "");
  check_dense("projection", t);
}

AutoencoderSizes check_inputs(const TensorView& x, const AutoencoderWeights& weights,
                              Device device) {
  check_present("x", x, device);
  check(x.dtype != DType::u8, "x: expected a floating dtype, got uint8");
  const AutoencoderSizes size = check_weights(weights, device);
  const std::int64_t frames = size.frames, mels = size.n_mels;
  check(x.rank == 2 || x.rank == 3, "x: expected [N, ", frames * mels, "] or [N, ", frames, ", ",
        mels, "], got ", x);
  if (x.rank == 2) {
    check(x.sizes[1] == frames * mels, "x: expected rows of ", frames, " x ", mels, " = ",
          frames * mels, " values, got ", x.sizes[1]);
  } else {
    check(x.sizes[1] == frames && x.sizes[2] == mels, "x: expected rows of ", frames, " frames of ",
          mels, " values, got ", x);
  }
  check(x.sizes[0] >= 0, "x: expected N >= 0, got ", x);
  const bool half = x.dtype == DType::f16 || x.dtype == DType::bf16;
  const DType dtype = weights.encoder_weight.dtype;
  check(dtype == x.dtype || (half && dtype == DType::f32), "encoder_weight: expected dtype ",
        x.dtype, " as x", half ? " or float32" : "", ", got ", dtype);
  return size;
}

/// One of the three and no other: the reconstruction, the latent, the score.
void check_outputs(const char* names, const TensorView& y, const TensorView& latent,
                   const TensorView& score) {
  const int given = y.defined() + latent.defined() + score.defined();
  check(given == 1, names, ": expected exactly one of them, got ", given);
}

constexpr std::size_t kWeights = std::size(kAutoencoderWeights);

/// The names of the weights' gradients, in the weights' order.
const std::array<std::string, kWeights>& gradient_names() {
  static const auto names = [] {
    std::array<std::string, kWeights> made;
    for (std::size_t i = 0; i < kWeights; ++i) {
      made[i] = std::string("d") + kAutoencoderWeights[i].name;
    }
    return made;
  }();
  return names;
}

void check_call(const Context& context, const AutoencoderForward& call) {
  const Device device = context.device;
  const AutoencoderSizes size = check_inputs(call.x, call.weights, device);
  check_outputs("y, latent, score", call.y, call.latent, call.score);
  if (call.y.defined()) check_rows("y", call.y, call.x, device);
  if (call.latent.defined()) check_latent("latent", call.latent, call.x, size.latent, device);
  if (call.score.defined()) check_score("score", call.score, call.x, device);
  check_projection(call.projection, call.x, size.latent, device);
}

void check_call(const Context& context, const AutoencoderBackward& call) {
  const Device device = context.device;
  const AutoencoderSizes size = check_inputs(call.x, call.weights, device);
  check_outputs("dy, dlatent, dscore", call.dy, call.dlatent, call.dscore);
  if (call.dy.defined()) check_rows("dy", call.dy, call.x, device);
  if (call.dlatent.defined()) check_latent("dlatent", call.dlatent, call.x, size.latent, device);
  if (call.dscore.defined()) check_score("dscore", call.dscore, call.x, device);
  check_projection(call.projection, call.x, size.latent, device);
  if (call.dx.defined()) check_rows("dx", call.dx, call.x, device);
  for (std::size_t i = 0; i < kWeights; ++i) {
    const AutoencoderWeight weight = kAutoencoderWeights[i].weight;
    const TensorView& t = call.gradients.*weight;
    if (!t.defined()) continue;
    const char* name = gradient_names()[i].c_str();
    check_present(name, t, device);
    check_shape(name, t, expected_shape(weight, size));
    check_dtype(name, t, call.weights.basis.dtype, " as the weights");
    check_dense(name, t);
  }
}

void check_memory(const AutoencoderForward& call) {
  const Argument outputs[] = {{"y", call.y},
                              {"latent", call.latent},
                              {"score", call.score},
                              {"projection", call.projection}};
  std::vector<Argument> inputs{{"x", call.x}};
  for (const auto& [weight, name, state] : kAutoencoderWeights) {
    inputs.push_back({name, call.weights.*weight});
  }
  check_outputs(outputs, inputs);
}

void check_memory(const AutoencoderBackward& call) {
  std::vector<Argument> outputs{{"dx", call.dx}};
  std::vector<Argument> inputs{{"dy", call.dy},
                               {"dlatent", call.dlatent},
                               {"dscore", call.dscore},
                               {"x", call.x},
                               {"projection", call.projection}};
  for (std::size_t i = 0; i < kWeights; ++i) {
    const auto& [weight, name, state] = kAutoencoderWeights[i];
    outputs.push_back({gradient_names()[i].c_str(), call.gradients.*weight});
    inputs.push_back({name, call.weights.*weight});
  }
  check_outputs(outputs, inputs);
}

}  // namespace

AutoencoderSizes autoencoder_sizes(const AutoencoderWeights& weights) {
  return check_weights(weights, weights.encoder_weight.device);
}

AutoencoderWeights autoencoder_weights(const Safetensors& file) {
  AutoencoderWeights weights;
  for (const auto& [weight, name, state] : kAutoencoderWeights) weights.*weight = file.at(state);
  try {
    autoencoder_sizes(weights);
  } catch (const Error& error) {  // says the name here; whoever has a file knows the other one
    const std::string message = error.what();
    const std::string argument = message.substr(0, message.find(':'));
    for (const auto& [weight, name, state] : kAutoencoderWeights) {
      if (argument == name) fail("'", state, "'", message.substr(argument.size()));
    }
    throw;
  }
  return weights;
}

void autoencoder(const Context& context, const AutoencoderForward& call) {
  check_call(context, call);
  check_memory(call);
  run_on_device(context, call, cpu::autoencoder_forward, cuda::autoencoder_forward);
}

void autoencoder(const Context& context, const AutoencoderBackward& call) {
  check_call(context, call);
  check_memory(call);
  run_on_device(context, call, cpu::autoencoder_backward, cuda::autoencoder_backward);
}

Candidates explain(const Context& context, const AutoencoderForward& call) {
  check_call(context, call);
  return explain_on_device(context, call, cpu::autoencoder_forward, cuda::autoencoder_forward);
}

Candidates explain(const Context& context, const AutoencoderBackward& call) {
  check_call(context, call);
  return explain_on_device(context, call, cpu::autoencoder_backward, cuda::autoencoder_backward);
}

}  // namespace fusewise

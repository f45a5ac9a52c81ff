#pragma once

// A call of the autoencoder on CUDA, described in words, as far as the choice of a kernel looks at
// it: sizes, types, alignments, which tensors there are, and the GPU's limits.

#include <sstream>
#include <stdexcept>
#include <string>

#include "cuda/autoencoder/arguments.cuh"
#include "cuda/device.h"

namespace fusewise::testing {

/// As the GPUs answer.
inline cuda::DeviceLimits limits_of_gpu(const std::string& name) {
  const std::int64_t l2 = std::int64_t{50} << 20;
  if (name == "H200") return {90, 90, 132, 233472, 232448, l2};
  if (name == "A100") return {80, 80, 108, 167936, 166912, l2};
  if (name == "L40S") return {89, 89, 142, 102400, 101376, l2};
  throw std::runtime_error("no GPU " + name);
}

/// Tensors of a call, each at a multiple of 256 bytes, or so many bytes behind one: "x+8". Missing
/// ones are null. "stride+2": rows of x are two elements further apart than they need to be.
class Words {
 public:
  explicit Words(const std::string& text) : text_(" " + text + " ") {}

  bool has(const std::string& word) const {
    return text_.find(" " + word + " ") != std::string::npos ||
           text_.find(" " + word + "+") != std::string::npos;
  }
  int behind(const std::string& word) const {
    const auto at = text_.find(" " + word + "+");
    return at == std::string::npos ? 0 : std::stoi(text_.substr(at + word.size() + 2));
  }
  void* address(const std::string& word) const {
    return reinterpret_cast<void*>(std::uintptr_t{4096} + behind(word));
  }
  void* optional(const std::string& word) const { return has(word) ? address(word) : nullptr; }

 private:
  std::string text_;
};

/// mels, frames, latent, slice latent; f32, tf32, bf16, f16, f16/f32 or f64; words.
template <typename Arguments>
Arguments make_call(const cuda::AutoencoderSizes& sizes, const std::string& kind,
                    const Words& words) {
  Arguments call;
  call.sizes = sizes;
  call.dtype = kind == "f64"                                  ? DType::f64
               : kind == "bf16"                               ? DType::bf16
               : kind[0] == 'f' && kind.substr(0, 3) == "f16" ? DType::f16
                                                              : DType::f32;
  call.parameter_dtype = kind == "f16/f32" ? DType::f32 : call.dtype;
  call.tf32 = kind == "tf32";
  call.x = words.address("x");
  call.x_stride = std::int64_t{sizes.frames} * sizes.n_mels + words.behind("stride");
  void* const weights = words.address("weights");
  call.parameters = {weights, weights, weights, weights, weights, weights,
                     weights, weights, weights, weights, weights};
  if constexpr (requires { call.out; }) {
    call.out = words.optional("out");
    call.z = words.optional("z");
    call.score = words.optional("score");
    call.projection = words.optional("projection");
  } else {
    call.d_out = words.optional("dy");
    call.d_z = words.optional("dz");
    call.d_score = words.optional("dscore");
    call.projection = words.optional("projection");
    call.dx = words.optional("dx");
    if (words.has("gradients")) call.gradients.encoder_weight = words.address("gradients");
    if (words.has("decoder_bias")) call.gradients.decoder_bias = words.address("decoder_bias");
  }
  return call;
}

}  // namespace fusewise::testing

#pragma once

#include <span>
#include <string_view>

namespace fusewise {

/// The pointwise functions after a linear map. Each operator lists those that it supports. All
/// propagate NaN.
enum class Activation {
  identity,
  relu,
  gelu,       ///< z Phi(z), exact, with the error function
  gelu_tanh,  ///< its approximation z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3)))
  silu,       ///< z / (1 + exp(-z))
  relu6,      ///< min(max(z, 0), 6)
  hardswish,  ///< z min(max(z + 3, 0), 6) / 6
};

/// The activations of linear_act and mlp.
inline constexpr Activation kActivations[] = {Activation::identity, Activation::relu,
                                              Activation::gelu, Activation::gelu_tanh,
                                              Activation::silu};

/// "identity", "relu", "gelu", "gelu_tanh", "silu", "relu6", "hardswish".
constexpr const char* name_of(Activation activation) {
  switch (activation) {
    case Activation::identity:
      return "identity";
    case Activation::relu:
      return "relu";
    case Activation::gelu:
      return "gelu";
    case Activation::gelu_tanh:
      return "gelu_tanh";
    case Activation::silu:
      return "silu";
    case Activation::relu6:
      return "relu6";
    case Activation::hardswish:
      return "hardswish";
  }
  return "unknown";
}

/// From a name such as "gelu_tanh". Throws Error that lists the names of `known`.
Activation activation_from(std::string_view name, std::span<const Activation> known = kActivations);

}  // namespace fusewise

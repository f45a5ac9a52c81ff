#include "fusewise/activation.h"

#include <vector>

#include "common/check.h"

namespace fusewise {

const char* name_of(Activation activation) {
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
    case Activation::hardswish:
      return "hardswish";
  }
  return "unknown";
}

Activation activation_from(std::string_view name, std::span<const Activation> known) {
  for (const Activation each : known) {
    if (name == name_of(each)) return each;
  }
  std::vector<const char*> names;
  for (const Activation each : known) names.push_back(name_of(each));
  fail("activation: expected ", quoted(names), ", got '", name, "'");
}

}  // namespace fusewise

#include "fusewise/activation.h"

#include <vector>

#include "common/check.h"

namespace fusewise {

Activation activation_from(std::string_view name, std::span<const Activation> known) {
  for (const Activation each : known) {
    if (name == name_of(each)) return each;
  }
  std::vector<const char*> names;
  for (const Activation each : known) names.push_back(name_of(each));
  fail("activation: expected ", quoted(names), ", got '", name, "'");
}

}  // namespace fusewise

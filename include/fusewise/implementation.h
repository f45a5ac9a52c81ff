#pragma once

#include <string>
#include <vector>

namespace fusewise {

/// One entry of an operator's ordered list of implementations, evaluated for one particular call.
struct Candidate {
  std::string name;
  /// Why it does not take this call, as a sentence. Empty if it would.
  std::string declined;
  /// Whether it takes the call when forced. It may decline only because another one is faster.
  bool able = false;
  /// Whether it is the one that runs: the first that does not decline, or the forced one.
  bool chosen = false;
};

using Candidates = std::vector<Candidate>;

}  // namespace fusewise

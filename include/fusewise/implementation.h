#pragma once

#include <string>
#include <vector>

namespace fusewise {

/// One entry of an operator's ordered list of implementations, seen from one particular call.
struct Candidate {
  std::string name;
  /// Why it does not take this call, as a sentence; empty where it would.
  std::string declined;
  /// Whether it takes the call when it is forced to; it may decline only because another is faster.
  bool able = false;
  /// Whether it is the one that runs: the first that does not decline, or the one that was forced.
  bool chosen = false;
};

using Candidates = std::vector<Candidate>;

}  // namespace fusewise

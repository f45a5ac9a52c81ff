#pragma once

// An operator's ordered list of implementations, and how one is chosen from it.

#include <span>
#include <string>
#include <string_view>

#include "common/check.h"
#include "fusewise/context.h"
#include "fusewise/implementation.h"

namespace fusewise {

/// `Call` is the operator's public argument struct. Calls that arrive here passed all checks.
template <typename Call>
struct Implementation {
  const char* name;
  /// Why this call is declined, as a sentence; empty where it is taken.
  std::string (*declines)(const Context&, const Call&);
  void (*run)(const Context&, const Call&);
};

template <typename Call>
using Implementations = std::span<const Implementation<Call>>;

/// Every entry with its reason, the chosen one marked. Throws where nothing can be chosen.
template <typename Call>
Candidates candidates(Implementations<Call> list, const Context& context, const Call& call) {
  Candidates result;
  bool chosen = false;
  bool known = call.implementation.empty();
  for (const Implementation<Call>& entry : list) {
    Candidate candidate{entry.name, entry.declines(context, call)};
    const bool wanted = call.implementation.empty() || call.implementation == candidate.name;
    known = known || call.implementation == candidate.name;
    candidate.chosen = !chosen && wanted && candidate.declined.empty();
    chosen = chosen || candidate.chosen;
    result.push_back(std::move(candidate));
  }
  if (chosen) return result;

  std::string message = "implementation: ";
  message += known ? "none takes this call" : "there is none named '";
  if (!known) message += std::string(call.implementation) + "'";
  for (const Candidate& candidate : result) {
    message += "; '" + candidate.name + "' ";
    message += candidate.declined.empty() ? "would take it" : "declines: " + candidate.declined;
  }
  throw Error(message);
}

/// Runs the first entry that takes the call, or the one that the call forces.
template <typename Call>
void run_chosen(Implementations<Call> list, const Context& context, const Call& call) {
  for (const Implementation<Call>& entry : list) {
    const bool wanted = call.implementation.empty() || call.implementation == entry.name;
    if (wanted && entry.declines(context, call).empty()) return entry.run(context, call);
  }
  candidates(list, context, call);  // throws, with every reason
}

}  // namespace fusewise

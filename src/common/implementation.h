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
  /// Why another one is faster, as a sentence; empty where none is. Null: it never is. Who forces
  /// an implementation gets it all the same.
  std::string (*yields)(const Context&, const Call&) = nullptr;
};

template <typename Call>
using Implementations = std::span<const Implementation<Call>>;

/// Why an entry does not take the call; empty where it would.
template <typename Call>
std::string reason(const Implementation<Call>& entry, const Context& context, const Call& call) {
  std::string declined = entry.declines(context, call);
  if (!declined.empty() || entry.yields == nullptr || !call.implementation.empty()) return declined;
  return entry.yields(context, call);
}

/// Every entry with its reason, the chosen one marked. Throws where nothing can be chosen.
template <typename Call>
Candidates candidates(Implementations<Call> list, const Context& context, const Call& call) {
  Candidates result;
  bool chosen = false;
  bool known = call.implementation.empty();
  for (const Implementation<Call>& entry : list) {
    Candidate candidate{entry.name, reason(entry, context, call)};
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
    if (wanted && reason(entry, context, call).empty()) return entry.run(context, call);
  }
  candidates(list, context, call);  // throws, with every reason
}

}  // namespace fusewise

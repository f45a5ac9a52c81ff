#pragma once

// An operator's ordered list of implementations, and how one is chosen from it.

#include <span>
#include <string>
#include <string_view>

#include "common/check.h"
#include "fusewise/context.h"
#include "fusewise/implementation.h"

namespace fusewise {

/// `Call` is the operator's public argument struct. Calls have passed all checks by now.
template <typename Call>
struct Implementation {
  const char* name;
  /// Why it cannot take this call, as a sentence. Empty if it can.
  std::string (*declines)(const Context&, const Call&);
  void (*run)(const Context&, const Call&);
  /// Why another one is faster, as a sentence. Empty if none is. Null: none ever is. A caller can
  /// still force this implementation.
  std::string (*yields)(const Context&, const Call&) = nullptr;
};

template <typename Call>
using Implementations = std::span<const Implementation<Call>>;

template <typename Call>
Candidate candidate(const Implementation<Call>& entry, const Context& context, const Call& call) {
  Candidate result{entry.name, entry.declines(context, call)};
  result.able = result.declined.empty();
  if (result.able && entry.yields != nullptr && call.implementation.empty()) {
    result.declined = entry.yields(context, call);
  }
  return result;
}

/// Every entry with its reason, the chosen one marked. Throws if nothing can be chosen.
template <typename Call>
Candidates candidates(Implementations<Call> list, const Context& context, const Call& call) {
  Candidates result;
  bool chosen = false;
  bool known = call.implementation.empty();
  for (const Implementation<Call>& entry : list) {
    Candidate& last = result.emplace_back(candidate(entry, context, call));
    const bool wanted = call.implementation.empty() || call.implementation == last.name;
    known = known || call.implementation == last.name;
    last.chosen = !chosen && wanted && last.declined.empty();
    chosen = chosen || last.chosen;
  }
  if (chosen) return result;

  std::string message = "implementation: ";
  const std::string forced = std::string("'").append(call.implementation).append("'");
  if (call.implementation.empty()) {
    message += "none can run this call";
  } else if (known) {
    message += forced + " cannot run this call";
  } else {
    message.append("there is none named ").append(forced);
  }
  for (const Candidate& each : result) {
    message += "; '" + each.name + "' ";
    message += each.declined.empty() ? "would take it" : "declines: " + each.declined;
  }
  throw Error(message);
}

/// Runs the first entry that takes the call, or the one that the call forces.
template <typename Call>
void run_chosen(Implementations<Call> list, const Context& context, const Call& call) {
  for (const Implementation<Call>& entry : list) {
    const bool wanted = call.implementation.empty() || call.implementation == entry.name;
    if (wanted && candidate(entry, context, call).declined.empty()) {
      return entry.run(context, call);
    }
  }
  candidates(list, context, call);  // throws, and lists every reason
}

}  // namespace fusewise

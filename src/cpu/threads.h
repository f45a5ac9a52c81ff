#pragma once

// Runs the CPU loops on the context's executor or on the library's own threads.

#include <type_traits>

#include "fusewise/context.h"

namespace fusewise::cpu {

/// How many threads a loop of this context can use.
int threads(const Context& context);

/// Calls body on disjoint ranges that together cover [0, count). A nested call from a body runs
/// inline. Exceptions of a body are rethrown here, after all ranges are done.
void parallel_for(const Context& context, std::int64_t count, Executor::Body body, void* state);

template <typename Function>
void parallel_for(const Context& context, std::int64_t count, const Function& function) {
  const Executor::Body body = [](std::int64_t begin, std::int64_t end, void* state) {
    (*static_cast<const Function*>(state))(begin, end);
  };
  parallel_for(context, count, body, const_cast<Function*>(&function));
}

}  // namespace fusewise::cpu

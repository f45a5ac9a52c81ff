// The CPU library's context: torch's own threads run our loops, so that nobody fights for cores.

#include <torch/csrc/stable/ops.h>

#include <exception>
#include <mutex>

#include "call.h"
#include "failure.h"

namespace fusewise::binding {
namespace {

class TorchThreads : public Executor {
 public:
  int threads() const override { return static_cast<int>(torch::stable::get_num_threads()); }

  void parallel_for(std::int64_t count, Body body, void* state) override {
    // An exception must not cross torch's C interface: it is carried around it.
    std::exception_ptr failure;
    std::mutex mutex;
    torch::stable::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
      try {
        body(begin, end, state);
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
      }
    });
    if (failure) std::rethrow_exception(failure);
  }
};

}  // namespace

void check_works(Device) {}

struct CallContext::State {
  TorchThreads threads;
};

CallContext::CallContext(const Tensor&) : state_(std::make_unique<State>()) {
  context_.executor = &state_->threads;
}

CallContext::~CallContext() = default;

}  // namespace fusewise::binding

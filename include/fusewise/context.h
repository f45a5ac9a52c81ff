#pragma once

#include <cstddef>
#include <cstdint>

#include "fusewise/tensor.h"

namespace fusewise {

/// Where scratch memory comes from. Memory is ordered by the context's stream: after `deallocate`
/// it may be given out again to work that is enqueued later on the same stream.
class Allocator {
 public:
  virtual ~Allocator() = default;
  /// Throws OutOfMemory. The result is aligned to 256 bytes.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void deallocate(void* memory) noexcept = 0;
};

/// Who runs the loops of the CPU kernels. A framework passes its own threads here, so that the two
/// do not fight for the cores. Results do not depend on the number of threads.
class Executor {
 public:
  using Body = void (*)(std::int64_t begin, std::int64_t end, void* state);

  virtual ~Executor() = default;
  virtual int threads() const = 0;
  /// Calls body on disjoint ranges that together cover [0, count), and returns when all are done.
  /// While it waits it may run other work on this thread, calls of this library among it.
  virtual void parallel_for(std::int64_t count, Body body, void* state) = 0;
};

/// Where a call runs and what it may use.
struct Context {
  Device device{};
  /// The cudaStream_t that work is enqueued on; ignored on the CPU.
  void* stream = nullptr;
  /// Null: the heap on the CPU, the device's stream-ordered memory pool on CUDA.
  Allocator* allocator = nullptr;
  /// Null: the library's own threads, one per core that the process may use.
  Executor* executor = nullptr;
  /// Told what the user should know although nothing failed; null: nobody is.
  void (*warn)(const char* message) = nullptr;
};

}  // namespace fusewise

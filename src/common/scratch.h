#pragma once

// Scratch memory of one call, given back when it goes out of scope.

#include "fusewise/context.h"

namespace fusewise {

/// The allocator used where a context names none: the heap, or the device's memory pool.
/// The CUDA one is bound to the context's stream.
void* allocate(const Context& context, std::size_t bytes);
void deallocate(const Context& context, void* memory) noexcept;

/// Asks for large pages under new memory of the heap: the page faults of small ones cost more than
/// the arithmetic. For nothing but memory so large that malloc has mapped it on its own, because
/// then the hint ends with it.
void prefer_large_pages(void* memory, std::int64_t bytes);

template <typename T>
class Scratch {
 public:
  Scratch(const Context& context, std::int64_t count)
      : context_(context),
        data_(count > 0 ? static_cast<T*>(allocate(context, count * sizeof(T))) : nullptr) {}
  ~Scratch() {
    if (data_ != nullptr) deallocate(context_, data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() const { return data_; }

 private:
  const Context& context_;
  T* data_;
};

}  // namespace fusewise

#pragma once

// Scratch memory of one call, freed when it goes out of scope.

#include "fusewise/context.h"

namespace fusewise {

/// The allocator for contexts without their own: the heap, or the device's memory pool. The CUDA
/// one is ordered by the context's stream.
void* allocate(const Context& context, std::size_t bytes);
void deallocate(const Context& context, void* memory) noexcept;

/// Asks for large pages for new heap memory: the page faults of small ones cost more than the
/// arithmetic. Only for blocks so large that malloc maps them separately. Then the hint ends when
/// the block is freed.
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

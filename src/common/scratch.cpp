#include "common/scratch.h"

#include <new>

#include "common/backends.h"
#include "common/check.h"

namespace fusewise {
namespace {

constexpr std::align_val_t kAlignment{256};

}  // namespace

void* allocate(const Context& context, std::size_t bytes) {
  if (context.allocator != nullptr) return context.allocator->allocate(bytes);
  if (context.device.type == DeviceType::cuda) return cuda::allocate(context, bytes);
  void* memory = ::operator new(bytes, kAlignment, std::nothrow);
  if (memory == nullptr) {
    throw OutOfMemory("no memory for " + std::to_string(bytes) + " bytes of scratch");
  }
  return memory;
}

void deallocate(const Context& context, void* memory) noexcept {
  if (context.allocator != nullptr) return context.allocator->deallocate(memory);
  if (context.device.type == DeviceType::cuda) return cuda::deallocate(context, memory);
  ::operator delete(memory, kAlignment);
}

}  // namespace fusewise

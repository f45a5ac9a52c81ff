#include "common/scratch.h"

#include <sys/mman.h>

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
  prefer_large_pages(memory, static_cast<std::int64_t>(bytes));
  return memory;
}

void deallocate(const Context& context, void* memory) noexcept {
  if (context.allocator != nullptr) return context.allocator->deallocate(memory);
  if (context.device.type == DeviceType::cuda) return cuda::deallocate(context, memory);
  ::operator delete(memory, kAlignment);
}

void prefer_large_pages(void* memory, std::int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr std::int64_t kAlwaysMapped = 32 << 20;
  constexpr std::uintptr_t kPage = 2 << 20;
  if (bytes < kAlwaysMapped) return;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const std::uintptr_t end = (address + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace fusewise

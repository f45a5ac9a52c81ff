#include "common/scratch.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "common/backends.h"
#include "common/check.h"

namespace fusewise {
namespace {

constexpr std::size_t kAlignment = 256;

#if defined(__SANITIZE_ADDRESS__)

void* allocate_aligned(std::size_t bytes) {
  return ::operator new(bytes, std::align_val_t{kAlignment}, std::nothrow);
}
void deallocate_aligned(void* memory) { ::operator delete(memory, std::align_val_t{kAlignment}); }

#else

// Aligned by hand, because malloc has small blocks ready but its aligned functions search for them.
// The memory starts at least 16 bytes into the block, and the block's address is stored just before
// it. Not used with a sanitizer, which would not detect writes past the end.

void* allocate_aligned(std::size_t bytes) {
  void* const block = ::operator new(bytes + kAlignment, std::nothrow);
  if (block == nullptr) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(block);
  void** const memory = reinterpret_cast<void**>((address / kAlignment + 1) * kAlignment);
  memory[-1] = block;
  return memory;
}
void deallocate_aligned(void* memory) { ::operator delete(static_cast<void**>(memory)[-1]); }

#endif

}  // namespace

void* allocate(const Context& context, std::size_t bytes) {
  if (context.allocator != nullptr) return context.allocator->allocate(bytes);
  if (context.device.type == DeviceType::cuda) return cuda::allocate(context, bytes);
  void* memory = allocate_aligned(bytes);
  if (memory == nullptr) {
    throw OutOfMemory(std::to_string(bytes) + " bytes of scratch memory could not be allocated");
  }
  prefer_large_pages(memory, static_cast<std::int64_t>(bytes));
  return memory;
}

void deallocate(const Context& context, void* memory) noexcept {
  if (context.allocator != nullptr) return context.allocator->deallocate(memory);
  if (context.device.type == DeviceType::cuda) return cuda::deallocate(context, memory);
  deallocate_aligned(memory);
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

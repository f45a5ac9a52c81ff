// What a call leaves as it was: the pages of its caller's memory.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "fusewise/squeeze_excite.h"

namespace fusewise {
namespace {

/// The flags of the mapping that holds an address, as in "rd wr mr mw me ac".
std::string flags_of(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream range(line);
    if (range >> std::hex >> begin >> dash >> end && dash == '-') {
      inside = begin <= wanted && wanted < end;
    }
    if (inside && line.rfind("VmFlags:", 0) == 0) return line.substr(8);
  }
  return "";
}

TEST(CallersMemory, KeepsItsKindOfPages) {
  constexpr std::size_t kBytes = 64 << 20;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  char* const middle = static_cast<char*>(memory) + kBytes / 2;
  const std::string before = flags_of(middle);
  ASSERT_FALSE(before.empty());
  const std::vector<float> x(4 << 20), ones(4, 1);
  SqueezeExciteForward call;
  call.x = TensorView(x.data(), DType::f32, {}, {1, 4, 1024, 1024});
  call.y = TensorView(middle, DType::f32, {}, {1, 4, 1024, 1024});
  call.w1 = TensorView(ones.data(), DType::f32, {}, {1, 4});
  call.w2 = TensorView(ones.data(), DType::f32, {}, {4, 1});
  call.activation = Activation::relu;
  squeeze_excite(Context{}, call);
  EXPECT_EQ(flags_of(middle), before);
  munmap(memory, kBytes);
}

}  // namespace
}  // namespace fusewise

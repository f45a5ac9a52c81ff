// Conversions between float32 and the half types, of every instruction set that this machine has:
// every half value, ties, overflow, and NaN whatever its bits are.

#include <cstring>

#include "cpu/autoencoder_kernels.h"
#include "cpu/instruction_sets.h"
#include "reference.h"

namespace fusewise::testing {
namespace {

struct Set {
  const char* name;
  const cpu::autoencoder::KernelSet* kernels;
};

std::vector<Set> available() {
  std::vector<Set> found{{"portable", &cpu::portable::autoencoder_kernels}};
  if (cpu::needs_avx2(Context{}, 0).empty()) {
    found.push_back({"avx2", &cpu::avx2::autoencoder_kernels});
  }
  if (cpu::needs_avx512(Context{}, 0).empty()) {
    found.push_back({"avx512", &cpu::avx512::autoencoder_kernels});
  }
  return found;
}

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

class HalfConversions : public ::testing::TestWithParam<Set> {
 protected:
  template <typename T>
  static const cpu::autoencoder::Kernels<T>& kernels(const Set& set) {
    if constexpr (std::is_same_v<T, cpu::BF16>)
      return set.kernels->bf16;
    else
      return set.kernels->f16;
  }

  template <typename T>
  void expect_narrowed(const std::vector<std::uint32_t>& inputs, DType dtype) const {
    std::vector<float> from;
    for (const std::uint32_t bits : inputs) from.push_back(float_of(bits));
    std::vector<T> to(from.size());
    kernels<T>(GetParam()).narrow(from.data(), static_cast<Index>(from.size()), to.data());
    for (std::size_t i = 0; i < from.size(); ++i) {
      const double value = half_value(to[i].bits, dtype);
      if (std::isnan(from[i])) {
        ASSERT_TRUE(std::isnan(value)) << std::hex << inputs[i] << " gives " << to[i].bits;
      } else {
        ASSERT_EQ(to[i].bits, half_bits(from[i], dtype)) << from[i];
      }
    }
  }
};

TEST_P(HalfConversions, NaNStaysNaN) {
  std::vector<std::uint32_t> all;
  for (const std::uint32_t sign : {0u, 0x80000000u}) {
    for (const std::uint32_t payload :
         {0x7fffffu, 0x400000u, 0x1u, 0x7fffu, 0x8000u, 0xffffu, 0x3fffffu, 0x7f8000u}) {
      all.push_back(sign | 0x7f800000u | payload);
    }
  }
  while (all.size() < 45) all.push_back(all[all.size() - 16]);  // whole vectors and a rest
  expect_narrowed<cpu::BF16>(all, DType::bf16);
  expect_narrowed<cpu::F16>(all, DType::f16);
}

TEST_P(HalfConversions, RoundToNearestEven) {
  std::vector<std::uint32_t> all;
  for (std::uint32_t bits = 0; bits < 0x7f800000u; bits += 0x7fffu) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) all.push_back(sign | bits);
  }
  // Ties of bfloat16 and of float16, and their neighbours.
  for (std::uint32_t bits = 0x38000000u; bits < 0x48000000u; bits += 0x1000u) {
    for (const int off : {-1, 0, 1}) all.push_back(bits + off);
  }
  all.insert(all.end(), {0x7f800000u, 0xff800000u, 0x7f7fffffu, 0x477fefffu, 0x477ff000u});
  expect_narrowed<cpu::BF16>(all, DType::bf16);
  expect_narrowed<cpu::F16>(all, DType::f16);
}

TEST_P(HalfConversions, EveryHalfValueIsWidened) {
  std::vector<cpu::BF16> brain;
  std::vector<cpu::F16> half;
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    brain.push_back({static_cast<std::uint16_t>(bits)});
    half.push_back({static_cast<std::uint16_t>(bits)});
  }
  std::vector<float> wide_brain(brain.size()), wide_half(half.size());
  kernels<cpu::BF16>(GetParam()).widen(brain.data(), 0x10000, wide_brain.data());
  kernels<cpu::F16>(GetParam()).widen(half.data(), 0x10000, wide_half.data());
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    for (const auto& [value, dtype] :
         {std::pair{wide_brain[bits], DType::bf16}, {wide_half[bits], DType::f16}}) {
      const double right = half_value(static_cast<std::uint16_t>(bits), dtype);
      ASSERT_TRUE(std::isnan(right) ? std::isnan(value) : value == right) << bits;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, HalfConversions, ::testing::ValuesIn(available()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fusewise::testing

#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace fusewise {

/// u8 is for bits that forward saves for backward, b8 for a bool per byte, i64 for counters. All
/// other types are floating point.
enum class DType : std::uint8_t { f32, f64, f16, bf16, u8, b8, i64 };

/// Bytes of one element.
std::int64_t size_of(DType dtype);
/// "float32", "float64", "float16", "bfloat16", "uint8", "bool", "int64".
const char* name_of(DType dtype);

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu", "cuda:0".
std::string name_of(Device device);

/// A tensor owned by the caller: pointer, type, shape, and strides in elements.
/// A default-constructed view means that the argument is absent.
///
/// Inputs may overlap each other and, with strides of 0, themselves. An output must have memory of
/// its own, and no two of its elements may share memory: going up from the smallest stride, each
/// stride must be at least the span of the smaller ones. Calls that break this rule are rejected.
/// Tensors may interleave, as two slices of one tensor do, only if their strides are equal.
/// Otherwise they are rejected.
struct TensorView {
  static constexpr int kMaxRank = 6;

  void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  int rank = -1;
  std::array<std::int64_t, kMaxRank> sizes{};
  std::array<std::int64_t, kMaxRank> strides{};

  TensorView() = default;
  /// A dense row-major tensor.
  TensorView(const void* data, DType dtype, Device device,
             std::initializer_list<std::int64_t> sizes);
  /// Any strides, in elements.
  TensorView(const void* data, DType dtype, Device device,
             std::initializer_list<std::int64_t> sizes,
             std::initializer_list<std::int64_t> strides);

  bool defined() const { return rank >= 0; }
  std::int64_t numel() const;
  /// "[32, 64, 7, 7]"
  std::string shape() const;
};

}  // namespace fusewise

#include "fusewise/tensor.h"

#include <algorithm>

#include "common/check.h"

namespace fusewise {

std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::u8:
    case DType::b8:
      return 1;
  }
  throw Error("unknown dtype");
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::f64:
      return "float64";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::u8:
      return "uint8";
    case DType::b8:
      return "bool";
    case DType::i64:
      return "int64";
  }
  return "unknown";
}

std::string name_of(Device device) {
  if (device.type == DeviceType::cpu && device.index == 0) return "cpu";
  if (device.type == DeviceType::cpu) return "cpu:" + std::to_string(device.index);
  return "cuda:" + std::to_string(device.index);
}

TensorView::TensorView(const void* data, DType dtype, Device device,
                       std::initializer_list<std::int64_t> sizes)
    : data(const_cast<void*>(data)),
      dtype(dtype),
      device(device),
      rank(static_cast<int>(sizes.size())) {
  check(rank <= kMaxRank, "a TensorView has at most ", kMaxRank, " dimensions, got ", rank);
  std::copy(sizes.begin(), sizes.end(), this->sizes.begin());
  std::int64_t stride = 1;
  for (int d = rank - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= this->sizes[d];
  }
}

TensorView::TensorView(const void* data, DType dtype, Device device,
                       std::initializer_list<std::int64_t> sizes,
                       std::initializer_list<std::int64_t> strides)
    : TensorView(data, dtype, device, sizes) {
  check(strides.size() == sizes.size(), "a TensorView needs as many strides as sizes, got ",
        strides.size(), " and ", sizes.size());
  std::copy(strides.begin(), strides.end(), this->strides.begin());
}

std::int64_t TensorView::numel() const {
  std::int64_t count = 1;
  for (int d = 0; d < rank; ++d) count *= sizes[d];
  return count;
}

std::string TensorView::shape() const {
  std::string text = "[";
  for (int d = 0; d < rank; ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(sizes[d]);
  }
  return text + "]";
}

}  // namespace fusewise

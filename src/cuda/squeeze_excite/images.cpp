#include "cuda/squeeze_excite/images.h"

#include <cstdint>

namespace fusewise::cuda {
namespace {

bool is_dense(const TensorView& t, std::initializer_list<int> innermost_first) {
  std::int64_t stride = 1;
  for (int d : innermost_first) {
    if (t.sizes[d] != 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

bool is_planar(const TensorView& t) { return is_dense(t, {3, 2, 1, 0}); }

}  // namespace

bool is_channels_last(const TensorView& image) { return is_dense(image, {1, 3, 2, 0}); }

bool is_aligned(const TensorView& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0;
}

std::string dense_images_decline(std::initializer_list<const TensorView*> images) {
  const TensorView& x = **images.begin();
  if (x.dtype == DType::f64) return "it has no float64 kernels";
  if (x.sizes[0] == 0) return "the batch is empty";
  const bool channels_last = is_channels_last(x);
  for (const TensorView* image : images) {
    if (channels_last ? !is_channels_last(*image) : !is_planar(*image)) {
      return "it takes dense NCHW or channels-last images, all in one layout";
    }
    if (!is_aligned(*image)) return "an image does not start on a 16-byte boundary";
  }
  const std::int64_t pixels = x.sizes[2] * x.sizes[3], bytes = size_of(x.dtype);
  if (channels_last && x.sizes[1] * bytes % 16 != 0) {
    return "the channels of a pixel are not a multiple of 16 bytes";
  }
  if (x.sizes[1] * pixels * bytes % 16 != 0) return "a sample is not a multiple of 16 bytes";
  if (x.sizes[0] >= 1 << 24 || x.sizes[1] >= 1 << 24 || pixels >= 1 << 30) {
    return "a dimension is too large for its 32-bit indices";
  }
  return {};
}

}  // namespace fusewise::cuda

#pragma once

// An image tensor with any strides.

#include "cuda/batch_norm/divisor.cuh"
#include "cuda/vector.cuh"
#include "fusewise/tensor.h"

namespace fusewise::cuda {

/// Where a value is.
struct Place {
  Index s, n, c, h, w;
};

struct Image {
  void* data;
  Index s, n, c, h, w;  // strides

  template <typename T>
  __device__ __forceinline__ T* at(const Place& p) const {
    return static_cast<T*>(data) + p.s * s + p.n * n + p.c * c + p.h * h + p.w * w;
  }
  template <typename T>
  __device__ __forceinline__ Accumulator<T> get(const Place& p) const {
    return to_accumulator<Accumulator<T>>(*at<const T>(p));
  }
  template <typename T>
  __device__ __forceinline__ void set(const Place& p, Accumulator<T> value) const {
    *at<T>(p) = from_accumulator<T>(value);
  }
};

inline Image image(const TensorView& t) {
  if (!t.defined()) return {};
  const int r = t.rank;
  const Index stream = r == 5 ? t.strides[0] : 0;
  return {t.data, stream, t.strides[r - 4], t.strides[r - 3], t.strides[r - 2], t.strides[r - 1]};
}

}  // namespace fusewise::cuda

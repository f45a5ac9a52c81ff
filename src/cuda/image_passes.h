#pragma once

// How the kernels of image_passes.cuh divide images of any layout among their threads.

#include <initializer_list>

#include "fusewise/context.h"
#include "fusewise/tensor.h"

namespace fusewise::cuda::passes {

using Index = long long;

constexpr int kThreads = 256;

/// The memory layout of all images of a call.
enum class ImageLayout {
  planar,         ///< the pixels of a channel are contiguous
  channels_last,  ///< the channels of a pixel are contiguous
  strided,        ///< anything else, element by element
};

struct Shape {
  Index n, c, hw;
  Index width;   ///< of a row of pixels, to separate h and w
  Index chunks;  ///< number of chunks of a channel's pixels; each has its own sum
  Index chunk;   ///< pixels per chunk
};

/// One plan for all passes over the images of a call.
struct Plan {
  ImageLayout layout;
  Shape shape;
  int lanes = 32;        ///< planar, strided: threads per chunk
  int columns = 1;       ///< channels-last: vectors of channels per block
  int tiles = 1;         ///< channels-last: blocks side by side
  bool vectors = false;  ///< channels-last: 16 bytes at a time

  Index blocks() const {
    if (layout == ImageLayout::channels_last) return shape.n * shape.chunks * tiles;
    return (shape.n * shape.chunks * shape.c * lanes + kThreads - 1) / kThreads;
  }
};

/// The first image determines the sizes. `resident`: blocks of a channels-last pass that an SM runs
/// at once.
Plan plan_for(const Context& context, std::initializer_list<const TensorView*> images,
              int resident);

/// The stride between neighbouring pixels, if H and W collapse into one dimension.
inline Index pixel_stride(const TensorView& t) {
  return t.sizes[3] == 1 ? t.strides[2] : t.strides[3];
}

}  // namespace fusewise::cuda::passes

#pragma once

// Requirements on the images of the kernels with 16-byte accesses.

#include <initializer_list>
#include <string>

#include "fusewise/tensor.h"

namespace fusewise::cuda {

/// Dense in the order N, H, W, C. True for images of one pixel in either layout.
bool is_channels_last(const TensorView& image);
/// Whether the data is aligned to 16 bytes.
bool is_aligned(const TensorView& tensor);

/// Why such kernels cannot take these images, as a sentence, or empty if they can. The images must
/// not be empty or float64. They must all be dense in one layout, 16-byte aligned, and have 32-bit
/// sizes.
std::string dense_images_decline(std::initializer_list<const TensorView*> images);

}  // namespace fusewise::cuda

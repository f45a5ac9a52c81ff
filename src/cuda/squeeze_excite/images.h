#pragma once

// What the kernels with 16-byte accesses ask of the images before they take a call.

#include <initializer_list>
#include <string>

#include "fusewise/tensor.h"

namespace fusewise::cuda {

/// Dense in the order N, H, W, C. One pixel is, in either layout.
bool is_channels_last(const TensorView& image);
/// Whether the data start on 16 bytes.
bool is_aligned(const TensorView& tensor);

/// Why such kernels cannot serve these images, as a sentence; empty where they can: not empty, no
/// float64, all dense in one layout, on 16-byte boundaries, with 32-bit sizes.
std::string dense_images_decline(std::initializer_list<const TensorView*> images);

}  // namespace fusewise::cuda

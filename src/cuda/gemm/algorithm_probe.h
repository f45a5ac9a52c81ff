#pragma once

// What cuBLASLt's algorithms do with a bias and an epilogue is not documented and differs between
// them, so each is tried out before it is used.

#include "cuda/gemm/cublaslt.h"

namespace fusewise::cuda {

/// Whether there is anything to be tried out: a bias beside half factors, or an epilogue.
bool needs_probe(const Product& product);

/// Whether the algorithm returns NaN for NaN (the relu of some returns 0) and adds the bias to the
/// sum before it is rounded to half (some add it afterwards). Overwrites d and synchronises the
/// stream.
bool is_right(const Context& context, const Product& product, Description& description,
              const Algorithm& algorithm);

}  // namespace fusewise::cuda

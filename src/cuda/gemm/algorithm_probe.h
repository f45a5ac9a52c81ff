#pragma once

// How cuBLASLt's algorithms handle a bias and an epilogue is not documented and differs between
// them. So each algorithm is tested before it is used.

#include "cuda/gemm/cublaslt.h"

namespace fusewise::cuda {

/// Whether there is anything to test: a bias with half-precision factors, or an epilogue.
bool needs_probe(const Product& product);

/// Whether the algorithm returns NaN for NaN (the relu of some returns 0) and adds the bias before
/// rounding to half precision (some add it afterwards). Overwrites d and synchronises the stream.
bool is_right(const Context& context, const Product& product, Description& description,
              const Algorithm& algorithm);

}  // namespace fusewise::cuda

#pragma once

#include "cuda/gemm/cublaslt.h"

namespace fusewise::cuda {

/// The algorithm for a product, with its workspace. It is measured if that is allowed; otherwise it
/// is cuBLASLt's first suggestion. Products of one bucket share one choice, and the choice of a
/// bucket never changes within a process.
Algorithm algorithm_for(const Context& context, const Product& product, Description& description);

}  // namespace fusewise::cuda

#pragma once

// The part of cuBLASLt's interface that we use: describe a product, ask for algorithms, run one.
// cuBLASLt is column-major, so it sees a row-major matrix as its transpose. Therefore d = a b is
// computed as d^T = b^T a^T, without any copy.

#include <cublasLt.h>

#include <vector>

#include "cuda/gemm/product.h"

namespace fusewise::cuda {

/// A product in cuBLASLt's terms. It is on the stack and allocates nothing. Never const, because
/// cuBLASLt's functions do not promise to leave it unchanged.
class Description {
 public:
  explicit Description(const Product& product);

  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, d;
  std::int64_t inner;
};

struct Algorithm {
  cublasLtMatmulAlgo_t algorithm;
  std::size_t workspace;  ///< bytes, for the sizes of one product
  /// Known to compute bias and epilogue as specified; see algorithm_probe.h.
  bool right = true;
};

/// cuBLASLt's suggestions for a product, best guess first. Algorithms that would lose terms of a
/// sum are left out. May be empty.
std::vector<Algorithm> suggested(const Context& context, const Product& product);

/// Whether a product can use an algorithm. If so, sets the workspace that it needs. Changes the
/// number of split-K parts if terms would be lost otherwise.
bool takes(const Context& context, Description& description, Algorithm& algorithm);

/// d = epilogue(factor * a b + bias).
void run_algorithm(const Context& context, const Product& product, Description& description,
                   const Algorithm& algorithm, void* workspace, double factor = 1);

}  // namespace fusewise::cuda

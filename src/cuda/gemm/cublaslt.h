#pragma once

// cuBLASLt's own interface, as far as it is used: describe a product, ask for algorithms, run one.
// cuBLASLt is column-major: a row-major matrix is its transpose to it, so that d = a b is computed
// as d^T = b^T a^T, and nothing is copied.

#include <cublasLt.h>

#include <vector>

#include "cuda/gemm/product.h"

namespace fusewise::cuda {

/// A product in cuBLASLt's terms, on the stack: nothing is allocated. Never const, as cuBLASLt's
/// functions do not promise to leave it alone.
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

/// What cuBLASLt suggests for a product, best guess first, where it adds up every term; may be
/// empty.
std::vector<Algorithm> suggested(const Context& context, const Product& product);

/// Whether a product can take an algorithm. Sets the workspace that it needs then, and changes the
/// number of parts that it cuts the sum into where terms would be lost otherwise.
bool takes(const Context& context, Description& description, Algorithm& algorithm);

/// d = epilogue(factor * a b + bias).
void run_algorithm(const Context& context, const Product& product, Description& description,
                   const Algorithm& algorithm, void* workspace, double factor = 1);

}  // namespace fusewise::cuda

#pragma once

// Half-precision GEMMs of sizes or addresses that are not multiples of 16 bytes, computed on padded
// copies. cuBLASLt's kernels for such operands reach a fifth of the speed of the others, and add
// the bias in a separate kernel, after the sum was rounded to half.

#include <array>
#include <cstdint>
#include <optional>

#include "cuda/gemm/product.h"

namespace fusewise::cuda {

/// One matrix in memory, copied element by element into another; what is larger there becomes 0.
struct Copy {
  const void* from = nullptr;
  std::int64_t from_stride = 0, rows = 0, columns = 0;
  void* to = nullptr;
  std::int64_t to_stride = 0, to_rows = 0, to_columns = 0;
};

inline constexpr int kMostCopies = 3;

/// How a product runs on padded copies: `inputs`, then `product`, then `result`.
struct PaddedProduct {
  Product product{};
  std::array<Copy, kMostCopies> inputs;  ///< of a, b and bias; those without rows are not needed
  Copy result;                           ///< of d; not needed where it has no rows
  std::int64_t bytes = 0;                ///< of scratch

  /// Where the scratch lies, aligned to 256 bytes. Called once.
  void place(void* scratch);
};

/// Nothing where the product is aligned, is not of half precision, or is too small to gain.
std::optional<PaddedProduct> padded(const Product& product);

/// Runs up to kMostCopies copies in one launch; those without rows are skipped.
void run_copies(const Context& context, const Copy* copies, int count);

}  // namespace fusewise::cuda

#pragma once

// Half-precision GEMMs of sizes or addresses that are not multiples of 16 bytes. cuBLASLt's kernels
// for them reach a fifth to a half of the speed of the others, and some add a bias only after the
// sum was rounded to half. On padded copies they are like any other.

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

/// A product with copies around it: `inputs`, then `product`, then `result`. Copies without rows
/// are not needed.
struct CopiedProduct {
  Product product{};
  std::array<Copy, kMostCopies> inputs{};
  Copy result{};
  std::int64_t bytes = 0;  ///< of scratch

  /// Where the scratch lies, aligned to 256 bytes. Called once.
  void place(void* scratch);
};

/// The product on padded copies of a, b, bias and d. Nothing where it is aligned or not of half
/// precision.
std::optional<CopiedProduct> padded(const Product& product);

/// The product where it is; of half precision with an aligned copy of its bias.
CopiedProduct as_is(const Product& product);

/// Whether `padded` is expected to be faster than `as_is`, where that was not measured.
bool padding_should_pay(const Product& product, const CopiedProduct& padded);

/// Runs up to kMostCopies copies in one launch; those without rows are skipped.
void run_copies(const Context& context, const Copy* copies, int count);

}  // namespace fusewise::cuda

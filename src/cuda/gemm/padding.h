#pragma once

// Half-precision GEMMs whose sizes or addresses are not multiples of 16 bytes. cuBLASLt's kernels
// for them reach a fifth to a half of the speed of aligned ones, and some add the bias only after
// rounding the sum to half precision. On padded copies, the aligned kernels can be used.

#include <array>
#include <cstdint>
#include <optional>

#include "cuda/gemm/product.h"

namespace fusewise::cuda {

/// Copies a matrix element by element into another. Elements that only the larger target has become
/// 0.
struct Copy {
  const void* from = nullptr;
  std::int64_t from_stride = 0, rows = 0, columns = 0;
  void* to = nullptr;
  std::int64_t to_stride = 0, to_rows = 0, to_columns = 0;
};

inline constexpr int kMostCopies = 3;

/// A product with copies around it: `inputs`, then `product`, then `result`. Copies with no rows
/// are not needed.
struct CopiedProduct {
  Product product{};
  std::array<Copy, kMostCopies> inputs{};
  Copy result{};
  std::int64_t bytes = 0;  ///< of scratch memory

  /// Sets the scratch memory, which must be aligned to 256 bytes. Called once.
  void place(void* scratch);
};

/// The product on padded copies of a, b, bias and d. Returns nothing if it is aligned already or
/// not of half precision.
std::optional<CopiedProduct> padded(const Product& product);

/// The product without padding. In half precision, the bias is an aligned copy.
CopiedProduct as_is(const Product& product);

/// Whether `padded` is expected to be faster than `as_is`, if that was not measured.
bool padding_should_pay(const Product& product, const CopiedProduct& padded);

/// Runs up to kMostCopies copies in one launch. Copies with no rows are skipped.
void run_copies(const Context& context, const Copy* copies, int count);

}  // namespace fusewise::cuda

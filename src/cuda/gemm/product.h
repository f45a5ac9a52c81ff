#pragma once

// GEMMs by cuBLASLt, with bias and activation in the epilogue.

#include <memory>

#include "common/matrix.h"
#include "fusewise/context.h"
#include "fusewise/linear_act.h"

namespace fusewise::cuda {

enum class Epilogue { none, relu, gelu_tanh };

/// Which size of a GEMM is the batch: the one that may differ from call to call.
enum class BatchSize { rows, columns, inner };

/// d = epilogue(a b + bias), all row-major and, unless d is wide, of one type; sums in float32,
/// float64 for float64. The bias is added to the sum before it is rounded to d's type.
struct Product {
  std::int64_t rows, columns, inner;
  Matrix a;  ///< [rows, inner]
  Matrix b;  ///< [inner, columns]
  Matrix d;  ///< [rows, columns]; transposed only without bias
  DType dtype;
  const void* bias = nullptr;  ///< [columns]
  Epilogue epilogue = Epilogue::none;
  ProductMath math{};
  BatchSize batch = BatchSize::rows;
  bool add = false;  ///< to what d has; without bias, epilogue and tuning, which overwrites d
  bool wide_result = false;  ///< d, and its bias, float32 beside half factors; without tuning
};

void multiply(const Context& context, const Product& product);

/// The same in two steps, the second of which only launches.
class PreparedProduct {
 public:
  PreparedProduct(const Context& context, const Product& product);
  ~PreparedProduct();
  PreparedProduct(const PreparedProduct&) = delete;
  PreparedProduct& operator=(const PreparedProduct&) = delete;

  void run(const Context& context) const;

  /// Whether bias and epilogue are known to be computed as specified: NaN for NaN, and rounded
  /// once. cuBLASLt's algorithms differ in that. It is tried out at the first call with a product
  /// bucket, on d, which is overwritten; false where it cannot be tried because a graph is being
  /// captured.
  bool is_right() const;

 private:
  struct State;
  std::unique_ptr<State> state_;  // none where there is nothing to do
};

}  // namespace fusewise::cuda

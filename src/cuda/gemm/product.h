#pragma once

// GEMMs by cuBLASLt, with bias and activation in the epilogue.

#include <memory>

#include "common/matrix.h"
#include "fusewise/context.h"
#include "fusewise/linear_act.h"

namespace fusewise::cuda {

enum class Epilogue { none, relu, gelu_tanh };

/// Which dimension of a GEMM is the batch, and so may differ from call to call.
enum class BatchSize { rows, columns, inner };

/// d = epilogue(a b + bias). All matrices are row-major and of one type, unless wide_result is set.
/// Accumulation is in float32, or float64 for float64. The bias is added before rounding to d's
/// type.
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
  bool add = false;         ///< d = a b + c; not with bias or epilogue
  const void* c = nullptr;  ///< with `add`: laid out like d; null: d itself
  /// Several GEMMs in one: elements from one matrix to the next, 0 where all have the same. c is
  /// like d. Not with a bias, padding or a transposed d, and not adding to its own output.
  int count = 1;
  std::int64_t a_step = 0, b_step = 0, d_step = 0;
  bool wide_result = false;  ///< d and bias are float32 for half-precision factors; no tuning
};

void multiply(const Context& context, const Product& product);

/// The same in two steps: the constructor prepares, and run() only launches.
class PreparedProduct {
 public:
  PreparedProduct(const Context& context, const Product& product);
  ~PreparedProduct();
  PreparedProduct(const PreparedProduct&) = delete;
  PreparedProduct& operator=(const PreparedProduct&) = delete;

  void run(const Context& context) const;

  /// Whether bias and epilogue are known to be computed as specified: NaN for NaN, and rounded
  /// once. cuBLASLt's algorithms differ in this. The first call of a product bucket tests it, and
  /// the test overwrites d. Returns false if the test is impossible because a graph is being
  /// captured.
  bool is_right() const;

 private:
  struct State;
  std::unique_ptr<State> state_;  // null if there is nothing to do
};

}  // namespace fusewise::cuda

#pragma once

// Matrix products by cuBLASLt, bias and activation in its epilogue.

#include <array>
#include <memory>
#include <string>

#include "common/matrix.h"
#include "fusewise/context.h"
#include "fusewise/linear_act.h"

namespace fusewise::cuda {

enum class Epilogue { none, relu, gelu_tanh };

/// d = epilogue(a b + bias), all row-major and, unless d is wide, of one type; sums in float32,
/// float64 for float64.
struct Product {
  std::int64_t rows, columns, inner;
  Matrix a;  ///< [rows, inner]
  Matrix b;  ///< [inner, columns]
  Matrix d;  ///< [rows, columns]; transposed only without bias
  DType dtype;
  const void* bias = nullptr;  ///< [columns]
  Epilogue epilogue = Epilogue::none;
  ProductMath math{};
  bool add = false;  ///< to what d has; without bias, epilogue and tuning, which overwrites d
  bool wide_result = false;  ///< d, and its bias, float32 beside halves; without tuning
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

  /// Whether the epilogue gives NaN for NaN, as its activation does: of some of the vendor's
  /// algorithms relu makes 0 of it. Tried out at the first call of a kind, on d, which is
  /// overwritten; false where that cannot be, as a graph is captured.
  bool lets_nan_through() const;

 private:
  struct State;
  std::unique_ptr<State> state_;  // none where there is nothing to do
};

/// Everything that the best algorithm for a product may depend on, apart from GPU and library.
using ProductKey = std::array<std::int64_t, 8>;

struct ProductKeyHash {
  std::size_t operator()(const ProductKey& key) const {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const std::int64_t part : key) hash = (hash ^ part) * 0x9e3779b97f4a7c15;
    return hash ^ (hash >> 32);
  }
};

ProductKey key_of(const Product& product);
std::string text_of(const ProductKey& key);

}  // namespace fusewise::cuda

#pragma once

// Describes an operator's tensors once: names, shapes, types. The checks of every call use it. Its
// text form tells the torch bindings the schemas, how to allocate results, and what a tracer sees
// of them.

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "fusewise/context.h"
#include "fusewise/tensor.h"

namespace fusewise {

enum class Role : std::uint8_t {
  input,
  optional_input,
  output,
  updated,         ///< an optional input that forward may also write
  saved,           ///< written by forward if backward will follow, and read by backward
  optional_saved,  ///< the same, but backward works without it
};

enum class Type : std::uint8_t {
  data,        ///< floating, and the same for all of this kind
  weight,      ///< the data's type, or float32 for half-precision data; the same for all weights
  statistics,  ///< float32; float64 for float64 data
  bits,        ///< uint8, a bit for each value of a row; backward also accepts the values
  bytes,       ///< uint8
  flags,       ///< bool
  counter,     ///< int64
};

enum class Layout : std::uint8_t {
  any,     ///< any strides; a result gets the layout of the first tensor
  dense,   ///< row-major
  rows,    ///< a matrix with contiguous rows
  matrix,  ///< a matrix with contiguous rows or columns
};

struct TensorRule {
  const char* name;
  Role role;
  /// Sizes separated by spaces, as in "N C H W". A letter is the same number in all tensors of a
  /// call. Several letters are their product. A number is itself. "|" separates two alternative
  /// shapes; an empty one is a scalar. The name of a tensor means the shape of that tensor. "M* K"
  /// is any number of dimensions before K, and M is their product; the core gets them as one
  /// dimension. "S? C" may lack the dimension S, but then all tensors of the call with an S? lack
  /// it.
  const char* shape;
  Type type;
  Layout layout;
  /// The values of the operator's first choice that have this output or save this tensor, separated
  /// by spaces. Empty: all values.
  const char* with = "";
  /// The input without which this tensor is not saved. Empty: there is none.
  const char* given = "";
  /// The values of the first choice for which backward reads this input. Empty: all values.
  const char* read_with = "";
};

/// A string argument of the operator, and the values that it may have.
struct ChoiceRule {
  const char* name;
  std::span<const char* const> values;
};

struct OperatorRules {
  const char* name;
  std::span<const TensorRule* const> tensors;  ///< inputs, outputs, then saved tensors
  std::span<const ChoiceRule> choices = {};
  std::span<const char* const> flags = {};
  std::span<const char* const> numbers = {};
  /// Letters of the sizes that must be at least 1. The others may be 0.
  const char* positive = "";
  /// Pairs of letters: the second one is half of the first, rounded up. No tensor determines it.
  const char* halves = "";
  /// The inputs in the order in which their shapes are read, if that is not the order above. An
  /// error names the first tensor that does not fit those before it.
  std::span<const char* const> order = {};
};

/// One tensor of a call.
struct GivenTensor {
  const TensorRule* rule;
  const TensorView* view;
  bool gradient;  ///< the gradient of the tensor in the rule; its name gets a "d" in front
  bool written;
  bool required;
};

/// The values of the letters in an operator's shapes, for one call.
class Sizes {
 public:
  std::int64_t operator[](char letter) const { return values_[letter - 'A']; }
  bool knows(char letter) const { return (known_ >> (letter - 'A') & 1) != 0; }
  void set(char letter, std::int64_t value) {
    values_[letter - 'A'] = value;
    known_ |= 1u << (letter - 'A');
    absent_ &= ~(1u << (letter - 'A'));
  }
  /// The tensors of the call lack this optional dimension. As a factor it is 1.
  void set_absent(char letter) {
    set(letter, 1);
    absent_ |= 1u << (letter - 'A');
  }
  bool is_absent(char letter) const { return (absent_ >> (letter - 'A') & 1) != 0; }

  /// The known letters as a bit mask, and a way to forget all others.
  std::uint32_t known() const { return known_; }
  void forget_all_but(std::uint32_t known) { known_ = known; }

 private:
  std::array<std::int64_t, 26> values_;
  std::uint32_t known_ = 0, absent_ = 0;
};

/// Throws Error that names the first tensor that is missing, on another device, or of a shape, type
/// or layout that the rules do not allow.
Sizes check_tensors(const OperatorRules& rules, std::span<const GivenTensor> given, Device device);

/// Throws Error if the choice has no such value. Otherwise returns the value's index.
std::size_t check_choice(const ChoiceRule& choice, std::string_view word);

/// Throws Error for a tensor that no rule allows with this value of the first choice.
[[noreturn]] void fail_unexpected(const OperatorRules& rules, const GivenTensor& given,
                                  std::string_view word);

/// Whether a shape allows any number of leading dimensions.
inline bool has_leading(const char* shape) { return shape[0] != 0 && shape[1] == '*'; }

/// Whether the strides match a layout. For matrix layouts, `t` must be a matrix.
bool lies_as(Layout layout, const TensorView& t);

/// Whether a tensor exists with this value of the first choice. An empty `word` matches any.
bool is_with(const TensorRule& rule, std::string_view word);

/// The view that a tensor not yet allocated will have, in the first of its shapes: dense, without
/// data. `data` and `weight` are the types of the call's inputs.
TensorView foreseen(const TensorRule& rule, const Sizes& sizes, DType data, DType weight,
                    Device device);

/// Throws Error if an output may overlap another tensor of the call.
void check_memory(std::span<const GivenTensor> given);

/// What backward does with a tensor.
struct BackwardUse {
  bool read = false;            ///< whether backward reads it
  const char* only_for = "";    ///< the tensor for whose gradient alone it is read, if any
  bool differentiable = false;  ///< whether it has a gradient
};

/// The rules as text for the torch bindings: one line per tensor, choice and flag, with fields
/// separated by tabs.
std::string text_of(const OperatorRules& rules, std::span<const BackwardUse> uses);

}  // namespace fusewise

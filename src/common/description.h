#pragma once

// An operator's tensors, written down once: names, shapes, types. From this come the checks of
// every call and, through its text, what torch's side knows: schemas, the memory of results, what a
// tracer sees of them.

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
  saved,           ///< written by forward, where backward will follow, and read by that
  optional_saved,  ///< the same, but backward works without it
};

enum class Type : std::uint8_t {
  data,        ///< floating, and the same for all of this kind
  weight,      ///< that of the data, or float32 beside half data, and the same for all weights
  statistics,  ///< float32; of float64 data float64
  bits,        ///< uint8, a bit for each value of a row; backward reads the values as well
};

enum class Layout : std::uint8_t {
  any,     ///< any strides; a result lies as the first tensor does
  dense,   ///< row-major
  rows,    ///< a matrix whose rows are adjacent
  matrix,  ///< a matrix whose rows or columns are adjacent
};

struct TensorRule {
  const char* name;
  Role role;
  /// Sizes with a space between them, as "N C H W". A letter stands for the same number in all
  /// tensors of a call, several letters for their product; a number is itself. " | " stands between
  /// two shapes of which a tensor has one. A tensor's name: the same shape as that. "M* K" is any
  /// number of dimensions in front of K, M their product; the core gets them as one.
  const char* shape;
  Type type;
  Layout layout;
  /// The values of the operator's first choice that have this output or save this, with a space
  /// between them; empty: all.
  const char* with = "";
};

/// A word among the operator's arguments, and the words that it may be.
struct ChoiceRule {
  const char* name;
  std::span<const char* const> values;
};

struct OperatorRules {
  const char* name;
  std::span<const TensorRule* const> tensors;  ///< inputs, outputs, then what is saved
  std::span<const ChoiceRule> choices = {};
  std::span<const char* const> flags = {};
  /// Letters of sizes that are at least 1; the others may be 0.
  const char* positive = "";
  /// The inputs, in the order in which their shapes are read, where that is not the order above. An
  /// error names the first that does not fit those before it.
  std::span<const char* const> order = {};
};

/// One tensor of a call.
struct GivenTensor {
  const TensorRule* rule;
  const TensorView* view;
  bool gradient;  ///< the gradient of what the rule describes; its name has a d in front
  bool written;
  bool required;
};

/// What the letters of an operator's shapes stand for in one call.
class Sizes {
 public:
  std::int64_t operator[](char letter) const { return values_[letter - 'A']; }
  bool knows(char letter) const { return (known_ >> (letter - 'A') & 1) != 0; }
  void set(char letter, std::int64_t value) {
    values_[letter - 'A'] = value;
    known_ |= 1u << (letter - 'A');
  }

  /// Which letters are known, a bit for each; and to forget the others again.
  std::uint32_t known() const { return known_; }
  void forget_all_but(std::uint32_t known) { known_ = known; }

 private:
  std::array<std::int64_t, 26> values_;
  std::uint32_t known_ = 0;
};

/// Throws Error, which names the first tensor that is missing, on another device, or of a shape,
/// type or layout that the rules do not allow.
Sizes check_tensors(const OperatorRules& rules, std::span<const GivenTensor> given, Device device);

/// Throws Error where the word is none of those that a choice has; returns its place among them.
std::size_t check_choice(const ChoiceRule& choice, std::string_view word);

/// Throws Error for a tensor that no rule has with this value of the first choice.
[[noreturn]] void fail_unexpected(const OperatorRules& rules, const GivenTensor& given,
                                  std::string_view word);

/// Whether a shape has any number of leading dimensions.
inline bool has_leading(const char* shape) { return shape[0] != 0 && shape[1] == '*'; }

/// Whether strides are those of a layout; of those for matrices, a matrix's.
bool lies_as(Layout layout, const TensorView& t);

/// Whether a tensor is there with this value of the first choice; an empty one is any.
bool is_with(const TensorRule& rule, std::string_view word);

/// What a tensor that is not there yet will be, in the first of its shapes: dense, without data.
/// `data` and `weight` are the types that the call's inputs have.
TensorView foreseen(const TensorRule& rule, const Sizes& sizes, DType data, DType weight,
                    Device device);

/// Throws Error where an output may overlap another tensor of the call.
void check_memory(std::span<const GivenTensor> given);

/// What backward does with a tensor.
struct BackwardUse {
  bool read = false;            ///< whether it reads it,
  const char* only_for = "";    ///< and for the gradient of which tensor alone, where it does so
  bool differentiable = false;  ///< whether it has a gradient
};

/// The rules as text for torch's side: a line for each tensor, choice and flag, fields separated by
/// tabs.
std::string text_of(const OperatorRules& rules, std::span<const BackwardUse> uses);

}  // namespace fusewise

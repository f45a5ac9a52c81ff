#include "common/description.h"

#include <string_view>
#include <vector>

#include "common/check.h"
#include "common/divide.h"
#include "common/matrix.h"
#include "common/overlap.h"

namespace fusewise {
namespace {

/// Calls body(part) for the parts of a text between separators.
template <typename Body>
void each_part(std::string_view text, std::string_view separator, const Body& body) {
  for (std::size_t end; (end = text.find(separator)) != std::string_view::npos;) {
    body(text.substr(0, end));
    text.remove_prefix(end + separator.size());
  }
  body(text);
}

bool is_digit(char letter) { return letter >= '0' && letter <= '9'; }

/// One size as shown in messages: "48" if all its letters are known, otherwise "C" or "F * 48".
std::string written_size(std::string_view size, const Sizes& sizes) {
  if (is_digit(size.front())) return std::string(size);
  if (size.back() == '*') return sizes.knows(size[0]) ? std::to_string(sizes[size[0]]) : "...";
  std::int64_t known = 1;
  bool any_known = false;
  std::string text;
  for (const char letter : size) {
    if (sizes.knows(letter)) {
      known *= sizes[letter];
      any_known = true;
    } else {
      text += (text.empty() ? "" : " * ") + std::string(1, letter);
    }
  }
  if (text.empty()) return std::to_string(known);
  return any_known ? text + " * " + std::to_string(known) : text;
}

/// "[R, 48] or [R, 48, 1, 1]"
std::string written_shape(const char* shape, const Sizes& sizes) {
  std::string text;
  each_part(shape, " | ", [&](std::string_view alternative) {
    if (!text.empty()) text += " or ";
    bool first = true;
    each_part(alternative, " ", [&](std::string_view size) {
      text += (first ? "[" : ", ") + written_size(size, sizes);
      first = false;
    });
    text += "]";
  });
  return text;
}

/// Whether a tensor has the shape that `at` points to. Moves `at` past that shape. A size with one
/// unknown letter determines that letter.
bool fits_one(const char*& at, const TensorView& t, Sizes& sizes) {
  bool fits = true;
  int d = 0;
  while (*at != 0 && *at != '|') {
    std::int64_t known = is_digit(*at) ? 0 : 1;
    char unknown = 0;
    for (; *at != 0 && *at != ' '; ++at) {
      if (*at == '*') continue;
      if (is_digit(*at)) {
        known = 10 * known + *at - '0';
      } else if (sizes.knows(*at)) {
        known *= sizes[*at];
      } else {
        fits = fits && unknown == 0;
        unknown = *at;
      }
    }
    if (*at == ' ') ++at;
    fits = fits && d < t.rank;
    if (!fits) continue;
    const std::int64_t size = t.sizes[d++];
    if (unknown == 0) {
      fits = size == known;
    } else if (known == 0 || size % known != 0) {
      fits = false;
    } else {
      sizes.set(unknown, size / known);
    }
  }
  if (*at == '|') at += 2;
  return fits && d == t.rank;
}

bool fits(const char* shape, const TensorView& t, Sizes& sizes) {
  const std::uint32_t before = sizes.known();
  while (*shape != 0) {
    if (fits_one(shape, t, sizes)) return true;
    sizes.forget_all_but(before);
  }
  return false;
}

struct Name {
  const GivenTensor& given;
};
std::string name_of(const GivenTensor& given) {
  return std::string(given.gradient ? "d" : "") + given.rule->name;
}
std::ostream& operator<<(std::ostream& out, Name name) { return out << name_of(name.given); }

const GivenTensor* find(std::span<const GivenTensor> given, std::string_view name) {
  for (const GivenTensor& each : given) {
    if (!each.gradient && each.view->defined() && each.rule->name == name) return &each;
  }
  return nullptr;
}

/// "C, H and W"
std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += names[i];
  }
  return text;
}

bool contains(std::string_view text, char letter) { return text.find(letter) != text.npos; }

/// " with C, H and W >= 1": the unknown letters in a shape that must not be 0.
std::string written_positive(std::string_view shape, const char* positive, const Sizes& sizes) {
  std::vector<std::string> letters;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const bool repeated = contains(shape.substr(0, i), shape[i]);
    if (!repeated && contains(positive, shape[i]) && !sizes.knows(shape[i])) {
      letters.push_back(std::string(1, shape[i]));
    }
  }
  return " with " + listed(letters) + " >= 1";
}

/// Sizes that a tensor does not determine itself come from a related tensor: for a gradient, the
/// tensor that it is the gradient of; for others, the tensor that the shape names. Null if that is
/// absent.
const GivenTensor* model_of(const GivenTensor& given, std::span<const GivenTensor> all) {
  const std::string_view shape = given.rule->shape;
  const bool named = shape.front() >= 'a';
  if (!named && !given.gradient) return nullptr;
  return find(all, named ? shape : given.rule->name);
}

/// An input may hold the values instead of their bits.
bool are_bits(const GivenTensor& given) {
  return given.rule->type == Type::bits && (given.written || given.view->dtype == DType::u8);
}

void check_shape(const OperatorRules& rules, const GivenTensor& given,
                 std::span<const GivenTensor> all, Sizes& sizes) {
  const TensorRule& rule = *given.rule;
  const TensorView& t = *given.view;
  if (const GivenTensor* model = model_of(given, all)) {
    return check(t.rank == model->view->rank && t.sizes == model->view->sizes, Name{given},
                 ": expected ", Name{*model}, "'s shape ", *model->view, ", got ", t);
  }
  if (are_bits(given)) {
    const TensorView expected = foreseen(rule, sizes, DType::u8, DType::u8, t.device);
    return check(t.rank == expected.rank && t.sizes == expected.sizes, Name{given}, ": expected ",
                 expected, ", got ", t);
  }
  const std::uint32_t before = sizes.known();
  if (!fits(rule.shape, t, sizes)) {
    const bool is_joined = !has_leading(rule.shape) || t.rank == 2 || t.rank == 0;
    fail(Name{given}, ": expected ", is_joined ? "" : "a matrix ", written_shape(rule.shape, sizes),
         ", got ", t);
  }
  if (sizes.known() == before) return;
  for (const char* letter = rules.positive; *letter != 0; ++letter) {
    if (!sizes.knows(*letter) || sizes[*letter] >= 1) continue;
    sizes.forget_all_but(before);
    fail(Name{given}, ": expected ", written_shape(rule.shape, sizes),
         written_positive(rule.shape, rules.positive, sizes), ", got ", t);
  }
}

bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

/// The type of sums and of intermediate results.
DType wide_type(DType data) { return data == DType::f64 ? DType::f64 : DType::f32; }

/// The types that a call uses, and which tensor determined them.
class Types {
 public:
  void check_one(const GivenTensor& given) {
    const DType dtype = given.view->dtype;
    switch (given.rule->type) {
      case Type::data:
        return agree(data_, given);
      case Type::weight:
        if (weight_ == nullptr && data_ != nullptr) {
          const DType data = data_->view->dtype;
          check(dtype == data || (is_half(data) && dtype == DType::f32), Name{given}, ": expected ",
                Name{*data_}, "'s dtype ", data, is_half(data) ? ", or float32" : "", ", got ",
                dtype);
        }
        return agree(weight_, given);
      case Type::bits:
        if (!are_bits(given)) return agree(data_, given);
        return check(dtype == DType::u8, Name{given}, ": expected dtype uint8, got ", dtype);
      case Type::statistics: {
        const DType wide = wide_type(data_->view->dtype);
        return check(dtype == wide, Name{given}, ": expected dtype ", wide, ", got ", dtype);
      }
    }
  }

 private:
  static void agree(const GivenTensor*& first, const GivenTensor& given) {
    if (first == nullptr) first = &given;
    check(given.view->dtype == first->view->dtype, Name{given}, ": expected ", Name{*first},
          "'s dtype ", first->view->dtype, ", got ", given.view->dtype);
  }

  const GivenTensor* data_ = nullptr;
  const GivenTensor* weight_ = nullptr;
};

const char* text_of(Role role) {
  switch (role) {
    case Role::input:
      return "input";
    case Role::optional_input:
      return "optional_input";
    case Role::output:
      return "output";
    case Role::saved:
      return "saved";
    case Role::optional_saved:
      return "optional_saved";
  }
  return "";
}

const char* text_of(Type type) {
  switch (type) {
    case Type::data:
      return "data";
    case Type::weight:
      return "weight";
    case Type::statistics:
      return "statistics";
    case Type::bits:
      return "bits";
  }
  return "";
}

const char* text_of(Layout layout) {
  switch (layout) {
    case Layout::any:
      return "any";
    case Layout::dense:
      return "dense";
    case Layout::rows:
      return "rows";
    case Layout::matrix:
      return "matrix";
  }
  return "";
}

/// "[48, 1]"
std::string written_strides(const TensorView& t) {
  std::string text;
  for (int d = 0; d < t.rank; ++d) {
    text += d > 0 ? ", " : "[";
    text += std::to_string(t.strides[d]);
  }
  return text + "]";
}

/// An incoming gradient may have any strides.
void check_layout(const GivenTensor& given) {
  if (given.gradient && given.rule->role == Role::output) return;
  const char* expected = given.rule->layout == Layout::dense  ? "a dense tensor"
                         : given.rule->layout == Layout::rows ? "contiguous rows"
                                                              : "contiguous rows or columns";
  check(lies_as(given.rule->layout, *given.view), Name{given}, ": expected ", expected,
        ", got strides ", written_strides(*given.view));
}

/// The names of the tensors for which `which` holds.
template <typename Which>
std::string listed_names(std::span<const GivenTensor> given, const Which& which) {
  std::vector<std::string> names;
  for (const GivenTensor& each : given) {
    if (which(each)) names.push_back(name_of(each));
  }
  return listed(names);
}

/// Outputs for different values of a choice: exactly one must be present. Saved tensors: all or
/// none.
void check_presence(std::span<const GivenTensor> given) {
  const auto is_alternative = [](const GivenTensor& t) {
    return t.rule->role == Role::output && *t.rule->with != 0;
  };
  const auto is_saved = [](const GivenTensor& t) { return t.rule->role == Role::saved; };
  int alternatives = 0, chosen = 0, saved = 0, kept = 0;
  for (const GivenTensor& each : given) {
    check(each.view->defined() || !each.required, Name{each}, ": is missing");
    alternatives += is_alternative(each);
    chosen += is_alternative(each) && each.view->defined();
    saved += is_saved(each);
    kept += is_saved(each) && each.view->defined();
  }
  check(alternatives == 0 || chosen == 1, listed_names(given, is_alternative),
        ": expected exactly one of them, got ", chosen);
  check(kept == 0 || kept == saved, listed_names(given, is_saved),
        ": expected all of them or none, got ", kept);
}

}  // namespace

Sizes check_tensors(const OperatorRules& rules, std::span<const GivenTensor> given, Device device) {
  check_presence(given);
  for (const GivenTensor& each : given) {
    check(each.view->dtype != DType::u8 || each.rule->type == Type::bits, Name{each},
          ": expected a floating dtype, got uint8");
  }
  Sizes sizes;
  for (const char* name : rules.order) check_shape(rules, *find(given, name), given, sizes);
  Types types;
  for (const GivenTensor& each : given) {
    const TensorView& t = *each.view;
    if (!t.defined()) continue;
    check_shape(rules, each, given, sizes);
    check(t.data != nullptr || t.numel() == 0, Name{each},
          ": expected a pointer to its data, got null");
    check(t.device == device, Name{each}, ": expected a tensor on ", device, ", got one on ",
          t.device);
  }
  for (const GivenTensor& each : given) {
    if (!each.view->defined()) continue;
    types.check_one(each);
    check_layout(each);
  }
  return sizes;
}

std::size_t check_choice(const ChoiceRule& choice, std::string_view word) {
  for (std::size_t i = 0; i < choice.values.size(); ++i) {
    if (word == choice.values[i]) return i;
  }
  fail(choice.name, ": expected ", quoted(choice.values), ", got '", word, "'");
}

void fail_unexpected(const OperatorRules& rules, const GivenTensor& given, std::string_view word) {
  fail(Name{given}, ": expected no tensor where ", rules.choices[0].name, " is '", word, "'");
}

bool is_with(const TensorRule& rule, std::string_view word) {
  if (*rule.with == 0 || word.empty()) return true;
  bool found = false;
  each_part(rule.with, " ", [&](std::string_view each) { found = found || each == word; });
  return found;
}

bool lies_as(Layout layout, const TensorView& t) {
  switch (layout) {
    case Layout::any:
      return true;
    case Layout::dense:
      return is_dense(t);
    case Layout::rows:
      return has_adjacent_rows(t);
    case Layout::matrix:
      return is_matrix(t);
  }
  return false;
}

TensorView foreseen(const TensorRule& rule, const Sizes& sizes, DType data, DType weight,
                    Device device) {
  TensorView t;
  t.dtype = rule.type == Type::data     ? data
            : rule.type == Type::weight ? weight
            : rule.type == Type::bits   ? DType::u8
                                        : wide_type(data);
  t.device = device;
  t.rank = 0;
  const std::string_view shape(rule.shape);
  each_part(shape.substr(0, shape.find(" | ")), " ", [&](std::string_view size) {
    std::int64_t product = is_digit(size.front()) ? 0 : 1;
    for (const char letter : size) {
      if (letter == '*') continue;
      product = is_digit(letter) ? 10 * product + letter - '0' : product * sizes[letter];
    }
    t.sizes[t.rank++] = product;
  });
  if (rule.type == Type::bits) t.sizes[t.rank - 1] = divide_up(t.sizes[t.rank - 1], 8);
  std::int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    t.strides[d] = stride;
    stride *= t.sizes[d];
  }
  return t;
}

void check_memory(std::span<const GivenTensor> given) {
  std::vector<std::string> names;
  names.reserve(given.size());
  std::vector<Argument> outputs, inputs;
  for (const GivenTensor& each : given) {
    names.push_back(name_of(each));
    (each.written ? outputs : inputs).push_back({names.back().c_str(), *each.view});
  }
  check_outputs(outputs, inputs);
}

std::string text_of(const OperatorRules& rules, std::span<const BackwardUse> uses) {
  std::string text;
  const auto line = [&](std::initializer_list<std::string_view> fields) {
    for (const std::string_view field : fields) {
      if (!text.empty() && text.back() != '\n') text += '\t';
      text += field;
    }
    text += '\n';
  };
  for (std::size_t i = 0; i < rules.tensors.size(); ++i) {
    const TensorRule& rule = *rules.tensors[i];
    line({"tensor", rule.name, text_of(rule.role), rule.shape, text_of(rule.type),
          text_of(rule.layout), uses[i].read ? "1" : "0", uses[i].only_for,
          uses[i].differentiable ? "1" : "0", rule.with});
  }
  for (const ChoiceRule& choice : rules.choices) {
    std::string values;
    for (const char* value : choice.values) {
      if (!values.empty()) values += ' ';
      values += value;
    }
    line({"choice", choice.name, values});
  }
  for (const char* flag : rules.flags) line({"flag", flag});
  line({"positive", rules.positive});
  std::string order;
  for (const char* name : rules.order) {
    if (!order.empty()) order += ' ';
    order += name;
  }
  line({"order", order});
  return text;
}

}  // namespace fusewise

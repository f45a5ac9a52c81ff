// The .safetensors reader. The file is not trusted: no number from it is added, multiplied or used
// as an offset before it is known to be in range.

#include "fusewise/safetensors.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include "common/check.h"

namespace fusewise {
namespace {

constexpr std::uint64_t kLongestHeader = 100'000'000;  // the format's own limit

struct Type {
  const char* name;
  std::uint64_t bytes;
};
constexpr Type kTypes[] = {{"F32", 4}, {"F64", 8}, {"F16", 2},  {"BF16", 2},    {"I64", 8},
                           {"I32", 4}, {"I16", 2}, {"I8", 1},   {"U64", 8},     {"U32", 4},
                           {"U16", 2}, {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};

constexpr std::uint64_t kLargest = std::numeric_limits<std::int64_t>::max();

/// a * b, or false if that does not fit an int64.
bool multiply(std::uint64_t a, std::uint64_t b, std::uint64_t& product) {
  if (b != 0 && a > kLargest / b) return false;
  product = a * b;
  return true;
}

/// The header's JSON, as far as the format uses it: objects of strings, numbers and lists.
class Json {
 public:
  explicit Json(std::string_view text) : text_(text) {}

  /// Calls member(name) for every member of an object. Duplicate names are an error.
  template <typename Member>
  void object(const Member& member) {
    expect('{');
    // A tree, not a hash table: no choice of names can make it slow.
    std::set<std::string> seen;
    if (skip('}')) return;
    do {
      const auto [name, is_new] = seen.insert(text());
      check(is_new, "header: '", *name, "' appears twice");
      expect(':');
      member(*name);
    } while (skip(','));
    expect('}');
  }

  template <typename Item>
  void list(const Item& item) {
    expect('[');
    if (skip(']')) return;
    do item();
    while (skip(','));
    expect(']');
  }

  /// At most the largest int64.
  std::uint64_t number() {
    space();
    const std::size_t begin = at_;
    std::uint64_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      const std::uint64_t digit = text_[at_++] - '0';
      check(multiply(value, 10, value) && value <= kLargest - digit, "header: the number at byte ",
            begin, " is too large");
      value += digit;
    }
    check(at_ > begin, "header: expected a whole number at byte ", begin);
    check(at_ == begin + 1 || text_[begin] != '0', "header: a number has a leading zero at byte ",
          begin);
    return value;
  }

  std::string text() {
    expect('"');
    std::string value;
    for (;;) {
      check(at_ < text_.size(), "header: ends inside a string");
      const char c = text_[at_++];
      if (c == '"') return value;
      check(static_cast<unsigned char>(c) >= 0x20, "header: a control character at byte ", at_ - 1);
      value += c == '\\' ? escaped() : std::string(1, c);
    }
  }

  /// Only spaces may follow: writers use them to align the data.
  void end() {
    space();
    check(at_ == text_.size(), "header: unexpected text after its end, at byte ", at_);
  }

 private:
  void space() {
    while (at_ < text_.size() && std::strchr(" \t\n\r", text_[at_]) && text_[at_] != '\0') ++at_;
  }
  bool skip(char wanted) {
    space();
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    check(skip(wanted), "header: expected '", wanted, "' at byte ", at_,
          at_ < text_.size() ? "" : ", its end");
  }

  std::string escaped() {
    check(at_ < text_.size(), "header: ends inside a string");
    const char c = text_[at_++];
    constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    const std::size_t known = kFrom.find(c);
    if (known != std::string_view::npos) return std::string(1, kTo[known]);
    check(c == 'u', "header: an unknown escape at byte ", at_ - 1);
    std::uint32_t code = hex();
    if (code >= 0xd800 && code < 0xdc00) {  // the first half of a pair
      check(text_.substr(at_, 2) == "\\u", "header: half of a surrogate pair at byte ", at_);
      at_ += 2;
      const std::uint32_t low = hex();
      check(low >= 0xdc00 && low < 0xe000, "header: half of a surrogate pair at byte ", at_);
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else {
      check(code < 0xdc00 || code >= 0xe000, "header: half of a surrogate pair at byte ", at_);
    }
    return utf8(code);
  }

  std::uint32_t hex() {
    std::uint32_t code = 0;
    for (int i = 0; i < 4; ++i) {
      constexpr std::string_view kDigits = "0123456789abcdefABCDEF";
      const std::size_t digit =
          at_ < text_.size() ? kDigits.find(text_[at_]) : std::string_view::npos;
      check(digit != std::string_view::npos, "header: expected four hex digits at byte ", at_);
      code = code * 16 + static_cast<std::uint32_t>(digit < 16 ? digit : digit - 6);
      ++at_;
    }
    return code;
  }

  static std::string utf8(std::uint32_t code) {
    const auto tail = [&](int shift) { return static_cast<char>(0x80 | (code >> shift & 0x3f)); };
    if (code < 0x80) return {static_cast<char>(code)};
    if (code < 0x800) return {static_cast<char>(0xc0 | code >> 6), tail(0)};
    if (code < 0x10000) return {static_cast<char>(0xe0 | code >> 12), tail(6), tail(0)};
    return {static_cast<char>(0xf0 | code >> 18), tail(12), tail(6), tail(0)};
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

/// A tensor as described in the header, checked against the length of the data.
struct Told {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;
};

Told read_tensor(Json& json, const std::string& name, std::uint64_t data_bytes) {
  Told told;
  told.name = name;
  bool has_shape = false;
  std::vector<std::uint64_t> offsets;
  json.object([&](const std::string& field) {
    if (field == "dtype") {
      told.dtype = json.text();
    } else if (field == "shape") {
      has_shape = true;
      json.list([&] {
        check(told.shape.size() < TensorView::kMaxRank, "'", name, "': expected at most ",
              TensorView::kMaxRank, " dimensions");
        told.shape.push_back(static_cast<std::int64_t>(json.number()));
      });
    } else if (field == "data_offsets") {
      json.list([&] {
        check(offsets.size() < 2, "'", name, "': expected two data_offsets, got more");
        offsets.push_back(json.number());
      });
    } else {
      fail("'", name, "': unknown field '", field, "'");
    }
  });
  const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                  [&](const Type& each) { return told.dtype == each.name; });
  check(type != std::end(kTypes), "'", name, "': unknown dtype '", told.dtype, "'");
  check(has_shape, "'", name, "': has no shape");
  check(offsets.size() == 2, "'", name, "': expected two data_offsets, got ", offsets.size());
  told.begin = offsets[0];
  told.end = offsets[1];
  check(told.begin <= told.end && told.end <= data_bytes, "'", name, "': data_offsets [",
        told.begin, ", ", told.end, "] do not lie in the ", data_bytes, " bytes of data");
  // A size of 0 must not hide an overflow of the others: strides are their products.
  std::uint64_t bytes = type->bytes;
  bool empty = false;
  for (const std::int64_t size : told.shape) {
    empty = empty || size == 0;
    check(size == 0 || multiply(bytes, size, bytes), "'", name,
          "': its shape has too many elements");
  }
  if (empty) bytes = 0;
  check(bytes == told.end - told.begin, "'", name, "': its shape needs ", bytes,
        " bytes, its data_offsets have ", told.end - told.begin);
  return told;
}

}  // namespace

Safetensors::Safetensors(const std::string& path) {
  std::error_code failed;
  check(std::filesystem::is_regular_file(path, failed), path, ": is not a file that can be read");
  std::ifstream file(path, std::ios::binary);
  const std::uint64_t size = std::filesystem::file_size(path, failed);
  check(file.good() && !failed, path, ": cannot be read");
  std::vector<std::byte> bytes(size);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  check(file.gcount() == static_cast<std::streamsize>(size), path,
        ": could not be read to its end");
  try {
    read(bytes);
  } catch (const Error& error) {
    fail(path, ": ", error.what());
  }
}

Safetensors::Safetensors(std::span<const std::byte> file) { read(file); }

void Safetensors::read(std::span<const std::byte> file) {
  check(file.size() >= 8, "too short for a .safetensors file: ", file.size(), " bytes");
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | std::to_integer<std::uint64_t>(file[i]);
  check(length <= kLongestHeader, "the file says that its header has ", length,
        " bytes, the format allows at most ", kLongestHeader);
  check(length <= file.size() - 8, "the file says that its header has ", length,
        " bytes, but only ", file.size() - 8, " follow");
  const std::span<const std::byte> data = file.subspan(8 + length);

  std::vector<Told> tensors;
  Json json(std::string_view(reinterpret_cast<const char*>(file.data()) + 8, length));
  json.object([&](const std::string& name) {
    if (name == "__metadata__") {
      json.object([&](const std::string& key) { metadata_[key] = json.text(); });
    } else {
      tensors.push_back(read_tensor(json, name, data.size()));
    }
  });
  json.end();

  std::sort(tensors.begin(), tensors.end(), [](const Told& a, const Told& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::uint64_t covered = 0, needed = 0;
  for (const Told& told : tensors) {
    check(told.begin == covered, "'", told.name, "': its data begins at ", told.begin,
          ", expected ", covered, "; gaps and overlaps are not allowed");
    covered = told.end;
    needed += (told.end - told.begin + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
  }
  check(covered == data.size(), "the tensors cover ", covered, " of ", data.size(),
        " bytes of data");

  // Copy each to an aligned address: in the file they may start anywhere.
  data_.resize(needed);
  std::size_t next = 0;
  for (Told& told : tensors) {
    const std::size_t bytes = told.end - told.begin;
    if (bytes > 0) std::memcpy(data_.data() + next, data.data() + told.begin, bytes);
    entries_[std::move(told.name)] = {std::move(told.dtype), std::move(told.shape), next};
    next += (bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
  }
}

bool Safetensors::contains(std::string_view name) const {
  return entries_.find(name) != entries_.end();
}

std::vector<std::string> Safetensors::names() const {
  std::vector<std::string> found;
  for (const auto& [name, entry] : entries_) found.push_back(name);
  return found;
}

TensorView Safetensors::at(std::string_view name) const {
  const auto found = entries_.find(name);
  check(found != entries_.end(), "'", name, "': is not in the file");
  const Entry& entry = found->second;
  constexpr std::pair<const char*, DType> kOurs[] = {
      {"F32", DType::f32}, {"F64", DType::f64}, {"F16", DType::f16}, {"BF16", DType::bf16}};
  const auto* type = std::find_if(std::begin(kOurs), std::end(kOurs),
                                  [&](const auto& each) { return entry.dtype == each.first; });
  check(type != std::end(kOurs), "'", name, "': expected dtype F32, F64, F16 or BF16, got ",
        entry.dtype);
  TensorView view;
  view.data = const_cast<std::max_align_t*>(data_.data() + entry.offset);
  view.dtype = type->second;
  view.rank = static_cast<int>(entry.shape.size());
  std::int64_t stride = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    view.sizes[d] = entry.shape[d];
    view.strides[d] = stride;
    stride *= std::max<std::int64_t>(1, entry.shape[d]);
  }
  return view;
}

}  // namespace fusewise
